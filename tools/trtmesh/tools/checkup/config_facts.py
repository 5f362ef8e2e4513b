"""Collects the facts of configurations: settings as a service would read them, its files, names and machine."""

from __future__ import annotations

import asyncio
import shlex
import ssl
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from itertools import permutations
from pathlib import Path

from trtmesh.chassis.addresses import host_of, parse_engine, resolved
from trtmesh.chassis.bearer import AdminToken
from trtmesh.chassis.config_file import FILE_ENTRY, read_config_file
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.process_facts import granted_memory, max_open_files
from trtmesh.chassis.settings import load_settings
from trtmesh.chassis.tls.settings import SecuredSettings, TlsSettings
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.callers.key_file import ListedKey, read_keys
from trtmesh.router.settings import RouterSettings
from trtmesh.tokenizer.settings import TokenizerSettings
from trtmesh.tools.checkup.certificates import ShownCertificate, as_peers_see, own_certificate

KINDS: Mapping[str, type[SecuredSettings]] = {
    kind.section: kind for kind in (RouterSettings, TokenizerSettings, EngineSettings)
}


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two services, by their names."""

    dialler: str
    listener: str
    refusal: str
    """Why it does not come about; '' if it does."""


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """A service as configured. Files and names are those of a setting, as `setting value`."""

    name: str
    settings: SecuredSettings | None
    problem: str = ""
    """Why it has no valid settings."""
    certificate: ShownCertificate | None = None
    certificate_problem: str = ""
    secrets: Mapping[str, int] = field(default_factory=dict)
    """Modes of files with secrets."""
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Why files cannot be used."""
    unknown_names: Mapping[str, str] = field(default_factory=dict)
    """Why names of hosts have no address."""
    token_length: int | None = None
    """Characters of the admin token; None without one."""
    keys: Sequence[ListedKey] = ()


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """Services of one mesh, on a machine such as this one."""

    services: Sequence[ServiceFacts]
    links: Sequence[Link]
    memory_bytes: int
    max_open_files: int
    now: float


async def collect_config(
    file: Path | None, commands: Sequence[str], environ: Mapping[str, str], seconds: float
) -> ConfigFacts:
    """Reads the services of a configuration file, and those of command lines such as `router --port 1`, which the file
    completes. Raises SettingsError for a file or a command that names no service."""
    # Each service reads it again.
    if file and _is_odd(file):
        raise SettingsError(f"is {file}, which is no regular file", setting="--config")
    sections = read_config_file(file) if file else {}
    lines = [*commands] or [_line(name, sections, environ) for name in KINDS if name in sections]
    if not lines:
        words = ", ".join(KINDS)
        raise SettingsError(f"is {file}, which has no section {words}", setting="--config")
    config = ("--config", str(file)) if file else ()
    services = []
    for line in lines:
        section, *argv = _words(line)
        if section not in KINDS:
            words = ", ".join(KINDS)
            raise SettingsError(f"is {line!r} but must begin with {words}", setting="--service")
        services.append(await _service(line, KINDS[section], [*argv, *config], environ, seconds))
    links = [link for one, other in permutations(services, 2) for link in _link(one, other)]
    return ConfigFacts(services, links, granted_memory(), max_open_files(), time.time())


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line) or [""]
    except ValueError as error:
        problem = f"is {line!r}, which no shell reads: {str(error).lower()}"
        raise SettingsError(problem, setting="--service") from error


def _line(
    section: str, sections: Mapping[str, Mapping[str, object]], environ: Mapping[str, str]
) -> str:
    """The command line of a section; `trtmesh up` completes one without what a service needs."""
    needed = "engines" if section == "router" else "model_dir"
    is_given = needed in sections[section] or f"TRTMESH_{section}_{needed}".upper() in environ
    return section if is_given else f"{section} --{needed.replace('_', '-')} ''"


async def _service(
    name: str,
    kind: type[SecuredSettings],
    argv: Sequence[str],
    environ: Mapping[str, str],
    seconds: float,
) -> ServiceFacts:
    token, keys, broken = None, list[ListedKey](), dict[str, str]()
    try:
        with redirect_stdout(StringIO()):
            settings = load_settings(kind, argv, environ)
        if odd := [f"{w} {path}" for w, path in _files(settings) if _is_odd(path)]:
            return ServiceFacts(name, None, f"no regular file: {', '.join(odd)}")
        if isinstance(settings, RouterSettings):
            token = AdminToken.read(settings.admin.token_file, environ)
    except SettingsError as error:
        return ServiceFacts(name, None, str(error))
    except SystemExit:
        return ServiceFacts(name, None, "--help prints its flags, and starts nothing")
    if isinstance(settings, RouterSettings) and (listed := settings.api_keys.file):
        try:
            keys = [*read_keys(listed.read_text(encoding="utf-8"))]
        except (OSError, ValueError) as error:
            broken[f"api_keys.file {listed}"] = str(getattr(error, "strerror", None) or error)
    directory, file = _model(settings)
    if file and directory is None:
        broken["model_dir"] = "it is not set"
    needed = {path: what for what, path in _needed(settings) if not path.is_file()}
    shown, problem = _certificate(settings.tls)
    return ServiceFacts(
        name,
        settings,
        certificate=shown,
        certificate_problem=problem,
        secrets=dict(_modes(settings)),
        unusable=broken | {f"{w} {path}": "it cannot be read" for path, w in needed.items()},
        unknown_names=await _unknown_names(settings, seconds),
        token_length=len(token) if token else None,
        keys=keys,
    )


