"""Metrics of an engine process: plain numbers, updated per step or sequence and converted when Prometheus scrapes.
Counting costs no time per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import Histogram
from trtmesh.engine.backend import BackendStats, SequenceEnd, StepOutput
from trtmesh.engine.handoff.metrics import HandoffMetrics
from trtmesh.v1 import generation_pb2 as pb

PREFIX = "trtmesh_engine_"


class EngineMetrics(Collector):
    """The metrics of an engine process.

    Inter-token latency is observed per step: the time since the previous step with tokens counts once for every
    continuing sequence. So a sequence with skipped steps shows the distance of steps, and several tokens in a step
    count once.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From the submit of an item to its sequences' first tokens.",
        )
        self.inter_token = Histogram(
            PREFIX + "inter_token_seconds",
            "Time between steps with tokens, once per continuing sequence.",
        )
        self.queue = Histogram(
            PREFIX + "queue_seconds", "From the submit of an item to its scheduling."
        )
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
        self.handoffs = HandoffMetrics(PREFIX)
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
        yield from (
            self.time_to_first_token.family(),
            self.inter_token.family(),
            self.queue.family(),
        )
        yield from self._counters()
        yield from self._gauges()
        yield from self.handoffs.collect()

    def _counters(self) -> Iterator[Metric]:
        stats = self.stats
        plain = (
            ("steps", "Engine steps.", stats.step_count if stats else 0),
            (
                "captured_steps",
                "Of the steps, those replayed as CUDA graphs alone.",
                stats.captured_steps if stats else 0,
            ),
            ("busy_seconds", "Time with sequences to compute.", self.told_busy_seconds),
            ("prompt_tokens", "Prompt tokens of the items taken.", self.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens that were reused.", self.cached_prompt_tokens),
            (
                "generated_tokens",
                "Tokens generated; changed beams count again.",
                self.generated_tokens,
            ),
            ("preemptions", "Sequences paused.", stats.preemptions if stats else 0),
            ("new_blocks", "KV blocks given to sequences.", stats.new_blocks if stats else 0),
            ("reused_blocks", "KV blocks shared instead.", stats.reused_blocks if stats else 0),
            ("merged_steps", "Steps sent as part of a later step.", self.merged_steps),
            ("adapter_loads", "Adapters loaded.", stats.adapter_loads if stats else 0),
            (
                "adapter_load_seconds",
                "Time spent on loading adapters.",
                stats.adapter_load_seconds if stats else 0.0,
            ),
            (
                "adapter_evictions",
                "Adapters evicted from host memory.",
                stats.adapter_evictions if stats else 0,
            ),
            (
                "adapter_hits",
                "Sequences that found their adapter ready to run.",
                stats.adapter_hits if stats else 0,
            ),
        )
        for name, text, value in plain:
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        finished = CounterMetricFamily(
            PREFIX + "sequences_finished", "Sequences that ended.", labels=["reason"]
        )
        for reason, count in list(self.finished.items()):
            word = pb.FinishReason.Name(pb.FinishReason.ValueType(reason))
            finished.add_metric([word.removeprefix("FINISH_REASON_").lower()], count)
        errors = CounterMetricFamily(
            PREFIX + "errors",
            "Items refused, sequences failed and streams broken off.",
            labels=["reason"],
        )
        for label, count in list(self.errors.items()):
            errors.add_metric([label], count)
        yield from (finished, errors)

    def _gauges(self) -> Iterator[Metric]:
        stats = self.stats
        plain = (
            ("open_streams", "Connected routers.", self.open_streams),
            ("live_sequences", "Sequences taken and not ended.", self.live_sequences),
            ("unacknowledged_steps", "Steps sent and not acknowledged.", self.unacknowledged_steps),
            ("running_sequences", "Sequences computed.", stats.running_sequences if stats else 0),
            ("waiting_sequences", "Sequences waiting.", stats.waiting_sequences if stats else 0),
            ("paused_sequences", "Sequences paused now.", stats.paused_sequences if stats else 0),
            ("total_blocks", "KV blocks in the pool.", stats.total_blocks if stats else 0),
            ("used_blocks", "KV blocks in use by sequences.", stats.used_blocks if stats else 0),
            ("free_blocks", "KV blocks free or reusable.", stats.free_blocks if stats else 0),
            ("host_blocks", "Blocks of the host cache.", stats.host_blocks if stats else 0),
            ("used_host_blocks", "Host blocks in use.", stats.used_host_blocks if stats else 0),
            ("adapter_slots", "Slots for adapters.", stats.adapter_slots if stats else 0),
            (
                "free_adapter_slots",
                "Free slots for adapters.",
                stats.free_adapter_slots if stats else 0,
            ),
            (
                "adapter_host_bytes",
                "Host memory for adapters.",
                stats.adapter_host_bytes if stats else 0,
            ),
            (
                "used_adapter_host_bytes",
                "Host memory in use by adapters.",
                stats.used_adapter_host_bytes if stats else 0,
            ),
        )
        for name, text, value in plain:
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
