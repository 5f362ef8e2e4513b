"""The canary over real processes: corruption is found by an item's repetition, and the worker at fault rests."""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.corruption import CONDITIONS, OTHER_DEVICE, SIMULATED_FAULT, corrupted
from e2e.mesh import PATIENT, SIMULATED, Mesh, eventually, running_mesh, samples_of, scrape
from router.adapters.contents_of import content
from trtmesh.tools.auditing.receipt_file import read_receipts
from trtmesh.v1 import receipt_pb2 as receipt_pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

SHARE = 0.5
NAMES = ("bad", "one", "two")
ADAPTERS = ("--simulated-adapters-slots", "4")
PROMPT = list(range(100, 180))
"""Two full blocks and a part of one."""


@asynccontextmanager
async def canary_mesh(
    folder: Path,
    fault: str = "",
    *,
    names: Sequence[str] = NAMES,
    share: float = SHARE,
    engine_flags: Sequence[str] = (),
) -> AsyncIterator[Mesh]:
    """A mesh whose worker `bad` has a fault."""
    code = SIMULATED_FAULT.format(condition=CONDITIONS.get(fault, "False"))
    if fault == "device":
        code = SIMULATED_FAULT.format(condition="True") + OTHER_DEVICE

    async def start(mesh: Mesh) -> None:
        starts = [mesh.start_tokenizer()]
        for name in names:
            own = [*engine_flags]
            if fault == "checksum":
                own += ["--role", "prefill" if name == "two" else "decode"]
            env = corrupted(folder / "fault", code) if name == "bad" else None
            engine = (*SIMULATED, *ADAPTERS, "--worker", name, *own)
            starts.append(mesh.start_engine(*engine, env=env))
        await asyncio.gather(*starts)
        handoffs = ("--handoff-enabled", "always" if fault == "checksum" else "auto")
        await mesh.start_router(
            *(*PATIENT, "--canary-share", str(share), "--placement-policy", "round_robin"),
            *("--receipts-file", str(folder / "receipts.jsonl"), *handoffs),
        )
        await mesh.ready(len(names), 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def outcomes(mesh: Mesh) -> dict[str, float]:
    none = dict.fromkeys(("identical", "different", "dropped", "unfit", "inexact", "failed"), 0.0)
    return none | await counted(mesh, "canary_items", "outcome")


async def alerts(mesh: Mesh) -> dict[str, float]:
    found = await counted(mesh, "canary_alerts", "worker")
    return {worker: count for worker, count in found.items() if count}


async def counted(mesh: Mesh, name: str, label: str) -> dict[str, float]:
    """A counter of the router by a label."""
    found = defaultdict[str, float](float)
    for sample in await samples_of(mesh.router):
        if sample.name == f"trtmesh_router_{name}_total":
            found[sample.labels[label]] += sample.value
    return dict(found)


async def examined(mesh: Mesh) -> bool:
    """Whether no sample waits or is being compared."""
    samples = await scrape(mesh.router)
    busy = ("canary_waiting", "worker_sequences", "live_items")
    return not any(samples[f"trtmesh_router_{name}"] for name in busy)


async def state_of(mesh: Mesh, name: str) -> admin_pb.Worker:
    return next(each for each in (await mesh.status()).workers if each.worker == name)


def most_items(share: float, bad_part: float) -> int:
    """Items after which a fault is found but for one time in a million."""
    return math.ceil(math.log(1e-6) / math.log(1 - share * bad_part))


@pytest.mark.parametrize("fault", ["weights", "kv", "adapter", "checksum"])
async def test_corruption_is_found_and_its_worker_rests(tmp_path: Path, fault: str) -> None:
    async with canary_mesh(tmp_path, fault) as mesh:
        options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "text": False}
        if fault == "adapter":
            asked = admin_pb.AddAdapterRequest(name="tiny")
            await mesh.admin.upload_adapter(asked, content(b"tiny"))
            options["adapter"] = "tiny"
        # An item is the bad worker's in a third of the cases, or in half where the others take no whole items.
        for number in range(most_items(SHARE, 1 / 3)):
            await mesh.client.complete([PROMPT], request_id=f"item-{number}", **options)
            await eventually(lambda: examined(mesh))
            if await alerts(mesh):
                break
        assert await alerts(mesh) == {"bad": 1}
        resting = await state_of(mesh, "bad")
        assert resting.state == admin_pb.WORKER_STATE_DRAINING
        assert "two workers contradict its tokens" in resting.problem
        assert {(await state_of(mesh, name)).state for name in NAMES[1:]} == {
            admin_pb.WORKER_STATE_READY
        }
        assert "silent corruption" in mesh.router.stderr
        await check_receipts(mesh, tmp_path / "receipts.jsonl", fault)
        # It takes nothing more, and what others generate is as before.
        found = await outcomes(mesh)
        for number in range(12):
            await mesh.client.complete([PROMPT], request_id=f"later-{number}", **options)
        await eventually(lambda: examined(mesh))
        assert (await outcomes(mesh))["different"] == found["different"] == 1
        assert (await outcomes(mesh))["failed"] == 0
        await mesh.admin.resume_worker("bad")
        assert (await state_of(mesh, "bad")).state == admin_pb.WORKER_STATE_READY
        await mesh.idle()


