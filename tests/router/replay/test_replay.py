"""Replaying traffic: read strictly, simulated with the router's own placement, recorded within bounds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from router.scripted import (
    LENGTH,
    READY,
    ScriptedEngine,
    serving_engine,
    serving_router,
    until_states,
)
from trtmesh.chassis.block_hashes import chain
from trtmesh.chassis.errors import InvalidRequest, QueueFull, QueueTimeout
from trtmesh.chassis.service import run
from trtmesh.cli.app import app
from trtmesh.router.placement import POLICIES, PlacementQuery, WorkerSnapshot, place
from trtmesh.router.placement.decision_log import DecisionRecord
from trtmesh.router.replay import Arrival, FleetModel, RecordedItem, Recorder, read_trace, replay
from trtmesh.router.router import Router
from trtmesh.router.settings import RouterSettings
from typer.testing import CliRunner


def shared_prefixes(items: int = 600, prefixes: int = 24, blocks: int = 16) -> list[Arrival]:
    """Items that come at random, each with one of several long prefixes and a tail of its own."""
    generator, arrivals, now = Random(5), [], 0.0
    for number in range(items):
        now += generator.expovariate(40)
        prefix = generator.randrange(prefixes)
        hashes = [prefix * 1000 + n for n in range(blocks)] + [10**6 + number]
        arrivals.append(Arrival(now, 32 * (blocks + 1) + 5, 20, 32, tuple(hashes)))
    return arrivals


def write(file: Path, arrivals: list[Arrival]) -> Path:
    lines = [
        {
            "timestamp": a.seconds * 1000,
            "input_length": a.prompt_tokens,
            "output_length": a.new_tokens,
            "block_tokens": a.block_tokens,
            "hash_ids": list(a.blocks),
        }
        for a in arrivals
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("policy", POLICIES)
def test_every_item_comes_to_its_end_and_every_token_is_counted(policy: str) -> None:
    arrivals = shared_prefixes()
    outcome = replay(arrivals, policy, FleetModel(workers=6))
    assert outcome.items == sum(outcome.items_by_worker) == len(outcome.end_seconds) == 600
    assert len(outcome.first_token_seconds) == 600
    computed = sum(outcome.computed_by_worker)
    assert computed + outcome.reused_tokens == outcome.prompt_tokens
    assert outcome.reused_tokens <= outcome.reusable_tokens
    assert outcome == replay(arrivals, policy, FleetModel(workers=6))


def test_looking_at_prefixes_pays() -> None:
    fleet = FleetModel(workers=6, prefill_tokens_per_second=4000)
    arrivals = shared_prefixes()
    outcomes = {policy: replay(arrivals, policy, fleet) for policy in POLICIES}
    best = outcomes["prefix_aware"].reusable_tokens
    for policy in ("prefix_aware", "auto"):
        assert outcomes[policy].reused_tokens > 0.8 * best
        assert outcomes[policy].reused_tokens > 1.1 * outcomes["round_robin"].reused_tokens
        assert outcomes[policy].balance < 2
        assert sum(outcomes[policy].first_token_seconds) < sum(
            outcomes["round_robin"].first_token_seconds
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [2, 8])
def test_equal_workers_share_what_has_no_prefix_in_common(policy: str, workers: int) -> None:
    dice = Random(1)
    seconds, arrivals = 0.0, []
    for number in range(1500):
        seconds += dice.expovariate(3.0 * workers)
        tokens, new_tokens = dice.randint(50, 2000), dice.randint(1, 300)
        blocks = tuple(number * 100 + block for block in range(tokens // 64))
        arrivals.append(Arrival(seconds, tokens, new_tokens, 64, blocks))
    shares = replay(arrivals, policy, FleetModel(workers=workers)).items_by_worker
    assert max(shares) < 1.3 * 1500 / workers
    assert min(shares) > 0.7 * 1500 / workers


def test_long_prompts_among_short_ones_do_not_mislead_those_who_look_at_the_load() -> None:
    dice = Random(1)
    seconds, arrivals = 0.0, []
    for number in range(1500):
        seconds += dice.expovariate(96)
        tokens = min(16_000, max(32, int(600 * dice.lognormvariate(0, 1))))
        blocks = tuple(number * 1000 + block for block in range(tokens // 32))
        arrivals.append(Arrival(seconds, tokens, dice.randint(32, 256), 32, blocks))
    fleet = FleetModel(workers=16)
    worst = {
        policy: sorted(replay(arrivals, policy, fleet).first_token_seconds)[-15]
        for policy in ("round_robin", "prefix_aware", "auto")
    }
    assert max(worst["prefix_aware"], worst["auto"]) < 0.75 * worst["round_robin"]


def test_caches_are_bounded() -> None:
    small = FleetModel(workers=2, cache_tokens=1024)
    large = FleetModel(workers=2)
    arrivals = shared_prefixes(200)
    for policy in ("prefix_aware", "round_robin"):
        assert (
            replay(arrivals, policy, small).reused_tokens
            < replay(arrivals, policy, large).reused_tokens
        )


def test_mooncake_traces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
        "\n"
        '{"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [1]}\n'
    )
    assert read_trace(file) == [
        Arrival(0.0, 512, 0, 512, (1,)),
        Arrival(2.0, 1100, 5, 512, (1, 2)),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", ":1 is not JSON"),
        ("[]", ":1 is not an object"),
        ('{"timestamp": 1, "output_length": 1}', ":1: input_length is None"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length is 0"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "timestamp is 'x'"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', ":1: timestamp is nan"),
        ('{"timestamp": -Infinity, "input_length": 1, "output_length": 1}', "timestamp is -inf"),
        ('{"timestamp": 1e400, "input_length": 1, "output_length": 1}', "timestamp is inf"),
        ('{"timestamp": 1%s, "input_length": 1, "output_length": 1}' % ("0" * 400), "timestamp"),
        ('{"timestamp": 1, "input_length": 1%s, "output_length": 1}' % ("0" * 400), "input_length"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
        ("", "no arrivals"),
    ],
)
def test_a_wrong_trace_names_the_line(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(InvalidRequest, match=words):
        read_trace(file)


def test_the_command_compares_policies(tmp_path: Path) -> None:
    file = write(tmp_path / "trace.jsonl", shared_prefixes(100))
    run = CliRunner().invoke(
        app, ["replay", str(file), "--policy", "round_robin", "--policy", "auto", "--json"]
    )
    assert run.exit_code == 0, run.output
    figures: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["policy"] for row in figures] == ["round_robin", "auto"]
    assert figures[0]["hit_rate"] < figures[1]["hit_rate"] <= figures[1]["best_hit_rate"]
    table = CliRunner().invoke(app, ["replay", str(file)])
    assert table.exit_code == 0
    assert all(policy in table.output for policy in POLICIES)
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "none")]).exit_code == 1


@pytest.mark.parametrize(
    "flags", [("--policy", "x"), ("--speed", "nan"), ("--step-ms", "inf"), ("--workers", "0")]
)
def test_wrong_usage_has_status_2(tmp_path: Path, flags: tuple[str, str]) -> None:
    file = write(tmp_path / "trace.jsonl", shared_prefixes(10))
    run = CliRunner().invoke(app, ["replay", str(file), *flags])
    assert run.exit_code == 2
    assert flags[0] in run.stderr


def item(**known: Any) -> RecordedItem:
    fields: dict[str, Any] = {"error": "", "prompt_tokens": 9, "new_tokens": 3, **known}
    return RecordedItem("r", 0, "m", 1.0, **fields)


def test_the_file_is_bounded_and_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    fleet = [WorkerSnapshot("a:1", "a", "m", "", frozenset())]
    record = DecisionRecord(
        "r", 0, "first", place("auto", fleet, PlacementQuery("m", prompt_tokens=9))
    )
    recorder = Recorder(tmp_path / "trace.jsonl", 10_000)
    for _ in range(300):
        recorder.note(item(first=record, block_tokens=4, hashes=[1, 2]))
        recorder.flush()
        sizes = [file.stat().st_size for file in tmp_path.iterdir()]
        assert sum(sizes) < 2 * 10_000 + 1000
    assert len(sizes) == 2
    assert {a.prompt_tokens for a in read_trace(tmp_path / "trace.jsonl")} == {9}
    assert counted(recorder) == (300, 0)
    for file in tmp_path.iterdir():
        file.unlink()
    tmp_path.rmdir()
    recorder.note(item())
    recorder.flush()
    assert counted(recorder) == (300, 1)


def test_a_file_that_cannot_be_written_is_a_wrong_setting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path, tmp_path / "none" / "trace.jsonl", Path("/dev/null")):
        flags = ("--port", "0", "--engines", "127.0.0.1:1", "--record-file", str(file))
        assert run(RouterSettings, Router, flags) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "router.record.file" in line
        assert str(file) in line


def counted(registry: Recorder | CollectorRegistry) -> tuple[float, float]:
    """Records that were written and that were lost."""
    samples = {s.name: s.value for family in registry.collect() for s in family.samples}
    names = [f"trtmesh_router_records_{word}_total" for word in ("written", "lost")]
    written, lost = (samples[name] for name in names)
    return written, lost


async def test_a_router_records_what_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"], tokens_per_block=4)
    async with (
        serving_engine(engine) as address,
        serving_router([address], placement={"policy": "auto"}, record={"file": file}) as client,
    ):
        await until_states(client, [READY], [])
        ids = list(range(1, 11))
        reader = client.generate([ids], text=False, max_tokens=9, request_id="r")
        await anext(reader)
        (submit,) = await engine.submitted()
        await engine.step((submit.handle, 0, [7, 8]), ends=[(submit.handle, LENGTH)])
        async for _ in reader:
            pass
    (arrival,) = read_trace(file)
    assert (arrival.prompt_tokens, arrival.new_tokens, arrival.block_tokens) == (10, 2, 4)
    assert list(arrival.blocks) == chain(0, ids, 4)
    line = json.loads(file.read_text())
    assert (line["request_id"], line["worker"], line["policy"]) == ("r", "scripted", "auto")
    assert replay([arrival], "auto", FleetModel()).items == 1


async def test_items_that_no_worker_took_are_recorded_too(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    limits = {"max_running_items": 1, "max_queued_items": 1, "queue_seconds": 0.05}
    async with (
        serving_engine(engine) as address,
        serving_router([address], record={"file": file}, admission=limits) as client,
    ):
        await until_states(client, [READY], [])
        options: dict[str, Any] = {"text": False, "max_tokens": 9}
        running = asyncio.create_task(client.complete([[1]], **options))
        (submit,) = await engine.submitted()
        (queued,) = await client.complete([[1, 2]], request_id="queued", **options)
        assert isinstance(queued.error, QueueTimeout)
        with pytest.raises(QueueFull):
            await client.complete([[1, 2, 3], "text"], request_id="refused", **options)
        await engine.step((submit.handle, 0, [7, 8]), ends=[(submit.handle, LENGTH)])
        await running
        registry = client.registry
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert counted(registry) == (len(lines), 0)
    told = {
        (line["request_id"], line["batch_index"]): (
            line["error"],
            line["input_length"],
            line["output_length"],
            line.get("worker"),
        )
        for line in lines
        if line["request_id"] in ("queued", "refused")
    }
    assert told == {
        ("queued", 0): ("QUEUE_TIMEOUT", 2, None, None),
        ("refused", 0): ("QUEUE_FULL", 3, None, None),
        ("refused", 1): ("QUEUE_FULL", None, None, None),
    }
    arrivals = read_trace(file)
    assert sorted((a.prompt_tokens, a.new_tokens, a.guessed) for a in arrivals) == [
        (1, 2, False), (2, 2, True), (2, 2, True), (3, 2, True),
    ]  # fmt: skip
    replayed = CliRunner().invoke(app, ["replay", str(file), "--policy", "auto", "--json"])
    assert json.loads(replayed.stdout)["items"] == 4
    assert replayed.stderr.startswith("3 of 4 items")


def test_what_no_worker_could_take_is_no_arrival(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace.jsonl", 10_000)
    recorder.note(item())
    recorder.note(item(error="PROMPT_EMPTY", prompt_tokens=None, new_tokens=None))
    recorder.note(item(error="QUEUE_TIMEOUT", prompt_tokens=None, new_tokens=None))
    recorder.flush()
    assert [a.guessed for a in read_trace(tmp_path / "trace.jsonl")] == [False, True]
