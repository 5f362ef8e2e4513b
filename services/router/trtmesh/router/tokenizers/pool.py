"""The tokenizers of the mesh: which one takes what, and what happens to it when that one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trtmesh.chassis.errors import NoTokenizer, QueueFull, QueueTimeout, TokenizerLost
from trtmesh.router.links.replica import LEAVING
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.tokenizers.encode_job import EncodeJob
from trtmesh.router.tokenizers.parked import Parked
from trtmesh.router.tokenizers.tokenizer import Tokenizer
from trtmesh.router.tokenizers.waiting_room import WaitingRoom
from trtmesh.v1 import tokenizer_pb2 as pb

FIRST_TOKENIZER_SECONDS = 2.0
"""How long workers are not connected to while no tokenizer was ever seen: they are told which one the mesh uses."""

RETRY_MS = 1000
"""When to try again, for what no tokenizer took."""


@dataclass(frozen=True, slots=True)
class EncodeLimits:
    """What may be on its way to one tokenizer, and what may wait for a place there and for how long."""

    outstanding: int
    queued: int
    queue_seconds: float


class TokenizerPool:
    """All tokenizers. What is on a lost one moves to another, or waits a bounded time for one.

    Tokenizers of one model must have one fingerprint; the first that is ready sets it, others are left out until they
    agree. A mesh with tokenizers of a single model uses them for every model: fingerprints tell whether that is right.

    Texts queue here as long as every tokenizer that could take them has as many as it may. Whoever answers, is ready
    or is lost makes the queue move, so a queue that is not empty means that all of these have something to answer.
    """

    def __init__(
        self,
        recovery_seconds: float,
        limits: EncodeLimits,
        most_losses: int,
        metrics: RouterMetrics,
        *,
        expected: bool = True,
    ) -> None:
        # Where no tokenizer is configured, none is worth waiting for.
        recovery_seconds = recovery_seconds if expected else 0.0
        self._limits = limits
        self._most_losses = most_losses
        self._metrics = metrics
        self._seen = asyncio.Event()
        if not expected:
            self._seen.set()
        self.tokenizers: dict[str, Tokenizer] = {}
        self._fingerprints: dict[str, str] = {}
        self._waiting_runs = WaitingRoom[SequenceRun](recovery_seconds, self._fail_run)
        self._waiting_encodes = WaitingRoom[EncodeJob](recovery_seconds, self._fail_encode)
        self._queues: dict[str, WaitingRoom[EncodeJob]] = {}
        self._parked = Parked(self._waiting_runs)

    @property
    def ready(self) -> bool:
        """Whether any tokenizer is ready."""
        return any(tokenizer.ready for tokenizer in self.tokenizers.values())

    async def known(self) -> None:
        """Returns as soon as a tokenizer was ready once, or after a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TOKENIZER_SECONDS):
                await self._seen.wait()

    def fingerprint_of(self, model: str) -> str:
        """The fingerprint that texts of `model` are encoded with; '' when no tokenizer was ever seen."""
        return self._fingerprints.get(self._tokenizer_model(model), "")

    def problem(self, tokenizer: Tokenizer) -> str:
        """Why a tokenizer takes nothing; '' when it does."""
        if not tokenizer.ready:
            return tokenizer.problem or LEAVING
        agreed = self._fingerprints.get(tokenizer.description.model)
        if tokenizer.description.fingerprint == agreed:
            return ""
        return (
            f"its fingerprint {tokenizer.description.fingerprint} differs from {agreed}, the one in use for"
            f" model {tokenizer.description.model}; serve the same tokenizer files from every tokenizer"
        )

    def answers_elsewhere(self, tokenizer: Tokenizer) -> bool:
        """Whether another tokenizer of the same model takes what comes and answers in time."""
        model = tokenizer.description.model
        return any(
            other.timely and not self.problem(other)
            for other in self.tokenizers.values()
            if other is not tokenizer and other.description.model == model
        )

    def describe(self, model: str) -> pb.GetTokenizerResponse:
        """What the tokenizer of `model` says of itself. Raises NoTokenizer."""
        return self._able(model)[0].description

    async def encode(self, model: str, command: pb.EncodeCommand) -> pb.Encoded:
        """The ids of texts. Raises NoTokenizer, QueueFull or QueueTimeout, or what the tokenizer says of the text."""
        rooms = (self._waiting_encodes, self._queue_of(model))
        if sum(map(len, rooms)) >= self._limits.queued:
            raise self._queue_full()
        job = EncodeJob(model, command)
        self._place_encode(job)
        try:
            return await job.done
        finally:
            for room in rooms:
                room.dismiss(job)
            if job.tokenizer is not None:
                job.tokenizer.withdraw(job)

    def attach(self, run: SequenceRun) -> None:
        """Finds a decoder for a sequence, now or within the recovery time; else the sequence fails."""
        try:
            _least_busy(self._able(run.model)).open(run)
        except NoTokenizer:
            run.decoder = self._parked
            self._waiting_runs.admit(run)

    def forget_leavers(self) -> list[Tokenizer]:
        """Lets go of those whose address is gone and that have nothing left; gives them."""
        gone = [t for t in self.tokenizers.values() if t.leaving and not t.busy]
        for tokenizer in gone:
            del self.tokenizers[tokenizer.address]
        return gone

    def on_ready(self, tokenizer: Tokenizer) -> None:
        """A tokenizer became ready: it gets what waited."""
        self._seen.set()
        model = tokenizer.description.model
        others = (other for other in self.tokenizers.values() if other is not tokenizer)
        if not any(other.ready and other.description.model == model for other in others):
            # Nothing that is ready disagrees: a restart of all tokenizers may change a model's files.
            self._fingerprints[model] = tokenizer.description.fingerprint
        self._move_queues()
        for job in self._waiting_encodes.leave():
            self._place_encode(job)
        for run in self._waiting_runs.leave():
            self.attach(run)

    def on_room(self, tokenizer: Tokenizer) -> None:
        """A tokenizer may take one more text."""
        self._move_queues()

    def on_lost(self, encodes: Sequence[EncodeJob], runs: Sequence[SequenceRun]) -> None:
        """A tokenizer was lost: what was on it moves, save what many were lost with, which may be the cause."""
        for job in encodes:
            job.losses += 1
            if job.losses >= self._most_losses and not job.done.done():
                job.done.set_exception(_too_many_losses(job))
        for run in runs:
            if run.note_decoder_lost() >= self._most_losses:
                run.fail(_undecodable(run))
        self.move(
            [job for job in encodes if not job.done.done()], [run for run in runs if not run.over]
        )

    def move(self, encodes: Sequence[EncodeJob], runs: Sequence[SequenceRun]) -> None:
        """A tokenizer does not go on with these, because it is gone or drains: another one shall."""
        for job in encodes:
            self._place_encode(job)
        self._move_queues()
        for run in runs:
            self._metrics.moved_decodes += 1
            self.attach(run)

    @property
    def queued_encodes(self) -> int:
        """Texts that wait for a tokenizer."""
        return len(self._waiting_encodes) + sum(map(len, self._queues.values()))

    def _place_encode(self, job: EncodeJob) -> None:
        queue = self._queue_of(job.model)
        queue.admit(job)
        self._move_queue(job.model, queue)

    def _move_queues(self) -> None:
        for model, queue in [*self._queues.items()]:
            self._move_queue(model, queue)

    def _move_queue(self, model: str, queue: WaitingRoom[EncodeJob]) -> None:
        """Hands texts to tokenizers of their model, in the order in which they came, as long as one has room."""
        if not queue:
            return
        try:
            able = self._able(model)
        except NoTokenizer:
            for job in queue.leave():
                self._waiting_encodes.admit(job)
            return
        while queue:
            roomy = [t for t in able if t.encodes < self._limits.outstanding]
            if not roomy:
                return
            _least_busy(roomy).encode(queue.leave_first())

    def _queue_of(self, model: str) -> WaitingRoom[EncodeJob]:
        """The queue of a model; there are no more of them than models that workers serve."""
        if (queue := self._queues.get(model)) is None:
            queue = WaitingRoom[EncodeJob](self._limits.queue_seconds, self._fail_queued)
            self._queues[model] = queue
        return queue

    def _able(self, model: str) -> list[Tokenizer]:
        """The tokenizers that take what is of `model`. Raises NoTokenizer where none does."""
        wanted = self._tokenizer_model(model)
        able = [
            tokenizer
            for tokenizer in self.tokenizers.values()
            if tokenizer.description.model == wanted and not self.problem(tokenizer)
        ]
        if not able:
            raise self._none_ready(model)
        return able

    def _tokenizer_model(self, model: str) -> str:
        if model in self._fingerprints or len(self._fingerprints) != 1:
            return model
        return next(iter(self._fingerprints))

    def _none_ready(self, model: str) -> NoTokenizer:
        reasons = "; ".join(
            f"{tokenizer.address}: {self.problem(tokenizer) or 'serves another model'}"
            for tokenizer in self.tokenizers.values()
        )
        return NoTokenizer(
            f"no tokenizer of model {model} is ready ({reasons or 'none is configured'}); send token ids and"
            " ask for no text, or try again later",
            retry_after_ms=RETRY_MS,
        )

    def _fail_run(self, run: SequenceRun) -> None:
        cause = self._none_ready(run.model)
        run.fail(TokenizerLost(f"the text of the sequence cannot go on: {cause.message}"))

    def _fail_encode(self, job: EncodeJob) -> None:
        if not job.done.done():
            job.done.set_exception(self._none_ready(job.model))

    def _fail_queued(self, job: EncodeJob) -> None:
        if not job.done.done():
            job.done.set_exception(
                QueueTimeout(
                    f"every tokenizer of model {job.model} had {self._limits.outstanding} texts to encode for"
                    f" {self._limits.queue_seconds:g} s (queue_seconds); try again later, or start more tokenizers",
                    retry_after_ms=RETRY_MS,
                )
            )

    def _queue_full(self) -> QueueFull:
        most = self._limits.queued
        return QueueFull.of(
            most,
            f"{most} texts wait for a tokenizer (max_queued_encodes); start more tokenizers",
            retry_after_ms=RETRY_MS,
        )


def _least_busy(tokenizers: Iterable[Tokenizer]) -> Tokenizer:
    return min(tokenizers, key=lambda tokenizer: tokenizer.sequences)


def _too_many_losses(job: EncodeJob) -> TokenizerLost:
    return TokenizerLost(
        f"{job.losses} tokenizers were lost while they encoded the {job.command.ByteSize()} bytes of this item"
        " (max_attempts); send a shorter text, or check max_message_bytes of tokenizers and routers"
    )


def _undecodable(run: SequenceRun) -> TokenizerLost:
    return TokenizerLost(
        f"{run.decoder_losses} tokenizers in a row were lost with sequence {run.sequence_index} before one decoded"
        f" token {run.decoded} (max_attempts); see their logs"
    )
