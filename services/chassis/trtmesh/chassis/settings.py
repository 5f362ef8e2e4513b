"""Settings of a process: flags over environment over YAML file over defaults, read once at start.

A settings class is a frozen pydantic model, nested at will. The leaf `torch.kv_cache_tokens` of the section `engine`
is the flag `--torch-kv-cache-tokens`, the variable `TRTMESH_ENGINE_TORCH_KV_CACHE_TOKENS` and, in the file,
`engine: {torch: {kv_cache_tokens: ...}}`. The layers are merged here and not by pydantic-settings because an error
must name the source that a value came from, which that library forgets when it merges.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from trtmesh.chassis.config_file import SECTIONS, read_config_file, suggestion
from trtmesh.chassis.errors import SettingsError

LeafPath = tuple[str, ...]


def split_commas(value: object) -> object:
    """A text as the list of its parts; anything else as it is."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


CommaList = Annotated[tuple[str, ...], BeforeValidator(split_commas)]
"""A list that a flag or a variable gives separated by commas."""

Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0 lets the operating system choose."""


def none_word(value: object) -> object:
    """None for the word `none`, which is how a flag or a variable takes a default away."""
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


OptionalPort = Annotated[Port | None, BeforeValidator(none_word)]
"""A TCP port, or None; a flag or a variable says `none`."""

Policy = Literal["round_robin", "least_loaded", "power_of_two", "prefix_aware", "auto"]
"""How a router chooses a worker; here because a stack takes the setting too."""


class Settings(BaseModel):
    """Base of every settings model."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServiceSettings(Settings):
    """What every service process can be told."""

    section: ClassVar[str]

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all."""
    port: Port = 0
    """Port of the gRPC server."""
    metrics_port: OptionalPort = None
    """Port of the Prometheus endpoint; unset or `none` serves no metrics."""
    grace_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """How long in-flight work may go on after the first SIGTERM or SIGINT."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Form of a log line, on standard error."""
    max_message_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = 64 * 2**20
    """Largest message that is received or sent."""
    stop_on_stdin_eof: bool = False
    """Whether the end of standard input stops the process, so that it does not outlive its parent."""


S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of one source by leaf, and how the source names a leaf."""

    source: str
    values: Mapping[LeafPath, object]
    names: Mapping[LeafPath, str]


def load_settings(
    cls: type[S],
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> S:
    """The settings of one process. Raises SettingsError that names the field, the source and the value."""
    leaves = dict(iterate_leaves(cls))
    environ = os.environ if environ is None else environ
    flags, config_file = _flag_layer(cls, leaves, argv)
    config_file = config_file or environ.get("TRTMESH_CONFIG")
    layers = [flags, _environment_layer(cls, leaves, environ)]
    if config_file:
        layers.append(_file_layer(cls, leaves, Path(config_file)))
    return _validate(cls, layers)


def iterate_leaves(
    model: type[BaseModel], prefix: LeafPath = ()
) -> Iterator[tuple[LeafPath, FieldInfo]]:
    """Every field of `model` that is not itself a settings model, by path."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            yield from iterate_leaves(kind, (*prefix, name))
        else:
            yield (*prefix, name), info


def help_of(info: FieldInfo) -> str:
    """What `--help` says of a field: its description, the words that it may be where they are given, its default."""
    words = _words(info.annotation)
    notes = [f"one of {', '.join(words)}"] if words else []
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if default not in (None, "", (), {}):
        notes.append(f"default {default}")
    text = (info.description or "").replace("\n", " ")
    return f"{text} ({'; '.join(notes)})" if notes else text


def _words(kind: object) -> list[str]:
    """The values of a Literal, or of one that may be unset."""
    if get_origin(kind) is Literal:
        return [str(word) for word in get_args(kind)]
    if get_origin(kind) in (Union, UnionType):
        return [word for part in get_args(kind) for word in _words(part)]
    return []


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; `{self.prog} --help` lists the flags")


def _flag_layer(
    cls: type[ServiceSettings], leaves: Mapping[LeafPath, FieldInfo], argv: Sequence[str]
) -> tuple[Layer, str | None]:
    parser = _Parser(prog=f"python -m trtmesh.{cls.section}", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file with this section")
    for path, info in leaves.items():
        parser.add_argument(
            _flag(path),
            dest=".".join(path),
            metavar="VALUE",
            help=help_of(info).replace("%", "%%"),
        )
    given = vars(parser.parse_args(argv))
    config_file = given.pop("config")
    values = {tuple(dest.split(".")): value for dest, value in given.items() if value is not None}
    return Layer("flag", values, {path: _flag(path) for path in leaves}), config_file


def _flag(path: LeafPath) -> str:
    return "--" + "-".join(path).replace("_", "-")


def _environment_layer(
    cls: type[ServiceSettings], leaves: Mapping[LeafPath, FieldInfo], environ: Mapping[str, str]
) -> Layer:
    prefix = f"TRTMESH_{cls.section.upper()}_"
    names = {path: prefix + "_".join(path).upper() for path in leaves}
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
    """A variable that seems meant for a service; other services read theirs, and other programs may have any."""
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
    values: dict[LeafPath, object] = {}
    _collect(
        read_config_file(file).get(cls.section, {}), (), leaves, values, f"{file}: {cls.section}"
    )
    names = {path: f"{file}: {'.'.join((cls.section, *path))}" for path in leaves}
    return Layer("file", values, names)


def _collect(
    section: Mapping[str, object],
    prefix: LeafPath,
    leaves: Mapping[LeafPath, FieldInfo],
    values: dict[LeafPath, object],
    where: str,
) -> None:
    for name, value in section.items():
        path = (*prefix, str(name))
        if path in leaves:
            values[path] = value
        elif isinstance(value, dict) and any(leaf[: len(path)] == path for leaf in leaves):
            _collect(value, path, leaves, values, where)
        else:
            known = {".".join(leaf) for leaf in leaves}
            dotted = ".".join(path)
            raise SettingsError(
                f"{where}.{dotted} = {value!r} is no setting{suggestion(dotted, known)}"
            )


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
        return cls.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(
            "; ".join(_describe(cls, layers, origin, e) for e in error.errors())
        ) from error


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
        ways = " or ".join(layer.names.get(path, "") for layer in layers)
        field = ".".join((cls.section, *path))
        return f"{field}: {error['msg'].lower()} (set {ways})" if path else str(error["msg"])
    name = ".".join((layer.names[path], *names[len(path) :]))
    value = error["input"] if len(names) > len(path) else layer.values[path]
    return f"{layer.source} {name} is {value!r}: {error['msg']}"
