"""aiperf and guidellm beside `trtmesh bench serve`, against one OpenAI door: do they measure the same?

The engine is simulated with a fixed step, so that the truth is steady; the three measure in turn, and medians of the
rounds are compared. `make bench-agreement` runs it on a quiet machine, prints a table and a line for each figure that
says `pass` or `fail`, and installs both tools below `.openai-clients/`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from cli.commands import EXECUTED, TRTMESH, running_stack
from e2e.mesh import DEMO
from environments import python_environment
from openai_clients.conftest import KEPT
from openai_clients.test_clients import CLIENTS, QUIET, Python

pytestmark = pytest.mark.clients

STEP_MS, TOKENS = 20.0, 64
LEVELS = (1, 16, 32)
ROUNDS = int(os.environ.get("AGREEMENT_ROUNDS", "3"))
SECONDS = float(os.environ.get("AGREEMENT_SECONDS", "15"))
"""Turns of each tool, and about how long each of them lasts: few show that everything runs, and measure nothing."""
MOST_MS, MOST_SHARE = 1.0, 0.02
RUN_SECONDS = 600.0
NAME = "local/demo"

Figures = Mapping[str, float]
FIGURES = {
    "ttft": "TTFT p50 ms",
    "itl": "ITL p50 ms",
    "requests": "requests/s",
    "tokens": "tokens/s",
}


@dataclass(frozen=True)
class Door:
    """What is measured, with so many requests at a time, and where a tool may write."""

    address: str
    level: int
    work: Path

    @property
    def requests(self) -> int:
        return self.level * math.ceil(SECONDS * 1000 / STEP_MS / TOKENS)

    def run(self, program: str, *arguments: str, **variables: str) -> None:
        """Runs a tool in a folder of its own."""
        own = {"HOME": str(self.work), "OPENAI_API_KEY": "unused", **QUIET, **variables}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own
        done = subprocess.run(
            [program, *arguments],
            capture_output=True, text=True, check=False, env=environment, timeout=RUN_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def of_trtmesh(door: Door) -> Figures:
    report = door.work / "report.json"
    door.run(
        *(TRTMESH, "bench", "serve", f"openai://{door.address}", "--tokenizer", str(DEMO)),
        *("--requests", str(door.requests + door.level), "--warmup", str(door.level)),
        *("--concurrency", str(door.level), "--input-tokens", "64"),
        *("--output-tokens", str(TOKENS), "--json", str(report)),
    )
    (found,) = json.loads(report.read_bytes())["runs"]
    return _of_tags(found)


def of_aiperf(door: Door) -> Figures:
    # Of a path aiperf 0.13 makes the name of a hub's model.
    kept = door.work / "hub" / f"models--{NAME.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0")
    (kept / "snapshots").mkdir()
    (kept / "snapshots" / "0").symlink_to(DEMO)
    door.run(
        *(installed("aiperf_load", "aiperf"), "profile", "--model", "demo", "--tokenizer", NAME),
        *("--use-server-token-count", "--url", f"http://{door.address}", "--endpoint-type", "chat"),
        *("--streaming", "--concurrency", str(door.level), "--request-count", str(door.requests)),
        *("--warmup-request-count", str(door.level), "--isl", "64", "--osl", str(TOKENS)),
        *("--random-seed", "1", "--ui-type", "none", "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(door.work), "--no-gpu-telemetry", "--no-server-metrics"),
        HF_HUB_CACHE=str(door.work / "hub"),
    )
    # The phases have files of their own, of the same name.
    return _of_tags(json.loads((door.work / "profile_export_aiperf.json").read_bytes()))


def _of_tags(found: Mapping[str, Mapping[str, float]]) -> Figures:
    assert found["output_sequence_length"]["avg"] == TOKENS
    return {
        "ttft": found["time_to_first_token"]["p50"],
        "itl": found["inter_token_latency"]["p50"],
        "requests": found["request_throughput"]["avg"],
        "tokens": found["output_token_throughput"]["avg"],
    }


def of_guidellm(door: Door) -> Figures:
    report = door.work / "report.json"
    door.run(
        *(installed("guidellm_load", "guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target=http://{door.address},model=demo"),
        *("--tokenizer", f"kind=hf_auto,model={DEMO}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}"),
        *("--profile", json.dumps({"kind": "concurrent", "streams": [door.level]})),
        *("--constraint", f"kind=max_requests,count={door.requests}"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_bytes())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["errored"] == 0
    return {
        "ttft": metrics["time_to_first_token_ms"]["successful"]["median"],
        "itl": metrics["inter_token_latency_ms"]["successful"]["median"],
        "requests": metrics["requests_per_second"]["successful"]["mean"],
        "tokens": metrics["output_tokens_per_second"]["successful"]["mean"],
    }


TOOLS: Mapping[str, Callable[[Door], Figures]] = {
    "trtmesh bench": of_trtmesh,
    "aiperf": of_aiperf,
    "guidellm": of_guidellm,
}


def installed(client: str, program: str) -> str:
    """A program of the environment that `make openai-clients` makes as well."""
    (own,) = (each for each in CLIENTS if each.program == client)
    assert isinstance(own, Python)
    return str(python_environment(KEPT / client, own.requirements).with_name(program))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    slow = {"TRTMESH_ENGINE_SIMULATED_TIMING_STEP_MS": str(STEP_MS), EXECUTED: "1"}
    with running_stack("--port", "0", env=slow) as stack:
        stack.wait_ready()
        yield str(json.loads(stack.wait_for('"event": "ready"'))["http"])


@pytest.mark.parametrize("level", LEVELS)
def test_the_tools_agree(level: int, address: str, tmp_path: Path) -> None:
    found: dict[str, list[Figures]] = {name: [] for name in TOOLS}
    for turn in range(ROUNDS):
        for name, measured in TOOLS.items():
            work = tmp_path / f"{name} {turn}"
            work.mkdir()
            found[name].append(measured(Door(address, level, work)))
    medians = {
        name: {figure: median(each[figure] for each in turns) for figure in FIGURES}
        for name, turns in found.items()
    }
    print(f"\n| {level} at a time | {' | '.join(TOOLS)} |\n|---|---|---|---|")
    for figure, title in FIGURES.items():
        print(f"| {title} | {' | '.join(f'{medians[name][figure]:.2f}' for name in TOOLS)} |")
    verdicts = [*judged(level, medians)]
    print("\n".join(verdicts))
    assert not [line for line in verdicts if line.startswith("fail")]


def judged(level: int, medians: Mapping[str, Figures]) -> Iterator[str]:
    """A line for each figure of each other tool: `pass` or `fail`, and by how much it differs from ours."""
    (name, own), *others = medians.items()
    for other, theirs in others:
        for figure, title in FIGURES.items():
            is_time = title.endswith("ms")
            apart = theirs[figure] - own[figure]
            if is_time:
                passes, shown = abs(apart) <= MOST_MS, f"{apart:+.2f} ms of {MOST_MS:g}"
            else:
                share = apart / own[figure]
                passes, shown = abs(share) <= MOST_SHARE, f"{share:+.2%} of {MOST_SHARE:.0%}"
            verdict = "pass" if passes else "fail"
            yield f"{verdict} {level} at a time, {title}: {other} is {shown} from {name}"
