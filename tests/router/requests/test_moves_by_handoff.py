"""Running and paused sequences that move with their KV: no token changes, and no prompt is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from chaos.full_pool import full_pool
from process_constants import patch
from router.handoff_fleet import PROMPT, Workers, workers
from router.scripted import READY, eventually, until_states
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
SLOW: dict[str, Any] = {"timing": {"step_ms": 12.0}}
"""Few tokens take as long as a move."""
FLAT_OUT: dict[str, Any] = {
    "timing": {"step_ms": 0.0},
    "limits": {"max_sequence_tokens": 200_000},
    "kv_cache": {"tokens_per_block": 16, "total_blocks": 30_000},
}


async def expected(*prompts: Any, **options: Any) -> list[Any]:
    async with workers("mixed") as on:
        return tokens_of(await on.ask(*prompts, **options))


def tokens_of(items: Any) -> list[Any]:
    assert [item.error for item in items] == [None] * len(items)
    return [each.token_ids for item in items for each in item.sequences]


def busy(on: Workers) -> list[str]:
    """Workers with sequences."""
    return [name for name in on.engines if on.load(name).running_sequences]


async def running(on: Workers) -> str:
    """The name of the only worker with sequences, once they have generated something."""
    await eventually(lambda: sum(on.load(n).generated_tokens for n in on.engines) > 4)
    (name,) = busy(on)
    return name


async def test_a_drained_worker_hands_its_sequences_over() -> None:
    async with workers("mixed", "mixed", **SLOW) as on:
        asked = on.ask(PROMPT, max_tokens=50)
        name = await running(on)
        drained = await on.client.admin.drain_worker(name, finish_seconds=0)
        assert (drained.moved_sequences, drained.left_sequences) == (1, 0)
        (other,) = set(on.engines) - {name}
        await eventually(lambda: on.handoffs(cause="drain", result="moved") == 1)
        assert tokens_of(await asked) == await expected(PROMPT, max_tokens=50)
        assert on.load(other).received_handoffs.consumed == 1
        assert on.load(other).computed_prompt_tokens < 16
        await on.quiet()


async def test_several_sequences_of_an_item_leave_a_drained_worker_one_after_the_other() -> None:
    options: dict[str, Any] = {"num_return_sequences": 2, "temperature": 0.9, "seed": 5}
    async with workers("mixed", "mixed", **SLOW) as on:
        asked = on.ask(PROMPT, max_tokens=500, **options)
        name = await running(on)
        drained = await on.client.admin.drain_worker(name, finish_seconds=0)
        assert (drained.moved_sequences, drained.left_sequences) == (2, 0)
        await eventually(lambda: on.handoffs(cause="drain", result="moved") == 2)
        assert tokens_of(await asked) == await expected(PROMPT, max_tokens=500, **options)
        await on.quiet()


async def test_a_worker_that_becomes_a_prefill_worker_hands_its_sequences_over() -> None:
    async with workers("mixed", "mixed", **SLOW) as on:
        asked = on.ask(PROMPT, max_tokens=50)
        name = await running(on)
        changed = await on.client.admin.set_worker_role(name, "prefill")
        assert changed.moved_sequences == 1
        await eventually(lambda: on.handoffs(cause="role", result="moved") == 1)
        assert tokens_of(await asked) == await expected(PROMPT, max_tokens=50)
        await on.quiet()


async def test_a_change_of_role_does_not_wait_for_the_prefills_of_the_new_role() -> None:
    async with workers("prefill", "decode", timing={"prefill_tokens_per_second": 100.0}) as on:
        asked = [on.ask(list(range(n, n + 2000)), max_tokens=4) for n in range(100, 400, 100)]
        await on.stage("prefilling", 3)
        await on.client.admin.set_worker_role("prefill-0", "decode")
        await on.client.admin.set_worker_role("prefill-0", "prefill")
        live = (await on.client.admin.list_handoffs()).handoffs
        assert [each.stage for each in live] == ["prefilling"] * 3
        for each in asked:
            each.cancel()
        await on.quiet()


async def test_a_removed_worker_leaves_after_its_handoffs() -> None:
    async with workers("mixed", "mixed", **SLOW) as on:
        asked = on.ask(PROMPT, max_tokens=50)
        name = await running(on)
        assert (await on.client.admin.remove_worker(name)).moved_sequences == 1
        await eventually(lambda: on.handoffs(cause="drain", result="moved") == 1)
        await eventually(lambda: on.client.gauge("ready_workers") == 1)
        assert tokens_of(await asked) == await expected(PROMPT, max_tokens=50)
        await on.quiet()


async def test_a_stopping_worker_hands_its_sequences_over() -> None:
    async with workers("mixed", "mixed", grace_seconds=5, **SLOW) as on:
        asked = on.ask(PROMPT, max_tokens=100)
        name = await running(on)
        await on.engines[name].service.drain()
        assert not on.load(name).running_sequences
        assert tokens_of(await asked) == await expected(PROMPT, max_tokens=100)
        assert on.handoffs(cause="drain", result="moved") == 1
        await on.quiet()


async def test_moves_beyond_the_limit_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtmesh.router.handoffs.item_handoffs.MAX_MOVES", 2)
    prompts = [list(range(start, start + 40)) for start in range(100, 112)]
    async with workers("mixed", "mixed", **SLOW) as on:
        asked = on.ask(*prompts, max_tokens=70)
        await eventually(lambda: on.client.gauge("worker_sequences") == len(prompts))
        await eventually(lambda: len(busy(on)) == 2)
        name = busy(on)[0]
        await on.client.admin.drain_worker(name, finish_seconds=0)
        assert not on.load(name).running_sequences
        assert tokens_of(await asked) == await expected(*prompts, max_tokens=70)
        assert on.handoffs(result="migrated") == 0
        await on.quiet()


async def test_a_receiver_that_is_cut_off_leaves_the_sequence_to_an_ordinary_move() -> None:
    async with workers("mixed", "mixed", "mixed", **SLOW) as on:
        asked = on.ask(PROMPT, max_tokens=50)
        name = await running(on)
        others = [other for other in on.engines if other != name]
        for other in others:
            on.proxies[other].freeze(to_target=True, from_target=False)
        draining = asyncio.create_task(on.client.admin.drain_worker(name, finish_seconds=0))
        await on.stage("reserving")
        (live,) = (await on.client.admin.list_handoffs()).handoffs
        on.proxies[live.receiver].cut()
        for other in others:
            if other != live.receiver:
                on.proxies[other].mend()
        assert (await draining).left_sequences == 0
        assert tokens_of(await asked) == await expected(PROMPT, max_tokens=50)
        assert on.handoffs(cause="drain", result="migrated") == 1
        on.proxies[live.receiver].mend()
        await on.quiet()


async def test_an_item_that_ends_during_a_drain_starts_no_other_handoff() -> None:
    """The end of its handoff lets the worker move the next sequence, and the item still has one there."""
    async with workers("mixed", "mixed", **SLOW) as on:
        asked = on.ask(PROMPT, max_tokens=340)
        name = await running(on)
        (other,) = set(on.engines) - {name}
        on.proxies[other].freeze(to_target=True, from_target=False)
        draining = asyncio.create_task(on.client.admin.drain_worker(name, finish_seconds=0))
        await on.stage("reserving")
        asked.cancel()
        await eventually(lambda: not on.client.gauge("live_items"))
        on.proxies[other].mend()
        await draining
        await on.quiet()
        assert on.handoffs(cause="drain") == 1


@asynccontextmanager
async def slow_call(on: Workers, tokens: int) -> AsyncIterator[Any]:
    """A call with a small window, which nothing reads."""
    config = pb.GenerationConfig(
        stopping=pb.StoppingConfig(max_tokens=tokens, ignore_end_id=True),
        output=pb.OutputConfig(text=False),
    )
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT))
    request = router_pb2.GenerateRequest(
        request_id="slow", items=[router_pb2.GenerateItem(prompt=prompt)], config=config
    )
    (address,) = on.client.addresses
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
        call = router_pb2_grpc.MeshServiceStub(channel).Generate(request)
        try:
            yield call
        finally:
            call.cancel()


async def rest_of(call: Any) -> list[int]:
    """Reads to the end; the token ids."""
    ids: list[int] = []
    while isinstance(response := await call.read(), router_pb2.GenerateResponse):
        for event in response.events:
            if event.HasField("tokens"):
                assert event.tokens.token_offset == len(ids)
                ids += event.tokens.token_ids
    return ids


TOKENS = 1_500
"""Three times what an unread call takes: its window has a few bytes, and the router keeps 500."""

_whole: list[int] = []


@pytest.fixture(autouse=True)
def slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a client read nothing for as long as a test takes."""
    patch(monkeypatch, client_unread_seconds=3600)


