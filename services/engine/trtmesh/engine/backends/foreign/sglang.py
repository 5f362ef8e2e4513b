"""SGLang's contract, `sglang.grpc.scheduler.SglangScheduler`.

It has no seed: an item with a seed of the client's finds no place here, and the draws of others are the engine's own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from google.protobuf.json_format import MessageToDict
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.foreign.connection import Connection
from trtmesh.engine.backends.foreign.contract import Ask, EngineFacts, LoadRecord, News
from trtmesh.engine.backends.foreign.load import record_of
from trtmesh.engine.backends.foreign.log_probs import asked_top, top_of
from trtmesh.engine.backends.foreign.sampling import (
    Draws,
    bad_ids_of,
    banning,
    bias_of,
    check_counted,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import supported_by

WHOLE_PROMPT, NO_PROMPT = 0, -1
"""Values of logprob_start_len."""


class SglangContract:
    """Implements Contract."""

    engine = "sglang"
    supported_fields = supported_by("sglang")
    asks_transfer = ""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(connection.channel)

    async def describe(self) -> EngineFacts:
        ask, stub = self._connection.ask, self._stub
        model = await ask(
            stub.GetModelInfo, sglang.GetModelInfoRequest(), sglang.GetModelInfoResponse
        )
        server = await ask(
            stub.GetServerInfo, sglang.GetServerInfoRequest(), sglang.GetServerInfoResponse
        )
        arguments = MessageToDict(server.server_args)
        return EngineFacts(
            version=server.sglang_version,
            model=model.served_model_name,
            model_path=model.model_path,
            vocabulary_size=model.vocab_size,
            max_sequence_tokens=model.max_context_length,
            max_batch_size=_number(arguments.get("max_running_requests")),
            tokens_per_block=_number(arguments.get("page_size")),
            cache_tokens=server.max_total_num_tokens,
            end_ids=tuple(model.eos_token_ids),
            data_type=str(arguments.get("dtype") or ""),
            details=repr((model.model_type, list(model.architectures), model.weight_version)),
        )

    def check(self, item: Submission) -> None:
        check_counted(item)
        bias_of(item.config)
        bad_ids_of(item.config)

    async def generate(self, ask: Ask) -> AsyncGenerator[News, None]:
        async with self._connection.stream(self._stub.Generate, request_of(ask)) as call:
            async for response in call:
                yield news_of(response, ask)

    async def abort(self, call_id: str) -> None:
        request = sglang.AbortRequest(request_id=call_id, reason="stopped")
        await self._connection.ask(self._stub.Abort, request, sglang.AbortResponse)

    async def load(self) -> LoadRecord | None:
        request = sglang.GetLoadsRequest()
        return record_of(
            await self._connection.ask(self._stub.GetLoads, request, sglang.GetLoadsResponse)
        )

    async def illness(self) -> str:
        answer = await self._connection.ask(
            self._stub.HealthCheck, sglang.HealthCheckRequest(), sglang.HealthCheckResponse
        )
        return "" if answer.healthy else answer.message or "it is not healthy"

    async def tokenizer(self) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        request = common_pb2.GetTokenizerRequest()
        async with self._connection.stream(self._stub.GetTokenizer, request) as call:
            async for chunk in call:
                yield chunk

    async def kv_events(self) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        request = common_pb2.SubscribeKvEventsRequest()
        async with self._connection.stream(self._stub.SubscribeKvEvents, request) as call:
            async for batch in call:
                yield batch


def request_of(ask: Ask) -> sglang.GenerateRequest:
    draws, sampling, output = Draws.of(ask.sampling), ask.sampling, ask.output
    bias = banning(ask.bias, ask.bad_ids)
    params = sglang.SamplingParams(
        temperature=draws.temperature,
        top_p=draws.top_p,
        # 0 would mean off here, too, but only in this contract; the engine's own word is -1.
        top_k=draws.top_k or -1,
        min_p=draws.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        max_new_tokens=ask.max_tokens,
        min_new_tokens=ask.min_tokens,
        stop_token_ids=ask.stop_ids,
        ignore_eos=not ask.model_end_ids,
        # The id that ends a sequence is part of our output.
        no_stop_trim=True,
        logit_bias={str(token): weight for token, weight in bias.items()},
        n=1,
    )
    if ask.guided is not None:
        _constrain(params, ask.guided)
    return sglang.GenerateRequest(
        request_id=ask.call_id,
        tokenized=sglang.TokenizedInput(input_ids=ask.token_ids),
        sampling_params=params,
        return_logprob=output.per_token or output.prompt_log_probs,
        logprob_start_len=WHOLE_PROMPT if output.prompt_log_probs else NO_PROMPT,
        top_logprobs_num=asked_top(output.top_log_probs),
        stream=True,
    )


def _constrain(params: sglang.SamplingParams, guided: GuidedDecoding) -> None:
    text = guided.guide or ""
    match guided.guide_type:
        case pb.GUIDE_TYPE_JSON:
            params.json_schema = '{"type": "object"}'
        case pb.GUIDE_TYPE_JSON_SCHEMA:
            params.json_schema = text
        case pb.GUIDE_TYPE_REGEX:
            params.regex = text
        case pb.GUIDE_TYPE_EBNF_GRAMMAR:
            params.ebnf_grammar = text
        case pb.GUIDE_TYPE_STRUCTURAL_TAG:
            params.structural_tag = text


def news_of(response: sglang.GenerateResponse, ask: Ask) -> News:
    if response.HasField("complete"):
        end = response.complete
        matched = end.matched_token_id if end.HasField("matched_token_id") else None
        return News(cached_tokens=end.cached_tokens, reason=end.finish_reason, matched_id=matched)
    chunk, most = response.chunk, ask.output.top_log_probs
    news = News(chunk.token_ids, chunk.cached_tokens)
    if chunk.HasField("output_logprobs"):
        news.log_probs = list(chunk.output_logprobs.token_logprobs)
        news.top_log_probs = top_of(chunk.output_logprobs.top_logprobs, most)
    if chunk.HasField("input_logprobs"):
        # The first prompt token has no probability.
        news.prompt_log_probs = [each.value for each in chunk.input_logprobs.token_logprobs[1:]]
        news.prompt_top_log_probs = top_of(chunk.input_logprobs.top_logprobs[1:], most)
    return news


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
