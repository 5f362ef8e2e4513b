"""The processes of a stack and their command lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from trtmesh.chassis.addresses import is_foreign
from trtmesh.chassis.bearer import AdminToken
from trtmesh.chassis.config_file import read_config_file
from trtmesh.chassis.cores import physical_cores, threads_for, weight_bytes
from trtmesh.chassis.device_names import VISIBLE, DeviceName, DeviceNames
from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.chassis.model_dir import check_model_dir
from trtmesh.chassis.settings import split_commas
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.extras import check_extras
from trtmesh.cli.mesh_settings import MeshSettings, flag_of
from trtmesh.cli.temporary_ca import TemporaryCa

LOOPBACK = "127.0.0.1"
SPREAD = "tensorrt_llm"
"""The backend with engines that see only the GPUs of their entry."""
RANKED = ("torch", SPREAD)
"""Backends with engines on several GPUs."""
LOCAL = "local"
"""The value of `router.tokenizers` for a tokenizer inside the router."""
ROUTER_PORTS = ("port", "http_port", "metrics_port", "admin_port")

ADAPTER_MEMORY = "torch.adapters.host_bytes"
ADAPTER_BYTES = 1 << 30
"""Memory for adapters in each engine, if the stack has some."""

_NOTHING = ""
_COMMON = {
    "grace_seconds": "mesh.grace_seconds",
    "metrics_port": "mesh.metrics_port",
    "stop_on_stdin_eof": _NOTHING,
    **{
        f"tls.{name}": "mesh.tls" for name in ("certificate", "key", "client_ca", "ca", "peer_name")
    },
    "tls.client_certificates": "mesh.tls",
}
_OVERRULED: Mapping[str, Mapping[str, str]] = {
    "tokenizer": {**_COMMON, "host": _NOTHING, "port": _NOTHING},
    "engine": {**_COMMON, "host": _NOTHING, "port": _NOTHING, "worker": _NOTHING},
    "router": {
        **_COMMON,
        "host": "mesh.host",
        "port": "mesh.port",
        "admin.port": "mesh.admin_port",
        "http.port": "mesh.http_port",
        "tokenizers": "mesh.tokenizers, their number",
        "engines": "mesh.engines, their number, or mesh.engines_at",
    },
}
"""The setting of the stack in place of each, if any."""


@dataclass(frozen=True, slots=True)
class ServiceSettingsGiven:
    """Settings of the services, by dotted name, as the configuration file and the environment give them."""

    sections: Mapping[str, Mapping[str, object]]
    environ: Mapping[str, str]

    def refuse_overruled(self) -> None:
        """Raises SettingsError for a service's setting without effect in a stack."""
        for service, names in _OVERRULED.items():
            for name, instead in names.items():
                for source in self.sources(service, name):
                    way = f"set {instead}" if instead else "leave it out"
                    raise SettingsError(f"{source} has no effect on a stack, which sets it; {way}")

    def sources(self, service: str, name: str) -> Iterator[str]:
        """Yields the sources of a setting: a variable, the file, both or neither."""
        if (variable := _variable(service, name)) in self.environ:
            yield f"environment variable {variable}"
        group, leaf = self._place(service, name)
        if leaf in group:
            yield f"{service}.{name} of the configuration file"

    def value(self, service: str, name: str) -> object | None:
        group, leaf = self._place(service, name)
        return self.environ.get(_variable(service, name)) or group.get(leaf)

    def _place(self, service: str, name: str) -> tuple[Mapping[str, object], str]:
        """The group of a setting in the file, empty if absent, and the setting's name in the group."""
        group: object = self.sections.get(service)
        *groups, leaf = name.split(".")
        for part in groups:
            group = group.get(part) if isinstance(group, Mapping) else None
        return (group if isinstance(group, Mapping) else {}), leaf


