"""`trtmesh bench core` and `identity`: the numbers of upstream's benchmark_core_model.py and identity_test.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.errors import InvalidRequest, SettingsError
from trtmesh.cli.option_groups import grouped, option
from trtmesh.cli.output import put, say_error
from trtmesh.cli.session import FAILED, INTERRUPTED, OK, run
from trtmesh.cli.tls import CONNECTION
from trtmesh.tools.bench.driver import MOST_OPEN
from trtmesh.tools.bench.measuring import Setup, Watch, measure
from trtmesh.tools.bench.options import ClientOptions
from trtmesh.tools.bench.record import AnswerOutcome, Load, Plan
from trtmesh.tools.bench.targets.target import Connecting, Url
from trtmesh.tools.bench.upstream.prompts import (
    HISTOGRAMS,
    of_dataset,
    of_histograms,
    of_normal_lengths,
)
from trtmesh.tools.bench.upstream.statistics import Figures, append_csv, boxed, figures_of
from trtmesh.tools.bench.workloads.words import load_tokenizer

WARMUP, WARMUP_TOKENS = 10, 100
MOST_REQUESTS = 10**6


class CoreWorkload(StrEnum):
    """The subcommands of benchmark_core_model.py."""

    DATASET = "dataset"
    NORMAL = "token-norm-dist"
    HISTOGRAM = "token-from-histogram"


class Spacing(StrEnum):
    """The times between requests at a rate."""

    CONSTANT = "constant"
    EXPONENTIAL = "exponential_dist"


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Flags of both scripts."""

    url: str = option(
        "Server, host:port.", "-u", "--url", default="localhost:8001", panel=CONNECTION
    )
    protocol: str = option("Only grpc is measured.", "-i", "--protocol", default="grpc")
    max_input_len: int = option(
        "Longer prompts are left out.", "--max-input-len", "--max_input_len", default=0, min=0
    )
    model: str = option("Model of token ids.", "--tensorrt-llm-model-name", default="tensorrt_llm")
    decoupled: bool = option("Stream the answers.", "--decoupled", default=False)
    dataset: Path | None = option("JSON list of objects with input, instruction and output.")
    tokenizer_dir: Path | None = option(
        "Directory with the tokenizer.json.", "--tokenizer-dir", "--tokenizer_dir"
    )
    op_tokens_per_word: float = option(
        "Output tokens for a word of `output`.", default=1.3, min=0.01
    )

    def connecting(self) -> Connecting:
        """Raises SettingsError."""
        if self.protocol != "grpc":
            problem = f"is {self.protocol}, which is not measured; give -i grpc"
            raise SettingsError(problem, setting="--protocol")
        if not self.max_input_len:
            raise SettingsError("must be given", setting="--max-input-len")
        scheme = "triton" if self.decoupled else "triton+unary"
        return Connecting(Url.parse(f"{scheme}://{self.url}"), self.model)

    def of_dataset(self, requests: int) -> list[Plan]:
        if self.dataset is None or self.tokenizer_dir is None:
            raise SettingsError("a dataset needs --dataset and --tokenizer-dir")
        tokenizer = load_tokenizer(self.tokenizer_dir, "--tokenizer-dir")
        words = self.op_tokens_per_word
        return of_dataset(self.dataset, tokenizer, self.max_input_len, requests, words)


