"""The seam between the engine service and the backend, which executes a model.

A backend knows nothing of gRPC, routers or handles: it takes items, names their sequences by integer keys, and
delivers steps. The service does multiplexing, deadlines, metrics, health and drain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.frozen import frozen
from trtmesh.chassis.stopping import StopVocabulary
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig, Tensor
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    # Needs numpy, which a simulation does without.
    from trtmesh.engine.kv_memory import KvMemory


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a router may rely on; engine.proto's GetEngineResponse documents the fields."""

    deterministic: bool
    resumes_exactly: bool
    stops_single_sequences: bool
    roles: tuple[epb.WorkerRole.ValueType, ...] = (epb.WORKER_ROLE_MIXED,)
    max_adapters: int = 0
    draft_methods: tuple[str, ...] = ()


MAX_STATE_BYTES = 2**20
"""Most bytes of a HandoffState."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """How a backend hands over whose library moves the KV itself. Workers make pairs where kind, compatibility, model
    and tokenizer are equal."""

    kind: str
    """A short word, such as `vllm-nixl`."""
    compatibility: str = ""
    """Everything else that must be equal: release, type of the KV, block size, parallelism."""


@dataclass(frozen=True, slots=True)
class HandoffState:
    """What a backend of the same kind needs to continue a sequence elsewhere. Nothing but backends reads it."""

    content: bytes
    """At most MAX_STATE_BYTES, and not empty."""
    seconds: float
    """Time from now for which the backend keeps the KV for another worker."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Describes a loaded backend; engine.proto's GetEngineResponse documents the fields."""

    backend: str
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    max_sequence_tokens: int
    max_batch_size: int
    max_sequences_per_item: int
    tokens_per_block: int
    total_blocks: int
    """0 where the size of the pool is unknown."""
    supported_fields: frozenset[str]
    capabilities: Capabilities
    end_ids: tuple[int, ...]
    data_type: int
    max_queue_size: int
    """Most sequences that may wait beyond those with a place in the batch."""
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt, where that is less than a sequence may have."""
    static_batching: bool = False
    max_adapter_bytes: int = 0
    """Most bytes of an adapter's content; 0 without support for adapters."""
    layers_per_part: int = 1
    """Most layers of a part of a handoff."""
    started_role: epb.WorkerRole.ValueType | None = None
    """Role for which the engine was started elsewhere; a role of the settings goes first."""
    computation: Mapping[str, str] | None = None
    """What tokens depend on beside the data type, by name; None where that may be any setting."""
    state_kind: StateKind | None = None
    """Set by a backend that hands over by states of its own; KV pools are then not asked for."""


@frozen
class Submission:
    """One item to generate; its config sets supported fields only.

    `keys` names its sequences, in sequence_index order from `sequence_index` on. `token_ids` is the prompt followed
    by `emitted_tokens` tokens that were generated before, here or elsewhere: generation continues at the next
    position, offsets and limits count these tokens, and draws and penalties are those of an uninterrupted run.
    `config.sampling.seed` is set, and every text of the config was replaced by ids.
    """

    keys: tuple[int, ...]
    request_id: str
    batch_index: int
    """Position in the request, or the number that the draws of the item use in its place."""
    sequence_index: int
    token_ids: Sequence[int]
    emitted_tokens: int
    config: GenerationConfig
    stop_vocabulary: StopVocabulary | None = None
    """The stop texts of a beam search: a beam ends with the token that completes one."""
    sender_lease_id: str = ""
    """Lease under which the item is handed over: a single sequence after its first token; several sequences, or beams,
    before it, with the KV of all tokens but the last."""
    receiver_lease_id: str = ""
    """Lease of the blocks with the KV of leading tokens. The first sequence waits for `adopt`, the others for it."""
    handoff_state: bytes = b""
    """Content of the HandoffState of a backend of the same kind: it has the KV of all tokens but the last, which it
    chose. Set for a single sequence, with `emitted_tokens` above 0."""
    end_ids: tuple[int, ...] = ()
    """End ids besides the model's, unless the config says which count."""
    is_prefill: bool = False
    """Whether the worker has the role prefill, where short prompts go before long ones (scheduling/scheduler.py)."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) - self.emitted_tokens


@dataclass(slots=True)
class SequenceStart:
    """The metrics of a sequence at its first token, where the item asks for metrics."""

    key: int
    perf_metrics: pb.PerfMetrics


@dataclass(slots=True)
class SequenceEnd:
    """The end of one sequence. `reason` is a generation_pb2.FinishReason; `error` is set exactly for ERROR."""

    key: int
    reason: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    cumulative_log_prob: float | None = None
    error: TrtmeshError | None = None
    perf_metrics: pb.PerfMetrics | None = None
    queue_seconds: float = 0.0
    handoff_state: HandoffState | None = None
    """Set for HANDOFF by a backend with a StateKind."""


TopLogProbs = tuple[list[int], list[float]]
"""Ids and their log-probabilities, most likely first."""


def most_likely(pairs: Iterable[tuple[int, float]], most: int) -> TopLogProbs:
    """The `most` likely of ids with their log-probabilities."""
    ranked = sorted(pairs, key=lambda pair: -pair[1])[:most]
    return [token for token, _ in ranked], [log_prob for _, log_prob in ranked]


@dataclass(slots=True)
class TokenDetails:
    """Optional data of a sequence's tokens in one step, parallel to the tokens."""

    key: int
    log_probs: list[float] = field(default_factory=list)
    cumulative_log_prob: float | None = None
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    generation_logits: Tensor | None = None
    model_log_probs: list[float] = field(default_factory=list)
    """The terms of the sum, where `log_probs` are normalised."""

    def then(self, later: TokenDetails) -> TokenDetails:
        """The data of these tokens and of the next."""
        return replace(
            later,
            log_probs=self.log_probs + later.log_probs,
            top_log_probs=self.top_log_probs + later.top_log_probs,
            model_log_probs=self.model_log_probs + later.model_log_probs,
            generation_logits=_stacked(self.generation_logits, later.generation_logits),
        )


