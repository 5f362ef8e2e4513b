"""`trtmesh bench serve` against a simulated stack."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from cli.bench.runs import HEADER
from cli.bench.runs import answer as known
from cli.commands import Stack, running, running_stack, trtmesh
from e2e.mesh import DEMO
from trtmesh.chassis.errors import Unavailable
from trtmesh.cli.app import app
from trtmesh.tools.bench import serving
from trtmesh.tools.bench.echo import ClientTooSlow, check_client
from trtmesh.tools.bench.measuring import server_count
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Load, Run, RunEnd
from trtmesh.tools.bench.report import ReportOptions
from trtmesh.tools.bench.run_file import read_runs
from trtmesh.tools.bench.serving import report
from trtmesh.tools.bench.targets.target import Connecting, Url
from trtmesh.tools.bench.workloads.words import load_tokenizer
from typer.testing import CliRunner

WORKLOAD = (
    *("--requests", "10", "--input-tokens", "5..40", "--output-tokens", "1..8"),
    *("--tokenizer", str(DEMO), "--seed", "7"),
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack("--port", "0") as stack:
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="module")
def slow_target() -> Iterator[str]:
    """A router whose requests last for as long as the test looks at them."""
    slow = {"TRTMESH_ENGINE_SIMULATED_TIMING_STEP_MS": "50"}
    with running_stack("--port", "0", env=slow) as stack:
        yield f"grpc://{stack.wait_ready()}"


@pytest.fixture(scope="module")
def http(stack: Stack) -> str:
    ready = json.loads(stack.wait_for('"event": "ready"'))
    return str(ready["http"])


def served(target: str, record: Path, *flags: str) -> Run:
    command = trtmesh("bench", "serve", target, *WORKLOAD, "--record", str(record), *flags)
    assert command.returncode == 0, command.stderr
    (found,) = read_runs(record)
    assert f"{len(found.answers)} sent = {len(found.answers)} ok" in command.stderr
    return found


def by_index(found: Run) -> Mapping[int, Answer]:
    assert found.end is not None
    assert found.end.unsent == 0
    return {answer.index: answer for answer in found.answers}


@pytest.fixture(scope="module")
def alone(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Answer]:
    """The native answers of one request at a time."""
    record = tmp_path_factory.mktemp("alone") / "record.jsonl"
    flags = ("--concurrency", "1", "--no-echo")
    answers = by_index(served(f"grpc://{stack.wait_ready()}", record, *flags))
    assert len({answer.text_sha256 for answer in answers.values()}) > 5
    return answers


TARGETS = {
    "grpc": ("--concurrency", "8"),
    "grpc, batches": ("--concurrency", "2", "--batch", "5"),
    "grpc, processes": ("--concurrency", "8", "--processes", "2", "--connections", "2"),
    "triton": ("--rate", "10", "--arrivals", "constant"),
    "triton+unary": ("--ramp", "5..15@1s"),
    "triton+http": ("--rate", "15", "--arrivals", "gamma", "--burstiness", "0.3"),
    "openai": ("--concurrency", "8"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_every_protocol_and_load_gives_equal_tokens(
    name: str, stack: Stack, http: str, alone: Mapping[int, Answer], tmp_path: Path
) -> None:
    protocol = name.partition(",")[0]
    at = http if protocol in ("triton+http", "openai") else stack.wait_ready()
    path = "/v1/completions" if protocol == "openai" else ""
    # The client is measured with every protocol.
    flags = TARGETS[name] if name == protocol else (*TARGETS[name], "--no-echo")
    found = served(f"{protocol}://{at}{path}", tmp_path / "record.jsonl", *flags)
    if echo := found.header.echo:
        assert echo.tokens_per_s > 0
        for p50, p90, p99 in (echo.added_first_ms, echo.added_gap_ms):
            assert 0 <= p50 <= p90 <= p99
    assert bool(echo) is (name == protocol)
    answers = by_index(found)
    assert answers.keys() == alone.keys()
    for index, answer in answers.items():
        assert answer.text_sha256 == alone[index].text_sha256
        assert answer.output_tokens == alone[index].output_tokens
        assert answer.prompt_tokens == alone[index].prompt_tokens
        if protocol == "grpc":
            assert answer.ids_sha256 == alone[index].ids_sha256
            assert (answer.lost, answer.doubled) == (0, 0)


def test_prompts_that_the_server_counts_have_their_length(stack: Stack, tmp_path: Path) -> None:
    record, target = tmp_path / "record.jsonl", f"grpc://{stack.wait_ready()}"
    lengths = ("--requests", "2", "--input-tokens", "40", "--output-tokens", "2")

    ended = trtmesh("bench", "serve", target, *lengths, "--no-echo", "--record", str(record))

    assert ended.returncode == 0, ended.stderr
    assert [answer.prompt_tokens for answer in read_runs(record)[0].answers] == [40, 40]


@pytest.mark.parametrize("protocol", ["triton", "triton+unary"])
async def test_server_counts_prompts_by_its_tokenizer(protocol: str, stack: Stack) -> None:
    texts = ["x", "def load_json(path):"]
    tokenizer = load_tokenizer(DEMO, "--tokenizer")

    count = await server_count(Connecting(Url.parse(f"{protocol}://{stack.wait_ready()}")))

    assert count
    assert await count(texts) == [len(tokenizer.encode(text).ids) for text in texts]


@pytest.fixture(scope="module")
def secure_stack() -> Iterator[Stack]:
    with running_stack("--port", "0", "--tls") as stack:
        stack.wait_ready()
        yield stack


@pytest.mark.parametrize(("protocol", "processes"), [("grpcs", 2), ("triton+https", 1)])
def test_secure_targets_are_checked(
    protocol: str, processes: int, secure_stack: Stack, tmp_path: Path
) -> None:
    ready = json.loads(secure_stack.wait_for('"event": "ready"'))
    at = ready["http"] if protocol in ("triton+https", "openais") else ready["router"]
    flags = ("--processes", str(processes), "--ca", ready["ca"])
    found = served(f"{protocol}://{at}", tmp_path / "record.jsonl", *flags, "--no-echo")
    assert found.header.target == f"{protocol}://{at}"
    refused = trtmesh("bench", "serve", f"{protocol}://{at}", *WORKLOAD, "--no-echo")
    assert refused.returncode == 1
    assert "certificate" in refused.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupt_reports_the_answers_so_far(
    processes: int, slow_target: str, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    many = ("--requests", "400", "--output-tokens", "16", "--input-tokens", "8", "--no-echo")
    with running(
        *("bench", "serve", slow_target, *many, "--tokenizer", str(DEMO), "--concurrency", "4"),
        *("--processes", str(processes), "--record", str(record)),
    ) as command:
        command.wait_until(lambda: _answers(record) >= 3, "answers")
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.left_nothing()
    (found,) = read_runs(record)
    assert found.end is not None
    assert found.end.interrupted
    counts = {outcome: found.count(outcome) for outcome in AnswerOutcome}
    assert counts[AnswerOutcome.OK] >= 3
    assert 1 <= counts[AnswerOutcome.CANCELLED] <= 4
    assert sum(counts.values()) == len(found.answers) == 400 - found.end.unsent
    told = "".join(command.err)
    assert f"{len(found.answers)} sent = {counts[AnswerOutcome.OK]} ok" in told
    assert f"{found.end.unsent} prompts were not sent before Ctrl-C" in told
    assert "TTFT" in "".join(command.out)


@pytest.mark.parametrize(
    ("verb", "moment"),
    [("serve", "of the echo"), ("serve", "of the first token"), ("find", "of the first token")],
)
def test_interrupt_before_the_run_leaves_nothing(verb: str, moment: str, tmp_path: Path) -> None:
    # What listens never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"openai://127.0.0.1:{silent.getsockname()[1]}"
        own = ("--tokenizer", str(DEMO), "--model", "demo", "--record", str(tmp_path / "record"))
        echo = () if moment == "of the echo" else ("--no-echo",)
        slo = ("--slo", "ttft:200") if verb == "find" else ()
        with running("bench", verb, target, *own, *echo, *slo) as command, ExitStack() as held:
            if echo:
                connection, _ = silent.accept()
                held.enter_context(connection)
            else:
                while not command.descendants():
                    assert command.popen.poll() is None
                    time.sleep(0.01)
            command.signal(signal.SIGINT)
            assert command.wait() == 130
            assert command.left_nothing()
        assert "Traceback" not in "".join(command.err)


@pytest.mark.parametrize(
    ("end", "status"), [(asyncio.CancelledError(), 130), (Unavailable("it has left"), 1)]
)
def test_end_between_two_runs_leaves_the_first(
    end: BaseException, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a server that leaves."""

    async def measured(_setup: object, load: Load, *_: object) -> Run:
        if load.concurrency != 1:
            raise end
        return Run(replace(HEADER, load=load), (known(0, [0.1, 0.2]),), RunEnd(1.0))

    monkeypatch.setattr(serving, "measure", measured)
    page = tmp_path / "page.html"
    own = ("--tokenizer", str(DEMO), "--requests", "1", "--html", str(page))
    asked = ["bench", "serve", "grpc://127.0.0.1:1", *own, "--concurrency", "1,2,3"]
    command = CliRunner().invoke(app, asked)
    assert command.exit_code == status, command.output
    assert "closed, 1 at a time: 1 sent = 1 ok" in command.stderr
    assert ("it has left; what was measured before follows" in command.stderr) == (status == 1)
    assert "closed, 3 at a time" not in command.stderr
    assert "TTFT" in command.stdout
    assert "closed, 1 at a time" in page.read_text()


