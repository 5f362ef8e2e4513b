"""What the backend asks of a foreign engine: the values, and the calls that the contracts of smg-grpc-proto share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from smg_grpc_proto.generated import common_pb2
from trtmesh.chassis.vocabulary import GuidedDecoding, Output, Sampling
from trtmesh.engine.backend import StateKind, Submission, TopLogProbs, most_likely
from trtmesh.engine.backends.foreign.connection import Connection
from trtmesh.engine.backends.foreign.sampling import Draws, bad_ids_of, bias_of, check_counted
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A foreign engine's description of itself; 0 and '' for unknown facts."""

    version: str
    model: str
    model_path: str
    vocabulary_size: int
    max_sequence_tokens: int
    max_batch_size: int
    tokens_per_block: int
    cache_tokens: int
    """Room of the KV cache, in tokens."""
    end_ids: tuple[int, ...]
    data_type: str
    """Element type of the model, such as `bfloat16`."""
    details: str = ""
    """Further facts for telling models of one name apart."""
    state_kind: StateKind | None = None
    """Of an engine with handoffs of KV."""
    role: epb.WorkerRole.ValueType | None = None
    """Of an engine started for a single role."""


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """The load of the whole engine, other clients included."""

    running: int
    waiting: int
    used_share: float
    """Share of the KV cache in use."""
    cache_tokens: int = 0
    waiting_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence to generate; one prompt and one sequence a call."""

    call_id: str
    token_ids: Sequence[int]
    max_tokens: int
    min_tokens: int
    ignored_prompt: int
    """Leading tokens, not counted by presence and frequency penalties."""
    stop_ids: tuple[int, ...]
    """Single ids for ending the sequence, as part of the output."""
    model_end_ids: bool
    """Whether the engine ends the sequence at ids known to the engine alone."""
    sampling: Sampling
    seed: int
    """64 bits, different for every sequence, and after every migration."""
    bias: Mapping[int, float]
    bad_ids: tuple[int, ...]
    output: Output
    guided: GuidedDecoding | None = None
    transfer: str = ""
    """Asks for a handoff of the KV, or brings the state of the engine with the KV; '' for neither."""


@dataclass(slots=True)
class News:
    """The new tokens of a sequence, or its end."""

    token_ids: Sequence[int] = ()
    cached_tokens: int = 0
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    """From the second token of the prompt on."""
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)
    reason: str = ""
    """Set at the end: `stop`, `length`, `abort` or another word of the engine."""
    matched_id: int | None = None
    """The last id, where the engine names an id as the end."""
    all_token_ids: Sequence[int] | None = None
    """With the end, all tokens, if the engine sends all; the log-probabilities then cover all tokens, too."""
    transfer: str = ""
    """With the end, the state for another engine."""


class Contract(ABC):
    """Speaks one contract over one connection. What vLLM and SGLang say alike stands here."""

    engine: ClassVar[str]
    """The engine's word in addresses."""
    supported_fields: ClassVar[frozenset[str]]
    """Fields of GenerationConfig within the contract."""
    asks_transfer: ClassVar[str] = ""
    """The value of Ask.transfer for a handoff of the KV; '' without handoffs."""

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

    @abstractmethod
    async def describe(self) -> EngineFacts:
        """Asks for the model and the server."""

    @abstractmethod
    async def abort(self, call_id: str) -> None:
        """Ends a call's sequence; unknown ids are ignored."""

    async def tell(self, method: str, **fields: Any) -> Any:
        """Calls a method with the fields of its request."""
        request = getattr(self._messages, f"{method}Request")(**fields)
        return await self._connection.ask(getattr(self._stub, method), request)

    def check(self, item: Submission) -> None:
        """Raises InvalidRequest or UnsupportedField for a value beyond the contract."""
        check_counted(item)
        bias_of(item.config)
        bad_ids_of(item.config)

    async def generate(self, ask: Ask) -> AsyncGenerator[News, None]:
        """Opens the call of one sequence; closing the iterator cancels the call."""
        call = self._connection.stream(self._stub.Generate, self._request_of(ask))
        async with aclosing(call) as responses:
            async for response in responses:
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
        """Returns the load, or None for an engine that only reports life. Raises AioRpcError."""
        return record_of(await self.tell("GetLoads"))

    async def illness(self) -> str:
        """Returns the engine's reason for being unhealthy, or ''. Raises AioRpcError."""
        answer = await self.tell("HealthCheck")
        return "" if answer.healthy else answer.message or "it is not healthy"

    def tokenizer(self) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        """The files of the tokenizer, as parts of an archive."""
        request = common_pb2.GetTokenizerRequest()
        return self._connection.stream(self._stub.GetTokenizer, request)

    def kv_events(self) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """The changes of the KV cache from now on."""
        request = common_pb2.SubscribeKvEventsRequest()
        return self._connection.stream(self._stub.SubscribeKvEvents, request)


def record_of(answer: Any) -> LoadRecord:
    """The load of all ranks together, as vLLM's and SGLang's GetLoads tell it."""
    ranks = answer.loads
    return LoadRecord(
        running=sum(rank.num_running_reqs for rank in ranks),
        waiting=sum(rank.num_waiting_reqs for rank in ranks),
        used_share=sum(rank.token_usage for rank in ranks) / max(1, len(ranks)),
        cache_tokens=sum(rank.max_total_num_tokens for rank in ranks),
        waiting_prompt_tokens=sum(rank.num_waiting_uncached_tokens for rank in ranks),
    )


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


def top_of(positions: Iterable[Any], most: int) -> list[TopLogProbs]:
    """The most likely ids of each position. The chosen one may stand first, however unlikely it was."""
    return [most_likely(zip(each.token_ids, each.values, strict=True), most) for each in positions]


def asked_top(most: int) -> int:
    """How many alternatives to ask for: the chosen id may take the place of one."""
    return most + 1 if most else 0
