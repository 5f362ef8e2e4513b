"""Runs items on any backend and collects all their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.gate import Gate
from trtmesh.chassis.parsing import parse_config
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.client.options import build_config
from trtmesh.engine.backend import (
    AdapterLoad,
    Backend,
    HoldsAdapters,
    PromptDetails,
    SequenceEnd,
    StepOutput,
    Submission,
    TokenDetails,
)

SECONDS = 60.0


def config_of(options: Mapping[str, Any]) -> GenerationConfig:
    """A config as the engine receives it, from the SDK's keywords."""
    return parse_config(build_config(None, options))


@dataclass
class Outcome:
    """All deliveries about one sequence."""

    token_ids: list[int] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)
    prompts: list[PromptDetails] = field(default_factory=list)
    end: SequenceEnd | None = None

    def summary(self) -> tuple[object, ...]:
        """The output as a client sees it, without names and times."""
        assert self.end is not None
        assert self.end.error is None, self.end.error
        details = [
            (d.log_probs, d.cumulative_log_prob, d.top_log_probs, d.generation_logits)
            for d in self.details
        ]
        prompts = [(p.log_probs, p.top_log_probs, p.context_logits) for p in self.prompts]
        ending = (self.end.reason, self.end.stop_token_ids, self.end.perf_metrics is not None)
        return self.token_ids, details, prompts, ending


class Lab:
    """A started backend. `order` holds the items' numbers as they ended."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.outcomes: dict[int, Outcome] = {}
        self.order: list[int] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.gate = Gate()

    @property
    def adapters(self) -> HoldsAdapters:
        """The backend, which must hold adapters."""
        assert isinstance(self.backend, HoldsAdapters)
        return self.backend

    def submit(self, prompt: Sequence[int], config: GenerationConfig) -> list[int]:
        """The keys of the item's sequences."""
        keys = range(len(self.outcomes), len(self.outcomes) + config.sequences)
        self.backend.submit(
            Submission(tuple(keys), f"item-{keys[0]}", 0, 0, list(prompt), 0, config)
        )
        self.outcomes.update((key, Outcome()) for key in keys)
        return list(keys)

    async def ended(self, keys: Sequence[int]) -> list[Outcome]:
        await self._until(lambda: all(self.outcomes[key].end for key in keys))
        return [self.outcomes[key] for key in keys]

    async def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Loads adapters into a backend without any."""
        for load in loads:
            self.adapters.load_adapter(load)
        await self._until(lambda: len(self.adapters.adapters()) == len(loads))
        assert not any(state.error for state in self.adapters.adapters())

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that a delivery fulfils."""
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def run(self, prompt: Sequence[int], config: GenerationConfig) -> list[Outcome]:
        return await self.ended(self.submit(prompt, config))

    def deliver(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._take, output)
        # A delivery on the loop's own thread finds the event set.
        self.gate.passed()

    def fail(self, error: BaseException) -> None:
        raise AssertionError(f"the backend failed: {error}")

    def _take(self, output: StepOutput) -> None:
        start = 0
        for key, offset, count in zip(
            output.keys, output.token_offsets, output.token_counts, strict=True
        ):
            # A changed beam is sent again from the beginning.
            tokens = self.outcomes[key].token_ids
            tokens[offset:] = output.token_ids[start : start + count]
            start += count
        for details in output.details:
            self.outcomes[details.key].details.append(details)
        for prompt in output.prompts:
            self.outcomes[prompt.key].prompts.append(prompt)
        for end in output.ends:
            self.outcomes[end.key].end = end
            self.order.append(end.key)
        self._changed.set()


@asynccontextmanager
async def lab(backend: Backend) -> AsyncIterator[Lab]:
    started = Lab(backend)
    await backend.start(started.deliver, started.fail)
    try:
        yield started
    finally:
        await backend.close()
