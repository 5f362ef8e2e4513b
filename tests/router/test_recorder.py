"""The record file of a router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from process_constants import patch
from prometheus_client import CollectorRegistry
from router.scripted import (
    LENGTH,
    READY,
    ScriptedEngine,
    serving_engine,
    serving_router,
    until_states,
)
from router.traces import recorded_item
from small_disk import full_beyond
from trtmesh.chassis.block_hashes import chain
from trtmesh.chassis.errors import QueueFull, QueueTimeout, SettingsError
from trtmesh.chassis.service import run
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.cli.app import app
from trtmesh.router.placement import AdapterNeed, PlacementQuery, WorkerSnapshot, place
from trtmesh.router.placement.place import DecisionRecord
from trtmesh.router.recorder import Recorder
from trtmesh.router.router import Router
from trtmesh.router.settings import RouterSettings
from trtmesh.tools.fleet_replay.fleet_model import FleetModel
from trtmesh.tools.fleet_replay.simulation import replay
from trtmesh.tools.fleet_replay.trace import read_trace
from typer.testing import CliRunner


def test_file_is_bounded_and_lost_lines_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, max_line_file_bytes=10_000)
    fleet = [WorkerSnapshot("a:1", "a", "m", "", frozenset(), tokens_per_block=4)]
    record = DecisionRecord(
        "anonymous", "r", 0, "first", place("auto", fleet, PlacementQuery("m", prompt_tokens=9))
    )
    recorder = Recorder(tmp_path / "trace.jsonl")
    for _ in range(300):
        recorder.note(**recorded_item(first=record, hashes=[1, 2]))
        recorder.flush()
        sizes = [file.stat().st_size for file in tmp_path.iterdir()]
        assert sum(sizes) < 2 * 10_000 + 1000
    assert len(sizes) == 2
    assert {a.prompt_tokens for a in read_trace(tmp_path / "trace.jsonl")} == {9}
    assert counted(recorder) == (300, 0)
    for file in tmp_path.iterdir():
        file.unlink()
    tmp_path.rmdir()
    recorder.note(**recorded_item())
    recorder.flush()
    assert counted(recorder) == (300, 1)
    recorder.close()


def test_second_router_is_refused_and_finds_a_moved_file_free(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    first = Recorder(file)
    with pytest.raises(SettingsError, match="which another router writes; give each"):
        Recorder(file)
    file.rename(tmp_path / "moved")
    second = Recorder(file)
    for recorder in (first, second):
        recorder.note(**recorded_item())
        recorder.flush()
    assert (counted(first), counted(second)) == ((0, 1), (1, 0))
    second.close()
    first.note(**recorded_item())
    first.flush()
    assert counted(first) == (1, 1)
    assert len(file.read_text().splitlines()) == 2
    first.close()


def test_adapter_of_an_item_is_recorded(tmp_path: Path) -> None:
    fleet = [WorkerSnapshot("a:1", "a", "m", "", frozenset())]
    recorder = Recorder(tmp_path / "trace.jsonl")
    for name in ("unit-tests", ""):
        need = AdapterNeed(Adapter(7, name, "v1"), 16, deliverable=True)
        decision = place("auto", fleet, PlacementQuery("m", prompt_tokens=9, adapter=need))
        recorder.note(**recorded_item(first=DecisionRecord("anonymous", "r", 0, "first", decision)))
    recorder.note(**recorded_item())
    recorder.flush()
    recorder.close()
    told = [(a.adapter, a.adapter_rank) for a in read_trace(tmp_path / "trace.jsonl")]
    assert told == [("unit-tests", 16), ("7", 16), ("", 0)]


def test_unwritable_file_ends_the_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path, tmp_path / "none" / "trace.jsonl", Path("/dev/null")):
        flags = ("--port", "0", "--engines", "127.0.0.1:1", "--record-file", str(file))
        assert run(RouterSettings, Router, flags) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "--record-file" in line
        assert str(file) in line


def counted(registry: Recorder | CollectorRegistry) -> tuple[float, float]:
    """Counts of written and lost records."""
    samples = {s.name: s.value for family in registry.collect() for s in family.samples}
    names = [f"trtmesh_router_records_{word}_total" for word in ("written", "lost")]
    written, lost = (samples[name] for name in names)
    return written, lost


async def test_recorded_file_can_be_replayed(tmp_path: Path) -> None:
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


async def test_items_without_a_worker_are_recorded(tmp_path: Path) -> None:
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


def test_full_disk_warns_once_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    recorder = Recorder(folder / "trace.jsonl")
    (folder / "trace.jsonl").unlink()
    folder.rmdir()
    for _ in range(100):
        recorder.note(**recorded_item())
        recorder.flush()
    (line,) = [each for each in caplog.records if "cannot write records" in each.getMessage()]
    assert "1 are lost so far" in line.getMessage()
    assert counted(recorder) == (0, 100)


def test_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorder = Recorder(file)
    recorder.note(**recorded_item())
    recorder.flush()
    before = file.read_bytes()
    with full_beyond(len(before) + 10):
        recorder.note(**recorded_item())
        recorder.flush()
    assert file.read_bytes() == before
    recorder.note(**recorded_item())
    recorder.flush()
    recorder.close()
    assert file.read_bytes().count(b"\n") == 2
    assert len(read_trace(file)) == 2


def test_torn_line_of_a_killed_router_is_cut_off_and_not_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorder = Recorder(file)
    recorder.note(**recorded_item())
    recorder.flush()
    recorder.close()
    before = file.read_bytes()
    file.write_bytes(before + before[: len(before) // 2])
    assert len(read_trace(file)) == 1
    Recorder(file).close()
    assert file.read_bytes() == before
