"""A sample on another worker: its sequences from the first token on, for nobody to read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.router.canary.sample import SampledItem
from trtmesh.router.canary.verdict import Generated
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.metrics import Latencies, ModelMetrics
from trtmesh.router.streams.sequence import Delivery, End, SequenceRun, SequenceTimes
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

LOOK_SECONDS = 0.1
"""Between two looks whether others wait for the worker."""


class Outcome:
    """The end of all sequences of a repetition, or the failure of the worker. Implements Owner: a sequence that loses
    its worker, or has to leave, is given up."""

    def __init__(self, sequences: int) -> None:
        self._left = sequences
        self.known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: TrtmeshError | None = None

    def _end(self, error: TrtmeshError | None) -> None:
        if not self.known.done():
            self.error = error
            self.known.set_result(None)

    def on_settled(self, run: SequenceRun) -> None:
        self._left -= 1
        if run.error is not None or not self._left:
            self._end(run.error)

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        self._end(error)

    def migrate(self, runs: Sequence[SequenceRun], address: str, error: TrtmeshError) -> bool:
        for run in runs:
            run.leave_worker(error)
        self._end(error)
        return True

    def continues(self, run: SequenceRun) -> bool:
        return False

    def on_handed_over(self, run: SequenceRun, end: End) -> None:
        """Never: nobody asks for it."""

    def hand_over(
        self, runs: Sequence[SequenceRun], address: str, cause: str
    ) -> Sequence[SequenceRun]:
        return runs


class Repetition:
    """Computes a sample again."""

    def __init__(self, sample: SampledItem, worker: Worker) -> None:
        self._sample, self.worker = sample, worker
        self._loop = asyncio.get_running_loop()
        # Without the sequences: a cycle would outlive the comparison.
        self._outcome = Outcome(sample.item.sequences)
        self.runs = [self._open(index) for index in range(sample.item.sequences)]

    def _open(self, sequence_index: int) -> SequenceRun:
        sample, now = self._sample, self._loop.time()
        return SequenceRun(
            sample.item,
            sequence_index,
            prompt=(),
            request_id=sample.receipt.request_id,
            model=sample.receipt.model,
            times=UncountedTimes(now, Latencies()),
            client=Nobody(),
            owner=self._outcome,
        )

    @property
    def outputs(self) -> list[Generated]:
        """What it generated, once computed."""
        return [Generated.of(run) for run in self.runs]

    async def compute(self, *, gives_way: bool) -> bool:
        """Computes all; False if it `gives_way` and others wait for the worker. Raises the error of the worker."""
        sample, guard = self._sample, self.worker.guard
        if sample.adapter is not None:
            await self.worker.hold(sample.adapter)
        command = engine_pb.SubmitCommand()
        command.CopyFrom(sample.command)
        tokens = len(command.token_ids)
        booking = guard.book(tokens, len(self.runs), self._loop.time(), sample.need)
        try:
            self.worker.submit(self.runs, command, booking)
            while not self._outcome.known.done():
                await asyncio.wait((self._outcome.known,), timeout=LOOK_SECONDS)
                if gives_way and self._others_wait:
                    return False
            if self._outcome.error is not None:
                raise self._outcome.error
            return True
        finally:
            for run in self.runs:
                run.end(pb.FINISH_REASON_CANCELLED, deliver=Delivery.NOTHING)
            if not any(run.address for run in self.runs):
                # Nothing was submitted.
                booking.release(self._loop.time())

    @property
    def _others_wait(self) -> bool:
        own = sum(run.queued for run in self.runs)
        return self.worker.load.waiting_sequences > own


class Nobody:
    """Reads nothing."""

    def put(self, event: router_pb.GenerateEvent) -> None: ...

    def put_tokens(
        self,
        batch_index: int,
        sequence_index: int,
        token_offset: int,
        token_ids: list[int],
        text: str,
        details: pb.TokenDetails | None,
    ) -> None: ...


class UncountedTimes(SequenceTimes):
    """Times of tokens that are no client's, and count nowhere."""

    def on_tokens(self, count: int, now: float, metrics: ModelMetrics) -> None:
        self.first_token = self.first_token or now
        self.last_token = now
