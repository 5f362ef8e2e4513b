"""Measures the torch engine on a GPU, beside what the GPU does at best, transformers, and the way through a mesh.

By shape, through the engine's Backend, counting only steps in which every sequence decodes:
`decode`: tokens a second by the number of sequences. `share` is the time in which the GPU would read the weights and
the KV of a step, at the rate of a copy, over the time of the step.
`prefill`: seconds to the first token of a lone prompt. `share` is that of the rate of a bfloat16 product of 8192 cubed.
`mixed`: a step of 32 sequences with a chunk of a prompt, over the same step alone plus the chunk alone.
`uneven`: 31 sequences of 160 tokens beside one of 8,000, and 32 with as many tokens together.
`traffic`: tokens a second of what people send over those of greedy text in the same run, by rows and mixture: sampling,
penalties, log-probabilities, adapters; `batch_invariant` over the same without, also in milliseconds of lone prompts;
and milliseconds to the first token (p50) of prompts of 128 tokens at once, through the Backend and a mesh, there as
requests of their own and as one request.
`families`: tokens a second of 32 sequences by families of transformers, their share of a copy, and how steps run.
`peers`: transformers' `generate` with a static batch, and its continuous batching, without and with CUDA graphs.
`mesh`: clients, router, tokenizer and engine as processes, over the Backend alone; and the time to the first token of
a lone prompt of 128 tokens. This and `traffic` are of the first shape.
Copy and product are measured in the same run. A part begins no cell after its time or that of the run; `left_out`
names these. `--device cpu --shapes tiny` shows that everything runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from _ceilings import copy_rate, prefill_operations, product_rate, step_bytes
from _engines import Decoded, Prompts, Remote
from _families import FAMILIES, build_family, family_step_bytes
from _models import LETTERS, SHAPES, build, quick_folder, save_tokenizer
from _stack import stack
from _traffic import ADAPTED, CHOICES, RANKS, SLOTS, Mixture
from trtmesh.chassis.errors import StartupError, TrtmeshError
from trtmesh.tools.bench.driver import Job, chains_of
from trtmesh.tools.bench.measures import first_token_ms
from trtmesh.tools.bench.processes import sending
from trtmesh.tools.bench.record import Answer, Plan, Prompt
from trtmesh.tools.bench.targets.target import Connecting, Url

PARTS = ("decode", "prefill", "mixed", "uneven", "traffic", "mesh", "families", "peers")
GRAPHS = "continuous_graphs"
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("Generate", {}),
    "continuous": ("ContinuousBatching", {"step_tokens": 4096}),
    GRAPHS: ("ContinuousBatching", {"step_tokens": 4096, "graphs": True}),
}
"""The class and the arguments of each."""
COSTLY = ("decode", "prefill")
"""Parts that `--batch-invariant` and `--ranks` measure again."""
PROMPT_TOKENS = 128
PREFILLS = (128, 512, 1024, 2048, 4096, 8192)
FIRST_TOKEN_RUNS = 9
STEP_TOKENS = 8192
MIXED_BATCH = 32
MIXED_CHUNKS = (256, 512)
CHUNKS = 8
STEPS_PER_CHUNK = 12
MIXED_STEPS = STEPS_PER_CHUNK * (CHUNKS + 2)
UNEVEN_BATCH = 32
UNEVEN_SHORT = 160
UNEVEN_LESS = 192
"""How much shorter than the longest prompt the long one is."""
FAMILY_ROWS = 32
FAMILY_STEP_TOKENS = 512
MESH_STREAMS = (32, 256)
MESH_TOKENS = 512
"""The streams of a mesh begin one after another, so few tokens would leave no time in which all run."""
LONE_PROMPTS = 41
TRAFFIC_ROWS = (32, 1, 128, 8)
"""The most telling first."""
TRAFFIC_TOKENS = 48
TRAFFIC_RUNS = 2
TRAFFIC_PROMPTS = (512, 2048)
AT_ONCE = (32, 128)
AT_ONCE_RUNS = 5
CLIENTS = 4
COMMAND_SECONDS = 170.0

Figures = dict[str, Any]
Cells = Iterator[tuple[str, Any]]
T = TypeVar("T")


class Bench:
    """The chosen parts, by shape. A part yields its cells, each a name and figures."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.dtype: torch.dtype = getattr(torch, arguments.dtype)
        self.copy_rate = copy_rate(self.device)
        self.product_rate = product_rate(self.device)
        self._release()
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self._folder = folder
        self._end = time.monotonic() + arguments.seconds

    def collect(self, what: str, cells: Cells) -> Figures:
        """The cells of a part; after a failure those before it, and the reason."""
        found: Figures = {}
        try:
            for cell, figures in cells:
                found[cell] = figures
        except SystemExit as error:
            self.failed.append(what)
            found["failed"] = str(error)
        print(f"{what}: {json.dumps(found)}", file=sys.stderr)
        return found

    def cells_in_time(self, what: str, cells: Iterable[T]) -> Iterator[T]:
        """The cells of a part that begin before its time, or that of the run, is over."""
        return self._before(time.monotonic() + self.arguments.part_seconds, what, cells)

    def parts_in_time(self, what: str, parts: Iterable[T]) -> Iterator[T]:
        """Those that begin before the time of the run is over."""
        return self._before(self._end, what, parts)

    def _before(self, end: float, what: str, cells: Iterable[T]) -> Iterator[T]:
        end = min(end, self._end)
        for cell in cells:
            if time.monotonic() < end:
                yield cell
            else:
                self.left_out.append(f"{what}: {cell}")

    def model(self, name: str) -> Path:
        """The directory of a shape."""
        folder = self._folder / name
        if not folder.exists():
            build(folder, name, self.dtype, self.arguments.device, self._positions)
            save_tokenizer(folder, SHAPES[name]["vocab_size"])
            self._release()
        return folder

    def shape(self, name: str, parts: Sequence[str]) -> Figures:
        """The parts of the Backend alone; `mesh` is what a mesh is compared with."""
        measures: dict[str, Callable[[Remote, str], Cells]] = {
            "decode": self._decode,
            "prefill": self._prefill,
            "mixed": self._mixed,
            "uneven": self._uneven,
            "mesh": self._backend_of_mesh,
        }
        chosen = {part: measures[part] for part in measures if part in parts}
        figures = self._measured(name, name, chosen) if chosen else {}
        if "traffic" in parts:
            figures["traffic"] = self._traffic(name)
        costly = {part: chosen[part] for part in chosen if part in COSTLY}
        if costly and self.arguments.batch_invariant:
            title = f"{name} batch_invariant"
            figures["batch_invariant"] = self._measured(title, name, costly, batch_invariant=True)
        if costly and self.arguments.ranks > 1:
            devices = ",".join(f"cuda:{rank}" for rank in range(self.arguments.ranks))
            figures["ranks"] = self._measured(f"{name} {devices}", name, costly, device=devices)
        return figures

    def _measured(
        self,
        title: str,
        name: str,
        parts: Mapping[str, Callable[[Remote, str], Cells]],
        **settings: Any,
    ) -> Figures:
        """Parts of one engine with these settings."""
        engine = Remote(COMMAND_SECONDS)
        try:
            figures = self.collect(title, self._load(engine, name, settings))
            for part in parts if "failed" not in figures else ():
                figures[part] = self.collect(f"{title} {part}", parts[part](engine, name))
        finally:
            engine.end()
        return figures

    def _traffic(self, name: str) -> Figures:
        """Each over the greedy text of the first engine."""
        greedy: Figures = {}
        adapters = {"host_bytes": 2**35, "max_batch_adapters": SLOTS}
        kinds: dict[str, tuple[Callable[[Remote, str], Cells], dict[str, Any]]] = {
            "choices": (partial(self._choices, greedy), {}),
            "adapters": (partial(self._adapted, greedy), {"adapters": adapters}),
            "batch_invariant": (partial(self._invariant, greedy), {"batch_invariant": True}),
        }
        return {
            kind: self._measured(f"{name} traffic {kind}", name, {"over_greedy": cells}, **settings)
            for kind in self.parts_in_time(f"{name} traffic", kinds)
            for cells, settings in [kinds[kind]]
        } | {"greedy": greedy}

    def _choices(self, greedy: Figures, engine: Remote, name: str) -> Cells:
        what = f"{name} traffic choices"
        for rows in self.cells_in_time(f"{what} at once", self._traffic_rows(AT_ONCE)):
            seconds = self._at_once(engine, name, rows)
            greedy[f"first_token_p50_ms_of_{rows}"] = round(1000 * seconds, 2)
        for tokens in self.cells_in_time(f"{what} prompts", self._traffic_prompts()):
            seconds = self._first_token_seconds(engine, name, tokens)
            greedy[f"prompt_ms_of_{tokens}"] = round(1000 * seconds, 2)
        for rows in self.cells_in_time(f"{what} greedy", self._traffic_rows()):
            greedy[str(rows)] = self._mixed_rate(engine, name, rows, Mixture())
        names = [(mixture, rows) for rows in self._traffic_rows() for mixture in CHOICES]
        for mixture, rows in self.cells_in_time(what, names):
            # A host varies by a tenth within minutes.
            if before := greedy.get(str(rows)):
                rate = self._mixed_rate(engine, name, rows, CHOICES[mixture])
                greedy[str(rows)] = after = self._mixed_rate(engine, name, rows, Mixture())
                yield f"{mixture} {rows}", round(2 * rate / (before + after), 3)

    def _adapted(self, greedy: Figures, engine: Remote, name: str) -> Cells:
        what = f"{name} traffic adapters"
        engine.call("load", RANKS)
        yield from self._over_greedy(greedy, what, engine, name, ADAPTED)

    def _invariant(self, greedy: Figures, engine: Remote, name: str) -> Cells:
        what = f"{name} traffic batch_invariant"
        yield from self._over_greedy(greedy, what, engine, name, {"decode": Mixture()})
        for tokens in self.cells_in_time(f"{what} prompts", self._traffic_prompts()):
            if plain := greedy.get(f"prompt_ms_of_{tokens}"):
                seconds = self._first_token_seconds(engine, name, tokens)
                yield f"prompt of {tokens}", round(plain / (1000 * seconds), 3)

    def _over_greedy(
        self,
        greedy: Figures,
        what: str,
        engine: Remote,
        name: str,
        mixtures: Mapping[str, Mixture],
    ) -> Cells:
        rows_of_cells = [row for row in self._traffic_rows() if str(row) in greedy]
        names = [(mixture, rows) for rows in rows_of_cells for mixture in mixtures]
        for mixture, rows in self.cells_in_time(what, names):
            rate = self._mixed_rate(engine, name, rows, mixtures[mixture])
            yield f"{mixture} {rows}", round(rate / greedy[str(rows)], 3)

    def _mixed_rate(self, engine: Remote, name: str, rows: int, mixture: Mixture) -> float:
        """Tokens a second, the median after a run that warms up."""
        rates = [
            engine.decode(
                self._prompts(name, [PROMPT_TOKENS] * rows, run), TRAFFIC_TOKENS,
                mixture.numbers(rows), mixture.configs(rows),
            ).steady_rate
            for run in range(TRAFFIC_RUNS + 1)
        ]  # fmt: skip
        return round(statistics.median(rates[1:]), 1)

    def _at_once(self, engine: Remote, name: str, prompts: int) -> float:
        """Seconds to the first token, the median of all in some runs after one that warms up."""
        runs = [
            engine.decode(self._prompts(name, [PROMPT_TOKENS] * prompts, run), 1)
            for run in range(AT_ONCE_RUNS + 1)
        ]
        return statistics.median(each for run in runs[1:] for each in run.first_tokens_seconds)

    def _traffic_rows(self, rows: Sequence[int] = TRAFFIC_ROWS) -> list[int]:
        return [each for each in rows if each <= max(self.arguments.batches)]

    def _traffic_prompts(self) -> list[int]:
        return [each for each in TRAFFIC_PROMPTS if each <= self.arguments.longest]

    def _load(self, engine: Remote, name: str, settings: Mapping[str, Any]) -> Cells:
        started = time.monotonic()
        folder = self.model(name)
        built = time.monotonic()
        yield "build_seconds", round(built - started, 1)
        engine.open(
            "Trtmesh", folder, self.arguments.dtype, 0,
            kv_cache={"prefix_reuse": False, "tokens": self._kv_tokens},
            batching={"max_step_tokens": STEP_TOKENS}, limits={"max_batch_size": self._most},
            **{"device": self.arguments.device, **settings},
        )  # fmt: skip
        yield "load_seconds", round(time.monotonic() - built, 1)

    @property
    def _most(self) -> int:
        """Sequences of the largest step."""
        streams = self.arguments.streams if "mesh" in self.arguments.parts else []
        return int(max(*self.arguments.batches, *streams, MIXED_BATCH + 1))

    @property
    def _new_tokens(self) -> int:
        """Most of a sequence."""
        streamed = self.arguments.stream_tokens if "mesh" in self.arguments.parts else 0
        return int(max(self.arguments.tokens, MIXED_STEPS, streamed))

    @property
    def _positions(self) -> int:
        return int(self.arguments.longest) + PROMPT_TOKENS + self._new_tokens

    @property
    def _kv_tokens(self) -> int:
        # A block more for each.
        each = PROMPT_TOKENS + self._new_tokens + 16
        return self._most * each + UNEVEN_BATCH * UNEVEN_SHORT + int(self.arguments.longest)

    def _decode(self, engine: Remote, name: str) -> Cells:
        tokens = self.arguments.tokens
        for batch in self.cells_in_time(f"{name} decode", self.arguments.batches):
            rates = self._rates(engine, name, [PROMPT_TOKENS] * batch, tokens)
            yield str(batch), self._step(name, rates, [PROMPT_TOKENS + tokens // 2] * batch)

    def _rates(self, engine: Remote, name: str, lengths: list[int], tokens: int) -> list[float]:
        """Tokens a second of some runs, each with prompts of its own of these lengths, after one that warms up."""
        return [
            engine.decode(self._prompts(name, lengths, run), tokens).steady_rate
            for run in range(self.arguments.runs + 1)
        ][1:]

    def _prompts(self, name: str, lengths: list[int], seed: int) -> Prompts:
        generator = torch.Generator().manual_seed(seed)
        size = SHAPES[name]["vocab_size"]
        return [
            torch.randint(2, size, (length,), generator=generator).tolist() for length in lengths
        ]

    def _step(self, name: str, rates: list[float], contexts: list[int]) -> Figures:
        """Figures of decode steps over sequences of these lengths."""
        rate = statistics.median(rates)
        seconds = len(contexts) / rate
        least = step_bytes(SHAPES[name], self.dtype, sum(contexts)) / self.copy_rate
        return {
            "tokens_a_second": round(rate, 1),
            "step_ms": round(1000 * seconds, 3),
            "share": round(least / seconds, 3),
            "spread": [round(each, 1) for each in (min(rates), max(rates))],
        }

    def _prefill(self, engine: Remote, name: str) -> Cells:
        lengths = [each for each in PREFILLS if each <= self.arguments.longest]
        for tokens in self.cells_in_time(f"{name} prefill", lengths):
            seconds = self._first_token_seconds(engine, name, tokens)
            operations = prefill_operations(SHAPES[name], tokens)
            yield (
                str(tokens),
                {
                    "first_token_ms": round(1000 * seconds, 2),
                    "tokens_a_second": round(tokens / seconds),
                    "share": round(operations / seconds / self.product_rate, 3),
                },
            )

    def _first_token_seconds(self, engine: Remote, name: str, tokens: int) -> float:
        """Of a lone prompt, the median after one that warms up."""
        seconds = [
            engine.decode(self._prompts(name, [tokens], run), 1).first_token_seconds
            for run in range(FIRST_TOKEN_RUNS + 1)
        ]
        return statistics.median(seconds[1:])

    def _mixed(self, engine: Remote, name: str) -> Cells:
        for chunk in self.cells_in_time(f"{name} mixed", MIXED_CHUNKS):
            steps, extras = [], []
            for run in range(self.arguments.runs + 1):
                given = self._prompts(name, [PROMPT_TOKENS] * MIXED_BATCH, run)
                joining = self._prompts(name, [chunk] * CHUNKS, 100 + run)
                # The first step completes prompts.
                plain = engine.call("joined", given, MIXED_STEPS, [], 1)[1:]
                mixed = engine.call("joined", given, MIXED_STEPS, joining, STEPS_PER_CHUNK)[1:]
                step = statistics.fmean(plain)
                steps.append(step)
                # All that a chunk costs, also in the step after, which could not be launched ahead.
                extras.append((sum(mixed) - step * len(mixed)) / CHUNKS)
            step, extra = statistics.median(steps[1:]), statistics.median(extras[1:])
            alone = self._first_token_seconds(engine, name, chunk)
            yield (
                str(chunk),
                {
                    "step_ms": round(1000 * step, 3),
                    "chunk_ms": round(1000 * alone, 3),
                    "mixed_ms": round(1000 * (step + extra), 3),
                    "over_sum": round((step + extra) / (step + alone), 3),
                },
            )

    def _uneven(self, engine: Remote, name: str) -> Cells:
        tokens, short = self.arguments.tokens, UNEVEN_BATCH - 1
        lengths = [UNEVEN_SHORT] * short + [self.arguments.longest - UNEVEN_LESS]
        kinds = {"uneven": lengths, "even": [sum(lengths) // UNEVEN_BATCH] * UNEVEN_BATCH}
        for kind in self.cells_in_time(f"{name} uneven", kinds):
            rates = self._rates(engine, name, kinds[kind], tokens)
            yield kind, self._step(name, rates, [each + tokens // 2 for each in kinds[kind]])

    def _backend_of_mesh(self, engine: Remote, name: str) -> Cells:
        """Tokens a second for as many tokens as the streams of the mesh have."""
        for streams in self.cells_in_time(f"{name} mesh's backend", self.arguments.streams):
            lengths = [PROMPT_TOKENS] * streams
            rates = self._rates(engine, name, lengths, self.arguments.stream_tokens)
            yield str(streams), round(statistics.median(rates), 1)

    def family(self, name: str) -> Cells:
        folder, tokens, rows = self._folder / name, self.arguments.tokens, FAMILY_ROWS
        positions = PROMPT_TOKENS + tokens + 16
        sizes = build_family(
            folder, name, self.dtype, self.arguments.device, positions,
            tiny=self.device.type == "cpu",
        )  # fmt: skip
        self._release()
        engine = Remote(COMMAND_SECONDS)
        try:
            engine.open(
                "Trtmesh", folder, self.arguments.dtype, 0, device=self.arguments.device,
                kv_cache={"prefix_reuse": False, "tokens": rows * positions},
                batching={"max_step_tokens": FAMILY_STEP_TOKENS}, limits={"max_batch_size": rows},
            )  # fmt: skip
            rates = [
                engine.decode(self._family_prompts(run), tokens).steady_rate
                for run in range(self.arguments.runs + 1)
            ][1:]
            rate = statistics.median(rates)
            least = family_step_bytes(sizes, rows, rows * (PROMPT_TOKENS + tokens // 2))
            yield "tokens_a_second", round(rate, 1)
            yield "step_ms", round(1000 * rows / rate, 3)
            yield "share", round(least / self.copy_rate * rate / rows, 3)
            yield "path", engine.call("path")
        finally:
            engine.end()
            shutil.rmtree(folder)

    def _family_prompts(self, seed: int) -> Prompts:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, 320, (FAMILY_ROWS, PROMPT_TOKENS), generator=generator).tolist()

    def mesh(self, name: str, backend: Figures) -> Cells:
        """Streams through real processes; `backend` are the tokens a second of the Backend alone."""
        folder = self.model(name)
        flags = (
            *("--model-dir", str(folder), "--torch-device", self.arguments.device),
            *("--torch-dtype", self.arguments.dtype),
            *("--torch-kv-cache-prefix-reuse", "false"),
            *("--torch-kv-cache-tokens", str(self._kv_tokens)),
            *("--torch-batching-max-step-tokens", str(STEP_TOKENS)),
            *("--torch-limits-max-batch-size", str(self._most)),
        )
        with stack(*flags, backend="torch", model_dir=folder) as running:
            address = running.address
            if "traffic" in self.arguments.parts:
                at_once = self._traffic_rows(AT_ONCE)
                for prompts in self.cells_in_time(f"{name} mesh at once", at_once):
                    of = f"first_token_p50_ms_of_{prompts}"
                    yield of, _at_once_milliseconds(address, prompts)
                    yield f"{of}_in_one_request", _at_once_milliseconds(address, prompts, prompts)
            if "mesh" not in self.arguments.parts:
                return
            yield "first_token_p50_ms", _lone_milliseconds(address)
            for streams in self.cells_in_time(f"{name} mesh", self.arguments.streams):
                figures = self._streamed(address, streams)
                if alone := backend.get(str(streams)):
                    figures["backend_tokens_a_second"] = alone
                    figures["share"] = round(figures["tokens_a_second"] / alone, 3)
                yield str(streams), figures

    def _streamed(self, address: str, streams: int) -> Figures:
        runs = [
            _together(_asked(address, _texts(streams, run), self.arguments.stream_tokens))
            for run in range(self.arguments.runs + 1)
        ][1:]
        firsts = [each for run in runs for each in run.first_tokens_seconds]
        return {
            "tokens_a_second": round(statistics.median(each.steady_rate for each in runs), 1),
            "with_the_start": round(statistics.median(each.whole_rate for each in runs), 1),
            "first_token_p50_ms": round(1000 * statistics.median(firsts), 2),
        }

    def peer(self, name: str, peer: str, decode: Figures) -> Cells:
        """Tokens a second, and those of the Backend over them."""
        kind, named = PEERS[peer]
        remote = Remote(COMMAND_SECONDS)
        try:
            remote.open(
                kind, self.model(name), self.arguments.dtype, os.cpu_count() or 1,
                self.arguments.device, **named,
            )  # fmt: skip
            for batch in self.cells_in_time(f"{name} {peer}", self.arguments.batches):
                given = self._prompts(name, [PROMPT_TOKENS] * batch, 1)
                remote.decode(given, 4)
                rate = remote.decode(given, self.arguments.peer_tokens).steady_rate
                figures = {"tokens_a_second": round(rate, 1)}
                if ours := decode.get(str(batch)):
                    figures["ours_over_it"] = round(ours["tokens_a_second"] / rate, 2)
                yield str(batch), figures
        finally:
            remote.end()

    def _release(self) -> None:
        """Gives memory of the device to other processes."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _asked(
    address: str, texts: Sequence[str], tokens: int, at_once: int = 0, batch: int = 1
) -> list[Answer]:
    """The answers to the texts, `batch` a request, all at once by processes of `trtmesh bench`, or so many. Raises
    SystemExit unless every token comes."""
    prompts = [
        Prompt(number, text, max_tokens=tokens, ignore_end_id=True)
        for number, text in enumerate(texts)
    ]
    plans = [Plan(tuple(prompts[first : first + batch])) for first in range(0, len(prompts), batch)]
    job = Job(chains_of(plans), at_once or len(plans))
    mesh, processes = Connecting(Url("grpc", (address,))), min(CLIENTS, job.most_open)
    answers: list[Answer] = []

    async def send() -> None:
        async with sending(mesh, 1, job, processes, answers.append) as sender:
            await sender.send()

    try:
        asyncio.run(send())
    except (TrtmeshError, StartupError) as error:
        raise SystemExit(f"the mesh was not asked: {error}") from error
    for each in answers:
        if not each.ok or each.lost or each.doubled or sum(each.tokens) != tokens:
            raise SystemExit(f"{sum(each.tokens)} of {tokens} tokens came: {each.error}")
    return answers


def _together(answers: Sequence[Answer]) -> Decoded:
    """Of streams that began together."""
    arrivals = [
        [at for at, count in zip(each.arrivals_s, each.tokens, strict=True) for _ in range(count)]
        for each in answers
    ]
    return Decoded(min(each.sent_s for each in answers), [], arrivals)


def _lone_milliseconds(address: str) -> float:
    """To the first token of a request alone, the median after one that warms up."""
    answers = _asked(address, _texts(LONE_PROMPTS, 1), 1, at_once=1)
    return round(statistics.median(ms for each in answers[1:] for ms in first_token_ms(each)), 2)


def _at_once_milliseconds(address: str, prompts: int, batch: int = 1) -> float:
    """To the first token, the median of all in some runs after one that warms up."""
    runs = [
        _together(_asked(address, _texts(prompts, run), 1, batch=batch))
        for run in range(AT_ONCE_RUNS + 1)
    ]
    seconds = [each for run in runs[1:] for each in run.first_tokens_seconds]
    return round(1000 * statistics.median(seconds), 2)


def _texts(count: int, seed: int) -> list[str]:
    """Of one token a letter."""
    dice = random.Random(seed)
    return ["".join(dice.choices(LETTERS, k=PROMPT_TOKENS)) for _ in range(count)]


def run(bench: Bench) -> Figures:
    arguments, found = bench.arguments, Figures()
    first, parts = arguments.shapes[0], arguments.parts
    shapes = arguments.shapes if set(parts) - {"families"} else []
    for name in bench.parts_in_time("shape", shapes):
        own = [part for part in parts if part not in ("mesh", "traffic") or name == first]
        found[name] = bench.shape(name, own)
    if {"mesh", "traffic"} & set(parts) and first in found:
        for name in bench.parts_in_time("mesh", [first]):
            backend = found[name].get("mesh", {})
            found[name]["mesh"] = bench.collect(f"{name} mesh", bench.mesh(name, backend))
    if "families" in parts:
        found["families"] = {
            name: bench.collect(f"family {name}", bench.family(name))
            for name in bench.parts_in_time("families", arguments.families)
        }
    for peer in arguments.peers if "peers" in parts else ():
        for name in bench.parts_in_time(peer, [each for each in found if each in SHAPES]):
            decode = found[name].get("decode", {})
            found[name][peer] = bench.collect(f"{name} {peer}", bench.peer(name, peer, decode))
    return found


def main(arguments: argparse.Namespace) -> int:
    on_gpu = torch.device(arguments.device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("there is no GPU", file=sys.stderr)
        return 2
    if not on_gpu and GRAPHS in arguments.peers:
        print(f"{GRAPHS} is left out: its graphs are those of CUDA", file=sys.stderr)
        arguments.peers = [peer for peer in arguments.peers if peer != GRAPHS]
    where = arguments.folder or quick_folder(arguments.shapes, getattr(torch, arguments.dtype))
    with tempfile.TemporaryDirectory(dir=where, prefix="trtmesh-bench-") as folder:
        bench = Bench(arguments, Path(folder))
        found = run(bench)
    figures = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "copy_tb_a_second": round(bench.copy_rate / 1e12, 3),
        "product_tflop_a_second": round(bench.product_rate / 1e12, 1),
        "families": found.pop("families", {}),
        "shapes": found,
        "left_out": bench.left_out,
        "failed": bench.failed,
    }
    print(json.dumps(figures))
    return 1 if bench.failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["1B", "8B"])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batch-invariant", action="store_true", help="also with this setting")
    parser.add_argument("--ranks", type=int, default=1, help="also with so many GPUs together")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a sequence")
    parser.add_argument("--peer-tokens", type=int, default=64, help="the same of peers")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest prompt")
    parser.add_argument("--streams", type=int, nargs="+", default=list(MESH_STREAMS))
    parser.add_argument("--stream-tokens", type=int, default=MESH_TOKENS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="no cell begins later")
    parser.add_argument("--part-seconds", type=float, default=45, help="the same of a part")
    parser.add_argument("--folder", type=Path, help="for models, in place of shared memory")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main(parse()))
