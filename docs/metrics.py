"""Writes docs/metrics.md: every metric of every service, from the tables by which they are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from trtmesh.chassis.metrics import Described, Label
from trtmesh.tools.metrics import SERVED

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Metrics

Written by `python docs/metrics.py` from the tables by which the services serve their metrics, at `/metrics` of their
`metrics_port`: in Prometheus' text format, or in OpenMetrics with exemplars for scrapers that ask for it.

* **A contract.** A name, its type and its labels stay. A renamed metric keeps its former name beside the new one for
  one minor version. `since` is the first version with a metric.
* **Bounds.** A label has the values named below. Values that clients and peers bring are cut, made printable and
  limited in number; all later ones count as `other`.
* **Units** end a name: seconds, bytes. All else are numbers of what the meaning says.
* **OpenTelemetry.** What begins with `gen_ai_` has the names, labels and bucket bounds of the conventions for servers
  of models. The time of an output token is the mean of a sequence; `trtmesh_router_inter_token_seconds` has each gap.
* **Scrapes** are rendered on a thread, once for all that wait, and take a fifth of a core at most.

## Behind a gateway

A router is what a gateway sees of a mesh, also where its engines are in the same process; the pages of engines are for
operators. `nv_trt_llm_request_metrics` counts as `waiting` what waits in this router and in all engines of the model,
and as `scheduled` what runs in the engines, for any router. llm-d's endpoint picker reads it, the KV cache and the
adapters with this configuration, from pods with the label `llm-d.ai/engine-type: triton-tensorrt-llm`; it takes the
first model of a page:

```yaml
plugins:
- type: metrics-data-source
  parameters: {port: 8002}
- type: core-metrics-extractor
  parameters:
    engineConfigs:
    - name: triton-tensorrt-llm
      queuedRequestsSpec: nv_trt_llm_request_metrics{request_type=waiting}
      runningRequestsSpec: nv_trt_llm_request_metrics{request_type=scheduled}
      kvUsageSpec: nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}
      cacheBlockSizeSpec: nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}
      cacheNumBlocksSpec: nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}
      loraSpec: vllm:lora_requests_info
```

Balancers without a scraper send `endpoint-load-metrics-format: TEXT` (or `JSON`) with a request on the HTTP port: the
head of the answer then has `endpoint-load-metrics` (ORCA) with `kv_cache_utilization`, which vLLM calls
`kv_cache_usage_perc`, and `num_requests_waiting`, at most 0.1 s old.
"""


def page() -> str:
    sections = (line for service, rows in SERVED.items() for line in _section(service, rows))
    return "\n".join([HEAD, *sections])


def _section(service: str, rows: tuple[Described, ...]) -> Iterator[str]:
    yield f"## {service}\n"
    yield "| Metric | Type | Unit | Labels | Meaning | Since |\n|---|---|---|---|---|---|"
    yield from map(_row, rows)
    yield ""
    yield from _labels(rows)


def _labels(rows: tuple[Described, ...]) -> Iterator[str]:
    """The values of labels; where metrics disagree about one of them, which metrics mean what."""
    metrics: dict[Label, list[str]] = {}
    for row in rows:
        for label in row.labels:
            metrics.setdefault(label, []).append(row.name)
    if not metrics:
        return
    times = Counter(label.name for label in metrics)
    yield "| Label | Of | Values |\n|---|---|---|"
    for label in sorted(metrics, key=attrgetter("name")):
        names = ", ".join(f"`{name}`" for name in metrics[label]) if times[label.name] > 1 else ""
        yield f"| `{label.name}` | {names} | {label.values} |"
    yield ""


def _row(row: Described) -> str:
    labels = ", ".join(f"`{label.name}`" for label in row.labels)
    former = f" Formerly `{row.former}`." if row.former else ""
    text = f"{row.text}{former}".replace("|", "\\|")
    return f"| `{row.name}` | {row.kind} | {row.unit} | {labels} | {text} | {row.since} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
