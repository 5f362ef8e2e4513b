"""What the rooms of a router hold now, read at each scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import GAUGE, LONGEST_NAME, Label, Row, families
from trtmesh.chassis.quoting import cut, escaped
from trtmesh.chassis.vocabulary import Adapter, Lora
from trtmesh.router.callers.callers import Callers
from trtmesh.router.fleet.discovery import Discovery
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.metrics import MODEL, PREFIX
from trtmesh.router.placement import Place
from trtmesh.router.placement.rates import Typical
from trtmesh.router.requests.context import Mesh
from trtmesh.router.requests.requests import Requests
from trtmesh.router.tokenizers.tokenizer import Tokenizer

VLLM_PREFIX = "vllm:"
"""Of what pickers of endpoints read of adapters, under vLLM's name."""

MOST_LISTED = 256
"""Most adapters named in a label."""


@dataclass(frozen=True, slots=True, eq=False)
class Rooms(Collector):
    """The rooms, seen from the thread of the metrics endpoint."""

    mesh: Mesh
    requests: Requests
    callers: Callers
    discoveries: Sequence[Discovery]

    @property
    def workers(self) -> list[Worker]:
        return [*self.mesh.fleet.workers.values()]

    @property
    def tokenizers(self) -> list[Tokenizer]:
        return [*self.mesh.tokenizers.tokenizers.values()]

    @property
    def waiting_sequences(self) -> Counter[str]:
        """Sequences that wait for a worker, by model."""
        waiting: Counter[str] = Counter()
        for model, _, sequences in self.requests.unplaced():
            waiting[self.mesh.metrics.model_names[model]] += sequences
        return waiting

    @property
    def adapters_now(self) -> Mapping[tuple[str, ...], float]:
        """The time, by the adapters that are ready to run or waited for; empty where no worker takes any."""
        snapshots = [worker.adapters for worker in self.workers]
        if not (most := sum(each.slots for each in snapshots)):
            return {}
        ready = {
            each.adapter
            for snapshot in snapshots
            for each in snapshot.held.values()
            if each.place is Place.DEVICE
        }
        asked = {item.config.lora for _, item, _ in self.requests.unplaced()}
        waiting = {each for each in asked if each is not None}
        return {(str(most), _listed(ready), _listed(waiting)): time.time()}

    def learned(self, rate: Callable[[Typical], float | None]) -> dict[str, float]:
        """A rate of each model's workers, where it is known."""
        known = {model: rate(typical) for model, typical in self.mesh.fleet.rates().items()}
        names = self.mesh.metrics.model_names
        return {names[model]: each for model, each in known.items() if each is not None}

    def load(self) -> Mapping[str, float]:
        """What balancers learn from the heads of answers: KV in use under the names of Triton and vLLM, and waiting
        sequences."""
        loads = [worker.load for worker in self.workers]
        total, used = (
            sum(getattr(e, name) for e in loads) for name in ("total_blocks", "used_blocks")
        )
        waiting = sum(each.waiting_sequences for each in loads)
        waiting += sum(sequences for _, _, sequences in self.requests.unplaced())
        use = used / (total or 1)
        return {
            "kv_cache_utilization": use,
            "kv_cache_usage_perc": use,
            "num_requests_waiting": waiting,
        }

    def collect(self) -> Iterator[Metric]:
        """Called in Prometheus' own thread."""
        yield from families(PREFIX, GAUGES, self)
        yield from families(VLLM_PREFIX, VLLM_GAUGES, self)


def _listed(adapters: Iterable[Adapter | Lora]) -> str:
    """Names, or numbers, of adapters; a name with a comma would read as two."""
    names = sorted({each.name or str(each.id) for each in adapters})
    plain = [escaped(cut(name, LONGEST_NAME)) for name in names if "," not in name]
    return ",".join(plain[:MOST_LISTED])


