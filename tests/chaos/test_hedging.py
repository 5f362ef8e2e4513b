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
    INSIDE,
    SIMULATED,
    WIDE_TOKENS,
    Mesh,
    StreamReader,
    eventually,
    running_mesh,
    samples_of,
    scrape,
)
from processes import ServiceProcess
from trtmesh.client import ItemResult
from trtmesh.router.hedging.lateness import Budget

HEDGED = (
    *("--hedge-enabled", "true", "--placement-policy", "round_robin"),
    # All other moves take far longer than a hedge, even on a busy machine.
    *("--deadlines-silence-seconds", "60", "--deadlines-step-gap-seconds", "60"),
)
GENEROUS = ("--hedge-token-share", "0.5")
"""For tests of other things than the budget: on a busy machine prompts seem expensive, and copies are many."""
ENGINE = (
    *(*SIMULATED, *WIDE_TOKENS),
    # Few tokens take as long as a fault.
    *("--simulated-timing-step-ms", "16", "--load-interval-seconds", "0.05"),
)
PROMPTS = [f"item {number} of a hedged request" for number in range(6)]
TOKENS = 75
GREEDY: Mapping[str, Any] = {}
SAMPLED: Mapping[str, Any] = {"temperature": 0.9, "seed": 11}

KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "several sequences": {**SAMPLED, "num_return_sequences": 2},
    "stop texts": {**SAMPLED, "stop_texts": ["a text that never comes"]},
    "found stop texts": {**SAMPLED, "stop_texts": ["tt", "ee"], "min_tokens": TOKENS},
    "whole": {**SAMPLED, "stream": False},
    "ids alone": {**GREEDY, "text": False},
}


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


async def test_frozen_worker_is_not_noticed() -> None:
    """Until it thaws, all its sequences go on at the other worker, and what it computed is equal."""
    # So many that none ends before the worker freezes.
    kinds = {
        kind: {**options, "max_tokens": 2 * TOKENS, "ignore_end_id": True}
        for kind, options in KINDS.items()
    }
    slow = ("--simulated-timing-step-ms", "32")
    async with hedged(2, *GENEROUS, flags=[slow] * 2) as scene:
        mesh, prompts = scene.mesh, PROMPTS[:3]
        asked = (mesh.client.complete(prompts, **options) for options in kinds.values())
        expected = dict(zip(kinds, map(contents, await asyncio.gather(*asked)), strict=True))
        readers = dict[str, StreamReader]()
        for kind, options in kinds.items():
            # One after another, so that each has items at both.
            readers[kind] = mesh.open(prompts, **options)
            await readers[kind].until(lambda r: all(item.started for item in r.items))
        frozen = scene.worker_of(readers["greedy"])
        begun = {
            kind: sum(item.started.worker == frozen for item in reader.items if item.started)
            for kind, reader in readers.items()
        }
        assert all(begun.values()), begun
        await freeze(scene.engines[frozen])
        for kind, reader in readers.items():
            assert contents(await reader.result()) == expected[kind], kind
            print(f"worst gap of {kind}: {reader.worst_gap_seconds() * 1000:.0f} ms")
        scene.engines[frozen].signal(signal.SIGCONT)
        sequences = sum(begun.values()) + begun["several sequences"]
        assert await scene.counts("hedges", outcome="won") >= sequences, await scene.whys()
        await scene.nothing_left()


@pytest.mark.parametrize("fault", [freeze, kill])
async def test_second_worker_fails_as_well(
    fault: Callable[[ServiceProcess], Awaitable[None]],
) -> None:
    """The third worker goes on."""
    options = {**SAMPLED, "max_tokens": TOKENS, "ignore_end_id": True}
    async with hedged(3, *GENEROUS) as scene:
        expected = contents(await scene.mesh.client.complete(PROMPTS, **options))
        reader = scene.mesh.open(PROMPTS, **options)
        await reader.until(lambda r: all(r.tokens(index) > 20 for index in range(len(PROMPTS))))
        first, second, _ = scene.engines.values()
        await freeze(first)
        await scene.mesh.counted("hedges", 1)
        await fault(second)
        assert contents(await reader.result()) == expected
        for engine in (first, second):
            engine.signal(signal.SIGCONT)
        await scene.nothing_left()


