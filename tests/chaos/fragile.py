"""A mesh of two engines to kill or freeze, each behind a proxy to cut or silence."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chaos.proxy import Proxy, proxy_to
from e2e.mesh import DEMO, Mesh, StreamReader, check_beginning, running_mesh, scrape
from processes import ServiceProcess
from trtmesh.client import ItemResult

NAMES = ("one", "two")
PROMPTS = [f"the {number}. prompt begins like the others" for number in range(4)]
SEQUENCES = 2
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "num_return_sequences": SEQUENCES}
TOKENS = 10
"""Tokens of a sequence that are compared."""


@dataclass
class Fragile:
    """A mesh, its engines and their proxies by engine name."""

    mesh: Mesh
    engine_flags: Sequence[str]
    engines: dict[str, ServiceProcess]
    proxies: dict[str, Proxy]

    @property
    def engines_flags(self) -> Sequence[str]:
        """Router flags; both engines come back."""
        addresses = ",".join(proxy.address for proxy in self.proxies.values())
        return ("--engines", addresses, "--retries-worker-wait-seconds", "60")

    def begun_on(self, reader: StreamReader, name: str) -> list[int]:
        """The batch indices of the items started on an engine."""
        return [
            batch_index
            for batch_index, item in enumerate(reader.items)
            if item.started and item.started.worker == name
        ]

    def proxy_of(self, reader: StreamReader, batch_index: int) -> Proxy:
        """The proxy of the engine where an item started, or of any engine before that."""
        started = reader.items[batch_index].started
        return self.proxies[started.worker if started else NAMES[0]]

    def cut(self, name: str) -> None:
        """Closes the connections to an engine and refuses new ones."""
        self.proxies[name].cut()

    def kill(self, name: str) -> None:
        self.engines[name].signal(signal.SIGKILL)

    def freeze(self, name: str) -> None:
        self.engines[name].signal(signal.SIGSTOP)

    async def moved_sequences(self) -> float:
        """The number of sequences migrated so far."""
        return (await scrape(self.mesh.router)).get("trtmesh_router_moved_sequences_total", 0.0)

    async def mend(self, *dead: str) -> None:
        """Repairs every fault; successors of the `dead` engines take their addresses."""
        for name in dead:
            await self.engines[name].wait()
            port = int(self.engines[name].address.rpartition(":")[2])
            self.engines[name] = await self.start_engine(name, port)
        for name, proxy in self.proxies.items():
            self.engines[name].signal(signal.SIGCONT)
            proxy.mend()
        await self.mesh.ready(workers=len(NAMES))

    async def start_engine(self, name: str, port: int = 0) -> ServiceProcess:
        return await self.mesh.start_engine(*self.engine_flags, "--worker", name, port=port)

    async def check_nothing_is_left(self) -> None:
        await self.mesh.idle()
        samples = await scrape(self.mesh.router)
        assert samples["trtmesh_router_worker_bookings"] == 0


@asynccontextmanager
async def fragile_mesh(
    engine_flags: Sequence[str], model_dir: Path = DEMO, router_flags: Sequence[str] = ()
) -> AsyncIterator[Fragile]:
    """Starts a mesh of two equal engines."""
    async with AsyncExitStack() as stack:
        found: list[Fragile] = []

        async def start(mesh: Mesh) -> None:
            fragile = Fragile(mesh, engine_flags, {}, {})
            found.append(fragile)
            *engines, _ = await asyncio.gather(
                *map(fragile.start_engine, NAMES), mesh.start_tokenizer(model_dir)
            )
            for name, engine in zip(NAMES, engines, strict=True):
                fragile.engines[name] = engine
                proxy = await stack.enter_async_context(proxy_to(engine.address))
                fragile.proxies[name] = proxy
            await mesh.start_router(*fragile.engines_flags, *router_flags)
            await mesh.ready(workers=len(NAMES), tokenizers=1)

        async with running_mesh(start=start):
            yield found[0]


def contents(items: Iterable[ItemResult]) -> list[Any]:
    """The parts of a result unaffected by faults."""
    return [
        (
            (item.error, item.reason, item.usage.generated_tokens, item.usage.prompt_tokens),
            [(s.token_ids, s.text, s.reason) for s in item.sequences],
        )
        for item in items
    ]


def log_probs(items: Sequence[ItemResult]) -> list[float]:
    """Every log-probability of every sequence, and their reported sum."""
    values: list[float] = []
    for sequence in (sequence for item in items for sequence in item.sequences):
        told = [chunk.details for chunk in sequence.chunks if chunk.details is not None]
        values += [value for details in told for value in details.log_probs]
        if sequence.finished and sequence.finished.cumulative_log_prob is not None:
            values.append(sequence.finished.cumulative_log_prob)
    return values


async def lose(
    fragile: Fragile,
    fault: str,
    name: str,
    position: int,
    whole: Sequence[ItemResult],
    **options: Any,
) -> float:
    """Loses the named engine, or the other if the policy placed every item there, once all its sequences have
    `position` tokens; checks their migration. Returns the longest gap between two events of an item."""
    before = await fragile.moved_sequences()
    reader = StreamReader(fragile.mesh.client, PROMPTS, **options, ignore_end_id=True)

    def chosen(reader: StreamReader) -> str:
        """The engine to lose; '' while unknown."""
        if fragile.begun_on(reader, name):
            return name
        (other,) = set(NAMES) - {name}
        return other if all(item.started for item in reader.items) else ""

    def reached(reader: StreamReader) -> bool:
        if position == 0:
            return bool(chosen(reader))
        return all(item.started for item in reader.items) and all(
            len(reader.positions(index)) == SEQUENCES and min(reader.positions(index)) >= position
            for index in fragile.begun_on(reader, chosen(reader))
        )

    try:
        await reader.until(reached)
        victim = chosen(reader)
        lost = fragile.begun_on(reader, victim)
        getattr(fragile, fault)(victim)
        await fragile.mesh.counted("moved_sequences", before + SEQUENCES * len(lost))
        items = await reader.stopped_at(TOKENS, SEQUENCES)
    finally:
        await reader.cancel()
    check_beginning(items, whole)
    # Kernels round differently in another batch.
    assert log_probs_of(items, TOKENS) == pytest.approx(log_probs_of(whole, TOKENS), abs=1e-2)
    await fragile.mend(*[victim] * (fault == "kill"))
    return reader.worst_gap_seconds()


def log_probs_of(items: Sequence[ItemResult], tokens: int) -> list[float]:
    """The log-probabilities of the first tokens of every sequence."""
    return [
        value
        for item in items
        for sequence in item.sequences
        for value in [
            value
            for chunk in sequence.chunks
            if chunk.details is not None
            for value in chunk.details.log_probs
        ][:tokens]
    ]


def check_log_probs(items: Sequence[ItemResult], whole: Sequence[ItemResult], tokens: int) -> None:
    """Checks the log-probabilities of the first tokens of stopped items to the bit, and the sums of all."""
    assert log_probs_of(items, tokens) == log_probs_of(whole, tokens)
    for sequence in (sequence for item in items for sequence in item.sequences):
        assert sequence.finished
        told = [p for chunk in sequence.chunks if chunk.details for p in chunk.details.log_probs]
        assert sequence.finished.cumulative_log_prob == pytest.approx(sum(told))


async def undisturbed(fragile: Fragile, **options: Any) -> Sequence[ItemResult]:
    """The first tokens of the items without a fault."""
    return await fragile.mesh.client.complete(
        PROMPTS, **options, max_tokens=TOKENS, ignore_end_id=True
    )
