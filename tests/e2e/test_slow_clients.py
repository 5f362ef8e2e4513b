"""A slow client: its paused stream occupies no worker and delays no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from e2e.mesh import (
    PATIENT,
    SIMULATED,
    Mesh,
    eventually,
    mesh_in_one_process,
    running_mesh,
    scrape,
)
from process_constants import constants
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

TOKENS = 4_000
"""Several times what buffers hold between a router and a client."""
FLAT_OUT = (*SIMULATED, "--simulated-timing-step-ms", "0", "--simulated-limits-max-sequence-tokens", "1000000",
            "--simulated-kv-cache-total-blocks", "100000")  # fmt: skip
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]

Call = grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]


@asynccontextmanager
async def slow_call(mesh: Mesh, sequences: int = 2, **output: Any) -> AsyncIterator[Call]:
    """Opens a call with a small flow-control window."""
    config = pb.GenerationConfig(
        sampling=pb.SamplingConfig(num_return_sequences=sequences, temperature=1.0, seed=3),
        stopping=pb.StoppingConfig(max_tokens=TOKENS, ignore_end_id=True),
        output=pb.OutputConfig(**output),
    )
    request = router_pb2.GenerateRequest(
        items=[router_pb2.GenerateItem(prompt=pb.Prompt(text="slow"))], config=config
    )
    async with grpc.aio.insecure_channel(mesh.router.address, options=SMALL_WINDOW) as channel:
        call = router_pb2_grpc.MeshServiceStub(channel).Generate(request)
        try:
            yield call
        finally:
            call.cancel()


async def read(call: Call, into: list[router_pb2.GenerateEvent]) -> bool:
    """Reads one message; False at the end."""
    response = await call.read()
    if not isinstance(response, router_pb2.GenerateResponse):
        return False
    into.extend(response.events)
    return True


async def read_all(call: Call) -> list[router_pb2.GenerateEvent]:
    """Reads to the end."""
    events: list[router_pb2.GenerateEvent] = []
    while await read(call, events):
        pass
    return events


def tokens_of(events: list[router_pb2.GenerateEvent]) -> tuple[dict[int, list[int]], str]:
    """The ids of each sequence, checked for gaps and repeats, and the text of the first."""
    ids: dict[int, list[int]] = {0: [], 1: []}
    text = ""
    for event in events:
        if event.HasField("tokens"):
            known = ids[event.sequence_index]
            assert event.tokens.token_offset == len(known)
            known += event.tokens.token_ids
            text += event.tokens.text if not event.sequence_index else ""
    return ids, text


@pytest.mark.parametrize("limit", [constants(buffer_tokens=800), constants(buffer_bytes=6_400)])
async def test_slow_client_is_paused_and_delays_no_other(
    limit: tuple[str, ...],
) -> None:
    flags = (*PATIENT, *limit, *constants(client_unread_seconds=3600))
    async with running_mesh(engine_flags=FLAT_OUT, router_flags=flags) as mesh:
        prompts = [f"normal {number}" for number in range(8)]
        expected = await mesh.client.complete(prompts, max_tokens=20)
        async with slow_call(mesh, text=True) as fast:
            whole = await read_all(fast)
        async with slow_call(mesh, text=True) as call:
            events: list[router_pb2.GenerateEvent] = []
            assert await read(call, events)
            await eventually(lambda: mesh.has_stage("paused"))
            # A paused request holds no KV blocks and no handles.
            await eventually(lambda: holds_nothing(mesh))
            readers = [mesh.open([prompt], max_tokens=20) for prompt in prompts]
            for reader, normal in zip(readers, expected, strict=True):
                # A busy machine has the whole in fewer messages.
                await read(call, events)
                (item,) = await reader.result()
                assert (item.token_ids, item.text) == (normal.token_ids, normal.text)
            events += await read_all(call)
        assert tokens_of(events) == tokens_of(whole)
        assert len(tokens_of(events)[0][1]) == TOKENS
        assert events[-1].HasField("item_finished")
        samples = await scrape(mesh.router)
        assert samples["trtmesh_router_slow_clients_total"] >= 2
        assert samples["trtmesh_router_paused_requests"] == 0
        await mesh.idle()


async def test_slow_client_of_one_process_keeps_no_kv() -> None:
    """Nobody could fetch it from a worker without a port: on the client's return it is computed again."""
    flags = (*PATIENT, *constants(buffer_tokens=800, client_unread_seconds=3600))
    async with mesh_in_one_process(*FLAT_OUT, router_flags=flags) as mesh:
        async with slow_call(mesh, sequences=1, text=True) as fast:
            whole = await read_all(fast)
        async with slow_call(mesh, sequences=1, text=True) as call:
            events: list[router_pb2.GenerateEvent] = []
            assert await read(call, events)
            await eventually(lambda: mesh.has_stage("paused"))
            await eventually(lambda: holds_nothing(mesh))
            events += await read_all(call)
        assert tokens_of(events) == tokens_of(whole)
        samples = await scrape(mesh.router)
        assert samples["trtmesh_router_moved_sequences_total"] >= 1
        assert not samples.get("trtmesh_router_handoffs_total")
        await mesh.idle()


