"""Settings of the services that the stack gives its processes itself, so that others would be given in vain."""

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
        "admin_port": "mesh.admin_port",
        "http_port": "mesh.http_port",
        "tokenizers": "mesh.tokenizers, their number",
        "engines": "mesh.engines, their number",
    },
}
"""What to set in the place of each; for some there is nothing."""


def refuse_overruled(sections: Sections, environ: Mapping[str, str]) -> None:
    """Raises SettingsError for a setting of a service that the stack would overrule without a word."""
    for service, names in _GIVEN.items():
        for name, instead in names.items():
            for source in _sources(service, name, sections, environ):
                way = f"set {instead}" if instead else "leave it out"
                raise SettingsError(f"{source} has no effect on a stack, which sets it; {way}")


def has_own(service: str, name: str, sections: Sections, environ: Mapping[str, str]) -> bool:
    """Whether the file or a variable gives a service that setting."""
    return any(_sources(service, name, sections, environ))


def _sources(
    service: str, name: str, sections: Sections, environ: Mapping[str, str]
) -> Iterator[str]:
    variable = f"TRTMESH_{service}_{name}".upper()
    if variable in environ:
        yield f"environment variable {variable}"
    if name in sections.get(service, {}):
        yield f"{service}.{name} of the configuration file"
