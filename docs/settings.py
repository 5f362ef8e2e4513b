"""Writes docs/settings.md: every setting of every service, from the code."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getdoc
from pathlib import Path

from pydantic.fields import FieldInfo
from trtmesh.chassis.settings import (
    ServiceSettings,
    allowed_words,
    iterate_groups,
    leaves_of,
)
from trtmesh.cli.mesh_settings import MeshSettings
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.tokenizer.settings import TokenizerSettings

PAGE = Path(__file__).with_suffix(".md")
SERVICES: tuple[type[ServiceSettings], ...] = (
    MeshSettings,
    RouterSettings,
    EngineSettings,
    TokenizerSettings,
)
HEAD = """\
# Settings

Written by `python docs/settings.py` from the code. A setting is a flag, a variable or a line of a YAML file (`--config
FILE` or `TRTMESH_CONFIG`), in this order of precedence:

| Source | `router.deadlines.queue_seconds` |
|---|---|
| flag of `python -m trtmesh.router` | `--deadlines-queue-seconds 20` |
| variable | `TRTMESH_ROUTER_DEADLINES_QUEUE_SECONDS=20` |
| file | `router: {deadlines: {queue_seconds: 20}}` |

A relative path in the file begins at the directory of the file, in a flag or a variable at the working directory.
Flags and variables separate the items of a list by commas. `trtmesh up` has the flags of the section `mesh`, and its
processes read their own sections from the same file and variables.
"""


def page() -> str:
    return "\n".join([HEAD, *(line for cls in SERVICES for line in _service(cls))])


def _service(cls: type[ServiceSettings]) -> Iterator[str]:
    for path, group in iterate_groups(cls):
        yield f"{'###' if path else '##'} {'.'.join((cls.section, *path))}\n"
        yield f"{getdoc(group)}\n"
        yield "| Setting | Default | Meaning |\n|---|---|---|"
        yield from (_row(name, info) for name, info in leaves_of(group))
        yield ""


def _row(name: str, info: FieldInfo) -> str:
    meaning = (info.description or "").replace("\n", " ").replace("|", "\\|")
    if words := allowed_words(info):
        meaning += f" One of {', '.join(f'`{word}`' for word in words)}."
    return f"| `{name}` | {_default(info)} | {meaning} |"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    if isinstance(default, tuple):
        default = ",".join(default)
    return "" if default in (None, "", {}) else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
