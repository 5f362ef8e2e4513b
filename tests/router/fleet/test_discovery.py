"""Names resolve to replicas; replicas come and go without a restart."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from chassis.test_addresses import NONE
from e2e.mesh import SIMULATED, StreamReader
from processes import service_process
from router.names import Names
from router.scripted import READY, ScriptedEngine, serving_engine, serving_router, until_states
from trtmesh.chassis.addresses import parse_engine
from trtmesh.chassis.errors import SettingsError
from trtmesh.router.fleet import discovery
from trtmesh.router.fleet.discovery import (
    UNKNOWN_ROUNDS,
    Discovery,
    check_engines,
    check_entries,
)
from trtmesh.v1 import router_admin_pb2 as admin_pb


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


class Seen:
    """Joins and leaves reported by discovery."""

    def __init__(self, *entries: str) -> None:
        self.told: list[str] = []
        self.ever: list[str] = []
        self.in_use: set[str] = set()
        self.problem = ""
        self.discovery = Discovery(
            entries,
            lambda a: self.told.append(f"+{a}"),
            lambda a: self.told.append(f"-{a}"),
            _in_use=lambda address: address in self.in_use,
            _on_problem=lambda problem: setattr(self, "problem", problem),
        )

    async def resolve(self) -> list[str]:
        """Resolves once; returns the reported changes."""
        self.told.clear()
        await self.discovery.resolve()
        self.ever += self.told
        return self.told

    async def resolve_rested(self) -> list[str]:
        """Resolves until a changed file has been taken; returns the reported changes."""
        first = [*await self.resolve()]
        return first + await self.resolve()


async def test_name_of_several_addresses_is_several_replicas(names: Names) -> None:
    seen = Seen("engines:9000", "10.0.0.9:1")
    names.answers["engines"] = ["10.0.0.1", "10.0.0.2"]
    assert await seen.resolve() == ["+10.0.0.1:9000", "+10.0.0.2:9000", "+10.0.0.9:1"]
    assert await seen.resolve() == []
    names.answers["engines"] = ["10.0.0.2", "10.0.0.3"]
    assert await seen.resolve() == ["+10.0.0.3:9000", "-10.0.0.1:9000"]


async def test_dual_stack_host_is_one_replica(names: Names) -> None:
    names.answers["engines"] = ["fd00::1", "10.0.0.1"]
    assert await Seen("engines:9000").resolve() == ["+10.0.0.1:9000"]
    names.answers["engines"] = ["fd00::1"]
    assert await Seen("engines:9000").resolve() == ["+[fd00::1]:9000"]


async def test_unknown_name_loses_its_replicas_after_many_answers(
    names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen("engines:9000")
    names.answers["engines"] = ["10.0.0.1"]
    await seen.resolve()
    names.answers.clear()
    for _ in range(UNKNOWN_ROUNDS - 1):
        assert await seen.resolve() == []
    assert await seen.resolve() == ["-10.0.0.1:9000"]
    assert seen.problem == "DNS does not know engines:9000: no such name"
    assert "its 1 replicas leave after 15 such answers" in caplog.text
    names.answers["engines"] = ["10.0.0.1"]
    assert await seen.resolve() == ["+10.0.0.1:9000"]
    assert seen.problem == ""


@pytest.mark.parametrize("failure", [socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM])
async def test_failing_name_server_removes_nothing_ever(
    failure: int, names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen("engines:9000")
    names.answers["engines"] = ["10.0.0.1"]
    await seen.resolve()
    names.answers.clear()
    names.failure = failure
    for _ in range(10 * UNKNOWN_ROUNDS):
        assert await seen.resolve() == []
    assert seen.problem == "DNS gives no answer for engines:9000: no such name"
    assert caplog.text.count("its 1 replicas stay") == 1
    # Failures between two unknown names prove nothing.
    names.failure = socket.EAI_NONAME
    for _ in range(UNKNOWN_ROUNDS - 1):
        assert await seen.resolve() == []
    names.answers["engines"] = ["10.0.0.1"]
    assert await seen.resolve() == []


async def test_changing_subsets_of_many_addresses_remove_no_replica_in_use(names: Names) -> None:
    rng, seen = random.Random(7), Seen("engines:9000")
    addresses = [f"10.0.0.{number}" for number in range(24)]
    joined: set[str] = set()
    for _ in range(300):
        names.answers["engines"] = rng.sample(addresses, 8)
        for told in await seen.resolve():
            assert told[0] == "+"
            assert told[1:] not in joined
            joined.add(told[1:])
        seen.in_use = {*joined}
    assert len(joined) == len(addresses)


async def test_replica_leaves_with_an_answer_without_it_once_out_of_use_or_missed_for_long(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen("engines:9000")
    names.answers["engines"] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    await seen.resolve()
    seen.in_use = {"10.0.0.1:9000", "10.0.0.2:9000"}
    names.answers["engines"] = ["10.0.0.1"]
    assert await seen.resolve() == ["-10.0.0.3:9000"]
    seen.in_use.remove("10.0.0.2:9000")
    assert await seen.resolve() == ["-10.0.0.2:9000"]
    names.answers["engines"] = ["10.0.0.4"]
    assert await seen.resolve() == ["+10.0.0.4:9000"]
    monkeypatch.setattr(discovery, "MISSED_SECONDS", 0)
    assert await seen.resolve() == ["-10.0.0.1:9000"]


async def test_addresses_are_told_in_one_spelling(names: Names) -> None:
    names.answers["localhost"] = names.answers["127.1"] = ["127.0.0.1"]
    same = ("127.0.0.1:1", "localhost:1", "127.1:1", "[::ffff:127.0.0.1]:1")
    seen = Seen(*same, "[::1]:1", "[0:0:0:0:0:0:0:1]:1")
    assert await seen.resolve() == ["+127.0.0.1:1", "+[::1]:1"]


async def test_half_of_a_file_that_is_being_written_removes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("10.0.0.1:9000\n10.0.0.2:9000\n")
    seen = Seen(f"file:{file}")
    assert len(await seen.resolve()) == 2
    for half in ("", "10.0.0.1:90", "10.0.0.1:9000\n10.0."):
        file.write_text(half)
        assert await seen.resolve() == []
    file.write_text("10.0.0.1:9000\n10.0.0.3:9000\n")
    assert await seen.resolve_rested() == ["+10.0.0.3:9000", "-10.0.0.2:9000"]


async def test_slow_name_delays_no_other(names: Names) -> None:
    seen = Seen("slow:9000", "engines:9000")
    names.answers["engines"] = ["10.0.0.1"]
    names.answers["slow"] = ["10.0.0.7"]
    names.slow.add("slow")
    assert await seen.resolve() == ["+10.0.0.1:9000"]
    names.answers["engines"] = ["10.0.0.2"]
    assert await seen.resolve() == ["+10.0.0.2:9000", "-10.0.0.1:9000"]
    names.slow.clear()
    names.answered.set()
    assert await seen.resolve() == ["+10.0.0.7:9000"]


async def test_name_answered_between_two_rounds_joins(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PATIENCE_SECONDS", 0)
    seen = Seen("slow:9000")
    names.answers["slow"] = ["10.0.0.7"]
    names.slow.add("slow")
    assert await seen.resolve() == []
    await names.answer()
    assert await seen.resolve() == ["+10.0.0.7:9000"]


async def test_entry_removed_during_the_lookup_neither_joins_nor_leaves(
    names: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery, "PATIENCE_SECONDS", 0)
    file = tmp_path / "replicas"
    file.write_text("slow:9000\n")
    seen = Seen(f"file:{file}")
    names.answers["slow"] = ["10.0.0.7"]
    names.slow.add("slow")
    assert await seen.resolve() == []
    file.write_text("# none\n")
    assert await seen.resolve_rested() == []
    await names.answer()
    assert await seen.resolve() == []
    assert await seen.resolve() == []
    file.write_text("slow:9000\n")
    await seen.resolve_rested()
    await names.answer()
    await seen.resolve()
    assert seen.ever == ["+10.0.0.7:9000"]


async def test_failure_of_a_returning_name_is_logged_again(
    names: Names, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "replicas"
    seen = Seen(f"file:{file}")
    for lines in ("nobody:9000\n", "nobody:9000\n", "# none\n", "nobody:9000\n"):
        file.write_text(lines)
        assert await seen.resolve_rested() == []
    complaints = [record.getMessage() for record in caplog.records]
    assert complaints == ["DNS does not know nobody:9000: no such name"] * 2


@pytest.mark.parametrize("seed", range(20))
async def test_joins_and_leaves_alternate_and_all_are_reported(
    seed: int, names: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery, "PATIENCE_SECONDS", 0)
    rng, file = random.Random(seed), tmp_path / "replicas"
    hosts, addresses = ("a", "b", "c"), [f"10.0.0.{number}" for number in range(4)]
    seen = Seen(f"file:{file}")
    joined: set[str] = set()

    async def resolve() -> None:
        for each in await seen.resolve():
            assert (each[0] == "+") == (each[1:] not in joined)
            joined.symmetric_difference_update({each[1:]})

    def choose() -> list[str]:
        names.answers = {host: rng.sample(addresses, rng.randrange(3)) for host in hosts}
        names.slow = set(rng.sample(hosts, rng.randrange(3)))
        chosen = rng.sample(hosts, rng.randrange(4))
        file.write_text("".join(f"{host}:1\n" for host in chosen))
        return chosen

    for _ in range(60):
        chosen = choose()
        names.answered.clear()
        await resolve()
        if rng.random() < 0.5:
            await names.answer()
    names.answers = {host: ["10.0.0.9", f"10.0.1.{ord(host)}"] for host in hosts}
    await names.answer()
    for _ in range(4):
        await resolve()
        await names.answer()
    await resolve()
    expected = {address for host in chosen for address in names.answers[host]}
    assert joined == {f"{address}:1" for address in expected}


@pytest.mark.parametrize("line", ["nonsense", "file:/etc/hosts", "file:other:9000", "a b:9000"])
async def test_invalid_file_keeps_the_replicas(line: str, tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("10.0.0.1:9000  # the first\n\n# nobody else\n")
    seen = Seen(f"file:{file}")
    assert await seen.resolve() == ["+10.0.0.1:9000"]
    file.write_text(f"10.0.0.2:9000\n{line}\n")
    assert await seen.resolve_rested() == []
    assert str(file) in seen.problem


async def test_localhost_resolves() -> None:
    assert await Seen("localhost:9000").resolve() in (["+127.0.0.1:9000"], ["+[::1]:9000"])


async def test_replicas_join_and_leave_a_running_router(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "MISSED_SECONDS", 0)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            service_process("engine", *SIMULATED, "--worker", "first", "--port", "0")
        )
        port = first.address.rpartition(":")[2]
        names.answers["engines"] = ["127.0.0.1"]
        client = await stack.enter_async_context(
            serving_router([f"engines:{port}"], placement={"policy": "round_robin"})
        )
        await until_states(client, [READY], [])
        second = ("--worker", "second", "--host", "127.0.0.2", "--port", port)
        await stack.enter_async_context(service_process("engine", *SIMULATED, *second))
        names.answers["engines"] = ["127.0.0.1", "127.0.0.2"]
        await until_states(client, [READY, READY], [])
        reader = StreamReader(client, [[5], [6], [7], [8]], max_tokens=400, text=False)
        await reader.until(lambda r: all(item.started for item in r.items))
        names.answers["engines"] = ["127.0.0.2"]
        items = await reader.result()
        assert {item.started.worker for item in items if item.started} == {"first", "second"}
        assert [len(item.token_ids) for item in items] == [400] * 4
        await until_states(client, [READY], [])
        (item,) = await client.complete([[5]], max_tokens=2, text=False)
        assert item.started
        assert item.started.worker == "second"


async def test_replica_returning_before_idle_stays(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "MISSED_SECONDS", 0)
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    async with serving_engine(engine) as address:
        names.answers["engines"] = ["127.0.0.1"]
        entry = f"engines:{address.rpartition(':')[2]}"
        async with serving_router([entry]) as client:
            await until_states(client, [READY], [])
            asked = asyncio.create_task(client.complete([[5]], max_tokens=9, text=False))
            (submit,) = await engine.submitted()
            names.answers["engines"] = ["127.0.0.9"]
            draining, connecting = (
                admin_pb.WORKER_STATE_DRAINING,
                admin_pb.WORKER_STATE_CONNECTING,
            )
            await until_states(client, [draining, connecting], [])
            names.answers["engines"] = ["127.0.0.1"]
            await until_states(client, [READY], [])
            await engine.step((submit.handle, 0, [1]), ends=[(submit.handle, 3)])
            assert (await asked)[0].token_ids == (1,)
            assert len(engine.hellos) == 1


@pytest.mark.parametrize("entry", [text for text in NONE if text != "file:x:1"])
def test_entry_is_an_address_or_a_file(entry: str) -> None:
    with pytest.raises(
        SettingsError, match="engines has an entry that is not host:port or file:PATH: "
    ):
        check_entries("engines", ["good:1", entry])


def test_addresses_and_files_are_entries() -> None:
    check_entries("engines", ["good:1", "[::1]:1", "file:/etc/trtmesh/engines", "file:x:1"])


def test_foreign_engines_are_entries_of_engines_alone() -> None:
    entries = ["vllm://engine:50051", "127.0.0.1:9101", "file:engines.txt"]
    check_engines("router.engines", entries)
    with pytest.raises(SettingsError, match="vllm://engine:50051"):
        check_entries("router.tokenizers", entries)
    with pytest.raises(SettingsError, match="vlm://engine:50051"):
        check_engines("router.engines", ["vlm://engine:50051"])


async def test_names_of_foreign_engines_resolve(names: Names, tmp_path: Path) -> None:
    names.answers = {"many": ["10.0.0.2", "10.0.0.1"]}
    file = tmp_path / "engines.txt"
    file.write_text("sglang://many:2  # two of them\n10.0.0.9:3\n", encoding="utf-8")
    told: list[str] = []
    found = Discovery(["vllm://many:1", f"file:{file}"], told.append, told.append, parse_engine)
    await found.resolve()
    assert told == [
        "10.0.0.9:3",
        *("sglang://10.0.0.1:2", "sglang://10.0.0.2:2"),
        *("vllm://10.0.0.1:1", "vllm://10.0.0.2:1"),
    ]
