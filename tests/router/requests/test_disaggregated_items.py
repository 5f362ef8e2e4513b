"""Items whose prompt is computed on one worker and continued on another: equal to those of a single worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from process_constants import patch
from router.adapters.contents_of import content as adapter_content
from router.handoff_fleet import PROMPT, Workers, expected, workers
from router.scripted import (
    PATIENCE_SECONDS,
    READY,
    eventually,
    serving_router,
    until_states,
)
from tokenizer.serving import served
from tokenizer.tokenizers_zoo import byte_level_bpe, save_model_dir
from trtmesh.chassis.errors import DeadlineExceeded
from trtmesh.client import FinishReason, GenerationPhase, HandoffConfig, ItemResult
from trtmesh.engine.handoff.settings import HandoffLimits
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

CONTENT = adapter_content()


def content(items: Any) -> Any:
    """Everything of results that the number of workers must not change."""
    return [_of_item(item) for item in items]


def _of_item(item: ItemResult) -> Any:
    assert item.error is None, item.error
    return [
        (each.token_ids, each.text, each.log_probs, each.finished and each.finished.reason)
        for each in item.sequences
    ]


either = pytest.mark.parametrize("by_state", [False, True], ids=["leases", "state"])
"""By leases, and by workers that move the KV themselves."""

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7},
    "two sequences": {"num_return_sequences": 2, "temperature": 0.9, "seed": 3},
    "two tokens": {"max_tokens": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
async def test_two_workers_generate_the_tokens_of_one(options: dict[str, Any]) -> None:
    async with workers("prefill", "decode") as on:
        items = await on.ask(PROMPT, **options)
        assert content(items) == content(await expected(PROMPT, **options))
        await on.quiet()
        assert on.handoffs(cause="disaggregated", result="moved") == 1
        assert on.load("decode-1").received_handoffs.consumed == 1
        assert on.load("decode-1").computed_prompt_tokens < 16


SLOW_PREFILL: dict[str, Any] = {"timing": {"step_ms": 2.0, "prefill_tokens_per_second": 40.0}}
"""Three seconds for a prompt."""


async def test_another_router_sees_the_reserved_blocks() -> None:
    async with workers("prefill", "decode", **SLOW_PREFILL) as on:
        engines = [engine.address for engine in on.engines.values()]
        async with serving_router(engines) as other:
            fleet = other.router._fleet
            await until_states(other, [READY] * 2, [])
            asked = on.ask(PROMPT)
            await on.stage("prefilling")
            guard = fleet.workers[on.engines["decode-1"].address].guard
            await eventually(lambda: (guard.sequences, guard.receiving_tokens) == (1, 128))
            await asked
            await on.quiet()
            await eventually(lambda: (guard.sequences, guard.receiving_tokens) == (0, 0))


CONTEXT_ONLY = HandoffConfig(phase=GenerationPhase.GENERATION_PHASE_CONTEXT_ONLY)
STAGES = ["reserving", "prefilling", "transferring"]
ENDLESS = 6000


@asynccontextmanager
async def in_stage(
    stage: str,
    *,
    settings: Any = None,
    prefill_rate: float = 40.0,
    by_state: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Workers, asyncio.Task[Any]]]:
    """Two workers, and an item whose handoff stays in a stage."""
    simulated: dict[str, Any] = {}
    if stage == "prefilling":
        simulated = {"timing": {"prefill_tokens_per_second": prefill_rate}}
    if stage == "transferring":
        simulated = {"limits": {"max_batch_size": 1}}
    async with workers(
        "prefill", "decode", settings=settings, by_state=by_state, **simulated
    ) as on:
        if stage == "transferring":
            # Its sequence occupies the decode worker.
            _ = on.ask(list(range(300, 340)), request_id="first", max_tokens=ENDLESS)
            await eventually(lambda: on.handoffs(result="moved") == 1)
        if stage == "reserving":
            on.proxies["decode-1"].freeze(to_target=True, from_target=False)
        asked = on.ask(PROMPT, request_id="second", **options)
        await on.stage(stage)
        yield on, asked
        on.proxies["decode-1"].mend()
        if stage == "transferring":
            await on.client.stop("first")
        await on.quiet()


def in_stages(every_run: str) -> pytest.MarkDecorator:
    """All stages in `make soak`: chaos/test_handoffs.py ends items at other steps of real processes."""
    return pytest.mark.parametrize(
        "stage",
        [
            pytest.param(each, marks=[] if each == every_run else [pytest.mark.soak])
            for each in STAGES
        ],
    )


@in_stages("prefilling")
async def test_stop_ends_an_item_in_every_stage(stage: str) -> None:
    async with in_stage(stage) as (on, asked):
        await on.client.stop("second")
        (item,) = await asked
        assert item.error is None
        assert item.reason is FinishReason.STOPPED


async def test_stop_of_a_prefill_releases_the_reservation() -> None:
    async with in_stage("prefilling") as (on, asked):
        await on.client.stop("second")
        await asked
        await on.quiet()
        received = on.load("decode-1").received_handoffs
        assert (received.granted, received.released, received.expired) == (1, 1, 0)


@in_stages("transferring")
async def test_a_client_that_leaves_frees_everything_in_every_stage(stage: str) -> None:
    async with in_stage(stage) as (_, asked):
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("worker", ["prefill-0", "decode-1"])
async def test_a_lost_worker_changes_no_token_in_any_stage(stage: str, worker: str) -> None:
    async with in_stage(stage) as (on, asked):
        on.proxies["decode-1"].mend()
        on.proxies[worker].cut()
        if stage == "transferring":
            await on.client.stop("first")
        assert content(await asked) == content(await expected(PROMPT))


@pytest.mark.parametrize("sequences", [1, 2])
async def test_a_lost_worker_moves_each_sequence_once(sequences: int) -> None:
    async with in_stage("prefilling", num_return_sequences=sequences) as (on, asked):
        on.proxies["prefill-0"].cut()
        await eventually(lambda: on.handoffs(result="migrated") == 1)
        on.proxies["prefill-0"].mend()
        for item in await asked:
            assert item.error is None
        assert on.moved() == sequences


@pytest.mark.parametrize("most", [0, 1])
async def test_first_halves_beyond_the_quota_keep_no_kv(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, max_parked=most)
    async with workers("prefill", "decode") as on:
        (whole,) = await on.ask(PROMPT)
        first, second = [(await on.ask(PROMPT, handoff=CONTEXT_ONLY))[0] for _ in range(2)]
        assert on.handoffs(result="given") == on.load("prefill-0").sent_handoffs.held == most
        listed = (await on.client.admin.list_handoffs()).handoffs
        assert [(each.stage, each.sender, each.tokens) for each in listed] == [
            ("given", "prefill-0", len(PROMPT))
        ] * most
        assert all(0 < each.expires_in_ms <= 60_000 for each in listed)
        for half in (second, first):
            assert half.token_ids == whole.token_ids[:1]
            finished = half.sequences[0].finished
            assert finished
            (item,) = await on.ask(PROMPT, handoff=generation_only(finished.handoff_state))
            assert item.error is None
            assert item.token_ids == whole.token_ids
        assert not (await on.client.admin.list_handoffs()).handoffs
        # The second half has come, so another first half keeps its KV.
        (third,) = await on.ask(PROMPT, handoff=CONTEXT_ONLY)
        finished = third.sequences[0].finished
        assert finished
        assert on.handoffs(result="given") == 2 * most
        await on.ask(PROMPT, handoff=generation_only(finished.handoff_state))
        await on.quiet()


def generation_only(state: bytes | None) -> HandoffConfig:
    phase = GenerationPhase.GENERATION_PHASE_GENERATION_ONLY
    return HandoffConfig(phase=phase, state=state or b"")


async def test_a_refused_reservation_places_the_item_as_a_whole() -> None:
    small: dict[str, Any] = {"kv_cache": {"tokens_per_block": 16, "total_blocks": 11}}
    async with workers("prefill", "decode", **small) as on:
        first = on.ask(list(range(300, 380)), request_id="first", max_tokens=90)
        await eventually(lambda: on.handoffs(result="moved") == 1)
        items = await on.ask(PROMPT, max_tokens=20)
        assert content(items) == content(await expected(PROMPT, max_tokens=20))
        await first
        await on.quiet()
        assert on.handoffs(cause="disaggregated", result="migrated") == 1


async def test_a_full_receiver_leaves_the_handoff_to_another() -> None:
    settings = {"placement": {"policy": "round_robin"}}
    small: dict[str, Any] = {"kv_cache": {"tokens_per_block": 16, "total_blocks": 300}}
    async with workers("prefill", "decode", "decode", settings=settings, **small) as on:
        # Its sequence fills one decode worker; the next item takes its turn on the other.
        long = on.ask(list(range(100, 3100)), request_id="long", max_tokens=1700)
        await eventually(lambda: on.handoffs(result="moved") == 1)
        await on.ask(list(range(300, 340)), max_tokens=2)
        prompt = list(range(5000, 7400))
        items = await on.ask(prompt)
        assert content(items) == content(await expected(prompt))
        assert not long.done()
        assert on.handoffs(result="migrated") == 1
        assert on.handoffs(result="moved") == 3
        await on.client.stop("long")
        await long
        await on.quiet()


async def test_several_sequences_of_a_one_token_prompt_stay_together() -> None:
    options: dict[str, Any] = {"num_return_sequences": 2, "temperature": 0.9, "seed": 3}
    async with workers("prefill", "decode") as on:
        items = await on.ask([100], **options)
        assert content(items) == content(await expected([100], **options))
        await on.quiet()
        assert on.handoffs() == 0


ADAPTER = admin_pb.AddAdapterRequest(name="a", id=7)
WEIGHTS = pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=[1, 1], data=b"ab")
CONFIG = pb.Tensor(
    data_type=pb.DATA_TYPE_INT32,
    shape=[1, 3],
    data=b"".join(n.to_bytes(4, "little") for n in (1, 0, 8)),
)
ADAPTERS: dict[str, Any] = {"adapters": {"slots": 2}}


@either
async def test_an_adapter_is_used_by_both_workers(by_state: bool) -> None:
    items = []
    for roles in (("prefill", "decode"), ("mixed",)):
        async with workers(*roles, by_state=by_state, **ADAPTERS) as on:
            await on.client.admin.upload_adapter(ADAPTER, CONTENT)
            items.append(content(await on.ask(adapter=pb.LoraConfig(name="a"))))
            assert on.handoffs(result="moved") == len(roles) - 1
            await on.quiet()
    assert items[0] == items[1] != content(await expected(PROMPT))


async def places(on: Workers) -> list[list[str]]:
    """The workers that hold each adapter."""
    return [[*each.workers] for each in (await on.client.admin.list_adapters()).adapters]


@asynccontextmanager
async def loading() -> AsyncIterator[tuple[Workers, asyncio.Task[Any]]]:
    """An item whose adapter is loaded by the decode worker, but cannot reach the prefill worker."""
    async with workers("prefill", "decode", **ADAPTERS) as on:
        on.proxies["prefill-0"].freeze(to_target=True, from_target=False)
        asked = on.ask(adapter=pb.LoraConfig(id=7, weights=WEIGHTS, config=CONFIG))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await places(on) != [["decode-1"]]:  # noqa: ASYNC110 - the router sets no event
                await asyncio.sleep(0.01)
        assert on.handoffs() == 0
        yield on, asked
        on.proxies["prefill-0"].mend()
        await on.quiet()


async def test_both_workers_load_an_adapter_at_the_same_time() -> None:
    async with loading() as (on, asked):
        on.proxies["prefill-0"].mend()
        (item,) = await asked
        assert item.error is None
        assert on.handoffs(result="moved") == 1


async def test_a_worker_lost_with_an_adapter_s_load_is_left() -> None:
    async with loading() as (on, asked):
        on.proxies["prefill-0"].cut()
        (item,) = await asked
        assert item.error is None
        assert on.handoffs() == 0


async def test_a_client_that_leaves_ends_both_loads_of_an_adapter() -> None:
    async with loading() as (_, asked):
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@either
async def test_a_stop_text_ends_a_split_item(tmp_path: Path, by_state: bool) -> None:
    directory = save_model_dir(byte_level_bpe(), tmp_path / "simulated")
    letters: dict[str, Any] = {"vocabulary": {"last_token_id": 90}}
    async with (
        served(directory) as tokenizer,
        workers(
            "prefill", "decode", tokenizers=[tokenizer.address], by_state=by_state, **letters
        ) as on,
    ):
        (whole,) = await on.ask(text=True)
        (generated,) = whole.sequences
        for first in (0, 4):
            moved = on.handoffs(result="moved")
            stop = generated.text[first : first + 2]
            (item,) = await on.ask(text=True, stop_texts=[stop])
            (sequence,) = item.sequences
            assert item.reason is FinishReason.STOP_WORD
            assert sequence.text == generated.text[:first]
            assert sequence.token_ids == generated.token_ids[: first + 2]
            assert on.handoffs(result="moved") == moved + 1
        await on.quiet()


@in_stages("reserving")
async def test_a_deadline_ends_an_item_in_every_stage(stage: str) -> None:
    options: dict[str, Any] = {"max_tokens": ENDLESS, "timeout_seconds": 8.0}
    async with in_stage(stage, prefill_rate=10.0, **options) as (_, asked):
        with pytest.raises(DeadlineExceeded):
            await asked


@in_stages("transferring")
async def test_a_router_that_stops_frees_both_workers_in_every_stage(stage: str) -> None:
    settings = {"retries": {"worker_wait_seconds": 0.1}}
    async with in_stage(stage, settings=settings) as (on, asked):
        await on.client.router.stop()
        (item,) = await asked
        assert item.error
        assert item.error.reason in {"WORKER_LOST", "NO_WORKER"}


async def test_a_silent_receiver_is_left_after_the_deadline_of_the_reservation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trtmesh.router.handoffs.live_handoff.RESERVE_SECONDS", 0.2)
    settings = {"handoff": {"enabled": "always"}}
    async with in_stage("reserving", settings=settings) as (on, asked):
        await eventually(lambda: on.handoffs(result="migrated") == 1)
        on.proxies["decode-1"].mend()
        assert content(await asked) == content(await expected(PROMPT))


@either
async def test_leases_are_renewed_while_a_prefill_lasts(
    by_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A crowded machine may hold up a renewal for seconds.
    patch(monkeypatch, lease_seconds=7.0)
    settings = {"handoff": {"enabled": "always"}}
    rate = len(PROMPT) / 9
    stage = in_stage("prefilling", settings=settings, prefill_rate=rate, by_state=by_state)
    async with stage as (on, asked):
        assert content(await asked) == content(await expected(PROMPT))
        assert on.handoffs(result="moved") == 1


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
async def test_a_worker_s_longest_lease_bounds_the_lives_of_leases(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, client_lease_seconds=10.0)
    # Less than the router's own, and less than the prefill lasts.
    limits = {name: HandoffLimits(max_lease_seconds=5.0)}
    slow: dict[str, Any] = {"timing": {"prefill_tokens_per_second": len(PROMPT) / 7}}
    async with workers("prefill", "decode", handoff_limits=limits, **slow) as on:
        items = await on.ask(PROMPT)
        assert on.handoffs(result="moved") == 1
        assert content(items) == content(await expected(PROMPT))
        (item,) = await on.ask(list(range(300, 340)), handoff=CONTEXT_ONLY)
        assert item.error is None
        await on.quiet()


@either
@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.soak)])
async def test_many_items_leave_nothing_behind(by_state: bool, count: int) -> None:
    # As full with either count.
    pool = {"total_blocks": 512 * count // 200}
    four = ("prefill", "decode") * 2
    async with workers(*four, by_state=by_state, kv_cache=pool) as on:
        starts = range(100, 300, 200 // count)
        prompts = [list(range(start, start + 30 + start % 49)) for start in starts]
        items = await on.ask(*prompts, max_tokens=8)
        assert content(items) == content(await expected(*prompts, max_tokens=8))
        await on.quiet()


@either
async def test_usage_counts_the_prefill_worker_s_cache(by_state: bool) -> None:
    async with workers("prefill", "decode", by_state=by_state) as on:
        (first,) = await on.ask(PROMPT)
        (second,) = await on.ask(PROMPT, perf_metrics=True)
        assert first.usage.cached_prompt_tokens == 0
        assert second.usage.cached_prompt_tokens == 112
        finished = second.sequences[0].finished
        assert finished
        metrics = finished.perf_metrics
        assert metrics
        times = [
            metrics.arrival_time_ns,
            metrics.first_scheduled_time_ns,
            metrics.first_token_time_ns,
            metrics.last_token_time_ns,
        ]
        assert times == sorted(times)
        assert all(times)
