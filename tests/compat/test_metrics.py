"""The metrics on Triton's port, line by line."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.triton import PATIENCE_SECONDS, Triton
from e2e.mesh import Mesh, eventually, page_of, router_before, samples_in
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="module")

REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
COUNTERS = ("request_success", "count", "exec_count", "request_duration_us", "queue_duration_us",
            "compute_input_duration_us", "compute_infer_duration_us", "compute_output_duration_us")  # fmt: skip
OF_ENSEMBLE = ["ensemble", "preprocessing", "tensorrt_llm", "postprocessing"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(workers: Mesh) -> AsyncIterator[Mesh]:
    async with router_before(workers, "--triton-decoupled", "") as mesh:
        yield mesh


async def scrape(mesh: Mesh) -> list[str]:
    """The metric lines of nv_ families, with help and type."""
    url = f"http://127.0.0.1:{mesh.router.metrics_port}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return str(answer.read(), "utf-8")

    lines = (await asyncio.to_thread(read)).splitlines()
    assert "trtmesh_router_live_requests 0.0" in lines
    return [line for line in lines if re.match(r"(# (HELP|TYPE) )?nv_", line)]


async def samples(mesh: Mesh) -> Mapping[str, str]:
    """Written values, by name and labels."""
    lines = [line for line in await scrape(mesh) if not line.startswith("#")]
    found = dict(line.rsplit(" ", 1) for line in lines)
    assert len(found) == len(lines)
    return found


def inference(model: str, name: str, reason: str = "") -> str:
    between = f'reason="{reason}",' if reason else ""
    return f'nv_inference_{name}{{model="{model}",{between}version="1"}}'


def engine(label: str, word: str, family: str) -> str:
    """The key of an nv_trt_llm sample: its labels in the order of their names."""
    labels = sorted([(label, word), ("model", "tensorrt_llm"), ("version", "1")])
    pairs = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"nv_trt_llm_{family}{{{pairs}}}"


IDLE = {
    engine("request_type", "active", "request_metrics"): "0",
    engine("request_type", "max", "request_metrics"): "1024",
    engine("request_type", "scheduled", "request_metrics"): "0",
    engine("request_type", "context", "request_metrics"): "0",
    engine("request_type", "waiting", "request_metrics"): "0",
    engine("memory_type", "cpu", "runtime_memory_metrics"): r"\d{8,}",
    engine("memory_type", "gpu", "runtime_memory_metrics"): "0",
    engine("memory_type", "pinned", "runtime_memory_metrics"): "0",
    engine("kv_cache_block_type", "max", "kv_cache_block_metrics"): "16384",
    engine("kv_cache_block_type", "free", "kv_cache_block_metrics"): "16384",
    engine("kv_cache_block_type", "used", "kv_cache_block_metrics"): "0",
    engine("kv_cache_block_type", "tokens_per", "kv_cache_block_metrics"): "32",
    engine("kv_cache_block_type", "reused", "kv_cache_block_metrics"): r"\d+",
    engine("kv_cache_block_type", "fraction", "kv_cache_block_metrics"): "0",
    engine("inflight_batcher_specific_metric", "total_context_tokens",
           "inflight_batcher_metrics"): "0",
    engine("inflight_batcher_specific_metric", "generation_requests",
           "inflight_batcher_metrics"): "0",
    engine("inflight_batcher_specific_metric", "micro_batch_id", "inflight_batcher_metrics"): "0",
    engine("inflight_batcher_specific_metric", "paused_requests", "inflight_batcher_metrics"): "0",
    engine("general_type", "timestamp", "general_metrics"): r"\d{16}",
    engine("general_type", "iteration_counter", "general_metrics"): r"\d+",
    engine("disaggregated_serving_type", "kv_cache_transfer_ms",
           "disaggregated_serving_metrics"): "0",
    engine("disaggregated_serving_type", "request_count", "disaggregated_serving_metrics"): "0",
}  # fmt: skip
"""Every nv_trt_llm sample of an idle mesh, with a regular expression for the value."""


async def test_idle_mesh_has_all_engine_samples(mesh: Mesh) -> None:
    """First in this file: default models have no samples before their first request."""
    await mesh.idle()
    found = await samples(mesh)
    assert not [key for key in found if key.startswith("nv_inference_")]
    lines = await scrape(mesh)
    for name in (*COUNTERS, "request_failure", "pending_request_count"):
        assert any(line.startswith(f"# HELP nv_inference_{name} ") for line in lines)
    of_engines = {key: value for key, value in found.items() if key.startswith("nv_trt_llm_")}
    assert of_engines.keys() == IDLE.keys()
    for key, value in of_engines.items():
        assert re.fullmatch(IDLE[key], value), (key, value)
    assert (
        abs(int(found[engine("general_type", "timestamp", "general_metrics")]) / 1e6 - time.time())
        < 60
    )


async def test_families_have_one_help_and_type(mesh: Mesh, triton: Triton) -> None:
    await triton.infer("ensemble", {"text_input": "x", "max_tokens": 2})
    lines = await scrape(mesh)
    types = [line.split()[2:] for line in lines if line.startswith("# TYPE")]
    helps = [line.split()[2] for line in lines if line.startswith("# HELP")]
    expected = [(f"nv_inference_{name}", "counter") for name in (*COUNTERS, "request_failure")]
    expected.append(("nv_inference_pending_request_count", "gauge"))
    expected += [
        (f"nv_trt_llm_{name}_metrics", "gauge")
        for name in ("request", "runtime_memory", "kv_cache_block", "inflight_batcher", "general")
    ]
    expected.append(("nv_trt_llm_disaggregated_serving_metrics", "counter"))
    expected += [(f"nv_llm_{way}_token_len", "histogram") for way in ("input", "output")]
    assert [tuple(pair) for pair in types] == expected
    assert helps == [name for name, _ in expected]


async def test_decoding_after_the_end_of_the_engine_is_counted(mesh: Mesh, triton: Triton) -> None:
    """Where the last text is decoded within a microsecond, another request counts."""
    key = inference("postprocessing", "compute_infer_duration_us")
    before = int((await samples(mesh)).get(key, 0))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while int((await samples(mesh)).get(key, 0)) == before:
            await triton.infer("ensemble", {"text_input": "one", "max_tokens": 5})


async def test_ensemble_requests_count_for_its_steps(mesh: Mesh, triton: Triton) -> None:
    before = await samples(mesh)
    rows = np.array([["one"], ["two"], ["three"]], np.object_)
    lengths = np.full((3, 1), 5, np.int32)
    await triton.infer("ensemble", {"text_input": rows, "max_tokens": lengths})
    found = await samples(mesh)
    told = {key.partition("{")[0] for key in found if key.startswith("nv_inference_")}
    assert told == {
        f"nv_inference_{name}" for name in (*COUNTERS, "request_failure", "pending_request_count")
    }

    def grown(model: str, name: str) -> int:
        key = inference(model, name)
        return int(found[key]) - int(before.get(key, 0))

    for model in OF_ENSEMBLE:
        own = [
            key for key in found if f'model="{model}"' in key and key.startswith("nv_inference_")
        ]
        assert len(own) == len(COUNTERS) + len(REASONS) + 1
        assert grown(model, "request_success") == grown(model, "exec_count") == 1
        assert grown(model, "count") == 3
        assert found[inference(model, "pending_request_count")] == "0"
        for reason in REASONS:
            key = inference(model, "request_failure", reason)
            assert found[key] == before.get(key, "0")
    spent = {
        model: {name: grown(model, name) for name in COUNTERS if name.endswith("_us")}
        for model in OF_ENSEMBLE
    }
    totals = {model: own.pop("request_duration_us") for model, own in spent.items()}
    # Each sample is rounded down to whole microseconds.
    for model in OF_ENSEMBLE[1:]:
        assert abs(totals[model] - sum(spent[model].values())) <= len(COUNTERS)
        # The last text may be decoded in the microsecond of the engine's end.
        assert model == "postprocessing" or spent[model]["compute_infer_duration_us"] > 0
    ensemble = spent.pop("ensemble")
    assert abs(totals["ensemble"] - sum(totals[model] for model in spent)) <= len(COUNTERS)
    for phase in ("compute_input", "compute_infer", "compute_output"):
        of_steps = sum(own[f"{phase}_duration_us"] for own in spent.values())
        assert ensemble[f"{phase}_duration_us"] > 0
        assert abs(ensemble[f"{phase}_duration_us"] - of_steps) <= len(spent)
    assert "tensorrt_llm_bls" not in str(found)


def lengths_of(found: Mapping[str, str], way: str) -> dict[str, int]:
    """The histogram of prompts or outputs, in the form of upstream's tests."""
    of = f'model="tensorrt_llm",response_metric_type="total_{way}_tokens",version="1"'
    name = f"nv_llm_{way}_token_len"
    own = {f"{name}_count{{{of}}}": "count", f"{name}_sum{{{of}}}": "sum"}
    bounds = ("10", "50", "100", "500", "1000", "+Inf")
    own |= {f'{name}_bucket{{{of},le="{bound}"}}': bound for bound in bounds}
    assert {key for key in found if key.startswith(f"{name}_")} == set(own)
    return {word: int(found[key]) for key, word in own.items()}


