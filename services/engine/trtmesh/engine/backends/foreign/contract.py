"""The backend's needs of a foreign engine's contract; each contract maps these to messages and fields."""

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


class Contract(Protocol):
    """Speaks one contract over one connection."""

    @property
    def supported_fields(self) -> frozenset[str]:
        """Fields of GenerationConfig within the contract."""

    @property
    def engine(self) -> str:
        """The engine's word in addresses."""

    @property
    def asks_transfer(self) -> str:
        """The value of Ask.transfer for a handoff of the KV; '' without handoffs."""

    async def describe(self) -> EngineFacts:
        """Asks for the model and the server."""

    def check(self, item: Submission) -> None:
        """Raises InvalidRequest or UnsupportedField for a value beyond the contract."""

    def generate(self, ask: Ask) -> AsyncGenerator[News, None]:
        """Opens the call of one sequence; closing the iterator cancels the call."""

    async def abort(self, call_id: str) -> None:
        """Ends a call's sequence; unknown ids are ignored."""

    async def load(self) -> LoadRecord | None:
        """Returns the load, or None for an engine that only reports life. Raises AioRpcError."""

    async def illness(self) -> str:
        """Returns the engine's reason for being unhealthy, or ''. Raises AioRpcError."""

    def tokenizer(self) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        """The files of the tokenizer, as parts of an archive."""

    def kv_events(self) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """The changes of the KV cache from now on."""
