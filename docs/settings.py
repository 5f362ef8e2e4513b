"""Writes docs/settings.md: every setting of every service, from the code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from inspect import getdoc
from pathlib import Path

from pydantic.fields import FieldInfo
from trtmesh.chassis.settings import (
    ServiceSettings,
    Settings,
    allowed_words,
    groups_of,
    iterate_groups,
    leaves_of,
)
from trtmesh.chassis.tls.settings import SecuredSettings
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
processes read their own sections from the same file and variables. Router, engine and tokenizer also have the settings
of [every service](#every-service). Traces have the standard variables of OpenTelemetry ([which](tracing.md)).
"""


def page() -> str:
    return "\n".join([HEAD, *_common(), *(line for cls in SERVICES for line in _service(cls))])


def _common() -> Iterator[str]:
    """What router, engine and tokenizer have in common; a section below repeats what it changes."""
    yield "## every service\n"
    yield from _table(leaves_of(SecuredSettings))
    for path, group in iterate_groups(SecuredSettings):
        if path:
            yield from _group(".".join(path), group)


def _service(cls: type[ServiceSettings]) -> Iterator[str]:
    known = {**dict(leaves_of(SecuredSettings)), **dict(groups_of(SecuredSettings))}
    yield f"## {cls.section}\n"
    yield f"{getdoc(cls)}\n"
    own = [(name, info) for name, info in leaves_of(cls) if not _is_known(info, known.get(name))]
    mappings = [(path[0], group) for path, group in iterate_groups(cls) if group.for_tests]
    yield from _table(own, mappings)
    groups = {
        ".".join((cls.section, *path)): group
        for path, group in iterate_groups(cls)
        if path and not group.for_tests and known.get(path[0]) is not group
    }
    alike = _alike(groups)
    for base, names in alike.items():
        yield from _group(" and ".join(names), base)
    for name, group in groups.items():
        yield from _group(name, group, next((base for base in alike if name in alike[base]), None))


def _alike(groups: Mapping[str, type[Settings]]) -> dict[type[Settings], list[str]]:
    """The classes that several groups are or extend, with the names of these."""
    alike: dict[type[Settings], list[str]] = {}
    for name, group in groups.items():
        for base in (group, *group.__bases__):
            if base is not Settings:
                alike.setdefault(base, []).append(name)
    return {base: names for base, names in alike.items() if len(names) > 1}


def _group(name: str, group: type[Settings], base: type[Settings] | None = None) -> Iterator[str]:
    """The settings of a group; those of `base` stand elsewhere."""
    known = dict(leaves_of(base)) if base else {}
    own = [(each, info) for each, info in leaves_of(group) if not _is_known(info, known.get(each))]
    if own or not base:
        yield f"### {name}\n"
        yield f"{getdoc(group)}\n"
        yield from _table(own)


def _is_known(info: FieldInfo, known: object) -> bool:
    return isinstance(known, FieldInfo) and _row("", info) == _row("", known)


def _table(
    leaves: Iterable[tuple[str, FieldInfo]], mappings: Iterable[tuple[str, type[Settings]]] = ()
) -> Iterator[str]:
    rows = [_row(name, info) for name, info in leaves]
    rows += [f"| `{name}` |  | {_joined(getdoc(group))} |" for name, group in mappings]
    if rows:
        yield "| Setting | Default | Meaning |\n|---|---|---|"
        yield from rows
        yield ""


def _joined(text: str | None) -> str:
    return (text or "").replace("\n", " ").replace("|", "\\|")


def _row(name: str, info: FieldInfo) -> str:
    meaning = _joined(info.description)
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