gauge = partial(Row, GAUGE)
# fmt: off
GAUGES: tuple[Row[Rooms], ...] = (
    gauge("live_requests", "Requests being served.", lambda r: len(r.requests.live)),
    gauge("paused_requests", "Requests paused until their clients read.", lambda r: len(r.requests.paused)),
    gauge("stalled_sequences", "Sequences without a token since their last one over a second ago.",
          lambda r: r.requests.stalled_sequences()),
    gauge("live_items", "Items being served.", lambda r: r.mesh.admission.live_items),
    gauge("queued_items", "Items queued for a place among the running items of their model.",
          lambda r: r.mesh.admission.queued_items),
    gauge("queued_encodes", "Texts queued for a tokenizer.", lambda r: r.mesh.tokenizers.queued_encodes),
    gauge("worker_sequences", "Handles in use on workers.", lambda r: sum(w.handles for w in r.workers)),
    gauge("decode_sequences", "Handles in use on tokenizers.", lambda r: sum(t.decodes for t in r.tokenizers)),
    gauge("live_handoffs", "Handoffs under way.", lambda r: len(r.mesh.handoffs.live)),
    gauge("worker_leases", "Leases on workers.", lambda r: sum(len(w.leases) for w in r.workers)),
    gauge("worker_bookings", "Bookings on workers.", lambda r: sum(w.guard.bookings for w in r.workers)),
    gauge("canary_waiting", "Sampled items that are not compared yet.",
          lambda r: r.mesh.canary.waiting if r.mesh.canary else 0),
    gauge("kv_index_blocks", "Known KV blocks, each once per holder.", lambda r: len(r.mesh.fleet.kv_index)),
    gauge("kv_index_bytes", "Approximate bytes of the KV index.", lambda r: r.mesh.fleet.kv_index.approximate_bytes),
    gauge("open_breakers", "Workers resting or probed after faults before a first token.",
          lambda r: sum(not w.guard.breaker.closed for w in r.workers)),
    gauge("lookup_problems", "Names that DNS does not know or gives no answer for, and unusable files of addresses.",
          lambda r: sum(len(each.problems) for each in [*r.discoveries])),
    gauge("adapters", "Adapters in the registry.", lambda r: sum(1 for _ in r.mesh.adapters.entries())),
    gauge("adapter_bytes", "Bytes of memory in use for contents of adapters.",
          lambda r: r.mesh.adapters.contents.memory.size_bytes),
    gauge("adapter_registry_stale", "1 while the registry of adapters cannot be read.",
          lambda r: bool(r.mesh.adapters.problem)),
    gauge("api_keys", "API keys in use.", lambda r: r.callers.keys),
    gauge("api_keys_stale", "1 while the file of API keys cannot be used as it is.",
          lambda r: bool(r.callers.problem)),
    gauge("learned_prompt_token_seconds", "Seconds that a worker takes for a prompt token, as learned by placement.",
          lambda r: r.learned(lambda t: t.prefill_seconds if t.prefill_rate else None), (MODEL,)),
    gauge("learned_step_seconds", "Seconds of a worker's step without its sequences, likewise.",
          lambda r: r.learned(lambda t: t.step.base if t.step else None), (MODEL,)),
    gauge("learned_step_sequence_seconds", "Further seconds of a step for each of its sequences, likewise.",
          lambda r: r.learned(lambda t: t.step.slope if t.step else None), (MODEL,)),
    gauge("learned_step_sequences", "Mean number of sequences in the steps from which that was learned.",
          lambda r: r.learned(lambda t: t.step.sequences if t.step else None), (MODEL,)),
    gauge("waiting_sequences", "Sequences in this router that wait for a worker.", labels=(MODEL,)),
    gauge("ready_workers", "Workers ready for items.", lambda r: sum(w.ready for w in r.workers)),
    gauge("ready_tokenizers", "Tokenizers ready for texts.", lambda r: sum(t.ready for t in r.tokenizers)),
)
VLLM_GAUGES: tuple[Row[Rooms], ...] = (
    gauge("lora_requests_info", "Unix time in seconds at which these adapters were ready on workers or waited for.",
          "adapters_now", (
        Label("max_lora", "most adapters that may be ready at once, of all workers together"),
        Label("running_lora_adapters", f"names between commas, at most {MOST_LISTED}"),
        Label("waiting_lora_adapters", f"names between commas, at most {MOST_LISTED}"),
    )),
)
# fmt: on
