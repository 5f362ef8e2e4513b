"""`bench core`, `identity` and `perf`: the tables of upstream's scripts."""

from __future__ import annotations

import csv
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.commands import Stack, running, running_stack, trtmesh
from process_constants import constants
from tokenizers import Tokenizer
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Header, Load, Run
from trtmesh.tools.bench.upstream.prompts import of_dataset, of_histograms, of_normal_lengths
from trtmesh.tools.bench.upstream.statistics import boxed, figures_of

BRIEF = constants(warmup_tokens=3)
"""A brief warm-up."""
DEMO = Path(__file__).parents[3] / "models" / "demo"


def run_of(*latencies_s: float, tokens: int = 4) -> Run:
    """Requests sent a second after the other."""
    answers = tuple(
        Answer(
            *(number, 0, f"r{number}", number / 2, float(number), number + latency),
            AnswerOutcome.OK,
            tokens=(tokens,),
            output_tokens=tokens,
        )
        for number, latency in enumerate(latencies_s)
    )
    return Run(Header("triton://x:1", "triton", Load("closed"), "", 0), answers)


def test_figures_are_upstreams() -> None:
    found = figures_of(run_of(*([0.5] * 9), 2.0), dict.fromkeys(range(10), 7))
    assert found == pytest.approx(
        {
            # From the first start to the last end: 11 s.
            "Requests/Sec": 10 / 11,
            "OP tokens/sec": 40 / 11,
            "Avg. latency (ms)": 650,
            "P99 latency (ms)": 2000,
            # The ninth of ten, not between it and the tenth.
            "P90 latency (ms)": 500,
            "Avg. IP tokens per request": 7,
            "Avg. OP tokens per request": 4,
            "Avg. InFlight requests": 6.5 / 11,
            "Total latency (ms)": 11_000,
            "Total requests": 10,
        }
    )
    assert figures_of(Run(run_of().header, ()), {}) == {}


def test_table_is_drawn_as_upstream_draws_it() -> None:
    assert boxed({"Requests/Sec": 21.768, "Total requests": 13}).splitlines() == [
        "+----------------+-------+",
        "|      Stat      | Value |",
        "+----------------+-------+",
        "|  Requests/Sec  | 21.77 |",
        "| Total requests | 13.00 |",
        "+----------------+-------+",
    ]


def dataset(path: Path) -> Path:
    long = {"input": "word " * 500, "instruction": "do", "output": "x"}
    short = {"input": "def load(path):", "instruction": "write it", "output": "a b c d"}
    path.write_text(json.dumps([short, long, short | {"output": "a"}]))
    return path


def test_prompts_of_a_dataset_are_short_enough(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    plans = of_dataset(dataset(tmp_path / "d.json"), tokenizer, 100, 10, 1.3)
    prompts = [plan.prompts[0] for plan in plans]
    assert tokenizer.decode(prompts[0].ids) == "def load(path): write it"
    # Four words and one, by 1.3 tokens each.
    assert [(prompt.index, prompt.max_tokens) for prompt in prompts] == [(0, 5), (1, 1)]
    assert len(of_dataset(tmp_path / "d.json", tokenizer, 100, 1, 1.3)) == 1
    (tmp_path / "d.json").write_text('[{"input": "a", "output": "b"}]')
    with pytest.raises(InvalidRequest, match=r"d\.json: \[0\].*instruction"):
        of_dataset(tmp_path / "d.json", tokenizer, 100, 1, 1.3)


def test_random_prompts_have_the_asked_lengths() -> None:
    plans = of_normal_lengths(2000, 120, (100, 10), (20, 0), 50)
    lengths = [len(plan.prompts[0].ids) for plan in plans]
    assert max(lengths) <= 120
    # Two deviations above the mean are left out.
    assert 0.96 < len(plans) / 2000 < 0.99
    assert sum(lengths) / len(lengths) == pytest.approx(100, abs=2)
    assert {plan.prompts[0].max_tokens for plan in plans} == {20}
    assert {token for plan in plans for token in plan.prompts[0].ids} == {*range(1, 51)}
    assert of_normal_lengths(2000, 120, (100, 10), (20, 0), 50) == plans


def test_histogram_has_its_frequencies() -> None:
    plans = of_histograms("example", 300, 50)
    assert len(plans) == min(220 + 225 + 150 + 150 + 140, 76 + 210 + 174 + 130 + 152)
    lengths = [len(plan.prompts[0].ids) for plan in plans]
    assert min(lengths) >= 151
    assert max(lengths) <= 275
    assert all(len(plan.prompts[0].ids) <= 200 for plan in of_histograms("example", 200, 50))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack("--port", "0") as stack:
        stack.wait_ready()
        yield stack


def figures(printed: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in re.findall(r"\|\s+(.+?)\s+\|\s+([\d.]+)\s+\|", printed)
    }


def test_core_measures_a_model_of_token_ids(stack: Stack, tmp_path: Path) -> None:
    table = tmp_path / "stats.csv"
    asked = ("bench", "core", "-u", stack.wait_ready(), "--max-input-len", "60")
    lengths = (
        "--input-mean",
        "30",
        "--input-stdev",
        "0",
        "--output-mean",
        "9",
        "--output-stdev",
        "0",
    )
    flags = ("token-norm-dist", *lengths, "--num-requests", "25", "--op-stats-csv", str(table))
    for decoupled in ((), ("--decoupled",)):
        done = trtmesh(*asked, *flags, *decoupled, *BRIEF)
        assert done.returncode == 0, done.stderr
        found = figures(done.stdout)
        assert found["Total requests"] == 25
        assert found["Avg. IP tokens per request"] == 30
        assert found["Avg. OP tokens per request"] == 9
        assert (
            0
            < found["Avg. latency (ms)"]
            <= found["P99 latency (ms)"]
            <= found["Total latency (ms)"]
        )
        assert found["Requests/Sec"] * 9 == pytest.approx(found["OP tokens/sec"], rel=0.01)
    with table.open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["Total requests"] for row in rows] == ["25", "25"]