def _is_odd(path: Path) -> bool:
    """Whether reading a file might never end: a pipe, a device."""
    return path.exists() and not path.is_file()


def _files(settings: SecuredSettings) -> Iterator[tuple[str, Path]]:
    """The files that are read here."""
    tls = settings.tls
    yield from ((f"tls.{name}", path) for name, path in tls if isinstance(path, Path))
    if isinstance(settings, RouterSettings):
        own = ("admin.token_file", settings.admin.token_file), ("api_keys.file", settings.api_keys.file)  # fmt: skip
        yield from ((name, path) for name, path in own if path)


def _model(settings: SecuredSettings) -> tuple[Path | None, str]:
    """The directory of the model, and a file that must be there; '' for a service without one."""
    if isinstance(settings, TokenizerSettings):
        return settings.model_dir, "tokenizer_config.json"
    if isinstance(settings, EngineSettings) and settings.backend == "torch":
        return settings.model_dir, "config.json"
    return None, ""


def _needed(settings: SecuredSettings) -> Iterator[tuple[str, Path]]:
    directory, file = _model(settings)
    if directory and directory != Path():
        yield "model_dir", directory / file
    files = (("tls.ca", settings.tls.ca), ("tls.client_ca", settings.tls.client_ca))
    yield from ((name, path) for name, path in files if path)
    if isinstance(settings, RouterSettings):
        entries = (*settings.engines, *settings.other_tokenizers)
        listed = [each.removeprefix(FILE_ENTRY) for each in entries if each.startswith(FILE_ENTRY)]
        yield from (("addresses", Path(file)) for file in listed)


def _modes(settings: SecuredSettings) -> Iterator[tuple[str, int]]:
    """The modes of files with secrets."""
    files = {"tls.key": settings.tls.key or settings.tls.certificate}
    if isinstance(settings, RouterSettings):
        files["admin.token_file"] = settings.admin.token_file
        files["receipts.key_file"] = settings.receipts.key_file
    for setting, path in files.items():
        if path is not None:
            with suppress(OSError):
                yield f"{setting} {path}", stat.S_IMODE(path.stat().st_mode)


def _certificate(tls: TlsSettings) -> tuple[ShownCertificate | None, str]:
    """The certificate, or why it cannot be used."""
    if tls.certificate is None:
        return None, ""
    try:
        return own_certificate(tls.certificate, tls.key), ""
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return None, f"{tls.key or tls.certificate} is not the key of {tls.certificate}"
        return None, f"{tls.certificate}: {(error.reason or str(error)).replace('_', ' ').lower()}"
    except OSError as error:
        return None, f"{tls.certificate} or its key: {error.strerror}"


async def _unknown_names(settings: SecuredSettings, seconds: float) -> Mapping[str, str]:
    if not isinstance(settings, RouterSettings):
        return {}
    entries = [f"engines {entry}" for entry in settings.engines]
    entries += [f"tokenizers {entry}" for entry in settings.other_tokenizers]
    entries = [entry for entry in entries if FILE_ENTRY not in entry]
    problems = await asyncio.gather(*(_look_up(e.partition(" ")[2], seconds) for e in entries))
    return {entry: problem for entry, problem in zip(entries, problems, strict=True) if problem}


async def _look_up(entry: str, seconds: float) -> str:
    """Why an address has no host, or ''."""
    try:
        async with asyncio.timeout(seconds):
            await resolved(host_of(parse_engine(entry)))
    except TimeoutError:
        return f"no name server answered within {seconds:g} s"
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _link(one: ServiceFacts, other: ServiceFacts) -> Iterator[Link]:
    """The connection of a service to another, if it makes one."""
    dialler, listener = one.settings, other.settings
    if dialler is None or listener is None:
        return
    dials = isinstance(dialler, RouterSettings | EngineSettings)
    if isinstance(listener, TokenizerSettings):
        dials = isinstance(dialler, RouterSettings) and bool(dialler.other_tokenizers)
    if dials and not isinstance(listener, RouterSettings):
        yield Link(one.name, other.name, _refusal(dialler.tls, listener.tls))


def _refusal(ours: TlsSettings, theirs: TlsSettings) -> str:
    """Why two services cannot connect, or ''. Unusable files are findings of their own."""
    if ours.ca is None or theirs.certificate is None:
        mixed = bool(ours.ca) != bool(theirs.certificate)
        return "one side speaks TLS, and the other plain text" if mixed else ""
    with suppress(OSError, ssl.SSLError):
        seen = as_peers_see(theirs.certificate, theirs.key, ours.ca, ours.peer_name)
        if seen.refusal or theirs.client_ca is None:
            return seen.refusal
        if ours.certificate is not None:
            return as_peers_see(ours.certificate, ours.key, theirs.client_ca, "").refusal
        if theirs.client_certificates == "required":
            return "it has no certificate to show"
    return ""