async def test_decode_worker_freezes_after_a_handoff() -> None:
    """The copy computes its prompt at the other decode worker; commands tell what became of it."""
    roles = [("--role", role) for role in ("prefill", "decode", "decode")]
    options = {**SAMPLED, "max_tokens": TOKENS, "ignore_end_id": True, "request_id": "split"}
    async with hedged(3, *GENEROUS, "--handoff-enabled", "always", flags=roles) as scene:
        prompts = [prompt * 20 for prompt in PROMPTS]
        expected = contents(await scene.mesh.client.complete(prompts, **options))
        reader = scene.mesh.open(prompts, **options)
        await reader.until(lambda r: all(r.tokens(index) > 20 for index in range(len(prompts))))
        await freeze(scene.engines["engine-1"])
        assert contents(await reader.result()) == expected
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


CHAT = {"prompt": PROMPTS[0], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
TRITON = {"text_input": PROMPTS[0], "max_tokens": TOKENS}
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
        for path, body in BODIES.items():
            won = await scene.counts("hedges", outcome="won")
            expected = _text(await http.post(path, body))
            # Whichever worker has the request next.
            asked = asyncio.create_task(http.post(path, body))
            await eventually(lambda: _runs(scene))
            workers = (await scene.mesh.status()).workers
            name = next(worker.worker for worker in workers if worker.items)
            await freeze(scene.engines[name])
            assert _text(await asked) == expected
            for each in scene.engines.values():
                each.signal(signal.SIGCONT)
            assert await scene.counts("hedges", outcome="won") > won
            await scene.nothing_left()


async def _runs(scene: Hedged) -> bool:
    return any(worker.items for worker in (await scene.mesh.status()).workers)


def _text(reply: Reply) -> str:
    answer = reply.json
    return str(answer["choices"][0]["text"] if "choices" in answer else answer["text_output"])


async def test_client_leaves_while_two_copies_run() -> None:
    async with hedged(2, *GENEROUS) as scene:
        reader = scene.mesh.open(PROMPTS[:1], max_tokens=20_000, ignore_end_id=True)
        await reader.tokens_here(20)
        frozen = scene.engines[scene.worker_of(reader)]
        (other,) = (engine for engine in scene.engines.values() if engine is not frozen)
        await freeze(frozen)
        await scene.mesh.counted("hedges", 1)
        await freeze(other)
        await reader.cancel()
        for engine in (frozen, other):
            engine.signal(signal.SIGCONT)
        await scene.nothing_left()


async def test_sequences_leave_a_worker_at_a_tenth_of_its_speed() -> None:
    """Before it fails; and a copy costs no more than its share of the tokens."""
    # A slow step is not so long that it is a stall.
    fast = ("--simulated-timing-step-ms", "4")
    slow = ("--simulated-faults-slow-after-steps", "360", "--simulated-faults-slow-factor", "10")
    options = {**SAMPLED, "max_tokens": 900, "ignore_end_id": True}
    async with hedged(3, flags=[(*fast, *slow), fast, fast]) as scene:
        expected: list[Any] = []
        for _ in range(2):
            items: Sequence[ItemResult] = await scene.mesh.client.complete(PROMPTS, **options)
            expected = expected or contents(items)
            assert contents(items) == expected
        assert await scene.counts("hedges", cause="slow", outcome="won") > 0
        await scene.budget_kept()
        await scene.nothing_left()


async def test_every_fault_at_once() -> None:
    """A worker is slow, one freezes, one dies, and one freezes later."""
    slow = ("--simulated-faults-slow-after-steps", "120", "--simulated-faults-slow-factor", "10")
    # Each of the others meets a frozen worker alone.
    kinds = [
        {**KINDS[kind], "max_tokens": TOKENS * 2, "ignore_end_id": True}
        for kind in ("greedy", "several sequences", "found stop texts", "whole")
    ]
    async with hedged(6, flags=[slow]) as scene:
        prompts = PROMPTS[:4]
        expected = [contents(await scene.mesh.client.complete(prompts, **kind)) for kind in kinds]
        readers = [scene.mesh.open(prompts, **kind) for kind in kinds]
        for reader in readers:
            await reader.until(lambda r: all(item.started for item in r.items))
        _, first, dying, later, *_ = scene.engines.values()
        await freeze(first)
        await scene.mesh.counted("hedges", 1)
        await kill(dying)
        await freeze(later)
        first.signal(signal.SIGCONT)
        for reader, whole in zip(readers, expected, strict=True):
            assert contents(await reader.result()) == whole
        later.signal(signal.SIGCONT)
        assert await scene.counts("hedges", outcome="won") > 0
        await scene.budget_kept()
        await scene.nothing_left()
