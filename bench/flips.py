"""Counts tokens that depend on the batch: each stream in random traffic is compared with the same stream alone.

The torch engine runs in this process. Alone, the engine computes one stream at a time. In traffic, sequences start and
end at random, prompts are cut into chunks of random sizes, a small KV cache pauses sequences, and a part of the streams
migrates: it is stopped after some tokens and continued with these. A stream counts until its first other token, so
`flips_per_million` is the rate at which streams part. Half of the streams are greedy; the others draw with temperature
0.8 alone, with top_p, with top_k, or with min_p.

Flips are too rare to count in minutes. `redrawn` repeats the choice of each sampled token with further seeds, from its
logits alone and from its logits in traffic, and counts where the two choices differ.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from _options import options_of
from torch import Tensor
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, Output, Sampling, Stopping
from trtmesh.engine.backend import BackendInfo, SequenceEnd, StepOutput, Submission
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.cpu.device import ORDERING
from trtmesh.engine.backends.torch.sampling.choice import Chooser
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

CHOOSER = Chooser(ORDERING)
DTYPES = ("float32", "bfloat16", "float16")
DEMO = Path(__file__).parents[1] / "models" / "demo"
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.02},
}
MIGRATED = 0.3
"""Share of streams that migrate."""
CHUNKS = (5, 16, 33, 64, 0)
"""Most prompt tokens of a sequence in a step, by round; 0 sets no limit."""


@dataclass(slots=True)
class Wanted:
    """A stream: what is asked for, and its tokens alone."""

    kind: str
    prompt: list[int]
    config: GenerationConfig
    batch_index: int
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


Stream = tuple[list[int], list[Tensor]]
"""Tokens, and the logits of each."""


class Lab:
    """A running engine."""

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        self._backend = TorchBackend(model, TorchSettings.model_validate(settings))
        self._loop = asyncio.get_running_loop()
        self._tokens: dict[int, list[int]] = {}
        self._logits: dict[int, list[Tensor]] = {}
        self._ended: dict[int, asyncio.Future[SequenceEnd]] = {}
        self._limits: dict[int, int] = {}
        self._next = 0

    async def start(self) -> BackendInfo:
        return await self._backend.start(self._deliver, self._fail)

    async def close(self) -> int:
        """Returns the number of preemptions."""
        preemptions = self._backend.stats().preemptions
        await self._backend.close()
        return preemptions

    async def stream(self, wanted: Wanted, emitted: list[int], stop_after: int | None) -> Stream:
        """The tokens after `emitted`, to the end or until a stop after about `stop_after` tokens."""
        key, self._next = self._next, self._next + 1
        self._tokens[key], self._logits[key] = [], []
        self._ended[key] = self._loop.create_future()
        if stop_after:
            self._limits[key] = stop_after
        given = [*wanted.prompt, *emitted]
        self._backend.submit(
            Submission((key,), "", wanted.batch_index, 0, given, len(emitted), wanted.config)
        )
        end = await self._ended[key]
        del self._ended[key]
        if end.error:
            raise SystemExit(f"a stream failed: {end.error}")
        return self._tokens.pop(key), self._logits.pop(key)

    def _deliver(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._take, output)

    def _fail(self, error: BaseException) -> None:
        print(error, file=sys.stderr)

    def _take(self, output: StepOutput) -> None:
        position = 0
        for key, count in zip(output.keys, output.token_counts, strict=True):
            tokens = self._tokens[key]
            tokens += output.token_ids[position : position + count]
            position += count
            if len(tokens) >= self._limits.get(key, sys.maxsize):
                del self._limits[key]
                self._backend.stop([key], pb.FINISH_REASON_CANCELLED)
        for details in output.details:
            assert details.generation_logits
            row = np.frombuffer(details.generation_logits.data, np.float32)
            self._logits[details.key].append(torch.from_numpy(row.copy()))
        for end in output.ends:
            self._limits.pop(end.key, None)
            self._ended[end.key].set_result(end)


def drawn_streams(
    count: int, tokens: int, vocabulary_size: int, rng: random.Random
) -> list[Wanted]:
    """Prompts of 1 to 100 tokens; a third begins with a common prefix."""
    prefix = [rng.randrange(2, vocabulary_size) for _ in range(40)]
    stopping = Stopping(max_tokens=tokens, ignore_end_id=True)
    wanted = []
    for number in range(count):
        own = [rng.randrange(2, vocabulary_size) for _ in range(rng.randint(1, 60))]
        kind = rng.choice(list(KINDS)) if number % 2 else "greedy"
        sampling = Sampling()
        if kind != "greedy":
            sampling = Sampling(temperature=0.8, seed=number, **KINDS[kind])
        output = Output(generation_logits=kind != "greedy")
        config = GenerationConfig(stopping=stopping, sampling=sampling, output=output)
        prompt = prefix + own if rng.random() < 0.33 else own
        wanted.append(Wanted(kind, prompt, config, rng.randrange(4)))
    return wanted


async def alone(model: Path, settings: dict[str, Any], wanted: list[Wanted]) -> None:
    lab = Lab(model, {**settings, "kv_cache": {"prefix_reuse": False}})
    await lab.start()
    for each in wanted:
        each.tokens, each.logits = await lab.stream(each, [], None)
    await lab.close()


async def in_traffic(
    model: Path, settings: dict[str, Any], wanted: list[Wanted], seed: int, chunk: int
) -> tuple[list[Stream], dict[str, int]]:
    """The tokens of each stream beside the others, and what happened meanwhile."""
    rng = random.Random(seed)
    longest = max(len(each.prompt) + len(each.tokens) for each in wanted)
    small = {
        **settings,
        "kv_cache": {"tokens": longest * rng.randint(5, 12)},
        "batching": {"max_step_tokens": min(rng.choice((48, 96, 512)), chunk or 512)},
        "limits": {"max_batch_size": 24},
    }
    lab = Lab(model, small)
    await lab.start()
    places = asyncio.Semaphore(32)
    migrated = 0

    async def run(each: Wanted) -> Stream:
        nonlocal migrated
        await asyncio.sleep(rng.random() * 0.5)
        async with places:
            tokens: list[int] = []
            logits: list[Tensor] = []
            if rng.random() < MIGRATED:
                tokens, logits = await lab.stream(each, [], rng.randint(1, len(each.tokens) - 1))
                migrated += 1
            if len(tokens) < len(each.tokens):
                more = await lab.stream(each, tokens, None)
                tokens, logits = tokens + more[0], logits + more[1]
            return tokens, logits

    shuffled = rng.sample(wanted, len(wanted))
    found = await asyncio.gather(*(run(each) for each in shuffled))
    order = {id(each): stream for each, stream in zip(shuffled, found, strict=True)}
    events = {"migrations": migrated, "preemptions": await lab.close()}
    return [order[id(each)] for each in wanted], events


def compare(
    wanted: list[Wanted], found: list[Stream], counts: dict[str, list[int]], redraws: int
) -> None:
    """Adds the compared tokens and the flips of each kind to `counts`, and the redrawn ones."""
    for each, (tokens, logits) in zip(wanted, found, strict=True):
        pairs = zip(each.tokens, tokens, strict=True)
        parted = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        same = len(tokens) if parted is None else parted + 1
        count = counts.setdefault(each.kind, [0, 0])
        count[0] += same
        count[1] += parted is not None
        if each.logits and redraws:
            count = counts.setdefault(f"redrawn {each.kind}", [0, 0])
            for alone, among in zip(each.logits[:same], logits[:same], strict=True):
                count[0] += redraws
                count[1] += redrawn(each, alone, among, redraws)


def redrawn(each: Wanted, alone: Tensor, among: Tensor, redraws: int) -> int:
    """The number of seeds with which the two rows of logits give different tokens."""
    if torch.equal(alone, among):
        return 0
    rows = []
    rule = EndRule(each.config.stopping, (), 1, sys.maxsize)
    for seed in range(redraws):
        config = replace(each.config, sampling=replace(each.config.sampling, seed=seed))
        config = replace(config, output=Output())
        rows.append(Continuation(0, 0, 0, [0], rule, TokenRules(config)))
    ids = [CHOOSER.choose(rows, row.expand(redraws, -1).contiguous()).ids for row in (alone, among)]
    return int((ids[0] != ids[1]).sum())


def summary(counts: dict[str, list[int]]) -> dict[str, float]:
    tokens = sum(each for each, _ in counts.values())
    flips = sum(each for _, each in counts.values())
    per_million = round(1e6 * flips / tokens, 2) if tokens else 0.0
    return {"tokens": tokens, "flips": flips, "flips_per_million": per_million}


async def main(
    *,
    model: Path = DEMO,
    dtype: Annotated[str, DTYPES] = "float32",
    device: str = "cpu",
    batch_invariant: bool = False,
    streams: int = 100,
    tokens: int = 100,
    rounds: int = 5,
    redraws: int = 50,
    threads: int = 2,
    seed: int = 0,
) -> None:
    """`streams` of so many new tokens run `rounds` times in traffic, with `redraws` seeds a sampled token."""
    settings: dict[str, Any] = {"dtype": dtype, "threads": threads, "device": device}
    if batch_invariant:
        settings["batch_invariant"] = True
    wanted = drawn_streams(streams, tokens, 6000, random.Random(seed))
    started = time.perf_counter()
    await alone(model, settings, wanted)
    counts: dict[str, list[int]] = {}
    happened = {"migrations": 0, "preemptions": 0}
    for number in range(rounds):
        chunk = CHUNKS[number % len(CHUNKS)]
        found, events = await in_traffic(model, settings, wanted, number, chunk)
        compare(wanted, found, counts, redraws)
        happened = {name: happened[name] + events[name] for name in happened}
        print(f"round {number + 1}: {counts}, {events}", file=sys.stderr)
    again = {kind: count for kind, count in counts.items() if kind.startswith("redrawn ")}
    first = {kind: count for kind, count in counts.items() if kind not in again}
    print(
        json.dumps(
            {
                **summary(first),
                "redrawn": summary(again),
                "by_kind": {kind: summary({kind: count}) for kind, count in sorted(counts.items())},
                **happened,
                "dtype": dtype,
                "device": device,
                "batch_invariant": batch_invariant,
                "seconds": round(time.perf_counter() - started),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(**options_of(main)))
