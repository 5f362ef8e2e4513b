"""Optional parts of the package."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from trtmesh.chassis.errors import StartupError

MODULES_OF_EXTRA = {
    "tokenizer": ("tokenizers",),
    "engine": ("torch",),
    "foreign": ("smg_grpc_proto",),
    "tls": ("cryptography",),
    "bench": ("jinja2", "numpy", "psutil"),
}
"""What tells that an extra of the package is installed: other packages bring some of its modules."""


def check_extras(needed: Iterable[str]) -> None:
    """Raises StartupError with the extras to install."""
    missing = [
        extra
        for extra in needed
        if any(find_spec(module) is None for module in MODULES_OF_EXTRA[extra])
    ]
    if missing:
        raise StartupError(
            f"parts of the package are not installed: pip install 'trtmesh[{','.join(missing)}]'"
        )