async def whole() -> list[int]:
    """The token ids of a call that is read at once, alike from every worker."""
    if not _whole:
        async with workers("mixed", **FLAT_OUT) as on, slow_call(on, TOKENS) as call:
            _whole.extend(await rest_of(call))
        assert len(_whole) == TOKENS
    return _whole


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, buffer_tokens=500)


@pytest.mark.usefixtures("small_buffer")
@pytest.mark.parametrize("parked", [True, False])
async def test_a_paused_sequence_continues_from_its_parked_kv(
    *, parked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, max_parked=64 if parked else 0)
    wanted = await whole()
    async with workers("mixed", **FLAT_OUT) as on:
        async with slow_call(on, TOKENS) as call:
            if parked:
                await on.stage("parked")
            else:
                await eventually(lambda: on.client.gauge("paused_requests"))
                await eventually(lambda: not on.client.gauge("worker_sequences"))
            assert bool(on.load("mixed-0").used_blocks) is parked
            assert not on.load("mixed-0").running_sequences
            assert await rest_of(call) == wanted
        await on.quiet()
        assert bool(on.handoffs(cause="paused", result="moved")) is parked
        assert not on.client.gauge("handoff_seconds_count"), "a pause is the client's time"
        if parked:
            # Each return computes the last token, and the tokens of an incomplete block.
            returns = on.handoffs(cause="paused", result="moved")
            assert on.load("mixed-0").computed_prompt_tokens <= len(PROMPT) + 16 * returns


