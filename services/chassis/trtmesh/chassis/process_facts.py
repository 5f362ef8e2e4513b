"""What a process tells of itself: release, ports, and the limits of its machine."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Container, Mapping
from importlib.metadata import version
from pathlib import Path

from trtmesh.chassis.addresses import bracketed
from trtmesh.chassis.cores import CGROUPS, OWN_CGROUP, own_cgroups
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.v1 import process_pb2 as pb


def process_facts(
    settings: SecuredSettings,
    addresses: Mapping[str, str],
    guarded: Container[str],
    metrics_port: int | None,
) -> pb.ProcessFacts:
    """`addresses` are by their names in the announcement; `guarded` are those whose callers need a secret."""
    tls = settings.tls
    shows = tls.client_ca is not None and tls.client_certificates == "required"
    named = {
        "grpc" if name == "address" else name.removesuffix("_address"): name for name in addresses
    }
    listeners = [
        pb.Listener(
            purpose=purpose,
            address=addresses[name],
            tls=tls.certificate is not None,
            open=not shows and name not in guarded,
        )
        for purpose, name in named.items()
    ]
    if metrics_port is not None:
        at = f"{bracketed(settings.host)}:{metrics_port}"
        listeners.append(
            pb.Listener(
                purpose="metrics", address=at, tls=tls.certificate is not None, open=not shows
            )
        )
    return pb.ProcessFacts(
        release=version("trtmesh"),
        listeners=listeners,
        memory_limit_bytes=granted_memory(),
        max_open_files=max_open_files(),
        max_connections=settings.connections.max_open,
    )


OPEN_MAX = 10_240
"""Most files of macOS, which calls its hard limit infinite and refuses to raise the soft one beyond this."""


def max_open_files() -> int:
    """Most files that a service may open here, and with them connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft, OPEN_MAX) if hard == resource.RLIM_INFINITY else hard


def allow_max_open_files() -> None:
    """Raises the soft limit to the hard one. Shells, systemd and containers start programs with a soft limit of 1,024,
    for the sake of select(2), which nothing here calls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files(), hard))


def granted_memory(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Bytes granted by the machine and the cgroups of this process."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (group / "memory.max" for group in own_cgroups(root, own))
    texts = (limit.read_text().strip() for limit in limits if limit.is_file())
    return min([machine, *(int(text) for text in texts if text != "max")])


def unix_ms() -> int:
    """This machine's clock, in milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000


def clock_ahead_ms(told: int) -> int | None:
    """How far a peer's clock is ahead of ours, by what it just told; None if it told nothing."""
    return told - unix_ms() if told else None