def _variable(service: str, name: str) -> str:
    return f"TRTMESH_{service}_{name}".replace(".", "_").upper()


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process: `python -m trtmesh.<module> <arguments>` and the ports."""

    name: str
    service: str
    arguments: tuple[str, ...]
    ports: Mapping[str, int | None]
    """Ports by setting: 0 for a free port, None for no port."""
    environment: Mapping[str, str] = field(default_factory=dict)
    tls: ClientTls | None = None
    """For calls to the process."""
    module: str = ""
    """Of the service unless given."""

    def command(self, ports: Mapping[str, int | None]) -> list[str]:
        flags: list[str] = []
        for name, port in ports.items():
            flags += [flag_of(name), "none" if port is None else str(port)]
        module = f"trtmesh.{self.module or self.service}"
        return [sys.executable, "-m", module, *self.arguments, *flags]


class Plan:
    """The command lines of a stack. All other settings are left to the services."""

    def __init__(
        self,
        settings: MeshSettings,
        config_file: str | None,
        tls: TemporaryCa | None = None,
        prefix: str = "",
    ) -> None:
        """`prefix` begins the names of the processes."""
        self._prefix = prefix
        self._settings = settings
        self._tls = tls
        self._config_file = config_file
        sections = read_config_file(Path(config_file)) if config_file else {}
        self._given = ServiceSettingsGiven(sections, os.environ)
        self._given.refuse_overruled()
        self._backend = settings.backend or self._given.value("engine", "backend") or "torch"
        check_extras(self._extras())
        self._models = _served_models(settings, self._given)
        _check_devices(settings, self._models)
        self._check_groups()
        _check_roles(settings, self._given)
        _check_one_process(settings, len(self._models))
        self._tokenizers_per_model = _tokenizers_per_model(settings, len(self._models))
        self.adapters = self._find_adapters()

    def _extras(self) -> Iterator[str]:
        """Yields the optional parts of the package for the processes."""
        settings = self._settings
        own = settings.mixed_engines or settings.has_roles or settings.devices
        yield "tokenizer"
        if own and self._backend != "simulated":
            yield "engine"
        if any(map(is_foreign, settings.engines_at)):
            yield "foreign"

    @property
    def first_model(self) -> str:
        """The model of the adapters."""
        return self._models[0].name

    def _find_adapters(self) -> Sequence[Path]:
        """The directories of the adapters to register. Raises SettingsError."""
        if self._settings.adapters is not None:
            return _adapters_in(self._settings.adapters)
        if not (self._settings.mixed_engines or self._settings.has_roles):
            return ()
        demo = _demo_model()
        if demo is None or self._models[0].directory.resolve() != demo:
            return ()
        # An operator with a setting for the memory decides about adapters too.
        if any(self._given.sources("engine", ADAPTER_MEMORY)):
            return ()
        return _adapters_in(demo.parent / "demo-adapters")

    def tokenizers(self) -> list[ProcessPlan]:
        return [
            ProcessPlan(
                name=f"{self._prefix}tokenizer-{index}",
                service="tokenizer",
                arguments=(*self._common("tokenizer", LOOPBACK), *model.flags),
                ports=self._ports(),
                tls=self.client_tls,
            )
            for index, model in enumerate(
                model for model in self._models for _ in range(self._tokenizers_per_model)
            )
        ]

    def engines(self) -> list[ProcessPlan]:
        """Without the engine inside the router, if there is one process."""
        return [
            ProcessPlan(
                name=f"{self._prefix}engine-{index}",
                service="engine",
                arguments=(*self._common("engine", LOOPBACK), *engine.flags),
                ports=self._ports(),
                environment=engine.environment,
                tls=self.client_tls,
            )
            for index, engine in enumerate(() if self._settings.one_process else self._engines())
        ]

    def _engines(self) -> Iterator[Place]:
        """Yields what sets each engine apart."""
        settings = self._settings
        places = [(model, place) for model in self._models for place in self._places(model)]
        backend = ("--backend", settings.backend) if settings.backend else ()
        adapters = self._adapter_memory()
        for index, (model, place) in enumerate(places):
            name = ("--worker", f"{self._prefix}engine-{index}")
            yield Place(
                (*place.flags, *backend, *adapters, *name),
                {**_sharing_cores(model, len(places)), **place.environment},
            )

    def _adapter_memory(self) -> tuple[str, ...]:
        """Returns the flag for engines to take the stack's adapters, unless the setting is given."""
        if not self.adapters or any(self._given.sources("engine", ADAPTER_MEMORY)):
            return ()
        return (flag_of(ADAPTER_MEMORY), str(ADAPTER_BYTES))

    def routers(self, tokenizers: Sequence[str], engines: Sequence[str]) -> list[ProcessPlan]:
        """Without addresses of tokenizers, each router has one inside; the engine too, if there is one process."""
        settings = self._settings
        ports = {name: getattr(settings, name) for name in ROUTER_PORTS}
        further = {name: None if port is None else 0 for name, port in ports.items()}
        all_engines = ",".join([*engines, *settings.engines_at])
        peers = ("--tokenizers", ",".join(tokenizers) or LOCAL, "--engines", all_engines)
        roots = ("--adapters-roots", ",".join(self._roots())) if self.adapters else ()
        return [
            ProcessPlan(
                name=f"{self._prefix}router-{index}",
                service="router",
                arguments=(
                    *self._common("router", settings.host),
                    *roots,
                    *peers,
                    *self._served_names(),
                    *self._foreign_models(),
                    *self._own_files(index),
                ),
                ports=ports if index == 0 else further,
                environment={} if tokenizers else self._inside(),
                tls=self.client_tls,
                module="cli.one_process" if settings.one_process else "",
            )
            for index in range(settings.routers)
        ]

    def _inside(self) -> Mapping[str, str]:
        """Returns the variables for the services inside a router."""
        shared = tuple(self._if_given("max_message_bytes"))
        tokenizer = _as_variables("tokenizer", (*self._models[0].flags, *shared))
        if not self._settings.one_process:
            return tokenizer
        (engine,) = self._engines()
        own = _as_variables("engine", (*engine.flags, *shared))
        return {**tokenizer, **own, **engine.environment}

    @property
    def models(self) -> Sequence[str]:
        """The names of the models, the default first."""
        return [model.name for model in self._models]

    def _served_names(self) -> tuple[str, ...]:
        """Returns the flag with the default among several models."""
        if len(self._models) == 1 or any(self._given.sources("router", "models")):
            return ()
        return ("--models", ",".join(self.models))

    def _foreign_models(self) -> tuple[str, ...]:
        """Returns the flag that makes the stack's models known for foreign engines."""
        if not any(map(is_foreign, self._settings.engines_at)) or any(
            self._given.sources("router", "foreign.model_dirs")
        ):
            return ()
        return ("--foreign-model-dirs", ",".join(str(model.directory) for model in self._models))

    def _own_files(self, index: int) -> Iterator[str]:
        """Yields the flags for the files that each router writes alone, for those after the first."""
        for setting in ("record", "receipts"):
            given = self._given.value("router", f"{setting}.file")
            if given is not None and index:
                file = Path(str(given))
                yield f"--{setting}-file"
                yield str(file.with_stem(f"{file.stem}.router-{index}"))

    def _roots(self) -> Sequence[str]:
        """Returns the root of the stack's adapters, searched first, and the given roots."""
        given = split_commas(self._given.value("router", "adapters.roots"))
        # The router refuses anything but a list.
        others = given if isinstance(given, Sequence) else ()
        return [*dict.fromkeys(str(each.parent) for each in self.adapters), *map(str, others)]

    @property
    def needs_api_key(self) -> bool:
        """Whether the routers ask clients for a key."""
        return self._given.value("router", "api_keys.file") is not None

    @property
    def has_console(self) -> bool:
        """Whether the routers serve the console at their admin addresses."""
        return self._given.value("router", "admin.console") != "none"

    def admin_token(self) -> AdminToken | None:
        """Returns the admin token of the routers. Raises SettingsError."""
        file = self._given.value("router", "admin.token_file")
        return AdminToken.read(Path(str(file)) if file else None, os.environ)

    def _ports(self) -> Mapping[str, int | None]:
        """The ports of a tokenizer or engine, free ones."""
        return {"port": 0, "metrics_port": None if self._settings.metrics_port is None else 0}

    def _places(self, model: ServedModel) -> list[Place]:
        settings = self._settings
        roles = [("--role", "prefill")] * settings.prefill + [
            ("--role", "decode")
        ] * settings.decode
        specialists: list[tuple[str, ...]] = [(*model.flags, *role) for role in roles]
        devices = settings.devices.get(model.name)
        if devices is None:
            return [*map(Place, specialists), *[Place(model.flags)] * settings.mixed_engines]
        places = zip_longest(specialists, devices, fillvalue=model.flags)
        return [self._place(flags, str(device)) for flags, device in places]

    def _place(self, flags: tuple[str, ...], device: str) -> Place:
        if self._backend == SPREAD:
            # The library takes the first visible GPUs.
            visible = [self._visible(name) for name in DeviceNames(device).names]
            return Place(flags, {VISIBLE: ",".join(visible)})
        return Place((*flags, "--torch-device", device))

    def _visible(self, name: DeviceName) -> str:
        """Returns the name of a GPU for child processes. Raises SettingsError."""
        names = [each for each in os.environ.get(VISIBLE, "").split(",") if each]
        seen = name.text in names if name.is_identity else (name.number or 0) < len(names)
        if names and not seen:
            raise SettingsError(
                f"names {name}, but {VISIBLE} has {len(names)} GPUs: {','.join(names)}",
                setting="mesh.devices",
            )
        if name.is_identity:
            return name.text
        number = name.number or 0
        return names[number] if names else str(number)

    def _check_groups(self) -> None:
        """Raises SettingsError for an entry of `devices` with a wrong form, or wrong for the backend."""
        for model, devices in self._settings.devices.items():
            for device in devices:
                try:
                    names = DeviceNames(device).names
                except ValueError as error:
                    raise SettingsError(
                        f"has {device!r} for {model}, which {error}", setting="mesh.devices"
                    ) from error
                if self._backend not in RANKED and len(names) > 1:
                    raise SettingsError(
                        f"has {device!r} for {model}, but an engine of the backend {self._backend} runs on one device",
                        setting="mesh.devices",
                    )
                if self._backend == SPREAD and not _are_gpus(names):
                    raise SettingsError(
                        f"has {device!r} for {model} but must name different GPUs, such as cuda:0,cuda:1",
                        setting="mesh.devices",
                    )

    @property
    def client_tls(self) -> ClientTls | None:
        """For calls to the processes; None for plain text."""
        return self._tls.client if self._tls else None

    @property
    def ca(self) -> Path | None:
        """The authority for clients to check the routers; None for plain text."""
        return self._tls.ca if self._tls else None

    def _common(self, service: str, host: str) -> tuple[str, ...]:
        settings = self._settings
        flags = ["--host", host, "--stop-on-stdin-eof", "true"]
        flags += ["--grace-seconds", str(settings.grace_seconds)]
        flags += self._if_given("log_level", "log_format", "max_message_bytes")
        if self._config_file:
            flags += ["--config", self._config_file]
        if self._tls is not None:
            flags += self._tls.flags(service)
        return tuple(flags)

    def _if_given(self, *names: str) -> Iterator[str]:
        """Yields the flags of a service for settings of the stack that were given a value."""
        for name in names:
            if self._settings.asks_for(name):
                yield from (flag_of(name), str(getattr(self._settings, name)))


