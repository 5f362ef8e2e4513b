"""Answers of TrtllmService over a backend that acts on command."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine.config_fields import LEAVES
from engine_streams import PATIENCE_SECONDS, RunningEngine, serving
from leaks import gone, without_collector
from recording_backend import INFO, RecordingBackend
from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from tokenizer.tokenizers_zoo import byte_level_bpe, ids_of
from tokenizers import Tokenizer, decoders
from trtllm_client import (
    DEMO,
    Output,
    collect,
    first_item,
    offering,
    refusal,
    request,
    stub_of,
    take,
)
from trtmesh.chassis.errors import BackendFailed, QueueFull
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.engine.backend import (
    PromptDetails,
    SequenceEnd,
    StepOutput,
    TokenDetails,
)
from trtmesh.engine.gateways.trtllm.call import GenerateCall
from trtmesh.engine.gateways.trtllm.texts import StopSearch
from trtmesh.v1 import generation_pb2 as pb

EVERYTHING = replace(INFO, supported_fields=frozenset(LEAVES), vocabulary_size=6144)


def backend() -> RecordingBackend:
    return RecordingBackend(EVERYTHING)


def end(key: int, reason: int = pb.FINISH_REASON_LENGTH, **more: Any) -> SequenceEnd:
    return SequenceEnd(key, reason, 3, 2, 5, **more)


def finish(recording: RecordingBackend, *ends: SequenceEnd) -> None:
    """Ends sequences in a step without tokens."""
    for each in ends:
        recording.live.pop(each.key, None)
    recording.deliver(StepOutput(recording.stats_now.step_count + 1, ends=list(ends)))


async def read(call: Any, outputs: dict[int, Output]) -> Any:
    """The next answer, added to `outputs`."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        answer = await call.read()
    take(outputs, answer)
    return answer


@asynccontextmanager
async def running(
    recording: RecordingBackend, asked: Any, **settings: Any
) -> AsyncIterator[tuple[Any, tuple[int, ...]]]:
    """A call, and the keys of its sequences."""
    async with offering(recording, **settings) as stub:
        call = stub.Generate(asked)
        item = await first_item(recording, call)
        yield call, item.keys
        call.cancel()


async def test_tokens_stream_as_they_come_and_the_last_answer_has_them_all() -> None:
    recording, outputs = backend(), dict[int, Output]()
    async with running(recording, request("mine")) as (call, (key,)):
        recording.step({key: [10, 11]})
        answer = await read(call, outputs)
        assert answer.request_id == "mine"
        assert (answer.chunk.prompt_tokens, answer.chunk.completion_tokens) == (3, 2)
        recording.step({key: [12]}, offset=2)
        answer = await read(call, outputs)
        assert list(answer.chunk.token_ids) == [12]
        finish(recording, end(key))
        complete = (await read(call, outputs)).complete
        assert await call.read() is grpc.aio.EOF
    assert list(complete.output_token_ids) == [10, 11, 12]
    assert complete.finish_reason == "length"
    assert complete.WhichOneof("matched_stop") is None
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 3, 2)


async def test_without_streaming_only_the_last_answers_come() -> None:
    recording = backend()
    async with running(recording, request(streaming=False)) as (call, (key,)):
        recording.step({key: [10]})
        recording.step({key: [11]}, offset=1)
        finish(recording, end(key))
        outputs = await collect(call, streaming=False)
    assert list(outputs[0].complete.output_token_ids) == [10, 11]


async def test_each_of_several_sequences_has_its_own_answers() -> None:
    recording = backend()
    sampling = tpb.SamplingConfig(num_return_sequences=2, temperature=1.0)
    async with running(recording, request(sampling_config=sampling)) as (call, (first, second)):
        recording.step({first: [10], second: [20]})
        finish(recording, end(second))
        recording.step({first: [11]}, offset=1)
        finish(recording, end(first))
        outputs = await collect(call)
    assert outputs[0].token_ids == [10, 11]
    assert outputs[1].token_ids == [20]


