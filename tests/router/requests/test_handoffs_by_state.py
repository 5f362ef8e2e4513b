"""Items whose prefill and decode run on workers that move the KV themselves: equal to those of a single worker."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from process_constants import patch
from router.handoff_fleet import PROMPT, Workers, expected, workers
from router.scripted import eventually
from trtmesh.chassis.errors import DeadlineExceeded
from trtmesh.client import FinishReason, ItemResult
from trtmesh.router.placement.split import INCOMPATIBLE

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7}

SLOW_PREFILL: dict[str, Any] = {
    "timing": {"prefill_tokens_per_second": 10.0, "prefill_tokens_per_step": 16}
}
"""A prompt takes twelve seconds."""

SLOW_TRANSFER: dict[str, Any] = {"handoff": {"transfer_ms": 3_600_000.0}}
"""A transfer that never ends."""


def tokens(items: Any) -> list[list[list[int]]]:
    return [_tokens_of(item) for item in items]


def _tokens_of(item: ItemResult) -> list[list[int]]:
    assert item.error is None, item.error
    return [list(each.token_ids) for each in item.sequences]


def leases(on: Workers, name: str) -> dict[str, tuple[int, int, int, int]]:
    """Leases granted, consumed, released and expired on a worker."""
    load = on.load(name)
    sides = {"sent": load.sent_handoffs, "received": load.received_handoffs}
    return {
        side: (each.granted, each.consumed, each.released, each.expired)
        for side, each in sides.items()
    }


@pytest.mark.parametrize("options", [{}, SAMPLED, {"max_tokens": 2}], ids=str)
async def test_two_workers_generate_the_tokens_of_one(options: dict[str, Any]) -> None:
    async with workers("prefill", "decode", by_state=True) as on:
        items = await on.ask(PROMPT, **options)
        assert tokens(items) == tokens(await expected(PROMPT, **options))
        await on.quiet()
        assert on.handoffs(cause="disaggregated", result="moved") == 1
        assert leases(on, "prefill-0") == {"sent": (1, 1, 0, 0), "received": (0, 0, 0, 0)}
        assert leases(on, "decode-1") == {"sent": (0, 0, 0, 0), "received": (1, 1, 0, 0)}
        assert on.load("decode-1").computed_prompt_tokens == 1


async def test_first_token_that_is_the_last_hands_nothing_over() -> None:
    async with workers("prefill", "decode", by_state=True) as on:
        items = await on.ask(PROMPT, max_tokens=1)
        assert [item.reason for item in items] == [FinishReason.LENGTH]
        await on.quiet()
        assert on.handoffs(cause="disaggregated", result="finished") == 1
        assert leases(on, "prefill-0")["sent"] == (1, 0, 1, 0)
        assert leases(on, "decode-1")["received"] == (0, 0, 0, 0)


async def test_several_sequences_stay_on_one_worker() -> None:
    options = {**SAMPLED, "num_return_sequences": 2}
    async with workers("prefill", "decode", by_state=True) as on:
        items = await on.ask(PROMPT, **options)
        assert tokens(items) == tokens(await expected(PROMPT, **options))
        await on.quiet()
        assert on.handoffs() == 0


@pytest.mark.parametrize(
    "of_decode", [{"handoff": {"compatibility": "bf16"}}, {"handoff": {"by": "leases"}}], ids=str
)
async def test_other_kinds_are_never_paired(of_decode: dict[str, Any]) -> None:
    async with workers("prefill", "decode", by_state=True, of_worker={"decode-1": of_decode}) as on:
        items = await on.ask(PROMPT, request_id="apart")
        assert tokens(items) == tokens(await expected(PROMPT))
        (placement,) = (await on.client.admin.explain("apart")).placements
        assert (placement.prefill_worker, placement.split_reason) == ("", INCOMPATIBLE)
        assert on.handoffs() == 0


async def test_explain_and_handoffs_name_the_transport() -> None:
    async with workers(
        "prefill", "decode", by_state=True, of_worker={"decode-1": SLOW_TRANSFER}
    ) as on:
        asked = on.ask(PROMPT, request_id="named")
        await on.stage("transferring")
        (handoff,) = (await on.client.admin.list_handoffs()).handoffs
        assert (handoff.transport, handoff.cause) == ("backend", "disaggregated")
        assert (handoff.sender, handoff.receiver) == ("prefill-0", "decode-1")
        assert handoff.tokens == len(PROMPT)
        (placement,) = (await on.client.admin.explain("named")).placements
        assert (placement.prefill_worker, placement.handoff_kind) == ("prefill-0", "simulated")
        asked.cancel()
        await on.quiet()


@pytest.mark.parametrize("how", ["stop", "cancel"])
@pytest.mark.parametrize("stage", ["prefilling", "transferring"])
async def test_client_ends_an_item_during_a_handoff(stage: str, how: str) -> None:
    slow = {"prefill-0": SLOW_PREFILL} if stage == "prefilling" else {"decode-1": SLOW_TRANSFER}
    async with workers("prefill", "decode", by_state=True, of_worker=slow) as on:
        asked = on.ask(PROMPT, request_id="ended")
        await on.stage(stage)
        if how == "stop":
            assert await on.client.stop("ended") == 1
            (item,) = await asked
            assert item.reason == FinishReason.STOPPED
            assert len(item.token_ids) == (stage == "transferring")
        else:
            asked.cancel()
        await on.quiet()
        assert on.handoffs(result="cancelled") == 1
        assert leases(on, "prefill-0")["sent"] == (1, 0, 1, 0)


@pytest.mark.parametrize("stage", ["prefilling", "transferring"])
async def test_deadline_ends_both_halves(stage: str) -> None:
    slow = {"prefill-0": SLOW_PREFILL} if stage == "prefilling" else {"decode-1": SLOW_TRANSFER}
    async with workers("prefill", "decode", by_state=True, of_worker=slow) as on:
        with suppress(DeadlineExceeded):
            (item,) = await on.ask(PROMPT, timeout_seconds=6)
            assert item.reason == FinishReason.CANCELLED
        await on.quiet()
        assert leases(on, "prefill-0")["sent"] == (1, 0, 1, 0)


async def test_state_that_expired_is_computed_again() -> None:
    slow = {"handoff": {"transfer_ms": 1000.0}}
    kept = {"handoff": {"kept_seconds": 0.05}}
    of_worker = {"prefill-0": kept, "decode-1": slow}
    async with workers("prefill", "decode", by_state=True, of_worker=of_worker) as on:
        items = await on.ask(PROMPT)
        assert tokens(items) == tokens(await expected(PROMPT))
        await on.quiet()
        assert on.handoffs(result="migrated") == 1
        assert leases(on, "prefill-0")["sent"] == (1, 0, 0, 1)
        assert leases(on, "decode-1")["received"] == (1, 0, 1, 0)


async def test_late_transfer_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, handoff_transfer_seconds=0.2)
    slow = {"decode-1": SLOW_TRANSFER}
    async with workers("prefill", "decode", by_state=True, of_worker=slow) as on:
        items = await on.ask(PROMPT)
        assert tokens(items) == tokens(await expected(PROMPT))
        await on.quiet()
        assert on.handoffs(result="migrated") == 1
        assert leases(on, "prefill-0")["sent"] == (1, 0, 1, 0)


async def test_running_sequences_leave_without_their_kv() -> None:
    # Few tokens take as long as a drain.
    async with workers("mixed", "mixed", by_state=True, timing={"step_ms": 20.0}) as on:
        asked = on.ask(PROMPT, max_tokens=200)
        await eventually(lambda: _busy(on))
        (busy,) = _busy(on)
        await on.client.admin.drain_worker(busy, finish_seconds=0)
        items = await asked
        assert tokens(items) == tokens(await expected(PROMPT, max_tokens=200))
        await on.quiet()
        assert on.handoffs() == 0
        assert on.moved(cause="moved") == 1


def _busy(on: Workers) -> list[str]:
    return [name for name in on.engines if on.load(name).generated_tokens]


async def test_state_too_large_to_travel_with_its_item_costs_a_migration() -> None:
    """A prompt fits into a message to the decode worker, but not beside the state."""
    # No block is full, so no KV event has the prompt.
    blocks: dict[str, Any] = {"kv_cache": {"tokens_per_block": 4096, "total_blocks": 64}}
    settings = {"max_message_bytes": 4096}
    async with workers("prefill", "decode", by_state=True, settings=settings, **blocks) as on:
        for length, result in ((3500, "moved"), (3700, "migrated")):
            prompt = [5] * length
            items = await on.ask(prompt, max_tokens=8, exclude_prompt=True)
            assert tokens(items) == tokens(await expected(prompt, max_tokens=8))
            await on.quiet()
            assert on.handoffs(result=result) == 1