def _answers(record: Path) -> int:
    return record.read_bytes().count(b'"kind":"answer"') if record.exists() else 0


def test_end_of_the_duration_is_said(slow_target: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    command = trtmesh(
        *("bench", "serve", slow_target, "--requests", "50", "--no-echo"),
        *("--tokenizer", str(DEMO), "--output-tokens", "200", "--concurrency", "2,3"),
        *("--duration", "1", "--record", str(record)),
    )
    assert command.returncode == 0, command.stderr
    for found, at_once in zip(read_runs(record), (2, 3), strict=True):
        assert found.end is not None
        assert found.header.load.concurrency == at_once
        assert 1 <= found.count(AnswerOutcome.CANCELLED) <= at_once
        assert len(found.answers) == 50 - found.end.unsent
        assert f"{found.end.unsent} prompts were not sent before the end" in command.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("http://a",), 2, "must be grpc://"),
        (("grpc://a", "--rate", "1", "--concurrency", "2"), 2, "give one of --concurrency"),
        (("grpc://a", "--rate", "0"), 2, "--rate has '0'"),
        (("grpc://a", "--concurrency", "1.5"), 2, "whole numbers"),
        (("grpc://a", "--ramp", "1"), 2, "--ramp is '1'"),
        (("grpc://a", "--arrivals", "pareto"), 2, "--arrivals is 'pareto'"),
        (("openai://a", "--batch", "2"), 2, "--batch is for grpc"),
        (("grpc://127.0.0.1:9", "--no-echo", "--tokenizer", str(DEMO)), 1, "127.0.0.1:9"),
        (("openai://127.0.0.1:9", "--no-echo", "--tokenizer", str(DEMO)), 1, "127.0.0.1:9"),
    ],
)
def test_wrong_commands_say_what_is_wrong(
    arguments: tuple[str, ...], status: int, says: str
) -> None:
    command = trtmesh("bench", "serve", *arguments)
    assert command.returncode == status, command.stderr
    assert says in command.stderr
    assert "Traceback" not in command.stderr


