"""A mesh of two engines, each behind a proxy that fails when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.proxy import Proxy, proxy_to
from e2e.mesh import DEMO, Mesh, StreamReader, running_mesh, scrape
from trtmesh.client import ItemResult

NAMES = ("one", "two")


@dataclass
class Fragile:
    """The mesh, and the proxy of each engine by the engine's name."""

    mesh: Mesh
    proxies: dict[str, Proxy]

    def proxy_of(self, reader: StreamReader, batch_index: int) -> Proxy:
        """The proxy of the engine that an item began on; of either, where it has not begun."""
        started = reader.items[batch_index].started
        return self.proxies[started.worker if started else NAMES[0]]

    async def mend(self) -> None:
        """Everything works again."""
        for proxy in self.proxies.values():
            proxy.mend()
        await self.mesh.ready(workers=len(NAMES))

    async def check_nothing_is_left(self) -> None:
        await self.mesh.idle()
        samples = await scrape(self.mesh.router)
        assert samples["trtmesh_router_worker_bookings"] == 0


@asynccontextmanager
async def fragile_mesh(
    engine_flags: Sequence[str], model_dir: Path = DEMO
) -> AsyncIterator[Fragile]:
    """Two equal engines."""
    async with AsyncExitStack() as stack:
        proxies: dict[str, Proxy] = {}

        async def start(mesh: Mesh) -> None:
            engines = await asyncio.gather(
                *(mesh.start_engine(*engine_flags, "--worker", name) for name in NAMES),
                mesh.start_tokenizer(model_dir),
            )
            for name, engine in zip(NAMES, engines, strict=False):
                proxies[name] = await stack.enter_async_context(proxy_to(engine.address))
            addresses = ",".join(proxy.address for proxy in proxies.values())
            # Nobody has to be patient here: both engines come back.
            flags = ("--engines", addresses, "--worker-recovery-seconds", "60")
            await mesh.start_router(*flags)
            await mesh.ready(workers=len(NAMES), tokenizers=1)

        async with running_mesh(start=start) as mesh:
            yield Fragile(mesh, proxies)


def contents(items: Sequence[ItemResult]) -> list[Any]:
    """What must not depend on what happened on the way."""
    return [
        (
            (item.error, item.reason, item.usage.generated_tokens, item.usage.prompt_tokens),
            [(s.token_ids, s.text, s.reason) for s in item.sequences],
        )
        for item in items
    ]


def log_probs(items: Sequence[ItemResult]) -> list[float]:
    """Every log-probability of every sequence, and the sum that its end told."""
    values: list[float] = []
    for sequence in (sequence for item in items for sequence in item.sequences):
        told = [chunk.details for chunk in sequence.chunks if chunk.details is not None]
        values += [value for details in told for value in details.log_probs]
        if sequence.finished and sequence.finished.cumulative_log_prob is not None:
            values.append(sequence.finished.cumulative_log_prob)
    return values
