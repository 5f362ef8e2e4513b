"""Settings and flags of `trtmesh up`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import typer
from pydantic import BeforeValidator, Field
from trtmesh.chassis.json_text import load_json
from trtmesh.chassis.settings import (
    CommaList,
    OptionalPort,
    Port,
    ServiceSettings,
    help_of,
    load_settings,
)
from trtmesh.cli.option_groups import with_options
from trtmesh.cli.tls import CONNECTION
from trtmesh.router.fleet.discovery import check_engines

Replicas = Annotated[int, Field(ge=1, le=64)]
ReplicasOrNone = Annotated[int, Field(ge=0, le=64)]


def _parse_json(value: object) -> object:
    """Parses a text; passes anything else through."""
    try:
        return load_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from error


Devices = Annotated[CommaList, Field(min_length=1, max_length=64)]
DevicesByModel = Annotated[Mapping[str, Devices], BeforeValidator(_parse_json)]


class MeshSettings(ServiceSettings):
    """Settings of a local stack, started by `trtmesh up` or `trtmesh demo`."""

    section: ClassVar[str] = "mesh"

    host: str = "127.0.0.1"
    """Address of the routers; tokenizers and engines listen on 127.0.0.1."""
    port: Port = 8001
    """Port of the first router. A default port in use is replaced by a free one."""
    admin_port: Port = 8003
    """Admin port of the first router. A default port in use is replaced by a free one."""
    http_port: OptionalPort = 8000
    """HTTP port of the first router's Triton door; `none` serves no HTTP. A default port in use is replaced by a free
    one."""
    metrics_port: OptionalPort = 8002
    """Metrics port of the first router; other processes take free ports. `none` serves no metrics. A default port in
    use is replaced by a free one."""
    model: CommaList = ()
    """Directory of the model, or of several, each with as many engines and tokenizers as the first, which has the
    adapters and is the default of requests; the flag may be given again. Unset means the repository's demo model."""
    adapters: Path | None = None
    """Directory whose subdirectories are LoRA adapters of the model, registered under their names; unset means those of
    the demo model for the demo model."""
    triton_model_repo: Path | None = None
    """Triton model repository; its models are served under their names. The configuration file takes precedence."""
    backend: Literal["torch", "tensorrt_llm", "simulated"] | None = None
    """Backend of the engines; unset leaves it to `engine.backend`."""
    engines: Replicas = 1
    """Engines of both phases per model without `devices`; unset means 1, and none beside `prefill` and `decode` or
    `engines_at`."""
    engines_at: CommaList = ()
    """Engines that run elsewhere, in the form of `router.engines`, such as vllm://127.0.0.1:50051; without `engines` or
    roles the stack then starts none of its own."""
    prefill: ReplicasOrNone = 0
    """Engines per model that compute prompts and hand their KV over."""
    decode: ReplicasOrNone = 0
    """Engines per model that continue prompts computed elsewhere."""
    devices: DevicesByModel = Field(default_factory=dict)
    """Devices by the name of a model's directory, each a name as of `engine.torch.device`; each runs one engine of the
    model, the first ones those of `prefill`, then `decode`. An entry with several, such as `cuda:0,cuda:1`, is one
    engine on all of them; with the backend tensorrt_llm it sees no others. Engines of other models run on
    `engine.torch.device`. JSON in a flag or a variable."""
    tokenizers: ReplicasOrNone = 0
    """Tokenizer processes per model. 0 means none: each router has a tokenizer inside, which saves the hop and serves
    one model. Unset means 0 for one model, and 1 for several."""
    routers: Replicas = 1
    """Routers; all but the first listen on free ports."""
    one_process: bool = False
    """Whether router, tokenizer and one engine run in one process, which saves a laptop memory and the hops: a fault of
    one ends all three, and they start again."""
    tls: bool = False
    """Whether all ports speak TLS, with throw-away certificates made for this run; the processes show theirs to each
    other, clients need none."""
    log_dir: Path | None = None
    """Directory for one log file per process; unset logs to standard error."""
    start_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Longest start of the stack, until all processes serve."""
    output: Literal["text", "json"] = "text"
    """Form of standard output: text, or one JSON object per line."""

    def asks_for(self, name: str) -> bool:
        """Returns whether the setting was given a value."""
        return name in self.model_fields_set

    @property
    def has_roles(self) -> bool:
        """Whether engines have a role of their own."""
        return bool(self.prefill or self.decode)

    @property
    def mixed_engines(self) -> int:
        """Engines of both phases per model without `devices`."""
        others = (self.prefill and self.decode) or self.engines_at
        return 0 if others and not self.asks_for("engines") else self.engines


Flags = Mapping[str, str]
"""Values of the command line by setting; `config` is the configuration file."""


def load_mesh_settings(flags: Flags, defaults: Flags = MappingProxyType({})) -> MeshSettings:
    """Loads the settings of the stack from flags, environment, file and `defaults`, in this order of precedence."""
    argv = [part for name, value in flags.items() for part in (flag_of(name), value)]
    settings = load_settings(MeshSettings, argv)
    check_engines(settings.spelling("mesh.engines_at"), settings.engines_at)
    unsaid = {name: v for name, v in defaults.items() if not settings.asks_for(name)}
    if settings.one_process:
        # It has one engine, whatever a command would start.
        unsaid.pop("engines", None)
    return load_mesh_settings({**flags, **unsaid}) if unsaid else settings


def config_file_of(flags: Flags) -> str | None:
    return flags.get("config") or os.environ.get("TRTMESH_CONFIG")


PANELS: Mapping[str, str] = {
    **dict.fromkeys(("start_seconds", "grace_seconds", "stop_on_stdin_eof"), "Start and end"),
    **dict.fromkeys(("log_level", "log_format", "log_dir", "output"), "Logs and output"),
    **dict.fromkeys(
        (
            *("host", "port", "admin_port", "http_port", "metrics_port", "tls"),
            "max_message_bytes",
        ),
        CONNECTION,
    ),
}
"""Help titles of options beside models and processes, in this order."""

SWITCHES = ("one_process", "tls")
"""Options without a value."""


def takes_mesh_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command(flags, *, own options)` an option for each field of MeshSettings.

    Values stay text: load_mesh_settings validates them and names the flag, variable or line in an error.
    """

    def with_flags(**values: Any) -> None:
        own = {name: values.pop(name) for name in own_names}
        values |= {name: "true" if values[name] else None for name in SWITCHES}
        values["model"] = ",".join(values["model"]) if values["model"] else None
        command({name: value for name, value in values.items() if value is not None}, **own)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    own_names = [parameter.name for parameter in own]
    config = _option("config", "YAML file with the sections mesh, router, tokenizer and engine.")
    infos = MeshSettings.model_fields
    titles = ["", *dict.fromkeys(PANELS.values())]
    order = sorted(infos, key=lambda name: titles.index(PANELS.get(name, "")))
    fields = [_option(name, help_of(infos[name])) for name in order if name not in SWITCHES]
    switches = [_switch(name, help_of(infos[name])) for name in SWITCHES]
    return with_options(with_flags, [config, *fields, *switches, *own], like=command)


def _option(name: str, text: str) -> inspect.Parameter:
    option = typer.Option(
        flag_of(name),
        metavar="VALUE",
        help=text,
        show_default=False,
        rich_help_panel=PANELS.get(name),
    )
    one, several = Annotated[str | None, option], Annotated[list[str] | None, option]
    annotation = several if name == "model" else one
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _switch(name: str, text: str) -> inspect.Parameter:
    """An option without a value."""
    annotation = Annotated[
        bool, typer.Option(flag_of(name), help=text, rich_help_panel=PANELS.get(name))
    ]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation
    )


def flag_of(name: str) -> str:
    return "--" + name.replace(".", "-").replace("_", "-")