async def holds_nothing(mesh: Mesh) -> bool:
    gauges = await mesh.gauges()
    return await mesh.used_blocks() == 0 and not gauges["worker_sequences"]


async def test_paused_request_can_be_stopped() -> None:
    flags = constants(client_unread_seconds=3600, buffer_tokens=800)
    async with running_mesh(engine_flags=FLAT_OUT, router_flags=flags) as mesh:
        async with slow_call(mesh) as call:
            await eventually(lambda: mesh.has_stage("paused"))
            (live,) = (await mesh.admin.list_requests()).requests
            assert await mesh.client.stop(live.request_id) == 1
            events = await read_all(call)
            assert events[-1].item_finished.reason == pb.FINISH_REASON_STOPPED
            ids, _ = tokens_of(events)
            told = {
                e.sequence_index: e.sequence_finished
                for e in events
                if e.HasField("sequence_finished")
            }
            assert {i: f.generated_tokens for i, f in told.items()} == {
                i: len(t) for i, t in ids.items()
            }
        await mesh.idle()


async def test_paused_sequence_returns_to_its_kv() -> None:
    """A single sequence: its KV waits on a worker, and moves to another if that one drains meanwhile."""
    flags = (*PATIENT, *constants(client_unread_seconds=3600, buffer_tokens=800))
    async with running_mesh(engines=2, engine_flags=FLAT_OUT, router_flags=flags) as mesh:
        async with slow_call(mesh, sequences=1) as fast:
            whole = await read_all(fast)
        for drains in (False, True):
            async with slow_call(mesh, sequences=1) as call:
                await eventually(lambda: parked_at(mesh))
                sender = await parked_at(mesh)
                assert not (await mesh.gauges())["worker_sequences"]
                # A worker counts them a few times a second.
                await eventually(mesh.used_blocks)
                if drains:
                    await mesh.admin.drain_worker(sender)
                computed = await computed_tokens(mesh)
                events = await read_all(call)
            assert tokens_of(events) == tokens_of(whole)
            paused = await scrape(mesh.router, cause="paused", result="moved")
            returns = paused["trtmesh_router_handoffs_total"]
            # Each return computes the last token, and the tokens of an incomplete block.
            assert await computed_tokens(mesh) - computed <= 32 * returns
        ends = {
            result: (await scrape(mesh.router, result=result)).get(
                "trtmesh_router_handoffs_total", 0
            )
            for result in ("migrated", "cancelled")
        }
        assert ends == {"migrated": 0, "cancelled": 0}
        await mesh.idle()


async def parked_at(mesh: Mesh) -> str:
    """The worker with the KV of a paused sequence, or ''."""
    live = (await mesh.admin.list_handoffs()).handoffs
    return next((each.sender for each in live if each.stage == "parked"), "")


async def computed_tokens(mesh: Mesh) -> int:
    return sum(worker.load.computed_prompt_tokens for worker in (await mesh.status()).workers)
