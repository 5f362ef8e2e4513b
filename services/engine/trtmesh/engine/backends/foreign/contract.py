"""What the backend needs of a foreign engine's contract; each contract maps it to its own messages and fields."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from smg_grpc_proto.generated import common_pb2
from trtmesh.chassis.vocabulary import GuidedDecoding, Output, Sampling
from trtmesh.engine.backend import StateKind, Submission, TopLogProbs
from trtmesh.v1 import engine_pb2 as epb


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A foreign engine as it describes itself; 0 and '' where it does not tell."""

    version: str
    model: str
    model_path: str
    vocabulary_size: int
    max_sequence_tokens: int
    max_batch_size: int
    tokens_per_block: int
    cache_tokens: int
    """Tokens for which the KV cache has room."""
    end_ids: tuple[int, ...]
    data_type: str
    """Element type of the model, such as `bfloat16`."""
    details: str = ""
    """Whatever else tells models of one name apart."""
    state_kind: StateKind | None = None
    """Of an engine that moves KV to others."""
    role: epb.WorkerRole.ValueType | None = None
    """Of an engine that was started for one."""


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
    """Leading tokens that presence and frequency penalties do not count."""
    stop_ids: tuple[int, ...]
    """Single ids that end the sequence; they are part of the output."""
    model_end_ids: bool
    """Whether the engine ends the sequence at ids that it alone knows."""
    sampling: Sampling
    seed: int
    """64 bits, different for every sequence, and after every migration."""
    bias: Mapping[int, float]
    bad_ids: tuple[int, ...]
    output: Output
    guided: GuidedDecoding | None = None
    transfer: str = ""
    """Asks for the KV to be handed over, or brings the state of an engine that did; '' for neither."""


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
    """The id that ended the sequence, where the engine tells."""
    all_token_ids: Sequence[int] | None = None
    """With the end, all tokens, from an engine that sends them; the log-probabilities are then those of all, too."""
    transfer: str = ""
    """With the end, the state for another engine."""


class Contract(Protocol):
    """Speaks one contract over one connection."""

    @property
    def supported_fields(self) -> frozenset[str]:
        """Fields of GenerationConfig that the contract carries."""

    @property
    def engine(self) -> str:
        """The engine, as in its addresses."""

    @property
    def asks_transfer(self) -> str:
        """What Ask.transfer says to have the KV handed over; '' where that cannot be."""

    async def describe(self) -> EngineFacts:
        """Asks for the model and the server."""

    def check(self, item: Submission) -> None:
        """Raises InvalidRequest or UnsupportedField for a value that the contract cannot carry."""

    def generate(self, ask: Ask) -> AsyncGenerator[News, None]:
        """Opens the call of one sequence; closing the iterator cancels the call."""

    async def abort(self, call_id: str) -> None:
        """Ends a call's sequence; unknown ids are ignored."""

    async def load(self) -> LoadRecord | None:
        """The load; None from an engine that only tells that it is alive. Raises AioRpcError."""

    async def illness(self) -> str:
        """Why the engine calls itself unhealthy, or ''. Raises AioRpcError."""

    def tokenizer(self) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        """The files of the tokenizer, as parts of an archive."""

    def kv_events(self) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """The changes of the KV cache from now on."""
