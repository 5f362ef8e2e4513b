"""aiperf and guidellm beside `trtmesh bench serve`, against one scripted OpenAI server that knows the truth.

The server notes when each request was read and when each token was written; what a tool reports beyond that is the
tool's own. The three measure in turn, each with its own prompts, and medians of the rounds are shown. `make
bench-agreement` runs it on a quiet machine, prints a table and a line for each figure that says `pass` or `fail`, and
installs both tools below `.openai-clients/`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil
import pytest
from cli.commands import TRTMESH
from e2e.mesh import DEMO
from environments import python_environment
from openai_clients.conftest import KEPT
from openai_clients.test_clients import CLIENTS, QUIET, Python

pytestmark = pytest.mark.clients

GAP_MS, TOKENS = float(os.environ.get("AGREEMENT_GAP_MS", "40")), 64
FIRST_MS = (80.0, 160.0)
"""The first token comes between them after the request, drawn for each, so that requests do not march in step."""
LEVELS = (1, 16, 32)
ROUNDS = int(os.environ.get("AGREEMENT_ROUNDS", "3"))
SECONDS = float(os.environ.get("AGREEMENT_SECONDS", "15"))
"""Turns of each tool, and about how long each of them lasts: few show that everything runs, and measure nothing."""
MOST_MS, MOST_SHARE = 1.0, 0.02
"""A time may be off by the larger."""
RUN_SECONDS = 600.0
NAME = "local/demo"
OK = "HTTP/1.1 200 OK\r\nContent-Type: "

Figures = Mapping[str, float]
FIGURES = {"ttft": "TTFT p50 ms", "itl": "ITL p50 ms", "requests": "requests/s"}


@dataclass
class Seen:
    """A request, by the monotonic clock: when its last byte was read, and when each token was written."""

    came: float
    began_s: float
    """What the machine had computed, in seconds of a core, when it came; then when its answer ended."""
    computed_s: float = 0.0
    written: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """Answers chats with tokens at drawn times. No library stands between the socket and the clock."""

    def __init__(self, seen: list[Seen]) -> None:
        self._seen = seen
        self._received = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        came = time.monotonic()
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if not end or len(body) < int(length[1] if length else 0):
            return
        self._received = b""
        if head.startswith(b"GET"):
            models = json.dumps({"object": "list", "data": [{"id": "demo"}]}).encode()
            self._write(
                f"{OK}application/json\r\nContent-Length: {len(models)}\r\n\r\n".encode() + models
            )
            return
        seen = Seen(came, _computed_s())
        self._seen.append(seen)
        asked = json.loads(body)
        tokens = asked.get("max_completion_tokens") or asked.get("max_tokens") or TOKENS
        task = asyncio.create_task(self._answer(seen, tokens, Random(len(self._seen))))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connection_lost(self, _: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    async def _answer(self, seen: Seen, tokens: int, draw: Random) -> None:
        self._write(f"{OK}text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        # At once, and no token: no client may count it as one.
        self._event({"delta": {"role": "assistant", "content": ""}})
        due = seen.came + draw.uniform(*FIRST_MS) / 1000
        for number in range(tokens):
            await asyncio.sleep(due + number * GAP_MS / 1000 - time.monotonic())
            seen.written.append(time.monotonic())
            self._event({"delta": {"content": " a"}})
        seen.computed_s = _computed_s()
        self._event({"delta": {"content": ""}, "finish_reason": "length"})
        counts = {"prompt_tokens": 64, "completion_tokens": tokens, "total_tokens": 64 + tokens}
        self._event(None, usage=counts)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, choice: Mapping[str, Any] | None, **more: Any) -> None:
        choices = [{"index": 0, "finish_reason": None, **choice}] if choice else []
        common = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
        self._chunk(f"data: {json.dumps({**common, 'choices': choices, **more})}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self._write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _write(self, data: bytes) -> None:
        self._transport.write(data)


def truth(seen: Sequence[Seen], requests: int) -> Figures:
    """Of the last so many whole answers, before which a tool warms up: the figures, how many requests were under way,
    and how many cores computed."""
    whole = [each for each in seen if len(each.written) == TOKENS][-requests:]
    first = min(whole, key=lambda each: each.came)
    last = max(whole, key=lambda each: each.written[-1])
    over_s = last.written[-1] - first.came
    decoded = [each.written[-1] - each.written[0] for each in whole]
    return {
        "ttft": 1000 * median(each.written[0] - each.came for each in whole),
        "itl": 1000 * median(decoded) / (TOKENS - 1),
        "requests": len(whole) / over_s,
        "busy": sum(each.written[-1] - each.came for each in whole) / over_s,
        "cores": (last.computed_s - first.began_s) / over_s,
    }


def _computed_s() -> float:
    now = psutil.cpu_times()
    return sum(now) - now.idle - getattr(now, "iowait", 0.0)


@dataclass(frozen=True)
class Door:
    """What is measured, with so many requests at a time, and where a tool may write."""

    address: str
    level: int
    work: Path

    @property
    def requests(self) -> int:
        """An odd number: of an even one not all tools take the same median."""
        return (self.level * math.ceil(SECONDS * 1000 / GAP_MS / TOKENS) - 1) | 1

    def run(self, program: str, *arguments: str, **variables: str) -> None:
        """Runs a tool in a folder of its own."""
        self.work.mkdir(exist_ok=True)
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
    }


OURS = "trtmesh bench"
TOOLS: Mapping[str, Callable[[Door], Figures]] = {
    OURS: of_trtmesh,
    "aiperf": of_aiperf,
    "guidellm": of_guidellm,
}


def installed(client: str, program: str) -> str:
    """A program of the environment that `make openai-clients` makes as well."""
    (own,) = (each for each in CLIENTS if each.program == client)
    assert isinstance(own, Python)
    return str(python_environment(KEPT / client, own.requirements).with_name(program))


@dataclass(frozen=True)
class Turn:
    """What a tool said, and what was true."""

    told: Figures
    truth: Figures

    def error(self, figure: str) -> float:
        """In ms, or as a share."""
        told, true = self.told[figure], self.truth[figure]
        return told - true if figure != "requests" else told / true - 1


async def measured(tool: Callable[[Door], Figures], level: int, work: Path) -> Turn:
    seen: list[Seen] = []
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(seen), "127.0.0.1", 0
    )
    async with server:
        host, port = server.sockets[0].getsockname()
        door = Door(f"{host}:{port}", level, work)
        told = await asyncio.to_thread(tool, door)
    return Turn(told, truth(seen, door.requests))


@pytest.mark.parametrize("level", LEVELS)
async def test_the_tools_agree_with_the_truth(level: int, tmp_path: Path) -> None:
    found: dict[str, list[Turn]] = {name: [] for name in TOOLS}
    for turn in range(ROUNDS):
        for name, tool in TOOLS.items():
            found[name].append(await measured(tool, level, tmp_path / f"{name} {turn}"))
    print("\n".join(("", *_table(level, found))))
    verdicts = [*judged(level, found)]
    print("\n".join(verdicts))
    assert not [line for line in verdicts if line.startswith("fail") and OURS in line]


def _table(level: int, found: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """What was told and true, and for the truth how many requests were under way and how many cores computed."""
    titles = (f"{title}: told, true, error" for title in FIGURES.values())
    yield f"| {level} at a time | {' | '.join(titles)} | under way | cores |"
    yield "|---" * (len(FIGURES) + 3) + "|"
    for name, turns in found.items():
        told, true = (
            {figure: median(each[figure] for each in side) for figure in side[0]}
            for side in ([turn.told for turn in turns], [turn.truth for turn in turns])
        )
        cells = [f"{told[each]:.2f}, {true[each]:.2f}, {_error(turns, each)}" for each in FIGURES]
        yield f"| {name} | {' | '.join(cells)} | {true['busy']:.2f} | {true['cores']:.2f} |"


def _error(turns: Sequence[Turn], figure: str) -> str:
    error = median(turn.error(figure) for turn in turns)
    return f"{error:+.2%}" if figure == "requests" else f"{error:+.2f}"


def judged(level: int, found: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """A line for each figure of each tool: `pass` or `fail`, and by how much it differs from the truth."""
    for name, turns in found.items():
        for figure, title in FIGURES.items():
            most = MOST_SHARE
            if figure != "requests":
                most = max(MOST_MS, most * median(turn.truth[figure] for turn in turns))
            passes = abs(median(turn.error(figure) for turn in turns)) <= most
            yield f"{'pass' if passes else 'fail'} {level} at a time: {name}, {title}: {_error(turns, figure)}"