def _stacked(above: Tensor | None, below: Tensor | None) -> Tensor | None:
    if above is None or below is None:
        return above or below
    rows = above.shape[0] + below.shape[0]
    return replace(above, shape=(rows, *above.shape[1:]), data=above.data + below.data)


@dataclass(slots=True)
class PromptDetails:
    """Optional data of one sequence's prompt, or of a run of its positions from `token_offset` on, in order.

    Delivered no later than the first token.
    """

    key: int
    token_offset: int = 0
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    context_logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """An adapter and its place in the memory of a backend; with `error`, why it could not be loaded or pinned."""

    adapter: Adapter
    place: epb.AdapterPlace.ValueType = epb.ADAPTER_PLACE_DEVICE
    rank: int = 0
    size_bytes: int = 0
    pinned: bool = False
    error: TrtmeshError | None = None


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter to load; without content, one in memory. `pinned` keeps it there until it is unloaded or unpinned."""

    identity: Adapter
    content: AdapterContent | None
    """Content whose version is that of the identity."""
    pinned: bool = False


@dataclass(slots=True)
class BlocksStored:
    """Blocks became reusable; hashes are chained from `parent_hash`, 0 at the start of a sequence."""

    parent_hash: int
    block_hashes: list[int]
    token_ids: list[int]
    adapter: Adapter | None = None


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks were evicted."""

    block_hashes: list[int]


@dataclass(slots=True)
class BlocksCleared:
    """All blocks were dropped at once, or are not known any more."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True)
class Content:
    """The tokens of the handed over KV."""

    tokens: int
    digest: bytes
    """Digest of the tokens, with adapter, salt and prompt table."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answers `reserve`: the blocks of a receiver's lease, or why there are none."""

    lease_id: str
    blocks: tuple[int, ...] = ()
    present_tokens: int = 0
    """Leading tokens with KV in the blocks."""
    error: TrtmeshError | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """A sequence with a sender's lease has all blocks up to its handoff, and starts."""

    lease_id: str
    key: int
    blocks: tuple[int, ...]
    """The null block where no further token sees a block."""
    tokens: int
    """Tokens with KV at the handoff; of a running sequence at least so many."""


@dataclass(frozen=True, slots=True)
class PartFinal:
    """Some layers of some blocks of a sender's lease are written for the last time. Parts come in order, and cover all
    blocks but null blocks."""

    lease_id: str
    first_block: int
    """Position among the blocks of the lease."""
    blocks: int
    first_layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """All KV of a sender's lease is final, and its blocks belong to the lease. The ends of its sequences, with
    FINISH_REASON_HANDOFF, are in the same step."""

    lease_id: str
    key: int
    blocks: tuple[int, ...]
    content: Content
    emitted_tokens: int
    """Generated tokens so far, the last of them without KV."""
    last_token: int | None
    """The last generated token; None without any."""


@dataclass(frozen=True, slots=True)
class Awaiting:
    """A sequence with a receiver's lease can start once its KV is there."""

    lease_id: str
    key: int
    content: Content


HandoffNews = Reserved | Offered | PartFinal | HandedOver | Awaiting


