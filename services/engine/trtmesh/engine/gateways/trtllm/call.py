"""A Generate call: an item between the backend and the client's stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from trtmesh.chassis.errors import BackendFailed, TrtmeshError
from trtmesh.engine.backend import SequenceEnd
from trtmesh.engine.gateways.trtllm.answers import PromptOutput, chunk, complete
from trtmesh.engine.gateways.trtllm.request import AskedGeneration
from trtmesh.engine.gateways.trtllm.sequence import SequenceOutput
from trtmesh.engine.gateways.trtllm.texts import StopSearch, Texts
from trtmesh.engine.service.event_outbox import StepPart
from trtmesh.engine.service.streams import HANDLE_BITS, LoadedEngine, Stream
from trtmesh.engine.service.submission import parse_submit
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)


class GenerateCall(Stream):
    """The handle of a sequence is the index. A slow client delays nobody: tokens wait here, as a single chunk, and are
    bounded by `max_tokens`.
    """

    busy = True
    """False once removed from the streams, after the last sequence and the last answer."""

    def __init__(self, engine: LoadedEngine, asked: AskedGeneration, texts: Texts | None) -> None:
        self._engine = engine
        self._asked = asked
        self._prompt = PromptOutput()
        searches = _searches(asked, texts)
        self._sequences = [
            SequenceOutput(asked, index, search) for index, search in enumerate(searches)
        ]
        self._live: set[int] = set()
        self._filled = asyncio.Event()
        self._error: TrtmeshError | None = None
        self._open = True
        self._number = engine.streams.add(self)

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def submit(self) -> None:
        """Raises TrtmeshError; then nothing runs."""
        engine, asked = self._engine, self._asked
        keys = tuple(map(self._key, range(asked.sequences)))
        try:
            item = parse_submit(asked.command, keys, engine)
            engine.backend.submit(item)
        except TrtmeshError as error:
            error.worker = error.worker or engine.name
            raise
        except Exception as error:
            # Broad on purpose: a defect of the backend fails this item alone.
            log.exception("the backend could not take the item")
            raise BackendFailed(f"{type(error).__name__}: {error}") from error
        self._live.update(range(asked.sequences))
        engine.metrics.submitted(keys, item.prompt_tokens, time.monotonic())

    async def next(self) -> list[tpb.GenerateResponse]:
        """The ready answers; none after the last. Raises the error at the end of the call."""
        while True:
            if answers := list(self._take()):
                return answers
            if all(sequence.completed for sequence in self._sequences):
                return []
            if self._error:
                raise self._error
            self._filled.clear()
            await self._filled.wait()

    def abort(self) -> None:
        """Ends every live sequence, as the client asks in another call."""
        self._stop(self._live)

    def close(self) -> None:
        """Stops the live sequences at once, because the call is over."""
        self._open = False
        # A raised error refers to this.
        self._error = None
        for sequence in self._sequences:
            sequence.end = None
        if self._live:
            self._stop(self._live)
        else:
            self._engine.streams.remove(self._number)

    def take_step(self, part: StepPart) -> None:
        if not self._open:
            return
        details = {each.key: each for each in part.details}
        ends = accumulate(part.token_counts)
        for handle, offset, count, end in zip(
            part.handles, part.token_offsets, part.token_counts, ends, strict=True
        ):
            tokens = part.token_ids[end - count : end]
            if self._sequences[handle].add(offset, tokens, details.get(handle)):
                self._engine.backend.stop([self._key(handle)], pb.FINISH_REASON_STOP_WORD)
        for prompt in part.prompts:
            self._prompt.log_probs += prompt.log_probs
            self._prompt.top_log_probs += prompt.top_log_probs
            if prompt.context_logits:
                self._prompt.logits += prompt.context_logits.data
        self._filled.set()

    def take_end(self, handle: int, end: SequenceEnd) -> None:
        if handle not in self._live:
            # After `fail` the backend may still end the same sequences.
            log.debug("the backend ended sequence %d again", handle)
            return
        self._live.remove(handle)
        self._engine.metrics.ended(end, time.monotonic())
        if end.error:
            end.error.worker = end.error.worker or self._engine.name
            self._error = self._error or end.error
        self._sequences[handle].end = end
        self._filled.set()
        if not (self._open or self._live):
            self._engine.streams.remove(self._number)

    def fail(self, error: TrtmeshError) -> None:
        for handle in list(self._live):
            prompt_tokens = len(self._asked.command.token_ids)
            reason = pb.FINISH_REASON_ERROR
            end = SequenceEnd(self._key(handle), reason, prompt_tokens, 0, 0, error=error)
            self.take_end(handle, end)

    def finish(self, farewell: TrtmeshError) -> None:
        self._error = self._error or farewell
        self._filled.set()

    def _take(self) -> Iterator[tpb.GenerateResponse]:
        for sequence in self._sequences:
            if self._asked.streaming and sequence.sendable > sequence.sent:
                yield chunk(sequence, len(self._asked.command.token_ids))
                sequence.sent = sequence.sendable
            if sequence.end and not sequence.end.error and not sequence.completed:
                sequence.completed = True
                yield complete(sequence, sequence.end, self._prompt)

    def _key(self, handle: int) -> int:
        return self._number << HANDLE_BITS | handle

    def _stop(self, handles: set[int]) -> None:
        if handles:
            self._engine.backend.stop(list(map(self._key, handles)), pb.FINISH_REASON_CANCELLED)


def _searches(asked: AskedGeneration, texts: Texts | None) -> Sequence[StopSearch | None]:
    if not asked.stop_texts:
        return [None] * asked.sequences
    assert texts is not None
    stops = texts.stops(asked.stop_texts)
    return [texts.follow(stops, asked.command.token_ids) for _ in range(asked.sequences)]
