"""Simulated workers with roles, as engine services on real sockets, and their router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from chaos.proxy import Proxy, proxy_to
from engine_streams import RunningEngine, serving
from router.scripted import (
    PATIENCE_SECONDS,
    READY,
    RouterClient,
    eventually,
    merged,
    serving_router,
    until_states,
)
from trtmesh.client import ItemResult
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.handoff.settings import HANDOFF_LIMITS, HandoffLimits
from trtmesh.v1 import engine_pb2 as epb

PROMPT = list(range(100, 220))
"""Seven full blocks and a part of one."""

SIMULATED: dict[str, Any] = {
    "timing": {"step_ms": 2.0, "prefill_tokens_per_second": 20_000.0},
    "kv_cache": {"tokens_per_block": 16, "total_blocks": 512},
}

CALM = {
    "handoff": {"enabled": "always"},
    "retries": {"worker_wait_seconds": 20},
    "deadlines": {
        "silence_seconds": 60,
        "step_gap_seconds": 60,
    },
}
"""A crowded machine moves nothing."""

NO_LIMITS: Mapping[str, Any] = {}

BY_STATE: Mapping[str, Any] = {"handoff": {"by": "state"}}
"""Simulated workers that move KV themselves."""

ZERO = ("live_handoffs", "worker_leases", "worker_bookings", "worker_sequences", "live_items")


@dataclass
class Workers:
    """A router and its workers by name."""

    client: RouterClient
    engines: dict[str, RunningEngine]
    proxies: dict[str, Proxy]
    """Proxies between the router, or another worker, and each worker."""
    _backends: Sequence[SimulatedBackend]
    _asked: list[asyncio.Task[Any]] = field(default_factory=list)

    def ask(self, *prompts: Any, **options: Any) -> asyncio.Task[Sequence[ItemResult]]:
        options = {"text": False, "max_tokens": 40} | options
        asked: asyncio.Task[Any] = asyncio.create_task(
            self.client.complete(prompts or [PROMPT], **options)
        )
        self._asked.append(asked)
        return asked

    async def end(self) -> None:
        for asked in self._asked:
            asked.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    def set_pace(self, step_ms: float) -> None:
        """Has all workers' steps take so long, from the next one on."""
        for backend in self._backends:
            timing = backend._settings.timing.model_copy(update={"step_ms": step_ms})
            backend._settings = backend._settings.model_copy(update={"timing": timing})

    def load(self, name: str) -> epb.Load:
        """The load of a worker now."""
        engine = self.engines[name].service._engine
        assert engine
        return engine.load()

    async def stage(self, stage: str, count: int = 1) -> None:
        """Waits for live handoffs in a stage."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                live = (await self.client.admin.list_handoffs()).handoffs
                if sum(handoff.stage == stage for handoff in live) == count:
                    return
                await asyncio.sleep(0.01)

    def handoffs(self, **labels: str) -> float:
        """Ended handoffs with these labels."""
        return self.counted("handoffs", **labels)

    def moved(self, **labels: str) -> float:
        """Moved sequences with these labels."""
        return self.counted("moved_sequences", **labels)

    def counted(self, counter: str, **labels: str) -> float:
        found = 0.0
        for family in self.client.registry.collect():
            for sample in family.samples:
                if sample.name == f"trtmesh_router_{counter}_total":
                    found += sample.value * (labels.items() <= sample.labels.items())
        return found

    async def quiet(self) -> None:
        """Waits until nothing is held anywhere, and checks the accounts of the leases."""
        await eventually(lambda: all(not self.client.gauge(name) for name in ZERO))
        await eventually(lambda: all(_is_quiet(self.load(name)) for name in self.engines))
        for load in map(self.load, self.engines):
            for counts in (load.sent_handoffs, load.received_handoffs):
                ended = counts.consumed + counts.released + counts.expired
                assert counts.granted == ended, counts


def _is_quiet(load: epb.Load) -> bool:
    held = load.sent_handoffs.held + load.received_handoffs.held
    return not (held or load.used_blocks or load.running_sequences or load.quarantined_blocks)


@asynccontextmanager
async def workers(
    *roles: str,
    settings: dict[str, Any] | None = None,
    grace_seconds: float = 30.0,
    tokenizers: Sequence[str] = (),
    handoff_limits: Mapping[str, HandoffLimits] = NO_LIMITS,
    of_worker: Mapping[str, Mapping[str, Any]] = NO_LIMITS,
    by_state: bool = False,
    **simulated: Any,
) -> AsyncIterator[Workers]:
    """Workers named by role and number, such as prefill-0; `handoff_limits` has their bounds of handoffs, `of_worker`
    their own settings of the backend."""
    backend = merged(merged(SIMULATED, simulated), BY_STATE if by_state else {})
    async with AsyncExitStack() as stack:
        engines, proxies, backends = {}, {}, []
        for number, role in enumerate(roles):
            name = f"{role}-{number}"
            own = SimulatedSettings.model_validate(merged(backend, of_worker.get(name, {})))
            backends.append(SimulatedBackend(own))
            engines[name] = await stack.enter_async_context(
                serving(
                    backends[-1],
                    worker=name,
                    role=role,
                    load_interval_seconds=0.1,
                    grace_seconds=grace_seconds,
                    handoff_limits=handoff_limits.get(name, HANDOFF_LIMITS),
                )
            )
            proxies[name] = await stack.enter_async_context(proxy_to(engines[name].address))
        addresses = [proxy.address for proxy in proxies.values()]
        client = await stack.enter_async_context(
            serving_router(addresses, tokenizers, **merged(CALM, settings or {}))
        )
        await until_states(client, [READY] * len(engines), [READY] * len(tokenizers))
        found = Workers(client, engines, proxies, backends)
        try:
            yield found
        finally:
            await found.end()


async def expected(*prompts: Any, **options: Any) -> Sequence[ItemResult]:
    """The results of a single mixed worker, at once."""
    async with workers("mixed", timing={"step_ms": 0.0}) as on, asyncio.timeout(PATIENCE_SECONDS):
        return await on.ask(*prompts, **options)
