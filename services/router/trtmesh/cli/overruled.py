"""Settings of the services, looked up in the sources of a stack; some of them the stack sets itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trtmesh.chassis.errors import SettingsError

Sections = Mapping[str, Mapping[str, object]]

_NOTHING = ""
_COMMON = {
    "grace_seconds": "mesh.grace_seconds",
    "metrics_port": "mesh.metrics_port",
    "stop_on_stdin_eof": _NOTHING,
}
_GIVEN: Mapping[str, Mapping[str, str]] = {
    "tokenizer": {**_COMMON, "host": _NOTHING, "port": "mesh.tokenizer_port"},
    "engine": {**_COMMON, "host": _NOTHING, "port": "mesh.engine_port", "worker": _NOTHING},
    "router": {
        **_COMMON,
        "host": "mesh.host",
        "port": "mesh.port",
        "admin.port": "mesh.admin_port",
        "http.port": "mesh.http_port",
        "tokenizers": "mesh.tokenizers, their number",
        "engines": "mesh.engines, their number",
    },
}
"""The setting of the stack that replaces each; some have none."""


def refuse_overruled(sections: Sections, environ: Mapping[str, str]) -> None:
    """Raises SettingsError for a setting of a service that the stack would overrule silently."""
    for service, names in _GIVEN.items():
        for name, instead in names.items():
            for source in _sources(service, name, sections, environ):
                way = f"set {instead}" if instead else "leave it out"
                raise SettingsError(f"{source} has no effect on a stack, which sets it; {way}")


def has_own(service: str, name: str, sections: Sections, environ: Mapping[str, str]) -> bool:
    """Whether a variable or the file sets a service's setting, by its dotted name."""
    return any(_sources(service, name, sections, environ))


def own_value(
    service: str, name: str, sections: Sections, environ: Mapping[str, str]
) -> object | None:
    """Returns the value of a service's setting from a variable or the file; None if neither sets it."""
    group, leaf = _place(service, name, sections)
    return environ.get(_variable(service, name)) or group.get(leaf)


def _sources(
    service: str, name: str, sections: Sections, environ: Mapping[str, str]
) -> Iterator[str]:
    if (variable := _variable(service, name)) in environ:
        yield f"environment variable {variable}"
    group, leaf = _place(service, name, sections)
    if leaf in group:
        yield f"{service}.{name} of the configuration file"


def _variable(service: str, name: str) -> str:
    return f"TRTMESH_{service}_{name}".replace(".", "_").upper()


def _place(service: str, name: str, sections: Sections) -> tuple[Mapping[str, object], str]:
    """Returns the group of a setting in the file, empty if absent, and the setting's name in it."""
    group: object = sections.get(service)
    *groups, leaf = name.split(".")
    for part in groups:
        group = group.get(part) if isinstance(group, Mapping) else None
    return (group if isinstance(group, Mapping) else {}), leaf
