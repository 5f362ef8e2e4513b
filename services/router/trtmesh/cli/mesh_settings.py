"""What `trtmesh up` can be told, and the flags that come of it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import typer
from pydantic import Field
from trtmesh.chassis.settings import (
    CommaList,
    OptionalPort,
    Port,
    ServiceSettings,
    help_of,
    load_settings,
)
from trtmesh.router.placement.settings import PolicyName

Replicas = Annotated[int, Field(ge=1, le=64)]


class MeshSettings(ServiceSettings):
    """Settings of the local stack: section `mesh` of the configuration file."""

    section: ClassVar[str] = "mesh"

    host: str = "127.0.0.1"
    """Address that the routers listen on; tokenizers and engines stay on 127.0.0.1."""
    port: Port = 8001
    """Port of the first router. When it is in use and was not asked for, a free one is taken."""
    admin_port: Port = 8003
    """Port of the first router's admin address; when it is in use and was not asked for, a free one is taken."""
    http_port: OptionalPort = 8000
    """Port of the first router's Triton door over HTTP, likewise; `none` serves none."""
    metrics_port: OptionalPort = 8002
    """Port of the first router's metrics, likewise; the other processes get free ones. `none` serves no metrics."""
    model: Path | None = None
    """Directory of the model; unset means the demo model of the repository."""
    models: CommaList = ()
    """Directories of further models, each with engines and tokenizers of its own, as many as the first."""
    triton_model_repo: Path | None = None
    """Model repository of Triton whose models are served under their names; what the file says wins over it."""
    backend: Literal["torch", "simulated"] | None = None
    """What executes the model; unset leaves it to the engine's own settings."""
    engines: Replicas = 1
    """Number of engines, of each model."""
    tokenizers: Replicas = 1
    """Number of tokenizers, of each model."""
    routers: Replicas = 1
    """Number of routers; those after the first listen on free ports."""
    engine_port: Port = 0
    """Port of the first engine, the next ones following; 0 takes free ones."""
    tokenizer_port: Port = 0
    """Port of the first tokenizer, the next ones following; 0 takes free ones."""
    policy: PolicyName | None = None
    """Placement policy; unset leaves it to the router's own settings."""
    log_dir: Path | None = None
    """Directory for one log file a process; unset logs to standard error."""
    start_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """How long the stack may take until every process serves."""
    max_restarts_per_minute: Annotated[int, Field(ge=1, le=1000)] = 5
    """How often a process that ended is started again within a minute, at most."""
    output: Literal["text", "json"] = "text"
    """Form of the lines on standard output: for people, or one JSON object each."""

    def asks_for(self, name: str) -> bool:
        """Whether a value was given for the setting, rather than its default."""
        return name in self.model_fields_set


Flags = Mapping[str, str]
"""What the command line gave, by name of the setting; `config` is the configuration file."""


def load_mesh_settings(flags: Flags, defaults: Flags = MappingProxyType({})) -> MeshSettings:
    """The settings of the stack from flags, environment and file, and else from `defaults`."""
    argv = [part for name, value in flags.items() for part in (_flag(name), value)]
    settings = load_settings(MeshSettings, argv)
    unsaid = {name: v for name, v in defaults.items() if not settings.asks_for(name)}
    return load_mesh_settings({**flags, **unsaid}) if unsaid else settings


def config_file_of(flags: Flags) -> str | None:
    """The configuration file that the settings come from."""
    return flags.get("config") or os.environ.get("TRTMESH_CONFIG")


def takes_mesh_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command(flags, *, own options)` an option for each field of MeshSettings.

    They are texts here: load_mesh_settings checks them and names the flag, variable or line that is wrong.
    """

    def with_flags(**values: Any) -> None:
        own = {name: values.pop(name) for name in own_parameters}
        command({name: value for name, value in values.items() if value is not None}, **own)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    own_parameters = [parameter.name for parameter in own]
    config = _option("config", "YAML file with the sections mesh, router, tokenizer and engine.")
    fields = [_option(name, help_of(info)) for name, info in MeshSettings.model_fields.items()]
    signature = inspect.Signature([config, *fields, *own])
    functools.update_wrapper(with_flags, command, assigned=("__name__", "__doc__", "__module__"))
    with_flags.__annotations__ = {n: p.annotation for n, p in signature.parameters.items()}
    with_flags.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return with_flags


def _option(name: str, text: str) -> inspect.Parameter:
    option = typer.Option(_flag(name), metavar="VALUE", help=text, show_default=False)
    annotation = Annotated[str | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
