"""What may be wrong with the configuration of services: pure functions over its facts."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product

from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.tools.checkup.config_facts import ConfigFacts, ServiceFacts
from trtmesh.tools.checkup.findings import Symptom
from trtmesh.tools.checkup.mesh_checks import CERTIFICATE_SECONDS, SPARE_FILES, ends_on
from trtmesh.tools.checkup.mesh_facts import is_loopback

SHORTEST_TOKEN = 20
"""Characters."""
OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
DATES = ("expired", "not yet valid")


def unusable(facts: ConfigFacts) -> Iterator[Symptom]:
    for service in facts.services:
        if service.problem:
            yield Symptom("settings", service.name, service.problem)
        for file, problem in service.unusable.items():
            yield Symptom("file", f"{service.name}: {file}", problem)
        for name, problem in service.unknown_names.items():
            yield Symptom("names", f"{service.name}: {name}", problem)
        if service.certificate_problem:
            yield Symptom("key-mismatch", service.name, service.certificate_problem)


def certificates(facts: ConfigFacts) -> Iterator[Symptom]:
    for service in facts.services:
        if (shown := service.certificate) is None:
            continue
        if shown.refusal:
            yield Symptom("certificate", service.name, f"tls.certificate: {shown.refusal}")
        elif shown.ends - facts.now < CERTIFICATE_SECONDS:
            yield Symptom("certificate-ends", service.name, ends_on(shown.ends))
    for link in facts.links:
        # Dates are a finding of their own.
        if link.refusal and not any(word in link.refusal for word in DATES):
            what = f"it cannot connect to {link.listener}: {link.refusal}"
            yield Symptom("tls-link", link.dialler, what)


def secrets(facts: ConfigFacts) -> Iterator[Symptom]:
    for service in facts.services:
        for file, mode in service.secrets.items():
            if mode & OTHERS_READ:
                what = f"others than its owner may read it (mode {mode:03o})"
                yield Symptom("secret", f"{service.name}: {file}", what)
        if service.token_length is not None and service.token_length < SHORTEST_TOKEN:
            what = f"the admin token has {service.token_length} characters"
            yield Symptom("weak-token", service.name, what)
        now = datetime.fromtimestamp(facts.now, UTC)
        if expired := [key.name for key in service.keys if key.is_expired(now)]:
            yield Symptom("expired-key", service.name, f"expired keys: {', '.join(expired)}")
        settings = service.settings
        has_file = isinstance(settings, RouterSettings) and settings.api_keys.file
        if has_file and not (service.keys or service.unusable):
            yield Symptom(
                "no-keys", service.name, "api_keys.file has no key: all calls are refused"
            )


def exposure(facts: ConfigFacts) -> Iterator[Symptom]:
    for service in facts.services:
        settings = service.settings
        if settings is None:
            continue
        tls = settings.tls
        shows = tls.client_ca is not None and tls.client_certificates == "required"
        at = f"ports on {settings.host} are open to the network"
        is_inside = is_loopback(f"{settings.host}:1")
        if isinstance(settings, RouterSettings):
            admin = settings.admin.host
            if not (is_loopback(f"{admin}:1") or shows or service.token_length):
                what = f"the admin port on {admin} is open to the network, without a token"
                yield Symptom("open-admin", service.name, what)
            if not (is_inside or tls.certificate):
                yield Symptom("plain-text", service.name, f"{at} in plain text, with all keys")
            keys = settings.api_keys
            if not (is_inside or shows or (keys.file and not keys.optional)):
                yield Symptom("open-port", service.name, f"{at}, without keys or certificates")
        elif not (is_inside or shows):
            yield Symptom("open-inside", service.name, f"{at}, without certificates")


def resources(facts: ConfigFacts) -> Iterator[Symptom]:
    ports: dict[int, list[str]] = defaultdict(list)
    for service in facts.services:
        if (settings := service.settings) is None:
            continue
        most, sums = facts.memory_bytes, _reserved(service)
        if sum(sums.values()) > most:
            told = " + ".join(f"{name} {size >> 20} MiB" for name, size in sums.items())
            what = f"{told} exceed the {most >> 20} MiB granted here"
            yield Symptom("memory", service.name, what)
        needed = settings.connections.max_open + SPARE_FILES
        if needed > facts.max_open_files:
            what = f"connections.max_open needs {needed} open files; {facts.max_open_files} are granted here"
            yield Symptom("files", service.name, what)
        for setting, port in _ports(service).items():
            ports[port].append(f"{setting} of {service.name}")
    for port, users in ports.items():
        if port and len(users) > 1:
            yield Symptom("port", users[0], f"port {port} is {' and '.join(users)}")


def _reserved(service: ServiceFacts) -> Mapping[str, int]:
    """Memory that a service may take by its settings."""
    settings = service.settings
    if isinstance(settings, RouterSettings):
        requests = settings.admission.max_request_bytes
        return {"admission.max_request_bytes": requests, "adapters.bytes": settings.adapters.bytes}
    if isinstance(settings, EngineSettings) and settings.backend == "torch":
        cache, adapters = settings.torch.host_cache.bytes, settings.torch.adapters.host_bytes
        return {"torch.host_cache.bytes": cache, "torch.adapters.host_bytes": adapters}
    return {}


def _ports(service: ServiceFacts) -> Mapping[str, int]:
    settings = service.settings
    assert settings
    ports = {"port": settings.port, "metrics_port": settings.metrics_port or 0}
    if isinstance(settings, RouterSettings):
        ports |= {"admin.port": settings.admin.port, "http.port": settings.http.port or 0}
    return ports


def engines(facts: ConfigFacts) -> Iterator[Symptom]:
    found = [(e.name, e.settings) for e in facts.services if isinstance(e.settings, EngineSettings)]
    roles = {engine.role for _, engine in found}
    if roles in ({"prefill"}, {"decode"}):
        yield Symptom("no-role", found[0][0], f"every engine here has the role {roles.pop()}")
    senders, receivers = ([e for e in found if e[1].role == r] for r in ("prefill", "decode"))
    for (name, one), (other_name, other) in product(senders, receivers):
        where, why = f"{name} and {other_name}", _why_apart(one, other)
        if why:
            yield Symptom("handoff", where, f"KV cannot move between them: {why}")
        sizes = {each.torch.kv_cache.tokens_per_block for each in (one, other)}
        if len(sizes) > 1 and one.backend == other.backend == "torch":
            yield Symptom("blocks", where, "their torch.kv_cache.tokens_per_block differ")
    inexact = [name for name, engine in found if not _is_exact(engine)]
    for service in facts.services:
        settings = service.settings
        if inexact and isinstance(settings, RouterSettings) and settings.hedge_share:
            what = f"hedge_share is set, and {', '.join(inexact)} take no copies: inexact"
            yield Symptom("hedging", service.name, what)


def _why_apart(one: EngineSettings, other: EngineSettings) -> str:
    """Why KV cannot move between two engines, or ''."""
    if not {*one.handoff.transports} & {*other.handoff.transports}:
        return "they have no common engine.handoff.transports"
    if one.backend != other.backend:
        return f"their backends are {one.backend} and {other.backend}"
    if one.torch.dtype != other.torch.dtype:
        return f"their torch.dtype is {one.torch.dtype} and {other.torch.dtype}"
    return ""


def _is_exact(engine: EngineSettings) -> bool:
    on_cpu = all(name.text == "cpu" for name in engine.torch.device.names)
    in_full = engine.torch.dtype == "float32" or (engine.torch.dtype == "auto" and on_cpu)
    is_exact = engine.backend == "torch" and (engine.torch.batch_invariant or in_full)
    return is_exact or engine.backend == "simulated"


CONFIG_CHECKS: Sequence[Callable[[ConfigFacts], Iterator[Symptom]]] = (
    unusable,
    certificates,
    secrets,
    exposure,
    resources,
    engines,
)
