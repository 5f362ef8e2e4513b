"""The pages of metrics of a mesh under load: what gateways read there, and that they keep their contract."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from compat.plain_http import PlainHttp
from e2e.mesh import (
    LASTING,
    PATIENT,
    SIMULATED,
    Mesh,
    eventually,
    page_of,
    running_mesh,
    samples_in,
)
from e2e.test_adapters import add
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families
from trtmesh.tools.metrics import SERVED

ROOM, IN_ENGINE, ASKED = 3, 5, 9
"""Sequences that the engine computes, that it has, and that clients ask for."""

FLAGS = (
    *SIMULATED,
    *("--simulated-limits-max-batch-size", str(ROOM), "--simulated-adapters-slots", "1"),
    *("--simulated-limits-max-sequence-tokens", "32768", "--simulated-timing-step-ms", "20"),
)
PROMPT = [[11] * 64]
CHAT, TEXT = "chat", "text_completion"
TYPES = {row.name: row for row in chain.from_iterable(SERVED.values())}


def picked(page: str, name: str, **labels: str) -> float:
    """What llm-d's picker takes: the first sample with these labels."""
    fitting = (s for s in samples_in(page) if s.name == name and labels.items() <= s.labels.items())
    return next(fitting).value


async def test_a_picker_of_endpoints_sees_what_waits_and_runs() -> None:
    """In the router and in the engine; with the KV in use, and the adapters that run and wait."""
    router = (*PATIENT, "--admission-max-running-items", str(IN_ENGINE))
    async with running_mesh(tokenizers=0, engine_flags=FLAGS, router_flags=router) as mesh:
        for name in ("runs", "waits"):
            await add(mesh, name, name.encode())
        asked = {"text": False, "max_tokens": 20_000}
        begun = [mesh.open(PROMPT, adapter="runs", **asked) for _ in range(IN_ENGINE)]

        await eventually(partial(shows, mesh, ROOM, IN_ENGINE - ROOM))
        begun += [mesh.open(PROMPT, adapter="waits", **asked) for _ in range(ASKED - IN_ENGINE)]
        await eventually(partial(shows, mesh, ROOM, ASKED - ROOM))
        page, of_engine = await page_of(mesh.router), await page_of(mesh.engines[0])
        assert picked(page, "trtmesh_router_waiting_sequences", model="demo") == ASKED - IN_ENGINE
        assert picked(of_engine, "trtmesh_engine_waiting_sequences") == IN_ENGINE - ROOM
        assert picked(page, "nv_trt_llm_request_metrics", request_type="active") == ASKED
        read = {key: picked(page, name, **labels) for key, (name, labels) in specs().items()}
        assert (read["queuedRequestsSpec"], read["runningRequestsSpec"]) == (ASKED - ROOM, ROOM)
        assert read["loraSpec"] == picked(page, "vllm:lora_requests_info")
        await check_blocks(mesh)
        (info,) = [each for each in samples_in(page) if each.name == "vllm:lora_requests_info"]
        assert abs(info.value - time.time()) < 600
        assert info.labels == {
            "max_lora": "1",
            "running_lora_adapters": "runs",
            "waiting_lora_adapters": "waits",
        }
        for reader in begun:
            await reader.cancel()
        await eventually(partial(shows, mesh, 0, 0))


def specs() -> Mapping[str, tuple[str, Mapping[str, str]]]:
    """What the picker of the documentation reads: names and labels."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    found = re.findall(r"(\w+Spec): ([\w:]+)(?:{(\w+)=(\w+)})?\n", page)
    return {key: (name, {label: value} if label else {}) for key, name, label, value in found}


async def shows(mesh: Mesh, scheduled: int, waiting: int) -> bool:
    page = await page_of(mesh.router)
    words = ("scheduled", "waiting")
    told = [picked(page, "nv_trt_llm_request_metrics", request_type=word) for word in words]
    return told == [scheduled, waiting]


async def check_blocks(mesh: Mesh) -> None:
    """The router tells the engine's blocks, once the sequences make no new ones between two looks."""

    async def equal() -> bool:
        page, engine = await page_of(mesh.router), await page_of(mesh.engines[0])
        used, total = (
            picked(engine, f"trtmesh_engine_{name}_blocks") for name in ("used", "total")
        )
        told = {
            key: picked(page, name, **labels)
            for key, (name, labels) in specs().items()
            if name == "nv_trt_llm_kv_cache_block_metrics"
        }
        fraction = round(used / total, 12)
        told["kvUsageSpec"] = round(told["kvUsageSpec"], 12)
        expected = {"kvUsageSpec": fraction, "cacheBlockSizeSpec": 32, "cacheNumBlocksSpec": total}
        return used > 0 and told == expected

    await eventually(equal)


