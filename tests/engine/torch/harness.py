"""A running torch backend for tests, and the deliveries by sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engine.gate import Gate
from engine.short_names import by_short_names
from process_constants import patch
from trtmesh.chassis.vocabulary import GenerationConfig, Output, Sampling, Stopping
from trtmesh.engine.backend import (
    BackendInfo,
    BackendStats,
    HandoffNews,
    HandsOverBlocks,
    HoldsAdapters,
    PromptDetails,
    SequenceEnd,
    StepOutput,
    Submission,
    TokenDetails,
)
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

SECONDS = 60.0


@dataclass
class Stream:
    """The deliveries for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    first_offset: int | None = None
    details: list[TokenDetails] = field(default_factory=list)
    prompts: list[PromptDetails] = field(default_factory=list)
    start: pb.PerfMetrics | None = None
    end: SequenceEnd | None = None
    blocks_used_at_end: int | None = None


class Harness:
    """Submits, collects, and checks the promises of every backend meanwhile."""

    def __init__(self, model_dir: Path, settings: TorchSettings) -> None:
        self.backend = TorchBackend(model_dir, settings)
        self.as_protocols: tuple[HandsOverBlocks, HoldsAdapters] = self.backend, self.backend
        self.streams: dict[int, Stream] = {}
        self.beams: set[int] = set()
        self.outputs: list[StepOutput] = []
        self.used_blocks: list[int] = []
        self.failures: list[BaseException] = []
        self.info: BackendInfo
        self.on_output: Callable[[StepOutput], object] = lambda _: None
        """Takes each delivery on the engine's thread."""
        self.handoffs: list[HandoffNews] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.gate = Gate()

    async def start(self) -> None:
        self.info = await self.backend.start(self._deliver, self._fail)

    def submit(
        self,
        prompt: Sequence[int],
        config: GenerationConfig | None = None,
        *,
        emitted: Sequence[int] = (),
        batch_index: int = 0,
        sequence_index: int = 0,
        sender_lease_id: str = "",
        receiver_lease_id: str = "",
    ) -> tuple[int, ...]:
        """Returns the keys of the item's sequences."""
        config = config or GenerationConfig()
        first = len(self.streams)
        keys = tuple(range(first, first + config.sequences))
        for key in keys:
            self.streams[key] = Stream()
        if config.beam_search.beam_width > 1:
            self.beams.update(keys)
        try:
            self.backend.submit(
                Submission(
                    keys=keys,
                    request_id=f"request-{first}",
                    batch_index=batch_index,
                    sequence_index=sequence_index,
                    token_ids=[*prompt, *emitted],
                    emitted_tokens=len(emitted),
                    config=config,
                    sender_lease_id=sender_lease_id,
                    receiver_lease_id=receiver_lease_id,
                )
            )
        except BaseException:
            for key in keys:
                del self.streams[key]
            raise
        return keys

    @contextmanager
    def held_at(self, condition: Callable[[StepOutput], bool]) -> Iterator[None]:
        """Stops the backend at the first delivery that fulfils a condition, until the end of the block: it goes no
        further, however late this thread looks."""
        with ExitStack() as held:

            def hold(output: StepOutput) -> None:
                if condition(output):
                    held.enter_context(self.gate.held())

            self.on_output = hold
            yield
            self.on_output = lambda _: None

    async def ended(self, keys: Sequence[int] | None = None) -> list[Stream]:
        """The streams of `keys`, or all, once they have ended."""
        wanted = list(self.streams if keys is None else keys)
        await self.until(lambda: all(self.streams[key].end for key in wanted))
        return [self.streams[key] for key in wanted]

    async def run(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> list[list[int]]:
        """The tokens of each prompt, all submitted at once."""
        with self.gate.held():
            keys = [self.submit(prompt, config)[0] for prompt in prompts]
        return [stream.token_ids for stream in await self.ended(keys)]

    async def until(self, condition: Any) -> None:
        """Waits for a condition that a delivery fulfils."""
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _deliver(self, output: StepOutput) -> None:
        # On the engine's thread, so the counters belong to this delivery.
        stats = self.backend.stats() if hasattr(self.backend, "_loaded") else None
        self.on_output(output)
        self._loop.call_soon_threadsafe(self._take, output, stats)
        self.gate.passed()

    def _fail(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._take_failure, error)

    def _take_failure(self, error: BaseException) -> None:
        self.failures.append(error)
        self._changed.set()

    def _take(self, output: StepOutput, stats: BackendStats | None) -> None:
        assert not self.outputs or output.step_count >= self.outputs[-1].step_count
        self.outputs.append(output)
        self.handoffs += output.handoffs
        if stats:
            self.used_blocks.append(stats.used_blocks)
        assert len(set(output.keys)) == len(output.keys), "two runs of a sequence"
        position = 0
        for key, offset, count in zip(
            output.keys, output.token_offsets, output.token_counts, strict=True
        ):
            stream = self.streams[key]
            assert stream.end is None, "tokens after the end"
            if stream.first_offset is None:
                stream.first_offset = offset
            if key in self.beams and not offset:
                stream.token_ids = []
                stream.details = []
            assert offset == stream.first_offset + len(stream.token_ids), "a gap or a repeat"
            stream.token_ids += output.token_ids[position : position + count]
            position += count
        assert position == len(output.token_ids)
        for prompt in output.prompts:
            stream = self.streams[prompt.key]
            positions = sum(len(p.log_probs) for p in stream.prompts)
            assert not stream.prompts or prompt.token_offset >= positions, "out of order"
            stream.prompts.append(prompt)
            assert prompt.key in output.keys or not stream.token_ids, "later than the first token"
        for start in output.starts:
            stream = self.streams[start.key]
            assert start.key in output.keys, "not with a token"
            run = output.token_counts[output.keys.index(start.key)]
            first = len(stream.token_ids) == run
            assert first or start.key in self.beams, "not with the first token"
            assert stream.start is None, "a second start"
            stream.start = start.perf_metrics
        for details in output.details:
            self.streams[details.key].details.append(details)
        for end in output.ends:
            stream = self.streams[end.key]
            assert stream.end is None, "a second end"
            stream.end = end
            stream.blocks_used_at_end = stats.used_blocks if stats else None
        self._changed.set()


def module_of(engine: Harness) -> Any:
    """The model's module."""
    compute: Any = engine.backend._loaded.engine._compute
    # Where steps are captured, what no graph computes is left to another.
    return getattr(compute, "_runner", compute)._model.module


@asynccontextmanager
async def running(model_dir: Path, **settings: Any) -> AsyncIterator[Harness]:
    """A started backend; a single thread avoids contention between tests."""
    # Only here: it imports PyTorch.
    from engine.torch.loads import shared_loads

    constants = {name: settings.pop(name) for name in ("layers_per_part",) if name in settings}
    harness = Harness(model_dir, by_short_names(TorchSettings, **{"threads": 1, **settings}))
    with pytest.MonkeyPatch.context() as patching, shared_loads():
        patch(patching, **constants)
        await harness.start()
    try:
        yield harness
    finally:
        await harness.backend.close()


def configure(**values: Any) -> GenerationConfig:
    """A config from leaf names, such as `configure(max_tokens=5, top_k=2)`; `fields_set` names them."""
    config = GenerationConfig()
    paths = set()
    parts: dict[str, Any] = {}
    for name, default in (
        ("stopping", Stopping()),
        ("sampling", Sampling()),
        ("output", Output()),
        ("kv_cache", config.kv_cache),
        ("beam_search", config.beam_search),
    ):
        assert is_dataclass(default)
        mine = {f.name: values.pop(f.name) for f in fields(default) if f.name in values}
        parts[name] = replace(default, **mine)
        paths |= {f"{name}.{leaf}" for leaf in mine}
    if "priority" in values:
        parts["priority"] = values.pop("priority")
        paths.add("priority")
    assert not values, f"no such fields: {sorted(values)}"
    return replace(config, **parts, fields_set=frozenset(paths))
