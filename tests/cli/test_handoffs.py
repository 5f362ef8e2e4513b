"""Operators' commands about roles and handoffs, against a stack with workers for prefill and for decode."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator

import pytest
from cli.commands import Stack, running, running_stack, trtmesh
from cli.test_admin_commands import WIDE, as_objects
from e2e.mesh import PATIENT, SIMULATED, Mesh, running_mesh
from process_constants import constants

PROMPT = "def fibonacci(n): " * 2000
"""Computed for longer than any test looks."""
SPLIT = {"TRTMESH_ROUTER_HANDOFF_ENABLED": "always"}
SLOW = {
    "TRTMESH_ENGINE_SIMULATED_TIMING_PREFILL_TOKENS_PER_SECOND": "100",
    "TRTMESH_ENGINE_SIMULATED_TIMING_PREFILL_TOKENS_PER_STEP": "16",
}


@pytest.fixture(scope="module")
def roles() -> Iterator[Stack]:
    flags = ("--port", "0", "--prefill", "1", "--decode", "2")
    with running_stack(*flags, env=SPLIT | SLOW) as stack:
        stack.wait_ready()
        yield stack


def roles_of(admin: str) -> list[str]:
    listed = as_objects(trtmesh("workers", "list", "--json", "--admin", admin).stdout)
    return [worker["load"]["role"].removeprefix("WORKER_ROLE_") for worker in listed]


def test_stack_has_workers_of_each_role(roles: Stack) -> None:
    assert sum(child["service"] == "engine" for child in roles.children) == 3
    assert roles_of(roles.admin) == ["PREFILL", "DECODE", "DECODE"]
    for command in (("workers", "list"), ("status",), ("top", "--count", "1")):
        shown = trtmesh(*command, "--admin", roles.admin, env=WIDE)
        assert shown.returncode == 0, shown.stderr
        assert {"prefill", "decode"} <= set(shown.stdout.split())


def test_prompt_moves_and_is_explained_and_counted(roles: Stack) -> None:
    admin, router = roles.admin, roles.wait_ready()
    flags = ("--router", router, "--request-id", "split", "--max-tokens", "8", "--json")
    assert trtmesh("generate", *flags, "short " * 20).returncode == 0
    explained = trtmesh("explain", "split", "--admin", admin, env=WIDE)
    assert "prefill on engine-0, decode on engine-" in explained.stdout
    (told,) = as_objects(trtmesh("explain", "split", "--admin", admin, "--json").stdout)
    (placement,) = told["placements"]
    assert placement["prefill_worker"] == "engine-0"
    assert placement["split_seconds"] > 0
    assert placement["whole_seconds"] > 0
    assert placement["split_reason"]
    sent = as_objects(trtmesh("workers", "list", "--json", "--admin", admin).stdout)[0]
    assert int(sent["load"]["sent_handoffs"]["granted"]) >= 1
    listed = trtmesh("workers", "list", "--admin", admin, env=WIDE).stdout
    assert {"received", "leases"} <= set(listed.split())
    counted = trtmesh("handoffs", "--admin", admin).stdout
    assert re.match(r"none under way; so far engine-0 sent \d+; engine-[12] received", counted)


async def test_live_handoff_is_listed_and_watched() -> None:
    slow = {name.removeprefix("TRTMESH_ENGINE_"): value for name, value in SLOW.items()}
    flags = [word for name, value in slow.items() for word in (flag_of(name), value)]

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(
            mesh.start_tokenizer(),
            mesh.start_engine(*SIMULATED, *flags, "--worker", "engine-0", "--role", "prefill"),
            mesh.start_engine(*SIMULATED, *flags, "--worker", "engine-1", "--role", "decode"),
        )
        # A reservation that is late would leave the prompt whole.
        patient = (*PATIENT, *constants(handoff_reserve_seconds=60))
        await mesh.start_router(*patient, "--handoff-enabled", "always")
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh:
        router = mesh.router
        await asyncio.to_thread(_check_live_handoff, router.admin_address, router.address)


def flag_of(name: str) -> str:
    return f"--{name.lower().replace('_', '-')}"


def _check_live_handoff(admin: str, router: str) -> None:
    nothing = trtmesh("handoffs", "--admin", admin)
    assert (nothing.returncode, nothing.stderr) == (0, "")
    assert nothing.stdout.startswith("none under way")
    flags = ("--router", router, "--request-id", "moving", "--max-tokens", "4", "--json")
    with (
        running("handoffs", "--watch", "--json", "--admin", admin) as watch,
        running("handoffs", "--watch", "--admin", admin, env=WIDE) as pages,
        running("generate", *flags, PROMPT) as client,
    ):
        line = watch.wait_for('"prefilling"')
        (handoff,) = json.loads(line)["handoffs"]
        assert (handoff["request_id"], handoff["sender"]) == ("moving", "engine-0")
        assert handoff["receiver"] == "engine-1"
        assert (handoff["cause"], len(handoff["lease_id"])) == ("disaggregated", 32)
        row = pages.wait_for("prefilling").split()
        assert row[:2] == [handoff["lease_id"][:12], "moving"]
        (alone,) = as_objects(trtmesh("handoffs", "--json", "--admin", admin).stdout)
        assert alone["lease_id"] == handoff["lease_id"]
        for command in (client, watch, pages):
            command.signal(signal.SIGINT)
            assert command.wait() == 130


def test_role_changes_and_comes_back(roles: Stack) -> None:
    admin = roles.admin
    with running("workers", "watch", "--admin", admin, env=WIDE) as watch:
        changed = trtmesh("workers", "role", "engine-2", "mixed", "--admin", admin)
        assert (changed.returncode, changed.stderr) == (0, "")
        assert changed.stdout.startswith("worker engine-2 is for mixed; ")
        watch.wait_for("mixed")
    (told,) = as_objects(
        trtmesh("workers", "role", "engine-2", "decode", "--admin", admin, "--json").stdout
    )
    assert told["worker"]["worker"] == "engine-2"
    assert roles_of(admin) == ["PREFILL", "DECODE", "DECODE"]


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [(("nobody", "decode"), 1, "NOT_FOUND"), (("engine-1", "encode"), 2, "encode")],
)
def test_wrong_role_or_worker_is_named(
    roles: Stack, arguments: tuple[str, ...], status: int, word: str
) -> None:
    result = trtmesh("workers", "role", *arguments, "--admin", roles.admin)
    assert result.returncode == status
    assert word in result.stderr
