"""Metric lines of busy engines, absent from an idle simulated mesh."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import datetime

import pytest
from trtmesh.router.doors.triton.metrics import (
    COUNTERS,
    EngineFigures,
    Sample,
    TritonMetrics,
    engine_families,
    family,
    number,
)
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.statistics import FAILURE_REASONS, Statistics
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1.kv_transfer_pb2 import HandoffCounts

BUSY = EngineFigures(
    engine_pb.Load(
        running_sequences=5,
        waiting_sequences=2,
        paused_sequences=1,
        pending_prompt_tokens=77,
        total_blocks=8,
        used_blocks=2,
        free_blocks=6,
        received_handoffs=HandoffCounts(granted=9, consumed=4, transfer_ms=123),
    ),
    max_batch_size=16,
    in_context=1,
)


def written(figures: EngineFigures) -> list[str]:
    text = "".join(engine_families({"m": figures}))
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_inflight_batching_families() -> None:
    lines = written(BUSY)
    name = "nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="
    assert [line for line in lines if "batcher" in line] == [
        f'{name}"total_context_tokens",model="m",version="1"}} 77',
        f'{name}"generation_requests",model="m",version="1"}} 4',
        f'{name}"micro_batch_id",model="m",version="1"}} 0',
        f'{name}"paused_requests",model="m",version="1"}} 1',
    ]
    requests = [line for line in lines if line.startswith("nv_trt_llm_request_metrics")]
    assert requests == [
        f'nv_trt_llm_request_metrics{{model="m",request_type="{word}",version="1"}} {value}'
        for word, value in (
            ("active", 7),
            ("max", 16),
            ("scheduled", 5),
            ("context", 1),
            ("waiting", 2),
        )
    ]
    assert not [line for line in lines if "v1" in line]


def test_handoffs_are_those_received() -> None:
    name = "nv_trt_llm_disaggregated_serving_metrics{disaggregated_serving_type="
    assert [line for line in written(BUSY) if "disaggregated" in line] == [
        f'{name}"kv_cache_transfer_ms",model="m",version="1"}} 123',
        f'{name}"request_count",model="m",version="1"}} 4',
    ]


def test_static_batching_replaces_the_inflight_family() -> None:
    load = engine_pb.Load(running_sequences=5)
    lines = written(EngineFigures(load, static_batching=True, max_batch_size=16, in_context=1))
    name = "nv_trt_llm_v1_metrics{model="
    assert [line for line in lines if "v1" in line] == [
        f'{name}"m",v1_specific_metric="total_context_tokens",version="1"}} 0',
        f'{name}"m",v1_specific_metric="total_generation_tokens",version="1"}} 4',
        f'{name}"m",v1_specific_metric="empty_generation_slots",version="1"}} 11',
    ]
    assert not [line for line in lines if "batcher" in line]


@pytest.mark.parametrize("static_batching", [False, True])
def test_verbose_log_equals_the_samples(
    caplog: pytest.LogCaptureFixture, static_batching: bool
) -> None:
    """Each reading logs the samples of a model as a JSON object."""
    models = {"m": triton_models(TritonSettings())["tensorrt_llm"]}
    figures = replace(BUSY, static_batching=static_batching)
    metrics = TritonMetrics(models, Statistics(models), lambda _: figures, ())
    with caplog.at_level(logging.INFO, "trtmesh"):
        metrics.text()
    assert not caplog.messages
    with caplog.at_level(logging.DEBUG, "trtmesh"):
        text = metrics.text()
    (line,) = caplog.messages
    told = json.loads(line.removeprefix("model tensorrt_llm: "))
    samples = [line for line in text.splitlines() if line.startswith("nv_trt_llm_")]
    stamps = [sample for sample in samples if "timestamp" in sample]
    logged_at = datetime.strptime(told.pop("Timestamp"), "%m-%d-%Y %H:%M:%S.%f").astimezone()
    assert abs(logged_at.timestamp() - int(stamps[0].rsplit(" ", 1)[1]) / 1e6) < 60
    values = [float(sample.rsplit(" ", 1)[1]) for sample in samples if sample not in stamps]
    assert sorted(told.values()) == sorted(values)
    names = ("Active Request Count", "Free KV cache blocks", "Fraction used KV cache blocks")
    assert [told[name] for name in names] == [7, 6, 0.25]
    own = "Empty Generation Slots" if static_batching else "Paused Requests"
    assert told[own] == (11 if static_batching else 1)


def test_fraction_keeps_its_decimals() -> None:
    (line,) = [line for line in written(BUSY) if "fraction" in line]
    assert line == (
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.25'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (104.0, "104"),
        (2**60, "1152921504606846976"),
        (1 / 3, "0.3333333333333333"),
    ],
)
def test_whole_numbers_have_no_decimal_point(value: float, text: str) -> None:
    assert number(value) == text


def test_label_values_are_escaped() -> None:
    text = family("f", "F.", "gauge", [Sample({"model": 'a"b\\c\nd'}, 1)])
    assert text.splitlines()[-1] == r'f{model="a\"b\\c\nd"} 1'


def test_family_without_samples_has_its_help() -> None:
    assert family("f", "F.", "gauge", []) == "# HELP f F.\n# TYPE f gauge\n"


def test_help_texts_are_tritons() -> None:
    lines = TritonMetrics({}, Statistics({}), lambda _: BUSY, ()).text().splitlines()
    helps = dict(line.removeprefix("# HELP nv_inference_").split(" ", 1) for line in lines[::2])
    assert helps["request_success"] == "Number of successful inference requests, all batch sizes"
    assert helps["compute_output_duration_us"] == (
        "Cumulative inference compute output duration in microseconds (does not include cached requests)"
    )


def test_listed_models_have_samples_before_their_first_request() -> None:
    models = triton_models(TritonSettings())
    metrics = TritonMetrics(models, Statistics(models), lambda _: BUSY, ["ensemble"])
    own = [line for line in metrics.text().splitlines() if line.startswith("nv_inference_")]
    assert len(own) == len(COUNTERS) + len(FAILURE_REASONS) + 1
    assert all('model="ensemble"' in line and line.endswith(" 0") for line in own)