def test_commands_are_known_without_the_extra() -> None:
    """Which then say what to install, in place of an ImportError."""
    blocked = "sys.modules['numpy'] = sys.modules['jinja2'] = None"
    modules = ("serve", "find", "report", "compare", "upstream.perf")
    imports = "; ".join(f"import trtmesh.tools.bench.{module}" for module in modules)

    subprocess.run([sys.executable, "-c", f"import sys; {blocked}; {imports}"], check=True)


def test_figures_of_a_busy_client_are_refused() -> None:
    busy = Run(HEADER, (), RunEnd(9.0, client_busy=0.95))
    with pytest.raises(ClientTooSlow, match="computed 95% of the time"):
        check_client(busy)
    check_client(replace(busy, end=RunEnd(9.0, client_busy=0.85)))
    check_client(replace(busy, end=None))


def test_sweep_reports_the_runs_that_were_the_servers(capfd: pytest.CaptureFixture[str]) -> None:
    fit = Run(HEADER, (known(0, [0.1, 0.2]),), RunEnd(1.0))
    busy = replace(
        fit,
        header=replace(HEADER, load=Load("closed", concurrency=999)),
        end=RunEnd(1.0, client_busy=0.97),
    )
    assert report([fit, busy], ReportOptions(), checks=True) == 1
    out, err = capfd.readouterr()
    assert "999 at a time" not in out
    assert "under closed, 999 at a time the client itself computed 97% of the time" in err
    assert report([fit, busy], ReportOptions(), checks=False) == 0
    assert "999 at a time" in capfd.readouterr().out
