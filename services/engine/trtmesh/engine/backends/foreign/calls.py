"""The calls that the contracts of smg-grpc-proto have in common, and what vLLM's and SGLang's say alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from smg_grpc_proto.generated import common_pb2
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.foreign.connection import Connection
from trtmesh.engine.backends.foreign.contract import Ask, LoadRecord, News
from trtmesh.engine.backends.foreign.load import record_of
from trtmesh.engine.backends.foreign.log_probs import top_of
from trtmesh.engine.backends.foreign.sampling import Draws, bad_ids_of, bias_of, check_counted
from trtmesh.v1 import generation_pb2 as pb


class CommonCalls:
    """Implements Contract, save for what the engine says of itself and for the stop of a call."""

    asks_transfer = ""

    def __init__(
        self,
        connection: Connection,
        stub: Any,
        messages: Any,
        request_of: Callable[[Ask], Any],
    ) -> None:
        """`messages` is the module of the contract's messages, `request_of` makes a GenerateRequest."""
        self._connection = connection
        self._stub = stub
        self._messages = messages
        self._request_of = request_of

    async def tell(self, method: str, **fields: Any) -> Any:
        """Calls a method with the fields of its request."""
        request = getattr(self._messages, f"{method}Request")(**fields)
        answer = getattr(self._messages, f"{method}Response")
        return await self._connection.ask(getattr(self._stub, method), request, answer)

    def check(self, item: Submission) -> None:
        check_counted(item)
        bias_of(item.config)
        bad_ids_of(item.config)

    async def generate(self, ask: Ask) -> AsyncGenerator[News, None]:
        async with self._connection.stream(self._stub.Generate, self._request_of(ask)) as call:
            async for response in call:
                yield self._news(response, ask)

    def _news(self, response: Any, ask: Ask) -> News:
        """What a GenerateResponse says."""
        if response.HasField("complete"):
            return ended(response.complete)
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

    async def load(self) -> LoadRecord | None:
        return record_of(await self.tell("GetLoads"))

    async def illness(self) -> str:
        answer = await self.tell("HealthCheck")
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


def ended(end: Any) -> News:
    matched = end.matched_token_id if end.HasField("matched_token_id") else None
    return News(cached_tokens=end.cached_tokens, reason=end.finish_reason, matched_id=matched)


def sampling_of(ask: Ask) -> dict[str, Any]:
    """The sampling fields with the same name and meaning in both contracts."""
    draws, sampling = Draws.of(ask.sampling), ask.sampling
    return {
        "temperature": draws.temperature,
        "top_p": draws.top_p,
        "min_p": draws.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": ask.stop_ids,
        "ignore_eos": not ask.model_end_ids,
        "n": 1,
    }


def guide_of(
    guided: GuidedDecoding | None, *, any_json: Mapping[str, Any], grammar: str
) -> dict[str, Any]:
    """The field of a guide: `any_json` is that for any JSON, `grammar` the name of a grammar's."""
    if guided is None:
        return {}
    if guided.guide_type == pb.GUIDE_TYPE_JSON:
        return dict(any_json)
    names = {
        pb.GUIDE_TYPE_JSON_SCHEMA: "json_schema",
        pb.GUIDE_TYPE_REGEX: "regex",
        pb.GUIDE_TYPE_EBNF_GRAMMAR: grammar,
        pb.GUIDE_TYPE_STRUCTURAL_TAG: "structural_tag",
    }
    return {names[pb.GuideType.ValueType(guided.guide_type)]: guided.guide}