async def test_tokens_that_may_change_wait_for_the_end() -> None:
    recording = backend()
    sampling = tpb.SamplingConfig(beam_width=2)
    async with running(recording, request(sampling_config=sampling)) as (call, (best, other)):
        recording.step({best: [10, 11], other: [20, 21]})
        recording.step({best: [20, 21, 22], other: [10, 11, 12]})
        finish(recording, end(best), end(other))
        outputs = await collect(call)
    assert outputs[0].token_ids == [20, 21, 22]
    assert outputs[1].token_ids == [10, 11, 12]
    assert [output.chunks for output in outputs.values()] == [1, 1]


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("reason", [pb.FINISH_REASON_END_ID, pb.FINISH_REASON_STOP_WORD])
async def test_a_stop_id_is_in_the_output_only_where_it_is_asked_for(
    reason: int, included: bool
) -> None:
    recording = backend()
    asked = request(include_stop_token_in_output=included, stop_token_ids=[12])
    async with running(recording, asked) as (call, (key,)):
        recording.step({key: [10, 11]})
        ends = [end(key, reason, stop_token_ids=(12,))]
        recording.live.pop(key)
        recording.step({key: [12]}, offset=2, ends=ends)
        outputs = await collect(call)
    complete = outputs[0].complete
    assert list(complete.output_token_ids) == [10, 11, 12] if included else [10, 11]
    assert complete.finish_reason == "stop"
    assert complete.completion_tokens == 3
    by_client = reason == pb.FINISH_REASON_STOP_WORD
    assert complete.matched_token_id == (12 if by_client else 0)
    assert complete.HasField("matched_token_id") == by_client


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("begins_a_token", [False, True])
async def test_a_stop_text_ends_the_sequence_that_generates_it(
    begins_a_token: bool, included: bool, streaming: bool
) -> None:
    recording = backend()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokens = tokenizer.encode("def answer():\n    return 42\n\nmore", add_special_tokens=False).ids
    stops = ["never", " return 4" if begins_a_token else "return 4"]
    asked = request(stop=stops, include_stop_token_in_output=included, streaming=streaming)
    async with running(recording, asked) as (call, (key,)):
        for place, token in enumerate(tokens):
            recording.step({key: [token]}, offset=place)
        outputs = await collect(call, streaming)
    complete = outputs[0].complete
    text = tokenizer.decode(list(complete.output_token_ids))
    assert complete.matched_stop_str == stops[1]
    assert complete.finish_reason == "stop"
    assert recording.stops[0] == ((key,), pb.FINISH_REASON_STOP_WORD)
    if begins_a_token and not included:
        assert text == "def answer():\n   "
        assert complete.completion_tokens > len(complete.output_token_ids)
    else:
        assert text == "def answer():\n    return 42"[: len(text)]
        assert "return 4" in text
        assert complete.completion_tokens == len(complete.output_token_ids)


