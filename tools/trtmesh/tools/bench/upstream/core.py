"""`trtmesh bench core` and `identity`: the numbers of upstream's benchmark_core_model.py and identity_test.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.errors import InvalidRequest, SettingsError
from trtmesh.cli.option_groups import grouped, option
from trtmesh.cli.output import put, say_error
from trtmesh.cli.session import FAILED, OK, run
from trtmesh.cli.tls import CONNECTION
from trtmesh.tools.bench.driver import MOST_OPEN
from trtmesh.tools.bench.measuring import Setup, Watch, measure
from trtmesh.tools.bench.record import Load, Plan, Run
from trtmesh.tools.bench.targets.target import Connecting, Url
from trtmesh.tools.bench.upstream.prompts import (
    HISTOGRAMS,
    of_dataset,
    of_histograms,
    of_normal_lengths,
)
from trtmesh.tools.bench.upstream.statistics import (
    Statistics,
    append_csv,
    boxed,
    statistics_of,
)
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


class CoreProtocol(StrEnum):
    """What upstream's scripts speak."""

    HTTP = "http"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Flags of both scripts."""

    url: str = option(
        "Server, host:port.", "-u", "--url", default="localhost:8001", panel=CONNECTION
    )
    protocol: CoreProtocol = option(
        "Only grpc is measured.", "-i", "--protocol", default=CoreProtocol.GRPC
    )
    max_input_len: int = option(
        "Longer prompts are left out.", "--max-input-len", "--max_input_len", default=0, min=0
    )
    model: str = option("Model of token ids.", "--tensorrt-llm-model-name", default="tensorrt_llm")
    decoupled: bool = option("Stream the answers.", "--decoupled", default=False)

    def connecting(self) -> Connecting:
        """Raises SettingsError."""
        if self.protocol is not CoreProtocol.GRPC:
            raise SettingsError(
                "is http, which is not measured; give -i grpc", setting="--protocol"
            )
        if not self.max_input_len:
            raise SettingsError("must be given", setting="--max-input-len")
        scheme = "triton" if self.decoupled else "triton+unary"
        return Connecting(Url.parse(f"{scheme}://{self.url}"), self.model)


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Prompts of a file."""

    dataset: Path | None = option("JSON list of objects with input, instruction and output.")
    tokenizer_dir: Path | None = option(
        "Directory with the tokenizer.json.", "--tokenizer-dir", "--tokenizer_dir"
    )
    op_tokens_per_word: float = option(
        "Output tokens for a word of `output`.", default=1.3, min=0.01
    )

    def plans(self, max_input_len: int, requests: int) -> list[Plan]:
        if self.dataset is None or self.tokenizer_dir is None:
            raise SettingsError("a dataset needs --dataset and --tokenizer-dir")
        tokenizer = load_tokenizer(self.tokenizer_dir, "--tokenizer-dir")
        return of_dataset(self.dataset, tokenizer, max_input_len, requests, self.op_tokens_per_word)


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Lengths of random prompts."""

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

    def normal(self, requests: int, max_input_len: int) -> list[Plan]:
        inputs = self.input_mean, self.input_stdev
        outputs = self.output_mean, self.output_stdev
        return of_normal_lengths(requests, max_input_len, inputs, outputs, self.highest_id)

    def histogram(self, max_input_len: int) -> list[Plan]:
        if self.histogram_key not in HISTOGRAMS:
            raise SettingsError(
                f"is {self.histogram_key!r} but must be one of {', '.join(HISTOGRAMS)}",
                setting="--histogram-key",
            )
        return of_histograms(self.histogram_key, max_input_len, self.highest_id)


@dataclass(frozen=True, slots=True)
class CoreLoadOptions:
    """When requests are sent."""

    concurrency: int | None = option(
        "Most requests at a time; by default all, as upstream has it over gRPC.",
        "-c",
        "--concurrency",
        min=1,
    )
    request_rate: float = option("Requests per second; -1 sends all at once.", default=-1.0)
    time_delay_dist: Spacing = option(
        "Times between requests at a rate.", default=Spacing.EXPONENTIAL
    )

    def load(self) -> Load:
        if self.request_rate <= 0:
            return Load("closed", concurrency=self.concurrency or MOST_OPEN)
        kind = "constant" if self.time_delay_dist is Spacing.CONSTANT else "poisson"
        return Load(kind, concurrency=self.concurrency, rate=self.request_rate)


@grouped
def core(
    workload: Annotated[CoreWorkload, typer.Argument(help="Where prompts come from.")],
    *,
    server: CoreOptions,
    load: CoreLoadOptions,
    dataset: DatasetOptions,
    lengths: LengthOptions,
    num_requests: Annotated[int, typer.Option(min=1, help="Most requests.")] = 30_000,
    op_stats_csv: Annotated[Path | None, typer.Option(help="Append the figures here.")] = None,
) -> None:
    """Measure a model of token ids as upstream's benchmark_core_model.py does: its flags, its load, its table.

    Its prompts and its definitions too, but for random ids, which here are in every vocabulary, and the requests in
    flight, which upstream leaves at 0. Ten requests warm up.

    Exit status: 0 done, 1 requests failed, 2 wrong usage.
    """

    def plans() -> list[Plan]:
        match workload:
            case CoreWorkload.DATASET:
                return dataset.plans(server.max_input_len, num_requests)
            case CoreWorkload.NORMAL:
                return lengths.normal(num_requests, server.max_input_len)
            case CoreWorkload.HISTOGRAM:
                return lengths.histogram(server.max_input_len)[:num_requests]

    run(_core(server, load.load(), plans, workload, op_stats_csv))


@grouped
def identity(
    *,
    server: CoreOptions,
    dataset: DatasetOptions,
    concurrency: Annotated[
        int, typer.Option("-c", "--concurrency", min=1, help="At a time.")
    ] = 128,
) -> None:
    """Measure a model of token ids as upstream's identity_test.py does: a dataset at once, and its total latencies.

    Exit status: 0 done, 1 requests failed, 2 wrong usage.
    """
    plans = partial(dataset.plans, server.max_input_len, MOST_REQUESTS)
    run(_core(server, Load("closed", concurrency=concurrency), plans, "dataset", None))


async def _core(
    server: CoreOptions,
    load: Load,
    plans: Callable[[], Sequence[Plan]],
    workload: str,
    csv: Path | None,
) -> int:
    found = await measured(server.connecting(), load, plans(), workload)
    if isinstance(found, str):
        say_error(f"Failed receiving responses: {found}")
        return FAILED
    put(f"[INFO] Total Latency: {found.total_s * 1000:.3f} ms")
    put(f"[INFO] Total request latencies: {sum(found.latencies_ms):.3f} ms")
    put(boxed(found.rows()))
    if csv:
        append_csv(csv, [found.rows()])
    return OK


async def measured(
    connecting: Connecting, load: Load, plans: Sequence[Plan], workload: str
) -> Statistics | str:
    """After a warm-up of requests like the first. Returns why if a request failed."""
    if not plans:
        raise InvalidRequest("no prompt is short enough; give a larger --max-input-len")
    (first,) = plans[0].prompts
    warming = replace(first, index=-1, max_tokens=WARMUP_TOKENS)
    setup = Setup(connecting=connecting, workload=workload, warmup=WARMUP)
    put(f"[INFO] Start benchmarking on {len(plans)} prompts.")
    done = await measure(setup, load, [*[Plan((warming,))] * WARMUP, *plans], Watch())
    lengths = {
        prompt.index: len(prompt.ids) for plan in plans for prompt in plan.prompts if prompt.ids
    }
    return _problem(done) or statistics_of(done, lengths) or "no request was answered"


def _problem(done: Run) -> str:
    return next((answer.error for answer in done.answers if not answer.ok), "")
