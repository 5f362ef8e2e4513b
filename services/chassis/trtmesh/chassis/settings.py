"""Settings of a process: flags over environment over YAML file over defaults, read once at start.

A settings class is a frozen pydantic model of groups. Each group is a frozen model, passed whole to its code. The leaf
`deadlines.queue_seconds` of the section `router` is the flag `--deadlines-queue-seconds`, the variable
`TRTMESH_ROUTER_DEADLINES_QUEUE_SECONDS` and, in the file, `router: {deadlines: {queue_seconds: ...}}`. The layers are
merged here, not by pydantic-settings: errors must name the source of a value, and pydantic-settings loses the source.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import getdoc
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import core_schema
from trtmesh.chassis.config_file import SECTIONS, read_config_file, suggestion
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.json_text import load_json
from trtmesh.chassis.validation import joined, problem_of

LeafPath = tuple[str, ...]


def split_commas(value: object) -> object:
    """Splits a text into a list; anything else stays as it is."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


CommaList = Annotated[tuple[str, ...], BeforeValidator(split_commas)]
"""A list; comma-separated in a flag or a variable."""

Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0 lets the operating system choose."""


def none_word(value: object) -> object:
    """Turns the word `none`, for unsetting a default in a flag or a variable, into None."""
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


OptionalPort = Annotated[Port | None, BeforeValidator(none_word)]
"""A TCP port, or None; `none` in a flag or a variable."""


def parse_json_text(value: object) -> object:
    """Parses a text, which a flag or a variable has for an object; anything else stays as it is."""
    return load_json(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class OneOf:
    """Limits a text to words, like a Literal of a computed list."""

    words: tuple[str, ...]

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> Any:
        return core_schema.literal_schema([*self.words])


class Settings(BaseModel):
    """Base of every settings model."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    for_tests: ClassVar[bool] = False
    """Whether the group is for tests of the mesh: `--help` and the page of settings leave its flags out."""


class ServiceSettings(Settings):
    """Settings of every service process."""

    section: ClassVar[str]

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all."""
    port: Port = 0
    """Port of the gRPC server."""
    metrics_port: OptionalPort = None
    """Port of the Prometheus endpoint; unset or `none` serves no metrics."""
    grace_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """Time for in-flight work to finish after the first SIGTERM, SIGINT or SIGHUP. Files of keys, addresses and
    certificates are read again without a signal; SIGUSR1 and SIGUSR2 do nothing."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Form of a log line, on standard error."""
    max_message_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = 64 * 2**20
    """Largest gRPC message, sent or received."""
    stop_on_stdin_eof: bool = False
    """Whether to stop at the end of standard input: the process then ends with its parent."""
    _spellings: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def spelling(self, name: str) -> str:
        """A dotted name as it was given: the flag, the variable, or the line of the file; unset, the dotted name."""
        return self._spellings.get(name, name)


S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of a source by leaf, and the source's name for a leaf."""

    source: str
    values: Mapping[LeafPath, object]
    names: Mapping[LeafPath, str]