async def test_a_panic_of_the_tokenizer_ends_its_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no Exception. This decoder panics where there is nothing to strip."""
    tokenizer = byte_level_bpe()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    begin, letter = ids_of(tokenizer, "<s>", "a")
    recording = backend()
    async with offering(recording, model_dir=tmp_path) as stub:
        error = await refusal(stub.Generate(request("a", prompt=[begin], stop=["never"])))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "PanicException" in (error.details() or "")

        def panic(*_: Any) -> None:
            raise type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

        monkeypatch.setattr(StopSearch, "_text_of", panic)
        panicking = stub.Generate(request("b", prompt=[letter], stop=["never"]))
        (key,) = (await first_item(recording, panicking)).keys
        other = stub.Generate(request("c"))
        (other_key,) = (await first_item(recording, other, 2)).keys
        recording.step({key: [letter], other_key: [letter]})
        error = await refusal(panicking)
        assert "PanicException" in (error.details() or "")
        finish(recording, end(other_key))
        outputs = await collect(other)
    assert list(outputs[0].complete.output_token_ids) == [letter]


async def test_a_stop_text_counts_after_min_tokens_only() -> None:
    recording = backend()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    (word,) = tokenizer.encode(" return", add_special_tokens=False).ids
    asked = request(stop=["return"], sampling_config=tpb.SamplingConfig(min_tokens=2))
    async with running(recording, asked) as (call, (key,)):
        for place in range(4):
            recording.step({key: [word]}, offset=place)
        outputs = await collect(call)
    assert outputs[0].complete.completion_tokens == 3


async def test_log_probabilities_and_logits_follow_the_output() -> None:
    recording = backend()
    output = tpb.OutputConfig(
        logprobs=0, prompt_logprobs=2, return_context_logits=True, return_generation_logits=True
    )
    row = EVERYTHING.vocabulary_size
    async with running(recording, request(output_config=output)) as (call, (key,)):
        assert recording.items[0].config.output.top_log_probs == 2
        prompts = [
            PromptDetails(key, 0, [-1.0, -2.0], [([1, 2], [-0.5, -0.6])] * 2, _rows(3, row)),
        ]
        details = [TokenDetails(key, [-3.0], -3.0, [([9, 8], [-0.1, -0.2])], _rows(1, row))]
        recording.step({key: [10]}, prompts=prompts, details=details)
        details = [TokenDetails(key, [-4.0], -7.0, [([7, 6], [-0.3, -0.4])], _rows(1, row))]
        ends = [end(key, pb.FINISH_REASON_END_ID, stop_token_ids=(2,))]
        recording.live.pop(key)
        recording.step({key: [2]}, offset=1, details=details, ends=ends)
        chunk = (await call.read()).chunk
        complete = (await call.read()).complete
    for told in (chunk, complete):
        (only,) = told.logprobs
        assert (only.token_id, only.logprob) == (10, -3.0)
        assert [top.token_id for top in only.top_logprobs] == [9], "a requested 0 means 1"
    placeholder, *others = complete.prompt_logprobs
    assert (placeholder.token_id, placeholder.logprob, len(placeholder.top_logprobs)) == (40, 0, 0)
    assert [(each.token_id, each.logprob) for each in others] == [(41, -1.0), (42, -2.0)]
    assert [top.token_id for top in others[0].top_logprobs] == [1, 2]
    assert len(complete.context_logits) == 3 * row * 4
    assert len(complete.generation_logits) == row * 4


def _rows(count: int, row: int) -> Tensor:
    return Tensor(pb.DATA_TYPE_FP32, (count, row), struct.pack("<f", 1.5) * (count * row))


async def test_metrics_are_seconds_and_the_arrival_is_the_clients() -> None:
    recording = backend()
    output = tpb.OutputConfig(return_perf_metrics=True)
    metrics = pb.PerfMetrics(
        arrival_time_ns=10**9,
        first_token_time_ns=3 * 10**9,
        total_accepted_draft_tokens=4,
        total_draft_tokens=6,
    )
    for number, (arrival_time, told) in enumerate([(None, 1.0), (0.5, 0.5)], start=1):
        asked = request(output_config=output, arrival_time=arrival_time)
        async with offering(recording) as stub:
            call = stub.Generate(asked)
            (key,) = (await first_item(recording, call, number)).keys
            finish(recording, end(key, perf_metrics=metrics))
            complete = (await collect(call))[0].complete
        assert complete.perf_metrics.arrival_time == told
        assert complete.perf_metrics.first_token_time == 3.0
        assert (complete.spec_accepted_tokens, complete.spec_draft_tokens) == (4, 6)


async def test_the_error_of_a_sequence_ends_the_call_and_its_siblings() -> None:
    recording = backend()
    sampling = tpb.SamplingConfig(num_return_sequences=2, temperature=1.0)
    asked = request(sampling_config=sampling)
    with without_collector():
        async with running(recording, asked) as (call, (first, second)):
            broken = BackendFailed("item 1 is broken")
            recording.end(first, reason=pb.FINISH_REASON_ERROR, error=broken)
            del broken
            error = await refusal(call)
            await until(lambda: not recording.live)
        await gone(GenerateCall)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "item 1 is broken" in (error.details() or "")
    assert recording.stops == [((second,), pb.FINISH_REASON_CANCELLED)]


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (QueueFull.of(1, "one waits"), grpc.StatusCode.UNAVAILABLE),
        (RuntimeError("a defect"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_refused_item_leaves_nothing_behind(
    refused: Exception, code: grpc.StatusCode
) -> None:
    recording = backend()
    recording.refusal = refused
    async with engine_and_stub(recording) as (engine, stub):
        error = await refusal(stub.Generate(request()))
        assert error.code() is code
        recording.refusal = None
        call = stub.Generate(request())
        (key,) = (await first_item(recording, call, 2)).keys
        finish(recording, end(key))
        assert (await collect(call))[0].complete.finish_reason == "length"
        await engine.service.drain()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - nothing tells the test
            await asyncio.sleep(0.001)


@asynccontextmanager
async def engine_and_stub(recording: RecordingBackend) -> AsyncIterator[tuple[RunningEngine, Any]]:
    settings = {"trtllm_service": True, "model_dir": DEMO}
    async with serving(recording, **settings) as engine, stub_of(engine.address) as stub:
        yield engine, stub


async def test_a_running_request_id_is_not_taken_twice_and_then_free_again() -> None:
    recording = backend()
    async with offering(recording) as stub:
        call = stub.Generate(request("same"))
        (key,) = (await first_item(recording, call)).keys
        error = await refusal(stub.Generate(request("same")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        finish(recording, end(key))
        await collect(call)
        again = stub.Generate(request("same"))
        await first_item(recording, again, 2)
        again.cancel()


async def test_abort_ends_the_call_with_what_there_is() -> None:
    recording = backend()
    async with offering(recording) as stub:
        call = stub.Generate(request("mine"))
        (key,) = (await first_item(recording, call)).keys
        recording.step({key: [10]})
        answer = await stub.Abort(tpb.AbortRequest(request_id="mine"))
        assert answer.success
        outputs = await collect(call)
        again = await stub.Abort(tpb.AbortRequest(request_id="mine"))
        assert not again.success
        assert again.message
    assert list(outputs[0].complete.output_token_ids) == [10]
    assert outputs[0].complete.finish_reason == "cancelled"
    assert recording.stops == [((key,), pb.FINISH_REASON_CANCELLED)]


async def test_an_item_that_is_aborted_in_the_queue_has_nothing_to_tell() -> None:
    recording = backend()
    output = tpb.OutputConfig(logprobs=1, prompt_logprobs=1, return_context_logits=True)
    async with offering(recording) as stub:
        call = stub.Generate(request("mine", output_config=output))
        await first_item(recording, call)
        assert (await stub.Abort(tpb.AbortRequest(request_id="mine"))).success
        complete = (await collect(call))[0].complete
    assert complete.finish_reason == "cancelled"
    told = (complete.output_token_ids, complete.logprobs, complete.prompt_logprobs)
    assert not any(told)


async def test_a_token_that_was_sent_stays_though_it_ended_the_sequence() -> None:
    recording, outputs = backend(), dict[int, Output]()
    async with running(recording, request()) as (call, (key,)):
        recording.step({key: [10, 2]})
        await read(call, outputs)
        finish(recording, end(key, pb.FINISH_REASON_END_ID, stop_token_ids=(2,)))
        complete = (await read(call, outputs)).complete
    assert list(complete.output_token_ids) == outputs[0].token_ids == [10, 2]


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
async def test_the_end_of_a_call_stops_its_sequences(how: str) -> None:
    recording = backend()
    async with engine_and_stub(recording) as (engine, stub):
        if how == "disconnect":
            async with stub_of(engine.address) as other:
                await first_item(recording, other.Generate(request()))
        else:
            call = stub.Generate(request(), timeout=10 if how == "deadline" else None)
            await first_item(recording, call)
            if how == "cancel":
                call.cancel()
        await until(lambda: recording.stops)
        assert recording.live == {}
        assert recording.stops == [(recording.items[0].keys, pb.FINISH_REASON_CANCELLED)]
        assert not (await stub.Abort(tpb.AbortRequest(request_id="r"))).success
        await engine.service.drain()


async def test_a_broken_backend_ends_every_call_as_lost() -> None:
    recording = backend()
    async with running(recording, request()) as (call, _):
        recording.fail(RuntimeError("out of order"))
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "out of order" in (error.details() or "")


async def test_a_stopping_worker_sends_what_is_finished_and_ends_the_rest() -> None:
    recording = backend()
    async with engine_and_stub(recording) as (engine, stub):
        call = stub.Generate(request())
        await first_item(recording, call)
        await engine.stop()
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "stops" in (error.details() or "")


async def test_a_draining_worker_finishes_and_admits_nothing() -> None:
    recording = backend()
    async with engine_and_stub(recording) as (engine, stub):
        call = stub.Generate(request("first"))
        (key,) = (await first_item(recording, call)).keys
        draining = asyncio.create_task(engine.service.drain())
        await until(lambda: engine.service._loaded().draining)
        error = await refusal(stub.Generate(request("second")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        finish(recording, end(key))
        assert (await collect(call))[0].complete.finish_reason == "length"
        await draining


async def test_embed_is_refused() -> None:
    async with offering(backend()) as stub:
        error = await refusal(stub.Embed(tpb.EmbedRequest(request_id="r")))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_ok_or_says_what_is_wrong() -> None:
    async with engine_and_stub(backend()) as (engine, stub):
        assert (await stub.HealthCheck(tpb.HealthCheckRequest())).status == "OK"
        await engine.runtime.health.unwell("drain", "draining")
        told = (await stub.HealthCheck(tpb.HealthCheckRequest())).status
        assert told == "drain: draining"


async def test_infos_describe_the_worker() -> None:
    async with offering(backend(), model="mine") as stub:
        model = await stub.GetModelInfo(tpb.GetModelInfoRequest())
        server = await stub.GetServerInfo(tpb.GetServerInfoRequest())
    assert model.model_id == "mine"
    assert (model.max_input_len, model.max_seq_len, model.max_batch_size) == (999, 1000, 100)
    assert (model.vocab_size, model.num_layers) == (6144, 8)
    assert "beam_search" in model.supported_features
    named = {field.name for field, _ in server.ListFields()}
    assert named == {"version", "backend"}, "sizes that nobody knows"
    assert server.backend == "recording"


async def test_the_service_is_off_by_default() -> None:
    async with serving(backend()) as engine, stub_of(engine.address) as stub:
        error = await refusal(stub.HealthCheck(tpb.HealthCheckRequest()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