async def check_receipts(mesh: Mesh, file: Path, fault: str) -> None:
    """Checks that the file has the receipts of the item and of both repetitions."""
    (line,) = (each for each in mesh.router.stderr.splitlines() if "silent corruption" in each)
    told = line.rpartition("receipts: ")[2].split()
    assert len(told) == 3

    async def written() -> bool:
        return set(told) <= receipts_in(file).keys()

    await eventually(written)
    receipts = receipts_in(file)
    item, second, third = (receipts[each] for each in told)
    assert item.item_digest == second.item_digest == third.item_digest
    assert len({each.workers[-1].worker for each in (item, second, third)}) == 3
    digests = [each.sequences[0].ids_digest for each in (item, second, third)]
    odd = next(n for n, each in enumerate(digests) if digests.count(each) == 1)
    assert (item, second, third)[odd].workers[-1].worker == "bad"
    if fault == "kv":
        assert item.cached_prompt_tokens >= 64
    if fault == "checksum":
        assert [span.by_handoff for span in item.workers] == [False, True]


def receipts_in(file: Path) -> dict[str, receipt_pb.Receipt]:
    """The whole receipts of a file, by their text."""
    lines, filed = file.read_text().splitlines(), [*read_receipts(file, None)]
    return {
        json.loads(line)["receipt"]: each.receipt for line, each in zip(lines, filed, strict=False)
    }


async def test_honest_workers_agree_whatever_is_asked(tmp_path: Path) -> None:
    async with canary_mesh(tmp_path, share=1.0) as mesh:
        sampled: dict[str, Any] = {"temperature": 0.9, "num_return_sequences": 2}
        for options in (
            {},
            sampled,
            {"min_tokens": 9},
            {"stop_texts": ["e", "a"]},
            {"ignore_end_id": True},
        ):
            await mesh.client.complete(["one", "two", PROMPT], max_tokens=40, **options)
        reader = mesh.open(["stopped", "left"], request_id="stopped", max_tokens=4000, **sampled)
        await reader.tokens_here(30)
        await mesh.client.stop("stopped", [0])
        await reader.cancel()
        await eventually(lambda: examined(mesh))

        async def all_seen() -> bool:
            return sum((await outcomes(mesh)).values()) == 17

        await eventually(all_seen)
        assert (await outcomes(mesh))["identical"] == 17
        assert not await alerts(mesh)
        await mesh.idle()


async def test_workers_that_are_not_exact_with_each_other_are_not_compared(tmp_path: Path) -> None:
    async with canary_mesh(tmp_path, "device", share=1.0) as mesh:
        for number in range(6):
            await mesh.client.complete([PROMPT], request_id=f"item-{number}", max_tokens=8)
        await eventually(lambda: examined(mesh))
        found = await outcomes(mesh)
        assert (found["identical"], found["dropped"]) == (4, 2)
        assert not await alerts(mesh)
        told = "items of worker bad are not compared, as no other one is exact with it"
        assert f"{told}; what differs: device" in mesh.router.stderr
        await eventually(lambda: receipts_written(tmp_path / "receipts.jsonl", 6))
        kept = receipts_in(tmp_path / "receipts.jsonl").values()
        digests = {each.workers[0].worker: each.workers[0].settings_digest for each in kept}
        assert digests["one"] == digests["two"] != digests["bad"]


async def receipts_written(file: Path, count: int) -> bool:
    return len(receipts_in(file)) >= count


async def test_two_workers_that_differ_rest_nobody(tmp_path: Path) -> None:
    async with canary_mesh(tmp_path, "weights", names=NAMES[:2], share=1.0) as mesh:
        await mesh.client.complete([PROMPT], max_tokens=8)

        async def told() -> bool:
            return await alerts(mesh) == {"unknown": 1}

        await eventually(told)
        assert "at fault: unknown" in mesh.router.stderr
        for name in NAMES[:2]:
            assert (await state_of(mesh, name)).state == admin_pb.WORKER_STATE_READY


async def test_sample_waits_until_a_worker_has_idle_capacity(tmp_path: Path) -> None:
    alone = ("--simulated-limits-max-batch-size", "1")
    async with canary_mesh(tmp_path, share=1.0, engine_flags=alone) as mesh:
        busy = [mesh.open([PROMPT], max_tokens=20_000) for _ in range(2)]
        for reader in busy:
            await reader.tokens_here(2)
        await mesh.client.complete(["short"], max_tokens=3)

        async def short_is_over() -> bool:
            return (await scrape(mesh.router))["trtmesh_router_worker_sequences"] == len(busy)

        await eventually(short_is_over)
        assert not any((await outcomes(mesh)).values())
        await busy[0].cancel()

        async def compared() -> bool:
            return (await outcomes(mesh))["identical"] == 1

        await eventually(compared)
