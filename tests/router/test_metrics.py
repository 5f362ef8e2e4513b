"""A router's metrics can be scraped after any message of a peer."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.samples import Sample
from trtmesh.chassis.metrics import OTHER
from trtmesh.router.metrics import CHAT, MOST_MODELS, RouterMetrics
from trtmesh.v1 import generation_pb2 as pb


def test_unknown_reasons_are_counted_together() -> None:
    metrics, registry = RouterMetrics(), CollectorRegistry()
    registry.register(metrics)
    for reason in (pb.FINISH_REASON_LENGTH, 98, 99):
        metrics.models["m"].finished[reason] += 1

    def finished(reason: str) -> float | None:
        labels = {"model": "m", "reason": reason}
        return registry.get_sample_value("trtmesh_router_items_finished_total", labels)

    assert (finished("length"), finished("unknown")) == (1, 2)


def test_names_in_labels_are_bounded() -> None:
    metrics, registry = RouterMetrics(), CollectorRegistry()
    registry.register(metrics)
    for number in range(2 * MOST_MODELS):
        metrics.models[f"model {number}"].tokens_in += 1
        metrics.models[f"model {number}"].queue.observe(1.0)
    samples = list(samples_of(registry, "trtmesh_router_tokens_in_total"))
    assert len(samples) == MOST_MODELS + 1
    assert sum(sample.value for sample in samples) == 2 * MOST_MODELS
    counts = samples_of(registry, "trtmesh_router_queue_seconds_count")
    assert sum(sample.value for sample in counts) == 2 * MOST_MODELS


def test_a_flood_of_names_leaves_the_page_small() -> None:
    """Of models, keys, certificates, adapters, parameters and workers, of which some are no text for a page."""
    metrics, registry = RouterMetrics(), CollectorRegistry()
    registry.register(metrics)
    for number in range(1000):
        name = f'\ud800\n{number}"' + "x" * 1000
        metrics.models[name].latencies[CHAT].request_duration["QUEUE_FULL"].observe(1.0)
        metrics.models[name].requests["openai", "refused"] += 1
        metrics.note_adapter(name, hit=True)
        metrics.note_unknown_parameter(name)
        metrics.note_canary_alert(name)
        for caller in (f"key{number}", f"certificate:{name}", f"unlisted:{number}"):
            metrics.note_item(caller, 2, 3)
            metrics.note_refusal("RATE_LIMITED", caller)
    page = generate_latest(registry).decode()
    lines = page.splitlines()
    assert len(lines) < 12_000
    assert max(map(len, lines)) < 500
    assert openmetrics(registry).endswith(b"# EOF\n")  # type: ignore[no-untyped-call] # of the library
    names = ("model", "gen_ai_request_model", "caller", "adapter", "parameter", "worker")
    for label, most in zip(names, (64, 64, 256, 64, 64, 64), strict=True):
        values = {
            sample.labels[label]
            for family in registry.collect()
            for sample in family.samples
            if label in sample.labels
        }
        assert OTHER in values
        assert len(values) <= most + (2 if label == "caller" else 1)
        assert all(value.isprintable() for value in values)
    counted = samples_of(registry, "trtmesh_router_caller_items_total")
    callers = {sample.labels["caller"]: sample.value for sample in counted}
    assert callers["unlisted"] == 1000
    assert sum(callers.values()) == 3000


def test_workers_that_left_are_no_longer_told() -> None:
    metrics, registry = RouterMetrics(), CollectorRegistry()
    registry.register(metrics)
    for number in range(100):
        for _ in range(2):
            metrics.note_placement("auto", f"pod-{number}", ["pod-old", f"pod-{number}"].copy)
    metrics.note_placement("auto", "pod-old", ["pod-old", "pod-99"].copy)
    placed = samples_of(registry, "trtmesh_router_items_placed_total")
    assert {s.labels["worker"]: s.value for s in placed} == {"pod-99": 2, "pod-old": 1}


def samples_of(registry: CollectorRegistry, name: str) -> Iterator[Sample]:
    return (s for family in registry.collect() for s in family.samples if s.name == name)
