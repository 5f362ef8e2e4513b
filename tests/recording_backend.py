"""A backend with a record of calls, acting on a test's commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.fingerprint import ANY_TOKENIZER
from trtmesh.engine.backend import (
    AdapterLoad,
    BackendInfo,
    BackendStats,
    Capabilities,
    Deliver,
    Fail,
    HeldAdapter,
    SequenceEnd,
    StepOutput,
    Submission,
)
from trtmesh.v1 import generation_pb2 as pb

INFO = BackendInfo(
    backend="recording",
    model="recorded",
    model_fingerprint="m",
    tokenizer_fingerprint=ANY_TOKENIZER,
    vocabulary_size=1000,
    max_sequence_tokens=1000,
    max_batch_size=100,
    max_sequences_per_item=256,
    max_queue_size=100,
    tokens_per_block=4,
    total_blocks=100,
    supported_fields=frozenset({"stopping.max_tokens"}),
    capabilities=Capabilities(
        deterministic=True, resumes_exactly=True, stops_single_sequences=True
    ),
    end_ids=(2,),
    data_type=pb.DATA_TYPE_FP32,
)

IDLE = BackendStats(
    step_count=0,
    running_sequences=0,
    waiting_sequences=0,
    pending_prompt_tokens=0,
    total_blocks=100,
    used_blocks=0,
    free_blocks=100,
    computed_prompt_tokens=0,
    reused_prompt_tokens=0,
    generated_tokens=0,
)


class RecordingBackend:
    """Implements Backend. Without commands it only ends sequences on `stop` and `close`."""

    def __init__(self, info: BackendInfo = INFO, adapters: Sequence[HeldAdapter] = ()) -> None:
        self.info = info
        self.stats_now = IDLE
        self.items: list[Submission] = []
        self.live: dict[int, Submission] = {}
        self._generated: dict[int, int] = {}
        """Tokens of each sequence so far."""
        self.stops: list[tuple[tuple[int, ...], int]] = []
        self.loads: list[AdapterLoad] = []
        self.unloads: list[tuple[int, str, bool]] = []
        self.refusal: Exception | None = None
        self.closed = False
        self._adapters = adapters

    async def start(self, deliver: Deliver, fail: Fail) -> BackendInfo:
        self.deliver, self.fail = deliver, fail
        return self.info

    def submit(self, item: Submission) -> None:
        self.items.append(item)
        if self.refusal:
            raise self.refusal
        self.live.update(dict.fromkeys(item.keys, item))
        self._generated.update(dict.fromkeys(item.keys, item.emitted_tokens))

    def stop(self, keys: Sequence[int], reason: int) -> None:
        self.stops.append((tuple(keys), reason))
        self.end(*keys, reason=reason)

    def stats(self) -> BackendStats:
        return self.stats_now

    def adapters(self) -> Sequence[HeldAdapter]:
        return self._adapters

    def load_adapter(self, load: AdapterLoad) -> None:
        self.loads.append(load)

    def unload_adapter(self, number: int, version: str, *, unpin: bool) -> None:
        self.unloads.append((number, version, unpin))

    async def close(self) -> None:
        self.closed = True
        self.end(*self.live, reason=pb.FINISH_REASON_CANCELLED)

    def step(self, tokens: dict[int, list[int]], offset: int = 0, **more: object) -> None:
        """Delivers a step with tokens of each key, at `offset`."""
        self._advance()
        self._generated.update((key, offset + len(ids)) for key, ids in tokens.items())
        output = StepOutput(
            self.stats_now.step_count,
            keys=list(tokens),
            token_offsets=[offset] * len(tokens),
            token_counts=[len(ids) for ids in tokens.values()],
            token_ids=[token for ids in tokens.values() for token in ids],
        )
        for name, value in more.items():
            setattr(output, name, value)
        self.deliver(output)

    def end(
        self,
        *keys: int,
        reason: int = pb.FINISH_REASON_END_ID,
        error: TrtmeshError | None = None,
    ) -> None:
        """Delivers the ends of the live `keys`, even before a first token."""
        ends = [
            SequenceEnd(
                key, reason, self.live.pop(key).prompt_tokens, 0, self._generated[key], error=error
            )
            for key in keys
            if key in self.live
        ]
        if ends:
            self._advance()
            self.deliver(StepOutput(self.stats_now.step_count, ends=ends))

    def _advance(self) -> None:
        self.stats_now = replace(self.stats_now, step_count=self.stats_now.step_count + 1)
