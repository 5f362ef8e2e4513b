"""Optional parts of the package."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from trtmesh.chassis.errors import StartupError

MODULE_OF_EXTRA = {
    "tokenizer": "tokenizers",
    "engine": "torch",
    "foreign": "smg_grpc_proto",
    "tls": "cryptography",
    "bench": "psutil",
}
"""A module of each extra of the package."""


def check_extras(needed: Iterable[str]) -> None:
    """Raises StartupError with the extras to install."""
    missing = [extra for extra in needed if find_spec(MODULE_OF_EXTRA[extra]) is None]
    if missing:
        raise StartupError(
            f"parts of the package are not installed: pip install 'trtmesh[{','.join(missing)}]'"
        )