@dataclass(frozen=True, slots=True)
class CoreLoadOptions:
    """What is sent and when, by the flags of benchmark_core_model.py."""

    num_requests: int = option("Most requests.", default=30_000, min=1)
    input_mean: int = option("Of token-norm-dist.", default=128, min=1)
    input_stdev: int = option("Of token-norm-dist.", default=0, min=0)
    output_mean: int = option("Of token-norm-dist.", default=32, min=1)
    output_stdev: int = option("Of token-norm-dist.", default=0, min=0)
    histogram_key: str = option(
        f"Of token-from-histogram: {', '.join(HISTOGRAMS)}.", default=next(iter(HISTOGRAMS))
    )
    highest_id: int = option(
        "Largest id of random prompts, which every vocabulary has.", default=1000, min=1
    )
    most_open: int | None = option(
        "Most requests at a time; by default all, as upstream has it over gRPC.",
        *("-c", "--concurrency"),
        min=1,
    )
    request_rate: float = option("Requests per second; -1 sends all at once.", default=-1.0)
    time_delay_dist: Spacing = option(
        "Times between requests at a rate.", default=Spacing.EXPONENTIAL
    )
    op_stats_csv: Path | None = option("Append the figures here.")

    def load(self) -> Load:
        if self.request_rate <= 0:
            return Load("closed", concurrency=self.most_open or MOST_OPEN)
        kind = "constant" if self.time_delay_dist is Spacing.CONSTANT else "poisson"
        return Load(kind, concurrency=self.most_open, rate=self.request_rate)

    def plans(self, workload: CoreWorkload, server: CoreOptions) -> list[Plan]:
        """Raises SettingsError and InvalidRequest."""
        most, longest = self.num_requests, server.max_input_len
        if workload is CoreWorkload.DATASET:
            return server.of_dataset(most)
        if workload is CoreWorkload.NORMAL:
            inputs = self.input_mean, self.input_stdev
            outputs = self.output_mean, self.output_stdev
            return of_normal_lengths(most, longest, inputs, outputs, self.highest_id)
        if self.histogram_key not in HISTOGRAMS:
            problem = f"is {self.histogram_key!r} but must be one of {', '.join(HISTOGRAMS)}"
            raise SettingsError(problem, setting="--histogram-key")
        return of_histograms(self.histogram_key, longest, self.highest_id)[:most]


@grouped
def core(
    workload: Annotated[CoreWorkload, typer.Argument(help="Where prompts come from.")],
    *,
    server: CoreOptions,
    load: CoreLoadOptions,
) -> None:
    """Measure a model of token ids as upstream's benchmark_core_model.py does: its flags, its load, its table.

    Its prompts and its definitions too, but for random ids, which here are in every vocabulary, and the requests in
    flight, which upstream leaves at 0. Ten requests warm up.

    Exit status: 0 done, 1 requests failed, 2 wrong usage, 130 Ctrl-C.
    """

    async def table() -> int:
        own = server.connecting()
        return await _core(
            own, load.load(), load.plans(workload, server), workload, load.op_stats_csv
        )

    run(table())


@grouped
def identity(
    *,
    server: CoreOptions,
    concurrency: Annotated[
        int, typer.Option("-c", "--concurrency", min=1, help="At a time.")
    ] = 128,
) -> None:
    """Measure a model of token ids as upstream's identity_test.py does: a dataset at once, and its total latencies.

    Exit status: 0 done, 1 requests failed, 2 wrong usage, 130 Ctrl-C.
    """

    async def table() -> int:
        own, load = server.connecting(), Load("closed", concurrency=concurrency)
        return await _core(own, load, server.of_dataset(MOST_REQUESTS), "dataset", None)

    run(table())


async def _core(
    connecting: Connecting, load: Load, plans: Sequence[Plan], workload: str, csv: Path | None
) -> int:
    put(f"[INFO] Start benchmarking on {len(plans)} prompts.")
    found, status = await measured(connecting, load, plans, workload)
    if found:
        put(f"[INFO] Total Latency: {found['Total latency (ms)']:.3f} ms")
        latencies = found["Avg. latency (ms)"] * found["Total requests"]
        put(f"[INFO] Total request latencies: {latencies:.3f} ms")
        put(boxed(found))
        if csv:
            append_csv(csv, [found])
    return status


async def measured(
    connecting: Connecting, load: Load, plans: Sequence[Plan], workload: str
) -> tuple[Figures, int]:
    """After a warm-up of requests like the first: the figures, and the exit status. Ctrl-C gives those so far."""
    if not plans:
        raise InvalidRequest("no prompt is short enough; give a larger --max-input-len")
    (first,) = plans[0].prompts
    warming = Plan((replace(first, index=-1, max_tokens=WARMUP_TOKENS),))
    setup = Setup(connecting, workload, ClientOptions(echo=False), warmup=WARMUP)
    try:
        done = await measure(setup, load, [*[warming] * WARMUP, *plans], Watch())
    except asyncio.CancelledError:
        return {}, INTERRUPTED
    lengths = {prompt.index: len(prompt.ids) for plan in plans for prompt in plan.prompts}
    interrupted = done.end is not None and done.end.interrupted
    for answer in done.answers:
        if not answer.ok and not (interrupted and answer.outcome is AnswerOutcome.CANCELLED):
            say_error(f"Failed receiving responses: {answer.error}")
            return {}, FAILED
    return figures_of(done, lengths), INTERRUPTED if interrupted else OK