@pytest.mark.usefixtures("small_buffer")
async def test_parked_kv_moves_where_its_worker_drains() -> None:
    wanted = await whole()
    async with workers("mixed", "mixed", **FLAT_OUT) as on:
        async with slow_call(on, TOKENS) as call:
            await on.stage("parked")
            (live,) = (await on.client.admin.list_handoffs()).handoffs
            await on.client.admin.drain_worker(live.sender, finish_seconds=0)
            assert await rest_of(call) == wanted
        await on.quiet()


@pytest.mark.usefixtures("small_buffer")
async def test_parked_kv_of_a_lost_worker_is_computed_again() -> None:
    wanted = await whole()
    async with workers("mixed", "mixed", **FLAT_OUT) as on:
        async with slow_call(on, TOKENS) as call:
            await on.stage("parked")
            (live,) = (await on.client.admin.list_handoffs()).handoffs
            moved = on.moved()
            on.proxies[live.sender].cut()
            await eventually(lambda: on.handoffs(cause="paused", result="migrated") == 1)
            # It has left its worker before.
            assert on.moved() == moved == on.moved(cause="paused") > 0
            assert await rest_of(call) == wanted
        await on.quiet()


@pytest.mark.usefixtures("small_buffer")
@pytest.mark.parametrize("drained", [False, True])
async def test_a_receiver_that_dies_while_a_sequence_resumes_is_left(*, drained: bool) -> None:
    wanted = await whole()
    async with workers("mixed", "mixed", "mixed", **FLAT_OUT) as on:
        before = on.handoffs(cause="paused", result="migrated")
        async with slow_call(on, TOKENS) as call:
            await on.stage("parked")
            (live,) = (await on.client.admin.list_handoffs()).handoffs
            if drained:
                await on.client.admin.drain_worker(live.sender, finish_seconds=0)
            for proxy in on.proxies.values():
                proxy.freeze(to_target=True, from_target=False)
            rest = asyncio.create_task(rest_of(call))
            await on.stage("reserving")
            (live,) = (await on.client.admin.list_handoffs()).handoffs
            assert (live.receiver != live.sender) is drained
            on.proxies[live.receiver].cut()
            await eventually(lambda: on.handoffs(cause="paused", result="migrated") > before)
            for proxy in on.proxies.values():
                proxy.mend()
            assert await rest == wanted
        await on.quiet()


@pytest.mark.usefixtures("small_buffer")
async def test_a_sequence_that_its_full_worker_refuses_migrates_to_another() -> None:
    """Where its KV is there is no room for the rest, so it does not wait there."""
    wanted = await whole()
    async with workers("mixed", "mixed", **FLAT_OUT) as on:
        async with slow_call(on, TOKENS) as call:
            await on.stage("parked")
            (live,) = (await on.client.admin.list_handoffs()).handoffs
            (other,) = set(on.engines) - {live.sender}
            async with full_pool(on.engines[live.sender].address):
                assert await rest_of(call) == wanted
                explained = await on.client.admin.explain("slow")
        migrated = next(each for each in explained.placements if each.cause == "migration")
        assert migrated.worker == other
        (left,) = (each for each in migrated.candidates if each.worker == live.sender)
        assert "has no room for the KV" in left.excluded_by
        assert on.handoffs(cause="paused", result="migrated")
        await on.quiet()


@pytest.mark.usefixtures("small_buffer")
@pytest.mark.parametrize("how", ["stop", "leave"])
async def test_a_parked_item_that_ends_frees_its_kv(how: str) -> None:
    async with workers("mixed", **FLAT_OUT) as on:
        async with slow_call(on, TOKENS) as call:
            await on.stage("parked")
            if how == "stop":
                assert await on.client.stop("slow") == 1
                await on.stage("parked", 0)
                assert not on.load("mixed-0").sent_handoffs.held
                await rest_of(call)
        await on.quiet()


@pytest.mark.usefixtures("small_buffer")
@pytest.mark.parametrize("how", ["remove", "stop"])
async def test_a_worker_that_leaves_waits_for_no_paused_client(how: str) -> None:
    wanted = await whole()
    async with workers("mixed", "mixed", **FLAT_OUT) as on:
        async with slow_call(on, TOKENS) as call:
            await on.stage("parked")
            (live,) = (await on.client.admin.list_handoffs()).handoffs
            if how == "remove":
                await on.client.admin.remove_worker(live.sender)
                await until_states(on.client, [READY], [])
                # The worker learns of it from the end of the router's stream.
                await eventually(lambda: not on.load(live.sender).sent_handoffs.held)
            else:
                await on.engines[live.sender].service.drain()
                assert not on.load(live.sender).sent_handoffs.held
            assert on.handoffs(cause="paused", result="cancelled") == 1
            assert await rest_of(call) == wanted
        await on.quiet()
