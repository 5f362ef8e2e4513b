"""Every field of SubmitCommand arrives in the right argument of the library, or is refused by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engine.tensorrt_llm.harness import backend, executor, last_call, last_params
from engine_streams import (
    Received,
    RouterStream,
    eventually,
    router_stream,
    sampling,
    serving,
    submit,
)
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

PROMPT = [40, 41, 42]
SEED = 5
LEASE = "0123456789abcdef0123456789abcdef"
LEASED: dict[str, Any] = {"sender_lease_id": LEASE, "lease_expires_in_ms": 5000}
DESCRIPTOR = epb.SubmitCommand.DESCRIPTOR


async def sent(stream: RouterStream, number: int = 1, **fields: Any) -> Received:
    """Submits an item with fields and waits for its end."""
    given = {"config": pb.GenerationConfig(), "prompt": PROMPT, **fields}
    given["config"].stopping.ignore_end_id = True
    await stream.send(submit(number, 8, **given))
    return await stream.end(number)


async def refused(stream: RouterStream, **fields: Any) -> pb.Error:
    end = (await sent(stream, **fields)).end
    assert end is not None
    assert end.reason == pb.FINISH_REASON_ERROR
    return end.error


async def drawn(stream: RouterStream, number: int, **fields: Any) -> int:
    """The seed that the library got."""
    await sent(stream, number, config=sampling(temperature=1.0, seed=SEED), **fields)
    return int(last_params().seed)


async def handle(stream: RouterStream) -> None:
    """Names the sequence towards the router alone."""
    received = await sent(stream, 7)
    assert received.end is not None
    assert received.end.handle == 7


async def request_id(stream: RouterStream) -> None:
    """The library numbers its requests itself."""
    await sent(stream)
    assert "r" not in last_call().values()


async def batch_index(stream: RouterStream) -> None:
    seeds = {await drawn(stream, n, batch_index=n) for n in range(3)}
    assert len(seeds) == 3
    assert SEED in seeds


async def sequence_index(stream: RouterStream) -> None:
    assert await drawn(stream, 1, sequence_index=0) == SEED
    assert await drawn(stream, 2, sequence_index=1) != SEED


async def draw_index(stream: RouterStream) -> None:
    assert await drawn(stream, 1, batch_index=4, draw_index=0) == SEED


async def token_ids(stream: RouterStream) -> None:
    await sent(stream)
    inputs = last_call()["inputs"]
    assert (inputs["prompt_token_ids"] if isinstance(inputs, dict) else inputs) == PROMPT


async def emitted_tokens(stream: RouterStream) -> None:
    """They count towards the limit."""
    await sent(stream, emitted_tokens=2)
    assert last_params().max_tokens == 6


async def end_ids(stream: RouterStream) -> None:
    """The library has one end id; the others stop."""
    command = submit(1, 8, config=pb.GenerationConfig(), prompt=PROMPT)
    command.submit.end_ids.append(9)
    await stream.send(command)
    await stream.end(1)
    params = last_params()
    assert 9 in {params.end_id, *(params.stop_token_ids or ())}


async def config(stream: RouterStream) -> None:
    """test_fields.py has each of its fields."""
    await sent(stream)
    assert last_params().max_tokens == 8


async def timeout_ms(stream: RouterStream) -> None:
    """The library has no deadline of a request: the service aborts it."""
    endless = pb.GenerationConfig(stopping=pb.StoppingConfig(ignore_end_id=True))
    await stream.send(submit(1, 100_000, config=endless, timeout_ms=50))
    received = await stream.end(1)
    assert received.end is not None
    assert received.end.reason == pb.FINISH_REASON_CANCELLED
    await eventually(lambda: not executor()._running)


async def stop_vocabulary(stream: RouterStream) -> None:
    """For beams, whose texts the library would have to see."""
    beams = pb.GenerationConfig(beam_search=pb.BeamSearchConfig(beam_width=2))
    words = pb.StopVocabulary(stop_texts=[b"end"])
    error = await refused(stream, config=beams, stop_vocabulary=words)
    assert error.reason == "UNSUPPORTED_FIELD"
    assert "stop_vocabulary" in error.message


async def sender_lease_id(stream: RouterStream) -> None:
    received = await sent(stream, **LEASED)
    assert received.end is not None
    assert received.end.reason == pb.FINISH_REASON_HANDOFF
    assert last_call()["disaggregated_params"].request_type == "context_only"


async def traceparent(stream: RouterStream) -> None:
    """Names the caller's trace towards the service, which exports the spans."""
    await sent(stream, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    assert "a" * 32 not in str(last_call())


async def receiver_lease_id(stream: RouterStream) -> None:
    error = await refused(stream, receiver_lease_id=LEASE)
    assert error.reason == "UNSUPPORTED_FIELD"
    assert list(error.fields) == ["submit.receiver_lease_id"]


async def lease_expires_in_ms(stream: RouterStream) -> None:
    """The service's own clock; the library's is an option of the transceiver."""
    error = await refused(stream, lease_expires_in_ms=5000)
    assert "submit.lease_expires_in_ms" in error.fields


async def handoff(stream: RouterStream) -> None:
    half = await sent(stream, **LEASED)
    assert half.end is not None
    prompt = [*PROMPT, *half.token_ids]
    rest = await sent(stream, 2, prompt=prompt, emitted_tokens=1, handoff=half.end.handoff)
    assert rest.end is not None
    assert rest.end.reason == pb.FINISH_REASON_LENGTH
    given = last_call()["disaggregated_params"]
    assert given.request_type == "generation_only"
    assert given.first_gen_tokens == half.token_ids


CHECKS: dict[str, Callable[[RouterStream], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        *(handle, request_id, batch_index, sequence_index, draw_index, token_ids, emitted_tokens),
        end_ids,
        *(config, timeout_ms, stop_vocabulary),
        *(sender_lease_id, receiver_lease_id, lease_expires_in_ms, handoff, traceparent),
    )
}


@pytest.mark.parametrize("name", [field.name for field in DESCRIPTOR.fields])
async def test_a_field_arrives_or_is_refused(name: str, release: str) -> None:
    settings: dict[str, Any] = {
        "options": {
            "cache_transceiver_config": {"backend": "UCX"},
            "disable_overlap_scheduler": True,
        },
    }
    if name == "stop_vocabulary":
        # Beams and handoffs exclude each other.
        settings = {"limits": {"max_beam_width": 2}}
    async with serving(backend(**settings)) as engine, router_stream(engine.address) as stream:
        await CHECKS[name](stream)