@dataclass(frozen=True, slots=True)
class Place:
    """What sets an engine apart, such as model, role and device."""

    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def _are_gpus(names: Sequence[DeviceName]) -> bool:
    """Returns whether all names are of single, different GPUs."""
    each_is_one = all(name.number is not None or name.is_identity for name in names)
    return each_is_one and len(set(names)) == len(names)


def _sharing_cores(model: ServedModel, engines: int) -> Mapping[str, str]:
    """Returns the variable with an engine's number of threads; an existing value wins."""
    # Engines with a thread for every core slow each other down.
    threads = threads_for(weight_bytes(model.directory), physical_cores() // engines)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def _as_variables(service: str, flags: Sequence[str]) -> Mapping[str, str]:
    """Returns flags of a service as variables, for a process of another service with this one inside."""
    names = (_variable(service, flag.removeprefix("--").replace("-", "_")) for flag in flags[::2])
    return dict(zip(names, flags[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    """The name of the directory."""
    directory: Path
    flags: tuple[str, ...]
    """Flags of tokenizers and engines; none if file or environment name the model for both."""


def _served_models(settings: MeshSettings, given: ServiceSettingsGiven) -> list[ServedModel]:
    services = ("tokenizer", "engine")
    own = [s for s in services if any(given.sources(s, "model_dir"))]
    models = [*map(Path, settings.model)]
    if not models and len(own) == 1:
        (other,) = set(services) - set(own)
        raise SettingsError(
            f"is set but {other}.model_dir is not; set mesh.model, or both",
            setting=f"{own[0]}.model_dir",
        )
    if not models and own:
        directory = Path(str(given.value("engine", "model_dir")))
        return [ServedModel(directory.resolve().name, directory, ())]
    models = models or [demo_model()]
    for model in models:
        check_model_dir(model)
    _check_names(models, given)
    return [
        ServedModel(model.resolve().name, model, ("--model-dir", str(model))) for model in models
    ]


def _check_names(models: Sequence[Path], given: ServiceSettingsGiven) -> None:
    """Raises SettingsError where requests could not tell several models apart."""
    if len(models) == 1:
        return
    for source in given.sources("engine", "model"):
        raise SettingsError(
            f"{source} would name all {len(models)} models; leave it out: directories name them"
        )
    names = [model.resolve().name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(
            f"has two directories called {twice!r}, but a model is called like its directory; rename one",
            setting="mesh.model",
        )


def _adapters_in(directory: Path) -> Sequence[Path]:
    """Returns the directories of adapters; the router refuses unusable adapters. Raises SettingsError."""
    try:
        return sorted(path.resolve() for path in directory.iterdir() if path.is_dir())
    except OSError as error:
        raise SettingsError(
            f"cannot be read: {directory}: {error.strerror}", setting="mesh.adapters"
        ) from error


def _check_devices(settings: MeshSettings, models: Iterable[ServedModel]) -> None:
    """Raises SettingsError where `devices` or `engines` would have no effect."""
    names = {model.name for model in models}
    if unknown := set(settings.devices) - names:
        raise SettingsError(
            f"names {', '.join(map(repr, sorted(unknown)))}, but the models of the stack are:"
            f" {', '.join(sorted(names))}",
            setting="mesh.devices",
        )
    if settings.asks_for("engines") and names == set(settings.devices):
        raise SettingsError(
            "has no effect: mesh.devices lists a device for each engine of every model",
            setting="mesh.engines",
        )


def _tokenizers_per_model(settings: MeshSettings, models: int) -> int:
    """The number of tokenizer processes for each model. Raises SettingsError where routers would need a tokenizer of
    several models inside."""
    count = settings.tokenizers
    if count == 0 and models > 1:
        if settings.asks_for("tokenizers"):
            raise SettingsError(
                f"is 0, but the tokenizer inside a router serves one model, and the stack has {models}",
                setting="mesh.tokenizers",
            )
        count = 1
    return count


def _check_one_process(settings: MeshSettings, models: int) -> None:
    """Raises SettingsError for a part of the stack with no place in one process."""
    if not settings.one_process:
        return
    devices = [each for given in settings.devices.values() for each in given]
    misfits = {
        "routers": settings.routers > 1,
        "tokenizers": settings.tokenizers > 0,
        "engines": settings.engines > 1,
        "engines_at": bool(settings.engines_at),
        "prefill": settings.prefill > 0,
        "decode": settings.decode > 0,
        "devices": len(devices) > 1 or any("," in each for each in devices),
        "model": models > 1,
        "backend": settings.backend == SPREAD,
    }
    for name in (name for name, is_one in misfits.items() if is_one):
        raise SettingsError(
            "has no place in one process, which is a router, a tokenizer, and a torch or simulated engine of one model;"
            " leave out mesh.one_process or this",
            setting=f"mesh.{name}",
        )


def _check_roles(settings: MeshSettings, given: ServiceSettingsGiven) -> None:
    """Raises SettingsError where a role is set twice, or has no device."""
    if not settings.has_roles:
        return
    for source in given.sources("engine", "role"):
        raise SettingsError(
            f"{source} has no effect beside mesh.prefill and mesh.decode; leave it out"
        )
    specialists = settings.prefill + settings.decode
    for model, devices in settings.devices.items():
        if len(devices) < specialists:
            raise SettingsError(
                f"lists {len(devices)} for {model}, but mesh.prefill and mesh.decode need {specialists}",
                setting="mesh.devices",
            )


def demo_model() -> Path:
    """Returns the model of the repository. Raises ModelUnusable elsewhere."""
    if (model := _demo_model()) is not None:
        return model
    raise ModelUnusable(
        "no model is given, and the demo model is not part of the package; give the directory of a Hugging Face model:"
        " --model DIR (hf download OWNER/NAME --local-dir DIR fetches one)"
    )


def _demo_model() -> Path | None:
    """The model of the repository, found from this file in an editable install."""
    for directory in Path(__file__).resolve().parents:
        model = directory / "models" / "demo"
        if (directory / "pyproject.toml").is_file() and model.is_dir():
            return model
    return None