@dataclass(slots=True)
class StepOutput:
    """The output of one engine step, in parallel lists over the sequences with new tokens.

    `token_ids` holds the tokens of all sequences, one after another; `token_offsets[i]` is the position of sequence i's
    first new token among its generated tokens. `starts` names the sequences with their first token on this worker,
    where the item asks for metrics. `ends` may name sequences without a token in this step. Beam search sends a
    sequence with changed tokens whole, from offset 0, with its details.
    """

    step_count: int
    keys: list[int] = field(default_factory=list)
    token_offsets: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)
    prompts: list[PromptDetails] = field(default_factory=list)
    starts: list[SequenceStart] = field(default_factory=list)
    kv_events: list[KvEvent] = field(default_factory=list)
    adapters: list[HeldAdapter] = field(default_factory=list)
    """Changed states of adapters, no later than the first token computed with them."""
    handoffs: list[HandoffNews] = field(default_factory=list)
    """In order. A part may be delivered while the step that computed it still runs."""

    def extend(self, later: StepOutput) -> None:
        """Adds further tokens of sequences with tokens in this step: each keeps a single run of tokens."""
        more: dict[int, list[int]] = {}
        start = 0
        for key, count in zip(later.keys, later.token_counts, strict=True):
            more.setdefault(key, []).extend(later.token_ids[start : start + count])
            start += count
        token_ids, self.token_ids, start = self.token_ids, [], 0
        for place, key in enumerate(self.keys):
            end = start + self.token_counts[place]
            added = more.get(key, ())
            self.token_ids += token_ids[start:end]
            self.token_ids += added
            self.token_counts[place] += len(added)
            start = end
        places = {details.key: place for place, details in enumerate(self.details)}
        for details in later.details:
            place = places[details.key]
            self.details[place] = self.details[place].then(details)


