"""The router and scripted peers: what it tells them, and what it makes of what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from router.scripted import (
    LENGTH,
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    BackendFailed,
    InvalidRequest,
    QueueFull,
    QueueTimeout,
    StreamIncomplete,
    TokenizerLost,
    UnsupportedField,
)
from trtmesh.client import FinishReason, ItemResult
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb


@dataclass
class Scene:
    """A router, a scripted engine and a scripted tokenizer."""

    engine: ScriptedEngine
    tokenizer: ScriptedTokenizer
    client: RouterClient
    requests: list[asyncio.Task[Any]] = field(default_factory=list)

    def ask(self, *prompts: Any, **options: Any) -> asyncio.Task[list[ItemResult]]:
        asked: asyncio.Task[Any] = asyncio.create_task(self.client.complete(prompts, **options))
        self.requests.append(asked)
        return asked


@asynccontextmanager
async def scene(
    engine: ScriptedEngine | None = None,
    tokenizer: ScriptedTokenizer | None = None,
    workers: int = READY,
    **settings: Any,
) -> AsyncIterator[Scene]:
    engine = engine or ScriptedEngine(supported_fields=["stopping.max_tokens"])
    tokenizer = tokenizer or ScriptedTokenizer()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving_engine(engine))]
        tokenizers = [await stack.enter_async_context(serving_tokenizer(tokenizer))]
        settings.setdefault("worker_recovery_seconds", 0.2)
        client = await stack.enter_async_context(serving_router(engines, tokenizers, **settings))
        await until_states(client, [admin_pb.WorkerState.ValueType(workers)], [READY])
        scene = Scene(engine, tokenizer, client)
        try:
            yield scene
        finally:
            for request in scene.requests:
                request.cancel()
            await asyncio.gather(*scene.requests, return_exceptions=True)


async def test_the_hello_names_the_tokenizer_of_the_mesh() -> None:
    async with scene() as on:
        assert [hello.tokenizer_fingerprint for hello in on.engine.hellos] == ["f1"]


async def test_an_engine_with_another_tokenizer_is_refused_by_the_router() -> None:
    engine = ScriptedEngine(tokenizer_fingerprint="f2", supported_fields=["stopping.max_tokens"])
    async with scene(engine, workers=admin_pb.WORKER_STATE_REFUSED) as on:
        (worker,) = (await on.client.status()).workers
        assert "f1" in worker.problem
        assert "f2" in worker.problem
        (item,) = await on.ask("text", max_tokens=1)
        assert item.error
        assert item.error.reason == "NO_WORKER"
        assert "f2" in item.error.message


async def test_an_engine_that_refuses_the_hello_is_shown_with_its_words() -> None:
    engine = ScriptedEngine()
    engine.refusal = "router r has tokenizer f1 and worker w f2"
    async with scene(engine, workers=admin_pb.WORKER_STATE_REFUSED) as on:
        (worker,) = (await on.client.status()).workers
        assert "tokenizer f1 and worker w f2" in worker.problem


async def test_what_a_worker_is_told() -> None:
    fields = ["stopping.max_tokens", "stopping.bad_token_ids"]
    fields += ["sampling.embedding_bias_token_ids", "sampling.embedding_bias_weights"]
    async with scene(ScriptedEngine(supported_fields=fields)) as on:
        asked = on.ask(
            "ab",
            max_tokens=7,
            bad_texts=["x"],
            stop_texts=["never"],
            skip_special_tokens=False,
            embedding_bias_texts=["b"],
            embedding_bias_weights=[2.0],
            request_id="told",
            timeout_seconds=50,
        )
        (submit,) = await on.engine.submitted()
        assert list(submit.token_ids) == [97, 98]
        assert submit.request_id == "told"
        assert 40_000 < submit.timeout_ms <= 51_000
        config = submit.config
        assert config.stopping.max_tokens == 7
        assert [list(ids.ids) for ids in config.stopping.bad_token_ids] == [[120]]
        assert not config.stopping.stop_texts
        assert not config.stopping.bad_texts
        assert not config.output.ListFields()
        assert not asked.done()
        assert config.sampling.HasField("seed")
        assert [list(ids.ids) for ids in config.sampling.embedding_bias_token_ids] == [[98]]
        assert list(config.sampling.embedding_bias_weights) == [2.0]
        assert not config.sampling.embedding_bias_texts


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stopping.bad_texts", {"bad_texts": ["x"]}),
        (
            "sampling.embedding_bias_texts",
            {"embedding_bias_texts": ["b"], "embedding_bias_weights": [1.0]},
        ),
        ("output.log_probs", {"log_probs": True}),
    ],
)
async def test_what_no_worker_can_do_is_refused_before_it_is_encoded_and_by_the_clients_name(
    name: str, options: dict[str, Any]
) -> None:
    engine = ScriptedEngine(supported_fields=["sampling.embedding_bias"])
    async with scene(engine) as on:
        (item,) = await on.ask("a", **options)
        assert isinstance(item.error, UnsupportedField)
        assert name in item.error.message
        assert "token_ids" not in item.error.message
        assert not on.tokenizer.encodes


async def test_repeated_tokens_are_dropped_and_a_gap_fails_the_item_alone() -> None:
    async with scene() as on:
        asked = on.ask("a", "b", max_tokens=9)
        first, second = (s.handle for s in await on.engine.submitted(2))
        await on.engine.step((first, 0, [65, 66]), (second, 0, [67]))
        await on.engine.step((first, 1, [66, 68]), (second, 2, [69]))
        await eventually(lambda: on.engine.stops)
        assert on.engine.stops == [(second, pb.FINISH_REASON_CANCELLED)]
        await on.engine.step(ends=[(first, LENGTH), (second, pb.FINISH_REASON_CANCELLED)])
        items = await asked
        assert items[0].text == "ABD."
        assert items[0].error is None
        assert isinstance(items[1].error, StreamIncomplete)
        assert "sent token 2" in items[1].error.message


async def test_the_last_text_is_waited_for_when_the_end_comes_alone() -> None:
    async with scene() as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        on.tokenizer.answering.clear()
        await on.engine.step((submit.handle, 0, [65]))
        await eventually(lambda: any(c.HasField("decode") for c in on.tokenizer.commands))
        await on.engine.step(ends=[(submit.handle, LENGTH)])
        decodes = [c.decode for c in on.tokenizer.commands if c.HasField("decode")]
        assert len(decodes) == 1
        on.tokenizer.answering.set()
        (item,) = await asked
        assert item.text == "A."
        assert item.reason is FinishReason.LENGTH


async def test_an_error_of_the_worker_comes_behind_all_tokens() -> None:
    async with scene() as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        error = to_proto(BackendFailed("it broke", worker="scripted"))
        end = epb.SequenceEnd(handle=submit.handle, reason=pb.FINISH_REASON_ERROR, error=error)
        await on.engine.step((submit.handle, 0, [65, 66]), ends=[end])
        (item,) = await asked
        assert isinstance(item.error, BackendFailed)
        assert item.text == "AB."
        assert item.usage.generated_tokens == 2


async def test_a_text_that_breaks_every_tokenizer_is_given_up() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.breaks_on_encode = True
        (item,) = await on.ask("poison", max_tokens=1)
        assert isinstance(item.error, TokenizerLost)
        assert "4 tokenizers were lost" in item.error.message
        assert len(tokenizer.encodes) == 4
        tokenizer.breaks_on_encode = False
        asked = on.ask("fine", max_tokens=1)
        (submit,) = await on.engine.submitted()
        await on.engine.step((submit.handle, 0, [65]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "A."


async def test_a_token_that_breaks_every_tokenizer_is_given_up_and_spares_others() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        neighbour = on.ask("a", max_tokens=9)
        poisoned = on.ask("b", max_tokens=9)
        handles = {s.token_ids[0]: s.handle for s in await on.engine.submitted(2)}
        first, second = handles[ord("a")], handles[ord("b")]
        await on.engine.step((first, 0, [65]), (second, 0, [66]))
        await eventually(lambda: sum(len(d.token_ids) for d in tokenizer.decodes) == 2)
        tokenizer.breaks_on_token = 67
        await on.engine.step((second, 1, [67]))
        (item,) = await poisoned
        assert isinstance(item.error, TokenizerLost)
        assert "4 tokenizers in a row" in item.error.message
        assert item.text == "B"
        await eventually(lambda: on.engine.stops)
        ends = [(second, pb.FINISH_REASON_CANCELLED), (first, LENGTH)]
        await on.engine.step((first, 1, [68]), ends=ends)
        assert (await neighbour)[0].text == "AD."


async def test_a_tokenizer_that_answers_wrongly_counts_as_lost() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.forgets_a_text = True
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        await on.engine.step((submit.handle, 0, [65, 66]))
        await eventually(lambda: tokenizer.streams > 1)
        tokenizer.forgets_a_text = False
        await on.engine.step((submit.handle, 2, [67]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "ABC."

        tokenizer.forgets_a_text = True
        asked = on.ask("b", max_tokens=9)
        submit = (await on.engine.submitted(2))[1]
        await on.engine.step((submit.handle, 0, [65]))
        (item,) = await asked
        assert isinstance(item.error, TokenizerLost)
        assert "4 tokenizers in a row" in item.error.message


async def test_a_tokenizer_that_is_lost_now_and_then_costs_a_sequence_nothing() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer, max_attempts=2) as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()

        async def lose_one_with(token_id: int) -> None:
            tokenizer.breaks_on_token = token_id
            await on.engine.step((submit.handle, token_id - 65, [token_id]))
            await eventually(lambda: tokenizer.broken == token_id - 64)
            tokenizer.breaks_on_token = None
            # Once more on the next stream, where it is decoded.
            await eventually(lambda: times_asked(tokenizer, token_id) == 2)

        for token_id in range(65, 69):
            await lose_one_with(token_id)
        await on.engine.step(ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "ABCD."


def times_asked(tokenizer: ScriptedTokenizer, token_id: int) -> int:
    return sum(token_id in decode.token_ids for decode in tokenizer.decodes)


async def test_texts_beyond_what_a_tokenizer_may_have_wait_and_beyond_that_are_refused() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer, encodes_per_tokenizer=1, max_queued_encodes=3) as on:
        tokenizer.answering.clear()
        asked = on.ask("a", "b", "c", "d", max_tokens=1, request_id="first")
        await eventually(lambda: tokenizer.encodes)
        (late,) = await on.ask("e", max_tokens=1)
        assert isinstance(late.error, QueueFull)
        assert late.error.retry_after_ms
        assert "Exceeds maximum queue size" in late.error.message

        assert await on.client.stop("first", [3])
        in_its_place = on.ask("f", max_tokens=1)
        tokenizer.answering.set()
        submits = await on.engine.submitted(4)
        assert "".join(encode.text for encode in tokenizer.encodes) == "abcf"
        await on.engine.step(
            *((submit.handle, 0, [65]) for submit in submits),
            ends=[(submit.handle, LENGTH) for submit in submits],
        )
        items = [*await asked, *await in_its_place]
        assert [item.text for item in items] == ["A.", "A.", "A.", "", "A."]
        assert items[3].reason is FinishReason.STOPPED


async def test_a_text_waits_for_a_busy_tokenizer_no_longer_than_in_any_queue() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer, encodes_per_tokenizer=1, queue_seconds=0.05) as on:
        tokenizer.answering.clear()
        first = on.ask("a", max_tokens=1)
        await eventually(lambda: tokenizer.encodes)
        (item,) = await on.ask("b", max_tokens=1)
        assert isinstance(item.error, QueueTimeout)
        assert "every tokenizer" in item.error.message
        assert not first.done()


async def test_queued_texts_go_on_where_their_tokenizer_was_lost() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer, encodes_per_tokenizer=1, queue_seconds=60) as on:
        tokenizer.answering.clear()
        asked = on.ask("a", "b", "c", max_tokens=1)
        await eventually(lambda: tokenizer.encodes)
        await tokenizer.hang_up()
        tokenizer.answering.set()
        submits = await on.engine.submitted(3)
        assert [encode.text for encode in tokenizer.encodes] == ["a", "b", "c", "a"]
        await on.engine.step(
            *((submit.handle, 0, [65]) for submit in submits),
            ends=[(submit.handle, LENGTH) for submit in submits],
        )
        assert [item.text for item in await asked] == ["A.", "A.", "A."]


async def test_the_encode_of_a_stopped_item_is_withdrawn() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.answering.clear()
        asked = on.ask("never", request_id="gone", max_tokens=1)
        await eventually(lambda: tokenizer.encodes)
        await on.client.stop("gone")
        assert (await asked)[0].reason is FinishReason.STOPPED
        tokenizer.answering.set()
        await eventually(lambda: tokenizer.cancelled == [tokenizer.encodes[0].handle])


async def test_an_item_that_no_message_holds_does_not_break_the_stream_of_others() -> None:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    async with scene(engine, max_message_bytes=100_000) as on:
        neighbour = on.ask([65], max_tokens=1)
        (submit,) = await engine.submitted()
        (item,) = await on.ask([127] * 99_990, max_tokens=1)
        assert type(item.error) is InvalidRequest
        assert "max_message_bytes" in item.error.message
        await engine.step((submit.handle, 0, [66]), ends=[(submit.handle, LENGTH)])
        assert (await neighbour)[0].text == "B."
        assert len(engine.hellos) == 1


async def test_items_beyond_the_limit_are_refused_at_once() -> None:
    async with scene(max_items=5) as on:
        asked = [on.ask("a", "b", max_tokens=1, request_id=f"r{index}") for index in range(8)]
        submits = await on.engine.submitted(4)
        results = {index: request for index, request in enumerate(asked) if request.done()}
        await eventually(lambda: sum(request.done() for request in asked) == 6)
        for request in asked:
            if request.done():
                with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
                    request.result()
        assert len(results) <= 6
        assert len(submits) == 4
        ends = [(submit.handle, LENGTH) for submit in submits]
        await on.engine.step(ends=ends)
        await asyncio.gather(*(request for request in asked if not request.done()))
        again = on.ask("a", "b", "c", "d", "e", max_tokens=1)
        await on.engine.submitted(9)
        assert not again.done()


async def test_a_worker_that_drains_gets_nothing_new() -> None:
    async with scene() as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        await on.engine.report(draining=True)
        await until_states(on.client, [admin_pb.WORKER_STATE_DRAINING], [READY])
        (late,) = await on.ask("b", max_tokens=1)
        assert late.error
        assert late.error.reason == "NO_WORKER"
        await on.engine.step((submit.handle, 0, [65]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "A."