def test_identity_measures_a_dataset(stack: Stack, tmp_path: Path) -> None:
    asked = ("bench", "identity", "-u", stack.wait_ready(), "--max_input_len", "60")
    done = trtmesh(
        *asked, "--dataset", str(dataset(tmp_path / "d.json")), "--tokenizer_dir", str(DEMO), *BRIEF
    )
    assert done.returncode == 0, done.stderr
    assert "Start benchmarking on 2 prompts" in done.stdout
    assert "Total request latencies" in done.stdout
    assert figures(done.stdout)["Avg. OP tokens per request"] == 3


def test_perf_fills_a_matrix(stack: Stack, tmp_path: Path) -> None:
    table = tmp_path / "matrix.csv"
    asked = (
        "bench",
        "perf",
        f"grpc://{stack.wait_ready()}",
        "--input-len",
        "5,20",
        "--output-len",
        "3",
    )
    flags = ("--batch-size", "1,2", "--rounds", "3", "--csv", str(table), "--tokenizer", str(DEMO))
    done = trtmesh(*asked, *flags, *BRIEF)
    assert done.returncode == 0, done.stderr
    with table.open() as file:
        rows = [*csv.DictReader(file)]
    names = ("batch", "input", "output", "Total requests", "Avg. IP tokens per request")
    assert [tuple(int(float(row[name])) for name in names) for row in rows] == [
        (1, 5, 3, 3, 5),
        (1, 20, 3, 3, 20),
        (2, 5, 3, 6, 5),
        (2, 20, 3, 6, 20),
    ]


@pytest.mark.parametrize(
    ("command", "sign"),
    [
        (("core", "token-norm-dist", "--max-input-len", "60", "--input-mean", "30"), "Avg."),
        (("perf", "--batch-size", "1,2", "--rounds", "400", "--output-len", "9"), "batch"),
    ],
)
def test_interrupt_leaves_the_figures_so_far(
    command: tuple[str, ...], sign: str, stack: Stack
) -> None:
    at = ("-u", stack.wait_ready(), "-c", "2") if command[0] == "core" else ()
    target = () if at else (f"grpc://{stack.wait_ready()}", "--tokenizer", str(DEMO))
    with running("bench", command[0], *target, *command[1:], *at, *BRIEF) as started:
        started.wait_until(
            lambda: re.search(r" [1-9]\d* of \d+ ended", "".join(started.err)), "answers"
        )
        started.signal(signal.SIGINT)
        assert started.wait() == 130
    assert sign in "".join(started.out)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("core", "dataset", "--max-input-len", "9"), "needs --dataset and --tokenizer-dir"),
        (("core", "token-norm-dist"), "--max-input-len must be given"),
        (("core", "token-norm-dist", "--max-input-len", "9", "-i", "http"), "give -i grpc"),
        (("core", "token-from-histogram", "--max-input-len", "9", "--histogram-key", "x"), "example"),
        (("core", "token-norm-dist", "--max-input-len", "9"), "larger --max-input-len"),
        (("perf", "grpc://x:1", "--batch-size", "0"), "--batch-size is '0'"),
        (("serve", "grpc://x:1", "--stack", "y:1"), "--stack is for --disrupt"),
        (("serve", "grpc://x:1", "--disrupt", "kill"), "--disrupt is 'kill'"),
    ],
)  # fmt: skip
def test_wrong_options_say_what_to_do(arguments: tuple[str, ...], problem: str) -> None:
    done = trtmesh("bench", *arguments)
    assert done.returncode in (1, 2)
    assert problem in done.stderr, done.stderr