@dataclass(frozen=True, slots=True)
class BackendStats:
    """A snapshot; engine.proto's Load documents the fields. Counters only grow."""

    step_count: int
    running_sequences: int
    waiting_sequences: int
    pending_prompt_tokens: int
    total_blocks: int
    used_blocks: int
    free_blocks: int
    computed_prompt_tokens: int
    reused_prompt_tokens: int
    generated_tokens: int
    lacks_blocks: bool = False
    """Whether the next waiting sequence finds too few free blocks."""
    captured_steps: int = 0
    """Of the steps, those that a GPU replayed as graphs alone; a metric only."""
    paused_sequences: int = 0
    preemptions: int = 0
    new_blocks: int = 0
    reused_blocks: int = 0
    host_blocks: int = 0
    used_host_blocks: int = 0
    device_memory_bytes: int = 0
    pinned_memory_bytes: int = 0
    adapter_slots: int = 0
    free_adapter_slots: int = 0
    evictable_adapter_slots: int = 0
    adapter_host_bytes: int = 0
    used_adapter_host_bytes: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    adapter_hits: int = 0
    adapter_load_seconds: float = 0.0
    """Time spent on loads; a metric only."""
    drafts: int = 0
    """Runs of draft tokens, one for a sequence and step; this and the following are metrics only."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_by_position: Sequence[int] = ()
    draft_failures: int = 0
    """Errors of the drafter, each of which is no drafts for a while."""
    guide_compile_seconds: float = 0.0
    """CPU time, as that of masks."""
    guide_mask_seconds: float = 0.0
    guides_compiled: int = 0
    guides_kept: int = 0
    """Items that found their grammar compiled."""
    late_masks: int = 0
    """Times that a sequence sat out a step, for lack of its mask."""
    guide_refusals: Mapping[str, int] = field(default_factory=dict)
    """Items by the word of their reason."""


Deliver = Callable[[StepOutput], None]
Fail = Callable[[BaseException], None]


class Backend(Protocol):
    """Executes a model: what every backend does. Call order: `start` once; then the other methods any number of times,
    always from the event loop's thread; `close` once, and nothing after it. The same goes for the methods of the
    protocols below, of which a backend implements those that it can.

    Promises of every implementation:

    * `submit` MUST either raise a TrtmeshError and forget the item, or take it. It MUST NOT block.
    * Every key of a taken item MUST get exactly one SequenceEnd, and nothing after it. Tokens MUST arrive in
      order and without gaps; only a sequence of a beam search MAY come again, from offset 0.
    * `stop` MUST lead to the SequenceEnd of every live key within one step, with the given reason. An unknown or ended
      key MUST be ignored.
    * When a SequenceEnd is delivered, the sequence's KV blocks MUST already be free (or kept only for reuse).
    * `deliver` MUST be called in step order; it MAY be called from any thread and returns at once.
    * A fault of one item MUST end that item alone, with an error. A fault of the whole backend MUST be reported once
      through `fail`; the service then stops serving and exits. Sequences that the backend ends because of such a fault
      MUST end with WorkerLost, so that another worker continues them.
    * `stats` MUST be cheap (under 50 µs) and safe while a step runs.
    * `close` MUST end every live sequence, release the model and return within seconds.
    """

    async def start(self, deliver: Deliver, fail: Fail) -> BackendInfo:
        """Loads the model; when it returns, `submit` works. Raises ModelUnusable when the model cannot be served."""

    def submit(self, item: Submission) -> None:
        """Takes an item, or raises InvalidRequest, QueueFull, OutOfBlocks, AdapterNotFound or AdaptersFull."""

    def stop(self, keys: Sequence[int], reason: int) -> None:
        """Ends sequences; `reason` is a generation_pb2.FinishReason."""

    def stats(self) -> BackendStats:
        """The load now."""

    async def close(self) -> None:
        """Ends everything and releases the model. Called once, even if `start` failed or was never called."""


@runtime_checkable
class HoldsAdapters(Backend, Protocol):
    """A backend that computes with adapters. Only with `max_adapter_bytes` above 0 it is asked to load or unload one.

    * `load_adapter` and `unload_adapter` MUST NOT block. Each MUST lead to a HeldAdapter of its id and version in the
      `adapters` of a step, also where nothing changes. A failed load MUST leave nothing in memory, and a version in
      memory is never loaded again.
    * An adapter of a sequence, and a pinned one, MUST stay in memory. A sequence MUST use the version that its item
      names, to its end.
    """

    def adapters(self) -> Sequence[HeldAdapter]:
        """The adapters in memory, and those of its own directory that cannot be loaded."""

    def load_adapter(self, load: AdapterLoad) -> None:
        """Loads an adapter."""

    def unload_adapter(self, number: int, version: str, *, unpin: bool) -> None:
        """Unloads a version of an adapter, or all with '', once no sequence uses it; with `unpin`, only unpins it."""


@runtime_checkable
class HandsOverStates(Backend, Protocol):
    """A backend with a StateKind: its library moves the KV itself.

    * An item with `sender_lease_id` MUST end after its first new token with FINISH_REASON_HANDOFF and
      its `handoff_state`, unless that token ends it. The KV MUST stay until a receiver's library has fetched it, `drop`
      of the lease, or the end of its `seconds`, and MUST be free after any of them. An item with `handoff_state` MUST
      NOT deliver any of its `emitted_tokens` again. Where it cannot continue from the state, it MUST end with
      HandoffFailed before its first token, unless it computes the prompt itself.
    """

    def drop(self, lease_id: str) -> None:
        """Frees the KV of a HandoffState, where the library can."""


@runtime_checkable
class HandsOverBlocks(Backend, Protocol):
    """A backend whose KV the service moves, block by block.

    * The blocks of a lease MUST keep their place and content from the news of it until `drop`, `adopt`, or, before the
      handoff, the end of its sequence. A sequence with a sender's lease is not preempted. `reserve` MUST NOT grant a
      block before every earlier write to it has ended.
    * A lease has blocks, or a sequence with blocks, never both: `stop` of the sequence followed by `drop` of the lease
      MUST free the blocks in any case. An unknown lease MUST be ignored by `adopt` and `drop`.
    * A sequence that waits for `adopt` MUST NOT be computed. The end of such a sequence leaves the blocks to the lease.
    """

    def kv_memory(self) -> KvMemory | None:
        """The KV pools; None if no blocks can be handed over. The other methods, and lease ids of items, are only used
        with KV pools."""

    def reserve(self, lease_id: str, tokens: int, block_hashes: Sequence[int]) -> None:
        """Allocates blocks for `tokens` tokens, beginning with those published under `block_hashes`. Leads to
        Reserved; where there is no room, at once and with QueueFull."""

    def hand_over(self, key: int, lease_id: str) -> None:
        """Ends a running sequence at its next token, and gives its blocks to the lease. Leads to Offered and
        HandedOver, unless the sequence ends otherwise. One of several of its item leaves the others running. A
        sequence that has not started, or a beam, fails with HandoffFailed."""

    def adopt(self, lease_id: str) -> None:
        """Gives the blocks of a receiver's lease, with the KV of its content, to the sequence that awaits them."""

    def drop(self, lease_id: str) -> None:
        """Returns the blocks of a lease to the pool. Without effect on a sequence that is not handed over."""
