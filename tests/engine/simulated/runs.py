"""Runs of a simulated backend on the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from engine.short_names import by_short_names
from trtmesh.chassis.vocabulary import GenerationConfig, KvCache, Output, Sampling, Stopping
from trtmesh.engine.backend import (
    BlocksRemoved,
    BlocksStored,
    HandoffNews,
    SequenceEnd,
    StepOutput,
    Submission,
)
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.v1 import generation_pb2 as pb

PATIENCE_SECONDS = 60.0


@dataclass
class Run:
    """A backend and all deliveries."""

    backend: SimulatedBackend
    outputs: list[StepOutput] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    starts: dict[int, pb.PerfMetrics] = field(default_factory=dict)
    ends: dict[int, SequenceEnd] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    news: list[HandoffNews] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, output: StepOutput) -> None:
        self.outputs.append(output)
        ids = iter(output.token_ids)
        for key, offset, count in zip(
            output.keys, output.token_offsets, output.token_counts, strict=True
        ):
            assert key not in self.ends
            first = self.offsets.setdefault(key, offset)
            known = self.tokens.setdefault(key, [])
            assert offset == first + len(known)
            known += [next(ids) for _ in range(count)]
        for start in output.starts:
            assert len(self.tokens[start.key]) == 1, "not with the first token"
            self.starts[start.key] = start.perf_metrics
        for end in output.ends:
            assert end.key not in self.ends
            self.ends[end.key] = end
        self.news += output.handoffs
        for event in output.kv_events:
            if isinstance(event, BlocksStored):
                parent = event.parent_hash
                for block in event.block_hashes:
                    assert block not in self.stored
                    self.stored[block] = parent
                    parent = block
            elif isinstance(event, BlocksRemoved):
                for block in event.block_hashes:
                    del self.stored[block]
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def output(self) -> None:
        """Waits for the next delivery."""
        seen = len(self.outputs)
        await self.until(lambda: len(self.outputs) > seen)

    async def end(self, key: int) -> SequenceEnd:
        await self.until(lambda: key in self.ends)
        return self.ends[key]

    async def generate(self, item: Submission) -> list[int]:
        self.backend.submit(item)
        for key in item.keys:
            await self.end(key)
        return self.tokens.get(item.keys[0], [])


@asynccontextmanager
async def running(**values: object) -> AsyncIterator[Run]:
    backend = SimulatedBackend(by_short_names(SimulatedSettings, **({"step_ms": 0} | values)))
    run = Run(backend)
    await backend.start(run.deliver, run.fail)
    try:
        yield run
    finally:
        await backend.close()
        stats = backend.stats()
        assert stats.running_sequences == stats.waiting_sequences == stats.used_blocks == 0
        assert stats.pending_prompt_tokens == 0


def item(
    key: int = 1,
    max_tokens: int | None = 8,
    *,
    prompt: tuple[int, ...] = (40, 41, 42),
    keys: tuple[int, ...] = (),
    emitted: tuple[int, ...] = (),
    stopping: Stopping | None = None,
    sampling: Sampling | None = None,
    kv_cache: KvCache | None = None,
    sequence_index: int = 0,
    priority: int = 0,
    perf_metrics: bool = False,
    sender_lease_id: str = "",
    receiver_lease_id: str = "",
    is_prefill: bool = False,
) -> Submission:
    return Submission(
        keys=keys or (key,),
        request_id="r",
        batch_index=0,
        sequence_index=sequence_index,
        token_ids=[*prompt, *emitted],
        emitted_tokens=len(emitted),
        config=GenerationConfig(
            stopping=replace(stopping or Stopping(), max_tokens=max_tokens),
            sampling=sampling or Sampling(),
            kv_cache=kv_cache or KvCache(),
            output=Output(perf_metrics=perf_metrics),
            priority=priority,
        ),
        sender_lease_id=sender_lease_id,
        receiver_lease_id=receiver_lease_id,
        is_prefill=is_prefill,
    )
