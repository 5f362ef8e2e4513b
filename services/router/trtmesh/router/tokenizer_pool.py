"""The tokenizers of the mesh: which one takes what, and what happens to it when that one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

from trtmesh.chassis.errors import NoTokenizer, TokenizerLost
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.replica import LEAVING
from trtmesh.router.sequence import SequenceRun
from trtmesh.router.tokenizer import EncodeJob, Tokenizer
from trtmesh.v1 import tokenizer_pb2 as pb

FIRST_TOKENIZER_SECONDS = 2.0
"""How long workers are not connected to while no tokenizer was ever seen: they are told which one the mesh uses."""

MOST_ENCODE_LOSSES = 3
"""Tokenizers that may be lost with a text before the text is taken for the cause."""

W = TypeVar("W", bound=Hashable)


class WaitingRoom(Generic[W]):
    """Things that wait for a tokenizer, each no longer than a bounded time."""

    def __init__(self, seconds: float, give_up: Callable[[W], None]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._timers: dict[W, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def admit(self, thing: W) -> None:
        loop = asyncio.get_running_loop()
        self._timers[thing] = loop.call_later(self._seconds, self._time_out, thing)

    def dismiss(self, thing: W) -> None:
        """Lets one thing go that does not wait any more."""
        if (timer := self._timers.pop(thing, None)) is not None:
            timer.cancel()

    def leave(self) -> list[W]:
        """Empties the room; gives what was in it, in the order of arrival."""
        things = list(self._timers)
        for thing in things:
            self.dismiss(thing)
        return things

    def _time_out(self, thing: W) -> None:
        del self._timers[thing]
        self._give_up(thing)


class _Parked:
    """Decoder of a sequence that waits for a tokenizer: its tokens stay with the sequence itself."""

    def __init__(self, room: WaitingRoom[SequenceRun]) -> None:
        self._room = room

    def decode(self, sequence: SequenceRun, token_ids: list[int]) -> None:
        """Nothing: whoever opens the sequence decodes all that has no text yet."""

    def finish(self, sequence: SequenceRun) -> None:
        """Nothing, likewise."""

    def restart(self, sequence: SequenceRun) -> None:
        """Nothing, likewise."""

    def drop(self, sequence: SequenceRun) -> None:
        self._room.dismiss(sequence)


class TokenizerPool:
    """All tokenizers. What is on a lost one moves to another, or waits a bounded time for one.

    Tokenizers of one model must have one fingerprint; the first that is ready sets it, others are left out until they
    agree. A mesh with tokenizers of a single model uses them for every model: fingerprints tell whether that is right.
    """

    def __init__(
        self, recovery_seconds: float, metrics: RouterMetrics, *, expected: bool = True
    ) -> None:
        # Where no tokenizer is configured, none is worth waiting for.
        recovery_seconds = recovery_seconds if expected else 0.0
        self._metrics = metrics
        self._seen = asyncio.Event()
        if not expected:
            self._seen.set()
        self.tokenizers: dict[str, Tokenizer] = {}
        self._fingerprints: dict[str, str] = {}
        self._waiting_runs = WaitingRoom[SequenceRun](recovery_seconds, self._fail_run)
        self._waiting_encodes = WaitingRoom[EncodeJob](recovery_seconds, self._fail_encode)
        self._parked = _Parked(self._waiting_runs)

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

    def describe(self, model: str) -> pb.GetTokenizerResponse:
        """What the tokenizer of `model` says of itself. Raises NoTokenizer."""
        return self._choose(model).description

    async def encode(self, model: str, command: pb.EncodeCommand) -> pb.Encoded:
        """The ids of texts. Raises NoTokenizer, or what the tokenizer says of the text."""
        job = EncodeJob(model, command)
        self._place_encode(job)
        try:
            return await job.done
        finally:
            self._waiting_encodes.dismiss(job)
            if job.tokenizer is not None:
                job.tokenizer.withdraw(job)

    def attach(self, run: SequenceRun) -> None:
        """Finds a decoder for a sequence, now or within the recovery time; else the sequence fails."""
        try:
            self._choose(run.model).open(run)
        except NoTokenizer:
            run.decoder = self._parked
            self._waiting_runs.admit(run)

    def on_ready(self, tokenizer: Tokenizer) -> None:
        """A tokenizer became ready: it gets what waited."""
        self._seen.set()
        model = tokenizer.description.model
        others = (other for other in self.tokenizers.values() if other is not tokenizer)
        if not any(other.ready and other.description.model == model for other in others):
            # Nothing that is ready disagrees: a restart of all tokenizers may change a model's files.
            self._fingerprints[model] = tokenizer.description.fingerprint
        for job in self._waiting_encodes.leave():
            self._place_encode(job)
        for run in self._waiting_runs.leave():
            self.attach(run)

    def on_lost(self, encodes: list[EncodeJob], runs: list[SequenceRun]) -> None:
        """A tokenizer was lost: what was on it moves."""
        for job in encodes:
            if job.done.done():
                continue
            if job.losses < MOST_ENCODE_LOSSES:
                self._place_encode(job)
            else:
                job.done.set_exception(_too_many_losses(job))
        for run in runs:
            self._metrics.moved_decodes += 1
            self.attach(run)

    def _place_encode(self, job: EncodeJob) -> None:
        try:
            self._choose(job.model).encode(job)
        except NoTokenizer:
            self._waiting_encodes.admit(job)

    def _choose(self, model: str) -> Tokenizer:
        """The tokenizer of `model` with the least to do. Raises NoTokenizer."""
        wanted = self._tokenizer_model(model)
        able = [
            tokenizer
            for tokenizer in self.tokenizers.values()
            if tokenizer.description.model == wanted and not self.problem(tokenizer)
        ]
        if not able:
            raise self._none_ready(model)
        return min(able, key=lambda tokenizer: tokenizer.sequences)

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
            retry_after_ms=1000,
        )

    def _fail_run(self, run: SequenceRun) -> None:
        cause = self._none_ready(run.model)
        run.fail(TokenizerLost(f"the text of the sequence cannot go on: {cause.message}"))

    def _fail_encode(self, job: EncodeJob) -> None:
        if not job.done.done():
            job.done.set_exception(self._none_ready(job.model))


def _too_many_losses(job: EncodeJob) -> TokenizerLost:
    return TokenizerLost(
        f"{job.losses} tokenizers were lost while they encoded the {job.command.ByteSize()} bytes of this item;"
        " send a shorter text, or check max_message_bytes of tokenizers and routers"
    )
