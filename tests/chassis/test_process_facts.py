"""What a process tells of itself."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from trtmesh.chassis import process_facts as facts
from trtmesh.chassis.tls.settings import SecuredSettings, TlsSettings


class ExampleSettings(SecuredSettings):
    section = "router"


ADDRESSES = {"address": "0.0.0.0:1", "admin_address": "127.0.0.1:2"}


def test_listeners_tell_who_may_call() -> None:
    told = facts.process_facts(ExampleSettings(), ADDRESSES, {"admin_address"}, 3)
    assert [(each.purpose, each.address, each.tls, each.open) for each in told.listeners] == [
        ("grpc", "0.0.0.0:1", False, True),
        ("admin", "127.0.0.1:2", False, False),
        ("metrics", "127.0.0.1:3", False, True),
    ]
    assert told.release
    assert told.max_open_files > 0
    assert told.max_connections == ExampleSettings().connections.max_open


def test_service_may_open_as_many_files_as_its_hard_limit_says() -> None:
    """Shells, systemd and containers start programs with a soft limit of 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    flags = ("--port", "0", "--admin-port", "0", "--engines", "127.0.0.1:1")
    command = [sys.executable, "-m", "trtmesh.router", *flags]
    limited = ["sh", "-c", 'ulimit -Sn 512 && exec "$@"', "sh", *command]
    with subprocess.Popen(limited, stdout=subprocess.PIPE) as router:
        assert router.stdout
        try:
            assert json.loads(router.stdout.readline())["service"] == "router"
            assert resource.prlimit(router.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        finally:
            router.kill()
    assert facts.max_open_files() == hard


@pytest.mark.parametrize("soft", [256, 65_536])
def test_infinite_hard_limit_is_no_soft_one(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    """As on macOS."""
    given = list[tuple[int, int]]()
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, infinite))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    facts.allow_max_open_files()
    assert given == [(max(soft, facts.OPEN_MAX), infinite)]
    assert facts.max_open_files() == given[0][0]


@pytest.mark.parametrize(("certificates", "is_open"), [("required", False), ("optional", True)])
def test_required_certificates_close_every_port(certificates: str, *, is_open: bool) -> None:
    file = Path("file.pem")
    tls = TlsSettings.model_validate(
        {"certificate": file, "client_ca": file, "client_certificates": certificates}
    )
    told = facts.process_facts(ExampleSettings(tls=tls), ADDRESSES, set(), 3)
    assert {(each.tls, each.open) for each in told.listeners} == {(True, is_open)}


def test_memory_is_the_least_limit_of_the_cgroups(tmp_path: Path) -> None:
    group = tmp_path / "slice" / "service"
    group.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/slice/service\n")
    whole = facts.granted_memory(tmp_path, own)
    (group / "memory.max").write_text("max\n")
    assert facts.granted_memory(tmp_path, own) == whole
    (group.parent / "memory.max").write_text("1048576\n")
    assert facts.granted_memory(tmp_path, own) == 2**20


def test_clock_of_a_peer_that_does_not_tell_is_unknown() -> None:
    assert facts.clock_ahead_ms(0) is None
    ahead = facts.clock_ahead_ms(facts.unix_ms() + 10**9)
    assert ahead is not None
    assert ahead > 10**8