def load_settings(cls: type[S], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> S:
    """Reads the settings of a process. Raises SettingsError with the field, the source and the value."""
    leaves = dict(iterate_leaves(cls))
    environ = os.environ if environ is None else environ
    flags, config_file = _flag_layer(cls, leaves, argv)
    config_file = config_file or environ.get("TRTMESH_CONFIG")
    layers = [flags, _environment_layer(cls, leaves, environ)]
    if config_file:
        layers.append(_file_layer(cls, leaves, Path(config_file)))
    return _validate(cls, layers)


def load_beside(cls: type[S], argv: Sequence[str]) -> S:
    """Reads the settings of another service in the process, from its section of the file that `argv` names and from its
    variables. Raises SettingsError."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    file = parser.parse_known_args(argv)[0].config
    return load_settings(cls, ["--config", file] if file else [])


def iterate_groups(
    model: type[Settings], prefix: LeafPath = ()
) -> Iterator[tuple[LeafPath, type[Settings]]]:
    """Yields `model` and every nested settings model, by path. Of models for tests, yields the outermost alone."""
    yield prefix, model
    if not model.for_tests:
        for name, kind in groups_of(model):
            yield from iterate_groups(kind, (*prefix, name))


def groups_of(group: type[Settings]) -> Iterator[tuple[str, type[Settings]]]:
    """Yields the groups right in a group."""
    for name, info in group.model_fields.items():
        if _is_group(kind := info.annotation):
            yield name, kind


def iterate_leaves(
    model: type[Settings], prefix: LeafPath = ()
) -> Iterator[tuple[LeafPath, FieldInfo]]:
    """Yields the settings of `model` and of all groups, by path."""
    yield from (((*prefix, name), info) for name, info in leaves_of(model))
    for name, kind in groups_of(model):
        yield from iterate_leaves(kind, (*prefix, name))


def leaves_of(group: type[Settings]) -> Iterator[tuple[str, FieldInfo]]:
    """Yields the settings of a group, without nested groups."""
    return ((n, info) for n, info in group.model_fields.items() if not _is_group(info.annotation))


def _is_group(kind: object) -> TypeGuard[type[Settings]]:
    return isinstance(kind, type) and issubclass(kind, Settings)


def help_of(info: FieldInfo) -> str:
    """Describes a field: meaning, allowed words, default."""
    words = allowed_words(info)
    notes = [f"one of {', '.join(words)}"] if words else []
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if default not in (None, "", (), {}):
        notes.append(f"default {default}")
    text = (info.description or "").replace("\n", " ")
    return f"{text} ({'; '.join(notes)})" if notes else text


def allowed_words(kind: object) -> list[str]:
    """Lists the values of a Literal or a OneOf, with or without None."""
    if isinstance(kind, OneOf):
        return [*kind.words]
    if isinstance(kind, FieldInfo):
        parts: Sequence[object] = (kind.annotation, *kind.metadata)
    elif get_origin(kind) is Literal:
        return [str(word) for word in get_args(kind)]
    else:
        parts = get_args(kind) if get_origin(kind) in (Union, UnionType, Annotated) else ()
    return [word for part in parts for word in allowed_words(part)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; `{self.prog} --help` lists the flags")


def _flag_layer(
    cls: type[ServiceSettings], leaves: Mapping[LeafPath, FieldInfo], argv: Sequence[str]
) -> tuple[Layer, str | None]:
    given = vars(_parser(cls).parse_args(argv))
    config_file = given.pop("config")
    values = {tuple(dest.split(".")): value for dest, value in given.items() if value is not None}
    return Layer("flag", values, {path: _flag(path) for path in leaves}), config_file


def _parser(cls: type[ServiceSettings]) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"python -m trtmesh.{cls.section}", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file with this section")
    for path, group in iterate_groups(cls):
        title, meaning = ".".join(path), (getdoc(group) or "").replace("%", "%%")
        section = parser.add_argument_group(title, meaning) if path else parser
        leaves = (
            iterate_leaves(group) if group.for_tests else (((n,), i) for n, i in leaves_of(group))
        )
        for name, info in leaves:
            section.add_argument(
                _flag((*path, *name)),
                dest=".".join((*path, *name)),
                metavar="VALUE",
                help=argparse.SUPPRESS if group.for_tests else help_of(info).replace("%", "%%"),
            )
    return parser


def _flag(path: LeafPath) -> str:
    return "--" + "-".join(path).replace("_", "-")


def _environment_layer(
    cls: type[ServiceSettings], leaves: Mapping[LeafPath, FieldInfo], environ: Mapping[str, str]
) -> Layer:
    prefix = f"TRTMESH_{cls.section.upper()}_"

    def variable(path: LeafPath) -> str:
        return prefix + "_".join(path).upper()

    names = {path: variable(path) for path in leaves}
    known = {name: path for path, name in names.items()}
    for name, value in environ.items():
        _refuse_misspelt_section(name)
        if name.startswith(prefix) and name not in known:
            raise SettingsError(
                f"environment variable {name}={value!r} is no setting of the {cls.section}"
                f"{suggestion(name, known)}"
            )
    values = {path: environ[name] for path, name in names.items() if name in environ}
    return Layer("environment variable", values, names)


def _refuse_misspelt_section(name: str) -> None:
    """Refuses the misspelt name of a service; other variables may belong to other programs."""
    start, _, rest = name.partition("_")
    section = rest.partition("_")[0].lower()
    if (
        start == "TRTMESH"
        and section not in SECTIONS
        and (close := get_close_matches(section, SECTIONS, n=1, cutoff=0.75))
    ):
        raise SettingsError(
            f"environment variable {name} names no service; did you mean TRTMESH_{close[0].upper()}_...?"
        )


def _file_layer(
    cls: type[ServiceSettings], leaves: Mapping[LeafPath, FieldInfo], file: Path
) -> Layer:
    def dotted(path: LeafPath) -> str:
        return ".".join((cls.section, *path))

    names = {path: f"{file}: {dotted(path)}" for path in leaves}
    given = dict(_flatten(read_config_file(file).get(cls.section, {}), (), leaves))
    for path in [path for path in given if path not in leaves]:
        known = [".".join(leaf) for leaf in leaves]
        raise SettingsError(
            f"{file}: {dotted(path)} = {given[path]!r} is no setting{suggestion('.'.join(path), known)}"
        )
    return Layer("file", given, names)


def _flatten(
    section: Mapping[str, object], prefix: LeafPath, leaves: Mapping[LeafPath, FieldInfo]
) -> Iterator[tuple[LeafPath, object]]:
    """Yields the values of a section by path; a mapping is a value unless it is a group."""
    for name, value in section.items():
        path = (*prefix, str(name))
        if isinstance(value, dict) and any(leaf[: len(path)] == path != leaf for leaf in leaves):
            yield from _flatten(value, path, leaves)
        else:
            yield path, value


def _validate(cls: type[S], layers: Sequence[Layer]) -> S:
    merged: dict[str, Any] = {}
    origin: dict[LeafPath, Layer] = {}
    for layer in reversed(layers):
        for path, value in layer.values.items():
            node = merged
            for name in path[:-1]:
                node = node.setdefault(name, {})
            node[path[-1]] = value
            origin[path] = layer
    try:
        settings = cls.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(
            "; ".join(_describe(cls, layers, origin, e) for e in error.errors())
        ) from error
    settings._spellings = {
        ".".join((cls.section, *path)): layer.names[path]
        for path, layer in origin.items()
        # The flags of a child process are the parent's choice: their names mean nothing to the user.
        if path in layer.names and not (settings.stop_on_stdin_eof and layer.source == "flag")
    }
    return settings


def _describe(
    cls: type[ServiceSettings],
    layers: Sequence[Layer],
    origin: Mapping[LeafPath, Layer],
    error: Mapping[str, Any],
) -> str:
    names = tuple(str(part) for part in error["loc"])
    path = next((leaf for leaf in origin if names[: len(leaf)] == leaf), names)
    layer = origin.get(path)
    if layer is None:
        field = ".".join((cls.section, *path))
        # A group of settings has no name in any layer.
        ways = " or ".join(layer.names[path] for layer in layers if path in layer.names)
        advice = f" (set {ways})" if ways else ""
        problem = problem_of(error)
        return f"{field} {problem}{advice}" if path else problem
    name = ".".join((layer.names[path], *names[len(path) :]))
    value = error["input"] if len(names) > len(path) else layer.values[path]
    if error["type"] == "missing":
        return f"{layer.source} {name} {problem_of(error)}"
    return joined(f"{layer.source} {name} is {value!r}", problem_of(error))