DOORS = (
    ("/v2/models/ensemble/generate", {"text_input": "one two", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4}),
    ("/v1/completions", {"prompt": "one two", "max_tokens": 4}),
    ("/v1/completions", {"prompt": "one two", "max_tokens": -1}),
)


async def test_pages_under_load_keep_the_contract() -> None:
    """All doors are used; every sample is of the table, and Prometheus' own check finds nothing in names of ours."""
    async with (
        running_mesh(engine_flags=LASTING, router_flags=(*PATIENT, "--http-port", "0")) as mesh,
        PlainHttp(mesh.router.http_address) as http,
    ):
        running = mesh.open(["while others come"], max_tokens=20_000)
        # Three blocks or more are a part of the cache that is written without an exponent.
        await running.tokens_here(100)
        await mesh.client.complete(["one two"], max_tokens=4)
        statuses = [(await http.post(path, body)).status for path, body in DOORS]
        assert statuses == [200, 200, 200, 400]

        async def counted() -> bool:
            return (await ended(mesh)) == {
                ("native", "complete"): 1,
                ("triton", "complete"): 1,
                ("openai", "complete"): 2,
                ("openai", "refused"): 1,
            }

        await eventually(counted)
        page = await page_of(mesh.router)
        duration = "gen_ai_server_request_duration_seconds_count"
        told = {
            (each.labels["gen_ai_operation_name"], each.labels["error_type"]): each.value
            for each in samples_in(page)
            if each.name == duration
        }
        assert told == {(CHAT, ""): 1, (TEXT, ""): 3, (TEXT, "INVALID_FIELD"): 1}
        for name, least in (("time_to_first_token", 4), ("time_per_output_token", 3)):
            full = f"gen_ai_server_{name}_seconds_count"
            assert picked(page, full, gen_ai_operation_name=CHAT) == 1
            assert picked(page, full, gen_ai_operation_name=TEXT) == least
        await check_load_headers(http)
        for process in (mesh.router, *mesh.tokenizers, *mesh.engines):
            check_page(await page_of(process))
            await asyncio.to_thread(check_open_page, process.metrics_port)
        await running.cancel()


async def ended(mesh: Mesh) -> Mapping[tuple[str, str], float]:
    """Requests by door and outcome."""
    return {
        (each.labels["door"], each.labels["outcome"]): each.value
        for each in samples_in(await page_of(mesh.router))
        if each.name == "trtmesh_router_requests_total"
    }


async def check_load_headers(http: PlainHttp) -> None:
    """The load stands in the head of any answer, of a stream too, for those who ask."""
    path, body = DOORS[2]
    for kind, more in (("text", {}), ("JSON", {"stream": True}), ("BIN", {})):
        headers = {"endpoint-load-metrics-format": kind}
        reply = await http.call("POST", path, body | more, headers=headers)
        told = reply.headers.get("endpoint-load-metrics", "")
        if kind == "text":
            assert re.fullmatch(
                r"TEXT named_metrics\.kv_cache_utilization=0\.\d+, named_metrics\.kv_cache_usage_perc=0\.\d+,"
                r" named_metrics\.num_requests_waiting=[01]",
                told,
            )
        elif kind == "JSON":
            named = json.loads(told.removeprefix("JSON "))["named_metrics"]
            assert 0 < named["kv_cache_utilization"] == named["kv_cache_usage_perc"] < 1
        else:
            assert told == ""
    assert "endpoint-load-metrics" not in (await http.post(path, body)).headers


def check_page(page: str) -> None:
    for family in text_string_to_metric_families(page):
        for each in family.samples:
            check_sample(each.name, {*each.labels} - {"le"})
    if promtool := shutil.which("promtool"):
        found = subprocess.run(
            [promtool, "check", "metrics"], input=page, text=True, capture_output=True, check=False
        )
        complaints = (found.stdout + found.stderr).splitlines()
        assert [line for line in complaints if not line.startswith(FOREIGN)] == []


FOREIGN = ("nv_", "vllm:")
"""Names of others, which break rules of Prometheus."""


def check_sample(name: str, labels: set[str]) -> None:
    base = name
    for end in ("_bucket", "_count", "_sum", "_created"):
        if base not in TYPES:
            base = base.removesuffix(end)
    # The parser ends the name of every counter alike, and begins that of a created one so.
    row = TYPES.get(base) or TYPES.get(f"{base}_total") or TYPES[base.removesuffix("_total")]
    assert {label.name for label in row.labels} == labels, name


def check_open_page(port: int | None) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        page = answer.read().decode()
    families = [*open_families(page)]  # type: ignore[no-untyped-call] # of the library
    assert families
    for family in families:
        for each in family.samples:
            check_sample(each.name, {*each.labels} - {"le"})
