"""Metrics of an engine process: plain numbers, updated per step or sequence. Counting costs no time per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from operator import attrgetter

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import COUNTER, GAUGE, HISTOGRAM, Histogram, Kind, Label, Row, families
from trtmesh.engine.backend import BackendStats, SequenceEnd, StepOutput
from trtmesh.engine.handoff.metrics import HANDOFF_TABLE, HandoffMetrics
from trtmesh.v1 import generation_pb2 as pb

PREFIX = "trtmesh_engine_"


class EngineMetrics(Collector):
    """The metrics of an engine process.

    Inter-token latency is observed per step: the time since the previous step with tokens counts once for every
    continuing sequence. So a sequence with skipped steps shows the distance of steps, and several tokens in a step
    count once.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.queue = Histogram()
        self.stats: BackendStats | None = None
        self.open_streams = 0
        self.live_sequences = 0
        self.unacknowledged_steps = 0
        self.merged_steps = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.finished: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.handoffs = HandoffMetrics()
        self._awaiting_first: dict[int, float] = {}
        self._awaiting_kv: set[int] = set()
        self._computing = 0
        """Live sequences, without those waiting for KV."""
        self._last_tokens_at = 0.0
        self._busy_before = self._busy_since = 0.0
        self.told_busy_seconds = 0.0
        """Value of the last load report. Scrapes happen on another thread, and must never see a decrease."""

    def submitted(
        self, keys: Collection[int], prompt_tokens: int, now: float, *, awaits_kv: bool = False
    ) -> None:
        """Counts an admitted item; `now` is monotonic time in seconds. Waiting for KV of another worker is no
        computation."""
        if awaits_kv:
            self._awaiting_kv.update(keys)
        else:
            self._compute(len(keys), now)
        self.live_sequences += len(keys)
        self.prompt_tokens += prompt_tokens
        self._awaiting_first.update(dict.fromkeys(keys, now))

    def stepped(self, output: StepOutput, now: float) -> None:
        """Counts a delivered step; `now` is monotonic time in seconds."""
        going_on = len(output.keys)
        if not going_on:
            return
        self.generated_tokens += len(output.token_ids)
        awaiting = self._awaiting_first
        if awaiting:
            for key in [key for key in output.keys if key in awaiting]:
                self.time_to_first_token.observe(now - awaiting.pop(key))
                self._has_kv(key, now)
                going_on -= 1
        if going_on:
            self.inter_token.observe(now - self._last_tokens_at, going_on)
        self._last_tokens_at = now

    def ended(self, end: SequenceEnd, now: float) -> None:
        """Counts the end of an admitted sequence."""
        self._has_kv(end.key, now)
        self._compute(-1, now)
        self.live_sequences -= 1
        self._awaiting_first.pop(end.key, None)
        self.finished[end.reason] += 1
        self.cached_prompt_tokens += end.cached_prompt_tokens
        self.queue.observe(end.queue_seconds)
        if end.error:
            self.errors[end.error.reason] += 1

    def busy_seconds(self, now: float) -> float:
        """Time with sequences to compute until `now`."""
        running = now - self._busy_since if self._computing else 0.0
        return self._busy_before + running

    def _has_kv(self, key: int, now: float) -> None:
        if key in self._awaiting_kv:
            self._awaiting_kv.remove(key)
            self._compute(1, now)

    def _compute(self, more: int, now: float) -> None:
        """Counts sequences to compute, or fewer."""
        if self._computing + more == 0:
            self._busy_before = self.busy_seconds(now)
        elif not self._computing:
            self._busy_since = now
        self._computing += more

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus on another thread."""
        yield from families(PREFIX, TABLE, self)
        # Another report may come meanwhile: leases must add up.
        yield from families(PREFIX, HANDOFF_TABLE, copy(self.handoffs))


def _finished(metrics: EngineMetrics) -> dict[str, int]:
    """Ended sequences by the word of their reason."""
    counts = metrics.finished.copy().items()
    named = {
        pb.FinishReason.Name(pb.FinishReason.ValueType(reason)): count for reason, count in counts
    }
    return {name.removeprefix("FINISH_REASON_").lower(): count for name, count in named.items()}


def _accepted(metrics: EngineMetrics) -> dict[str, int]:
    """Accepted draft tokens by position."""
    counts = metrics.stats.accepted_by_position if metrics.stats else ()
    return {str(position): count for position, count in enumerate(counts)}


def _refused_guides(metrics: EngineMetrics) -> Mapping[str, int]:
    return metrics.stats.guide_refusals if metrics.stats else {}


def _of_stats(kind: Kind, name: str, text: str, field: str = "") -> Row[EngineMetrics]:
    """A row of the backend's statistics, by default of the field of its name."""
    read = attrgetter(field or name)
    return Row(kind, name, text, lambda metrics: read(metrics.stats) if metrics.stats else 0)