async def test_length_histograms(mesh: Mesh, triton: Triton) -> None:
    async def observed(tensors: Mapping[str, object]) -> tuple[dict[str, int], dict[str, int]]:
        before = await samples(mesh)
        await triton.infer("tensorrt_llm", tensors)
        found = await samples(mesh)

        def gained(way: str) -> dict[str, int]:
            earlier = lengths_of(before, way)
            return {word: n - earlier[word] for word, n in lengths_of(found, way).items()}

        return gained("input"), gained("output")

    prompts, outputs = await observed(
        {"input_ids": [5] * 10, "input_lengths": 10, "request_output_len": 51}
    )
    assert prompts == {"count": 1, "sum": 10} | dict.fromkeys(
        ("10", "50", "100", "500", "1000", "+Inf"), 1
    )
    assert outputs == {"count": 1, "sum": 51, "10": 0, "50": 0} | dict.fromkeys(
        ("100", "500", "1000", "+Inf"), 1
    )
    # The sequences of a prompt are summed; rows count separately.
    prompts, outputs = await observed(
        {
            "input_ids": np.array([[5, 6], [7, 8]], np.int32),
            "input_lengths": np.array([[2], [2]], np.int32),
            "request_output_len": np.array([[6], [6]], np.int32),
            "num_return_sequences": np.array([[2], [2]], np.int32),
            "runtime_top_k": np.array([[9], [9]], np.int32),
        }
    )
    assert (prompts["count"], prompts["sum"]) == (2, 4)
    assert (outputs["count"], outputs["sum"], outputs["10"], outputs["50"]) == (2, 24, 0, 2)


