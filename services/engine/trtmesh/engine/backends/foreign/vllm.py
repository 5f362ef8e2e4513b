"""vLLM's contract, `vllm.grpc.engine.VllmEngine`."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backend import StateKind, Submission
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
    int32_of,
)
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import supported_by

ROLES = {"kv_producer": epb.WORKER_ROLE_PREFILL, "kv_consumer": epb.WORKER_ROLE_DECODE}
"""Roles by vLLM's word for them."""

NIXL = "NixlConnector"
"""The connector whose prefill tells the decode side where its KV is."""

MOST_TOP_LOG_PROBS = 19
"""vLLM takes 20 by default, and the chosen id may be one of them."""


class VllmContract:
    """Implements Contract."""

    engine = "vllm"
    supported_fields = supported_by("vllm")
    asks_transfer = '{"do_remote_decode": true, "do_remote_prefill": false}'

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(connection.channel)

    async def describe(self) -> EngineFacts:
        ask, stub = self._connection.ask, self._stub
        model = await ask(stub.GetModelInfo, vllm.GetModelInfoRequest(), vllm.GetModelInfoResponse)
        server = await ask(
            stub.GetServerInfo, vllm.GetServerInfoRequest(), vllm.GetServerInfoResponse
        )
        loads = await ask(stub.GetLoads, vllm.GetLoadsRequest(), vllm.GetLoadsResponse)
        return EngineFacts(
            version=loads.version,
            model=model.served_model_name,
            model_path=model.model_path,
            vocabulary_size=model.vocab_size,
            max_sequence_tokens=model.max_context_length,
            max_batch_size=server.max_num_seqs,
            tokens_per_block=server.block_size,
            cache_tokens=record_of(loads).cache_tokens,
            end_ids=tuple(model.eos_token_ids),
            data_type=server.model_dtype.removeprefix("torch."),
            details=repr((model.model_type, list(model.architectures), server.kv_cache_dtype)),
            state_kind=_state_kind(server, loads.version),
            role=ROLES.get(server.kv_role),
        )

    def check(self, item: Submission) -> None:
        check_counted(item)
        bias_of(item.config)
        bad_ids_of(item.config)
        if item.config.output.top_log_probs > MOST_TOP_LOG_PROBS:
            raise InvalidField.of(
                "output.top_log_probs",
                item.config.output.top_log_probs,
                f"at most {MOST_TOP_LOG_PROBS} on this engine",
            )

    async def generate(self, ask: Ask) -> AsyncGenerator[News, None]:
        async with self._connection.stream(self._stub.Generate, request_of(ask)) as call:
            async for response in call:
                yield news_of(response, ask)

    async def abort(self, call_id: str) -> None:
        request = vllm.AbortRequest(request_ids=[call_id])
        await self._connection.ask(self._stub.Abort, request, vllm.AbortResponse)

    async def load(self) -> LoadRecord | None:
        request = vllm.GetLoadsRequest()
        return record_of(
            await self._connection.ask(self._stub.GetLoads, request, vllm.GetLoadsResponse)
        )

    async def illness(self) -> str:
        answer = await self._connection.ask(
            self._stub.HealthCheck, vllm.HealthCheckRequest(), vllm.HealthCheckResponse
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


def request_of(ask: Ask) -> vllm.GenerateRequest:
    draws, sampling, output = Draws.of(ask.sampling), ask.sampling, ask.output
    params = vllm.SamplingParams(
        temperature=draws.temperature,
        top_p=draws.top_p,
        top_k=draws.top_k,
        min_p=draws.min_p,
        seed=int32_of(ask.seed),
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        max_tokens=ask.max_tokens,
        min_tokens=ask.min_tokens,
        stop_token_ids=ask.stop_ids,
        ignore_eos=not ask.model_end_ids,
        logit_bias=banning(ask.bias, ask.bad_ids),
        n=1,
    )
    if output.log_probs or output.top_log_probs:
        params.logprobs = asked_top(output.top_log_probs)
    if output.prompt_log_probs:
        params.prompt_logprobs = asked_top(output.top_log_probs)
    if ask.guided is not None:
        _constrain(params, ask.guided)
    return vllm.GenerateRequest(
        request_id=ask.call_id,
        tokenized=vllm.TokenizedInput(input_ids=ask.token_ids),
        sampling_params=params,
        stream=True,
        kv_transfer_params_json=ask.transfer or None,
    )


def _state_kind(server: vllm.GetServerInfoResponse, version: str) -> StateKind | None:
    """Pairs need one release, connector, type and block size; vLLM itself compares these at the handshake."""
    if server.kv_connector != NIXL:
        return None
    same = (
        version,
        server.kv_cache_dtype,
        server.block_size,
        server.model_dtype,
        server.attention_backend,
        server.pairing_protocol,
    )
    return StateKind("vllm-nixl", repr(same))


def _constrain(params: vllm.SamplingParams, guided: GuidedDecoding) -> None:
    text = guided.guide or ""
    match guided.guide_type:
        case pb.GUIDE_TYPE_JSON:
            params.json_object = True
        case pb.GUIDE_TYPE_JSON_SCHEMA:
            params.json_schema = text
        case pb.GUIDE_TYPE_REGEX:
            params.regex = text
        case pb.GUIDE_TYPE_EBNF_GRAMMAR:
            params.grammar = text
        case pb.GUIDE_TYPE_STRUCTURAL_TAG:
            params.structural_tag = text


def news_of(response: vllm.GenerateResponse, ask: Ask) -> News:
    """The ids of `complete` are those of the last chunk again."""
    if response.HasField("complete"):
        end = response.complete
        matched = end.matched_token_id if end.HasField("matched_token_id") else None
        return News(
            cached_tokens=end.cached_tokens,
            reason=end.finish_reason,
            matched_id=matched,
            transfer=end.kv_transfer_params_json,
        )
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