POSITION = Label(
    "position",
    "positions of a run of draft tokens: 0 to 7, to at most 63 where a client's held",
)
GUIDE = Label("reason", "`not_compiled`, `not_followed`, `queue_full`")
FINISH = Label("reason", "finish reasons of generation.proto, in small letters")
ERROR = Label("reason", "reason words of the table of errors")

# fmt: off
TABLE: tuple[Row[EngineMetrics], ...] = (
    Row(HISTOGRAM, "time_to_first_token_seconds", "Seconds from the submit of an item to its sequences' first tokens.",
        "time_to_first_token"),
    Row(HISTOGRAM, "inter_token_seconds",
        "Seconds between steps with tokens, once per continuing sequence: one that skips steps shows their distance.",
        "inter_token"),
    Row(HISTOGRAM, "queue_seconds", "Seconds from the submit of an item to its scheduling.", "queue"),
    _of_stats(COUNTER, "steps", "Engine steps.", "step_count"),
    _of_stats(COUNTER, "captured_steps", "Of the steps, those replayed as CUDA graphs alone."),
    Row(COUNTER, "busy_seconds", "Seconds with sequences to compute; its rate is the utilisation.",
        "told_busy_seconds"),
    Row(COUNTER, "prompt_tokens", "Prompt tokens of the items taken."),
    Row(COUNTER, "cached_prompt_tokens", "Prompt tokens that were reused."),
    Row(COUNTER, "generated_tokens", "Tokens generated; changed beams count again."),
    _of_stats(COUNTER, "preemptions", "Sequences paused."),
    _of_stats(COUNTER, "new_blocks", "KV blocks given to sequences."),
    _of_stats(COUNTER, "reused_blocks", "KV blocks shared instead."),
    Row(COUNTER, "merged_steps", "Steps sent as part of a later step."),
    _of_stats(COUNTER, "adapter_loads", "Adapters loaded."),
    _of_stats(COUNTER, "adapter_load_seconds", "Seconds spent on loading adapters."),
    _of_stats(COUNTER, "adapter_evictions", "Adapters evicted from host memory."),
    _of_stats(COUNTER, "adapter_hits", "Sequences that found their adapter ready to run."),
    _of_stats(COUNTER, "spec_decode_num_drafts", "Runs of draft tokens verified.", "drafts"),
    _of_stats(COUNTER, "spec_decode_num_draft_tokens", "Draft tokens verified.", "draft_tokens"),
    _of_stats(COUNTER, "spec_decode_num_accepted_tokens", "Draft tokens accepted.", "accepted_draft_tokens"),
    Row(COUNTER, "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by their position in the run.",
        _accepted, (POSITION,)),
    _of_stats(COUNTER, "draft_failures", "Errors of the source of drafts."),
    _of_stats(COUNTER, "guide_compile_seconds", "CPU seconds spent on compiling guides."),
    _of_stats(COUNTER, "guide_mask_seconds", "CPU seconds spent on following guides in steps."),
    _of_stats(COUNTER, "guides_compiled", "Guides compiled."),
    _of_stats(COUNTER, "guides_kept", "Items that found their guide compiled."),
    _of_stats(COUNTER, "late_masks", "Times that a sequence sat out a step, since its guide takes long."),
    Row(COUNTER, "guide_refusals", "Items ended for their guide.", _refused_guides, (GUIDE,)),
    Row(COUNTER, "sequences_finished", "Sequences that ended.", _finished, (FINISH,)),
    Row(COUNTER, "errors", "Items refused, sequences failed and streams broken off.", labels=(ERROR,)),
    Row(GAUGE, "open_streams", "Connected routers."),
    Row(GAUGE, "live_sequences", "Sequences taken and not ended."),
    Row(GAUGE, "unacknowledged_steps", "Steps sent and not acknowledged."),
    _of_stats(GAUGE, "running_sequences", "Sequences computed."),
    _of_stats(GAUGE, "waiting_sequences", "Sequences waiting."),
    _of_stats(GAUGE, "paused_sequences", "Sequences paused now."),
    _of_stats(GAUGE, "total_blocks", "KV blocks in the pool."),
    _of_stats(GAUGE, "used_blocks", "KV blocks in use by sequences."),
    _of_stats(GAUGE, "free_blocks", "KV blocks free or reusable."),
    _of_stats(GAUGE, "host_blocks", "Blocks of the host cache."),
    _of_stats(GAUGE, "used_host_blocks", "Host blocks in use."),
    _of_stats(GAUGE, "adapter_slots", "Slots for adapters."),
    _of_stats(GAUGE, "free_adapter_slots", "Free slots for adapters."),
    _of_stats(GAUGE, "adapter_host_bytes", "Bytes of host memory for adapters."),
    _of_stats(GAUGE, "used_adapter_host_bytes", "Bytes of host memory in use by adapters."),
)
# fmt: on