async def test_pages_are_those_of_prometheus(mesh: Mesh, triton: Triton) -> None:
    """Other tests read them by expressions."""
    await triton.infer("ensemble", {"text_input": "a", "max_tokens": 3})
    for process in (mesh.router, *mesh.tokenizers, *mesh.engines):
        page = await page_of(process)
        families = text_string_to_metric_families(page)
        found = named([sample for family in families for sample in family.samples])
        assert len(found) > 20
        assert found == named(samples_in(page))


def named(samples: Sequence[Sample]) -> dict[tuple[Any, ...], float]:
    """Values by names and labels. The parser ends the name of every counter alike."""
    return {
        (each.name.removesuffix("_total"), *sorted(each.labels.items())): each.value
        for each in samples
    }


async def test_failures_are_counted_by_reason(mesh: Mesh, triton: Triton) -> None:
    long = {"text_input": "long", "max_tokens": 8000}
    before = await samples(mesh)

    def failures(found: Mapping[str, str], model: str) -> dict[str, int]:
        keys = {reason: inference(model, "request_failure", reason) for reason in REASONS}
        counts = {reason: int(found[key]) - int(before.get(key, 0)) for reason, key in keys.items()}
        return {reason: count for reason, count in counts.items() if count}

    with pytest.raises(InferenceServerException, match="timeout of"):
        await triton.infer("ensemble", long, timeout=50_000)
    await mesh.idle()
    # Workers may be idle before the router's next report.
    await eventually(lambda: nothing_scheduled(mesh))
    asking = asyncio.create_task(triton.infer("ensemble", long))
    found = await samples_of_busy(mesh)
    assert found[engine("request_type", "active", "request_metrics")] == "1"
    assert 0 < float(found[engine("kv_cache_block_type", "fraction", "kv_cache_block_metrics")]) < 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await mesh.idle()
    found = await samples(mesh)
    for model in ("ensemble", "tensorrt_llm"):
        assert failures(found, model) == {"CANCELED": 1, "OTHER": 1}
        succeeded = inference(model, "request_success")
        assert found[succeeded] == before.get(succeeded, "0")


async def nothing_scheduled(mesh: Mesh) -> bool:
    return (await samples(mesh))[engine("request_type", "scheduled", "request_metrics")] == "0"


async def samples_of_busy(mesh: Mesh) -> Mapping[str, str]:
    """The request is dispatched and a report shows its running sequence."""
    url = f"http://127.0.0.1:{mesh.router.metrics_port}/metrics"
    wanted = {
        engine("request_type", "scheduled", "request_metrics"): "1",
        inference("ensemble", "pending_request_count"): "0",
    }

    def read() -> dict[str, str]:
        with urllib.request.urlopen(url) as answer:
            lines = str(answer.read(), "utf-8").splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if line.startswith("nv_"))

    found: dict[str, str] = {}

    async def busy() -> bool:
        found.update(await asyncio.to_thread(read))
        return wanted.items() <= found.items()

    await eventually(busy)
    return found
