"""Late sequences go on at two workers: clients see equal streams, whatever happens to the workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from chaos.fragile import contents
from cli.commands import trtmesh
from compat.plain_http import PlainHttp, Reply
from e2e.mesh import (
    ENDLESS,
    INSIDE,
    SIMULATED,
    WIDE_TOKENS,
    Mesh,
    StreamReader,
    check_beginning,
    eventually,
    lasting,
    running_mesh,
    samples_of,
    scrape,
)
from processes import ServiceProcess
from trtmesh.client import ItemResult
from trtmesh.router.hedging.lateness import Budget

HEDGED = (
    *("--hedge-share", "0.02", "--placement-policy", "round_robin"),
    # All other moves take far longer than a hedge, even on a busy machine.
    *("--deadlines-silence-seconds", "60", "--deadlines-step-gap-seconds", "60"),
)
GENEROUS = ("--hedge-share", "0.5")
"""For tests of other things than the budget: on a busy machine prompts seem expensive, and copies are many."""
ENGINE = (
    *(*SIMULATED, *WIDE_TOKENS),
    # Few tokens take as long as a fault.
    *("--simulated-timing-step-ms", "16"),
)
PROMPTS = [f"item {number} of a hedged request" for number in range(6)]
TOKENS = 40
"""Tokens of a sequence that are compared."""
GREEDY: Mapping[str, Any] = {"ignore_end_id": True}
SAMPLED: Mapping[str, Any] = {**GREEDY, "temperature": 0.9, "seed": 11}

Kinds = Mapping[str, Mapping[str, Any]]
KINDS: Kinds = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "several sequences": {**SAMPLED, "num_return_sequences": 2},
    "stop texts": {**SAMPLED, "stop_texts": ["a text that never comes"]},
}
"""Streams that run until the test stops them."""
ENDING: Kinds = {
    "found stop texts": {**SAMPLED, "stop_texts": ["tt", "ee"], "min_tokens": TOKENS},
    "whole": {**SAMPLED, "stream": False},
    "ids alone": {**GREEDY, "text": False},
}
"""Streams whose end is compared too; on a busy machine they may be over before a fault."""


@dataclass
class Hedged:
    """A mesh that hedges, by the names of its workers."""

    mesh: Mesh
    engines: dict[str, ServiceProcess]

    def worker_of(self, reader: StreamReader) -> str:
        started = reader.items[0].started
        assert started
        return started.worker

    async def counts(self, name: str, **labels: str) -> float:
        samples = await scrape(self.mesh.router, **labels)
        return samples.get(f"trtmesh_router_{name}_total", 0.0)

    async def won(self, least: float) -> None:
        """Waits until so many sequences have gone on at a second worker."""

        async def so_far() -> bool:
            return await self.counts("hedges", outcome="won") >= least

        try:
            await lasting(so_far)
        except TimeoutError:
            raise AssertionError(f"fewer than {least} have: {await self.whys()}") from None

    async def complete(
        self, kinds: Kinds, prompts: Sequence[str]
    ) -> Mapping[str, Sequence[ItemResult]]:
        """The first tokens of the streams without a fault."""
        asked = (
            self.mesh.client.complete(
                prompts, **options, max_tokens=TOKENS * (1 + (kind in ENDING))
            )
            for kind, options in kinds.items()
        )
        return dict(zip(kinds, await asyncio.gather(*asked), strict=True))

    def open(self, kind: str, options: Mapping[str, Any], prompts: Sequence[str]) -> StreamReader:
        tokens = 2 * TOKENS if kind in ENDING else ENDLESS
        return self.mesh.open(prompts, **options, max_tokens=tokens)

    async def warm(self) -> None:
        """Has the router learn the pace of its workers."""
        await self.mesh.client.complete(PROMPTS * 2, max_tokens=40, ignore_end_id=True)

    async def whys(self) -> Mapping[str, float]:
        """What became of late sequences, for a failure."""
        return {
            str(each.labels): each.value
            for each in await samples_of(self.mesh.router)
            if each.name.startswith("trtmesh_router_hedges")
        }

    async def budget_kept(self) -> None:
        """Waits until copies have their share of the tokens: what came of stopped ones is paid before the next."""
        await eventually(self._within_budget)

    async def _within_budget(self) -> bool:
        wasted, delivered = [
            await self.counts(name) for name in ("hedge_wasted_tokens", "tokens_out")
        ]
        print(f"{wasted:.0f} of {delivered:.0f} tokens computed twice")
        if wasted <= 0.02 * delivered + Budget.FIRST:
            return True
        await self.warm()
        return False

    async def nothing_left(self) -> None:
        await self.mesh.idle()
        assert await self.counts("hedge_differences") == 0


@asynccontextmanager
async def hedged(
    count: int, *router_flags: str, flags: Sequence[Sequence[str]] = ()
) -> AsyncIterator[Hedged]:
    """Engines, one of them with each of `flags`, and their router with a tokenizer inside."""
    names = [f"engine-{number}" for number in range(count)]
    own = [*flags, *[()] * (count - len(flags))]

    async def start(mesh: Mesh) -> None:
        starts = (
            mesh.start_engine(*ENGINE, "--worker", name, *more)
            for name, more in zip(names, own, strict=True)
        )
        await asyncio.gather(*starts)
        await mesh.start_router(*HEDGED, *router_flags, env=INSIDE)
        await mesh.ready(workers=count, tokenizers=1)

    async with running_mesh(start=start) as mesh:
        found = Hedged(mesh, dict(zip(names, mesh.engines, strict=True)))
        await found.warm()
        yield found


async def freeze(engine: ServiceProcess) -> None:
    engine.signal(signal.SIGSTOP)


async def kill(engine: ServiceProcess) -> None:
    engine.signal(signal.SIGKILL)


async def check(kind: str, reader: StreamReader, whole: Sequence[ItemResult]) -> None:
    """Checks that a stream goes on, whatever it has, and that its tokens are those without a fault."""
    if kind in ENDING:
        assert contents(await reader.result()) == contents(whole), kind
    else:
        await goes_on(reader, whole)
    print(f"worst gap of {kind}: {reader.worst_gap_seconds() * 1000:.0f} ms")


async def goes_on(reader: StreamReader, whole: Sequence[ItemResult]) -> None:
    """Checks that each sequence gets more tokens, and that they are those without a fault."""
    here = max(max(reader.positions(index)) for index in range(len(whole)))
    sequences = len(whole[0].sequences)
    items = await reader.stopped_at(max(TOKENS, here + 5), sequences)
    check_beginning(items, whole)


async def begun(reader: StreamReader) -> None:
    """Waits until each sequence of a stream has some tokens."""
    indices = range(len(reader.items))
    await reader.until(lambda r: all(min(r.positions(index), default=0) > 5 for index in indices))


def items_at(worker: str, reader: StreamReader) -> int:
    return sum(item.started.worker == worker for item in reader.items if item.started)


async def opened_at(
    scene: Hedged, worker: str, kind: str, options: Mapping[str, Any], prompts: Sequence[str]
) -> StreamReader:
    """A stream with items at a worker, which has none of a stream that begins in a slow moment of it."""
    while True:
        reader = scene.open(kind, options, prompts)
        await reader.until(lambda r: all(item.started for item in r.items))
        if items_at(worker, reader):
            return reader
        await reader.cancel()


async def test_frozen_worker_is_not_noticed() -> None:
    """Until it thaws, all its sequences go on at the other worker, and what it computed is equal."""
    slow = ("--simulated-timing-step-ms", "32")
    async with hedged(2, *GENEROUS, flags=[slow] * 2) as scene:
        kinds, prompts = {**KINDS, **ENDING}, PROMPTS[:3]
        expected = await scene.complete(kinds, prompts)
        frozen = "engine-0"
        # One after another, so that each has items at both.
        readers = {
            kind: await opened_at(scene, frozen, kind, options, prompts)
            for kind, options in kinds.items()
        }
        there = {kind: items_at(frozen, reader) for kind, reader in readers.items()}
        await freeze(scene.engines[frozen])
        await scene.won(sum(there[kind] for kind in KINDS) + there["several sequences"])
        # While the others run, copies have their share of ever more tokens.
        for kind in reversed(readers):
            await check(kind, readers[kind], expected[kind])
        scene.engines[frozen].signal(signal.SIGCONT)
        await scene.nothing_left()


@pytest.mark.parametrize("fault", [freeze, kill])
async def test_second_worker_fails_as_well(
    fault: Callable[[ServiceProcess], Awaitable[None]],
) -> None:
    """The third worker goes on."""
    async with hedged(3, *GENEROUS) as scene:
        expected = (await scene.complete({"sampled": SAMPLED}, PROMPTS))["sampled"]
        reader = scene.open("sampled", SAMPLED, PROMPTS)
        await begun(reader)
        first, second, _ = scene.engines.values()
        copies = await scene.counts("hedges")
        await freeze(first)
        await scene.mesh.counted("hedges", copies + 1)
        await fault(second)
        await goes_on(reader, expected)
        for engine in (first, second):
            engine.signal(signal.SIGCONT)
        await scene.nothing_left()


async def test_decode_worker_freezes_after_a_handoff() -> None:
    """The copy computes its prompt at the other decode worker; commands tell what became of it."""
    roles = [("--role", role) for role in ("prefill", "decode", "decode")]
    options = {**SAMPLED, "request_id": "split"}
    async with hedged(3, *GENEROUS, "--handoff-enabled", "always", flags=roles) as scene:
        prompts = [prompt * 20 for prompt in PROMPTS]
        expected = (await scene.complete({"sampled": SAMPLED}, prompts))["sampled"]
        reader = scene.open("sampled", options, prompts)
        await begun(reader)
        await freeze(scene.engines["engine-1"])
        await goes_on(reader, expected)
        explained, top = await asyncio.gather(
            *(
                asyncio.to_thread(trtmesh, *command, "--admin", scene.mesh.router.admin_address)
                for command in (("explain", "split"), ("top", "--count", "1"))
            )
        )
        scene.engines["engine-1"].signal(signal.SIGCONT)
        # On a busy machine other workers are late as well.
        lines = [each for each in explained.stdout.splitlines() if "was late (stall)" in each]
        assert any("on engine-1: copy on engine-2 won, " in line for line in lines), lines
        assert " won, " in top.stdout.splitlines()[0]
        await scene.nothing_left()


CHAT = {"prompt": PROMPTS[0], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
TRITON = {"text_input": PROMPTS[0], "max_tokens": 20}
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": CHAT,
    "/v2/models/ensemble/generate": TRITON,
}
"""By path."""


async def test_other_doors_have_the_same_items() -> None:
    async with (
        hedged(2, *GENEROUS, "--http-port", "0") as scene,
        PlainHttp(scene.mesh.router.http_address) as http,
    ):
        frozen, _ = scene.engines.values()
        for path, body in BODIES.items():
            expected = _text(await http.post(path, body))
            won = await scene.counts("hedges", outcome="won")
            await freeze(frozen)
            # Every second request comes to the frozen worker, which counts as ready.
            while await scene.counts("hedges", outcome="won") == won:
                assert _text(await http.post(path, body)) == expected
            frozen.signal(signal.SIGCONT)
            await scene.nothing_left()


def _text(reply: Reply) -> str:
    answer = reply.json
    return str(answer["choices"][0]["text"] if "choices" in answer else answer["text_output"])


async def test_client_leaves_while_two_copies_run() -> None:
    async with hedged(2, *GENEROUS) as scene:
        reader = scene.open("greedy", GREEDY, PROMPTS[:1])
        await reader.tokens_here(20)
        frozen = scene.engines[scene.worker_of(reader)]
        (other,) = (engine for engine in scene.engines.values() if engine is not frozen)
        copies = await scene.counts("hedges")
        await freeze(frozen)
        await scene.mesh.counted("hedges", copies + 1)
        await freeze(other)
        await reader.cancel()
        for engine in (frozen, other):
            engine.signal(signal.SIGCONT)
        await scene.nothing_left()


async def test_sequences_leave_a_worker_at_a_tenth_of_its_speed() -> None:
    """Before it fails; and a copy costs no more than its share of the tokens."""
    # A slow step is not so long that it is a stall.
    fast = ("--simulated-timing-step-ms", "4")
    slow = ("--simulated-faults-slow-after-steps", "150", "--simulated-faults-slow-factor", "10")
    async with hedged(3, flags=[(*fast, *slow), fast, fast]) as scene:
        expected = (await scene.complete({"sampled": SAMPLED}, PROMPTS))["sampled"]
        reader = scene.open("sampled", SAMPLED, PROMPTS)

        async def one_left() -> bool:
            return await scene.counts("hedges", cause="slow", outcome="won") > 0

        await lasting(one_left)
        await goes_on(reader, expected)
        await scene.budget_kept()
        await scene.nothing_left()


async def test_every_fault_at_once() -> None:
    """A worker is slow, one freezes, one dies, and one freezes later."""
    slow = ("--simulated-faults-slow-after-steps", "120", "--simulated-faults-slow-factor", "10")
    # Each of the others meets a frozen worker alone.
    kinds = {"greedy": GREEDY, "several sequences": KINDS["several sequences"], **ENDING}
    async with hedged(6, flags=[slow]) as scene:
        prompts = PROMPTS[:4]
        expected = await scene.complete(kinds, prompts)
        readers = {kind: scene.open(kind, options, prompts) for kind, options in kinds.items()}
        for reader in readers.values():
            await reader.until(lambda r: all(item.started for item in r.items))
        _, first, dying, later, *_ = scene.engines.values()
        copies = await scene.counts("hedges")
        await freeze(first)
        await scene.mesh.counted("hedges", copies + 1)
        await kill(dying)
        await freeze(later)
        first.signal(signal.SIGCONT)
        await scene.won(1)
        # While the others run, copies have their share of ever more tokens.
        for kind in reversed(readers):
            await check(kind, readers[kind], expected[kind])
        later.signal(signal.SIGCONT)
        await scene.budget_kept()
        await scene.nothing_left()
