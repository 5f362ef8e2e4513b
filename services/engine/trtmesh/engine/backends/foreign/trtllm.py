"""The contract of `trtllm-serve --grpc`, `trtllm.TrtllmService`.

It tells neither end ids nor the load, and sends all ids again at the end of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from smg_grpc_proto.generated import trtllm_service_pb2 as trtllm
from smg_grpc_proto.generated import trtllm_service_pb2_grpc
from trtmesh.chassis.errors import UnsupportedField
from trtmesh.engine.backend import Submission, most_likely
from trtmesh.engine.backends.foreign.connection import Connection
from trtmesh.engine.backends.foreign.contract import (
    Ask,
    Contract,
    EngineFacts,
    LoadRecord,
    News,
    asked_top,
    ended,
)
from trtmesh.engine.backends.foreign.sampling import Draws, bad_ids_of
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import supported_by

GUIDES = {
    pb.GUIDE_TYPE_JSON: trtllm.GuidedDecodingParams.GUIDE_TYPE_JSON,
    pb.GUIDE_TYPE_JSON_SCHEMA: trtllm.GuidedDecodingParams.GUIDE_TYPE_JSON_SCHEMA,
    pb.GUIDE_TYPE_REGEX: trtllm.GuidedDecodingParams.GUIDE_TYPE_REGEX,
    pb.GUIDE_TYPE_EBNF_GRAMMAR: trtllm.GuidedDecodingParams.GUIDE_TYPE_EBNF_GRAMMAR,
    pb.GUIDE_TYPE_STRUCTURAL_TAG: trtllm.GuidedDecodingParams.GUIDE_TYPE_STRUCTURAL_TAG,
}


class TrtllmContract(Contract):
    """Implements Contract."""

    engine = "trtllm"
    supported_fields = supported_by("trtllm")

    def __init__(self, connection: Connection) -> None:
        stub = trtllm_service_pb2_grpc.TrtllmServiceStub(connection.channel)
        super().__init__(connection, stub, trtllm, request_of)

    async def describe(self) -> EngineFacts:
        model, server = await self.tell("GetModelInfo"), await self.tell("GetServerInfo")
        return EngineFacts(
            version=server.version,
            model=model.model_id,
            model_path=model.model_id,
            vocabulary_size=model.vocab_size,
            max_sequence_tokens=model.max_seq_len,
            max_batch_size=model.max_batch_size,
            tokens_per_block=0,
            cache_tokens=0,
            end_ids=(),
            data_type="",
            details=repr((server.backend, model.hidden_size, model.num_layers, model.num_heads)),
        )

    def check(self, item: Submission) -> None:
        bad_ids_of(item.config)
        asked = item.config.stopping
        if asked.min_tokens and asked.end_id is not None:
            raise UnsupportedField(
                "are both set, but this engine bans its own end id only; leave one out",
                fields=("stopping.min_tokens", "stopping.end_id"),
            )

    async def abort(self, call_id: str) -> None:
        await self.tell("Abort", request_id=call_id)

    async def load(self) -> LoadRecord | None:
        return None

    async def illness(self) -> str:
        answer = await self.tell("HealthCheck")
        status = answer.status.strip()
        return "" if status.lower() == "ok" else status or "it is not healthy"

    def _news(self, response: trtllm.GenerateResponse, ask: Ask) -> News:
        if response.HasField("complete"):
            end = response.complete
            news = ended(end)
            news.all_token_ids = end.output_token_ids
            _add_log_probs(news, end.logprobs, ask.output.top_log_probs)
            return news
        chunk = response.chunk
        news = News(chunk.token_ids, chunk.cached_tokens)
        _add_log_probs(news, chunk.logprobs, ask.output.top_log_probs)
        return news


def request_of(ask: Ask) -> trtllm.GenerateRequest:
    draws, sampling, output = Draws.of(ask.sampling), ask.sampling, ask.output
    request = trtllm.GenerateRequest(
        request_id=ask.call_id,
        tokenized=trtllm.TokenizedInput(input_token_ids=ask.token_ids),
        sampling_config=trtllm.SamplingConfig(
            beam_width=1,
            num_return_sequences=1,
            temperature=draws.temperature,
            top_p=draws.top_p,
            # The PyTorch flow samples at temperature 0 unless one candidate remains.
            top_k=draws.top_k if draws.temperature else 1,
            min_p=draws.min_p,
            seed=ask.seed,
            min_tokens=ask.min_tokens,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            top_p_min=sampling.top_p_min,
            top_p_decay=sampling.top_p_decay,
            top_p_reset_ids=sampling.top_p_reset_id,
            prompt_ignore_length=ask.ignored_prompt,
            no_repeat_ngram_size=sampling.no_repeat_ngram_size or None,
        ),
        output_config=trtllm.OutputConfig(exclude_input_from_output=True),
        max_tokens=ask.max_tokens,
        streaming=True,
        embedding_bias=sampling.embedding_bias,
        stop_token_ids=ask.stop_ids,
        ignore_eos=not ask.model_end_ids,
        bad_token_ids=ask.bad_ids,
        include_stop_token_in_output=True,
    )
    if output.log_probs or output.top_log_probs:
        # 0 turns them off here.
        request.output_config.logprobs = max(1, asked_top(output.top_log_probs))
    if ask.guided is not None:
        request.guided_decoding.guide_type = GUIDES[pb.GuideType.ValueType(ask.guided.guide_type)]
        request.guided_decoding.guide = ask.guided.guide or ""
    return request


def _add_log_probs(news: News, positions: Iterable[trtllm.TokenLogprob], most: int) -> None:
    for each in positions:
        news.log_probs.append(each.logprob)
        if most:
            pairs = ((top.token_id, top.logprob) for top in each.top_logprobs)
            news.top_log_probs.append(most_likely(pairs, most))
