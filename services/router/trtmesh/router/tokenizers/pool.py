"""The tokenizers of the mesh: assigns texts and sequences, and moves both after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from trtmesh.chassis.errors import InvalidField, NoTokenizer, QueueFull, QueueTimeout, TokenizerLost
from trtmesh.router.links.replica import LEAVING
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.tokenizers.decoding import DecodedSequence, TextOptions, WholeText
from trtmesh.router.tokenizers.tokenizer import EncodeJob, Tokenizer
from trtmesh.v1 import tokenizer_pb2 as pb

FIRST_TOKENIZER_SECONDS = 2.0
"""Longest wait for a first tokenizer before workers are connected: their greeting names the fingerprint in use."""

MAX_PER_TOKENIZER = 256
"""Most texts of a router on a tokenizer at once; more queue by arrival."""

MAX_QUEUED = 8192
"""Most queued texts of a model; beyond, items end with QUEUE_FULL."""

QUEUE_SECONDS = 60.0
"""Longest wait of a queued text; afterwards QUEUE_TIMEOUT."""

MAX_LOST_TOKENIZERS = 4
"""Tokenizers lost in a row with a text, or with a sequence of which none decoded a new token; then TOKENIZER_LOST."""

WAIT_SECONDS = 10.0
"""Wait of texts and sequences for another tokenizer after a loss."""

RETRY_MS = 1000
"""Time for clients to wait before a retry if no tokenizer is free, in milliseconds."""

UNKNOWN = pb.GetTokenizerResponse()

W = TypeVar("W", bound=Hashable)


class WaitingRoom(dict[W, asyncio.TimerHandle], Generic[W]):
    """Things in order of arrival, with their timers. `give_up` gets everything still here after `seconds`."""

    def __init__(self, seconds: float, give_up: Callable[[W], None]) -> None:
        super().__init__()
        self._seconds = seconds
        self._give_up = give_up

    def admit(self, thing: W) -> None:
        loop = asyncio.get_running_loop()
        self[thing] = loop.call_later(self._seconds, self._time_out, thing)

    def dismiss(self, thing: W) -> None:
        """Removes an entry, if present."""
        if (timer := self.pop(thing, None)) is not None:
            timer.cancel()

    def leave_first(self) -> W:
        """Removes the oldest thing; the room must not be empty."""
        thing = next(iter(self))
        self.dismiss(thing)
        return thing

    def leave(self) -> list[W]:
        """Removes all things, in order of arrival."""
        things = list(self)
        for thing in things:
            self.dismiss(thing)
        return things

    def _time_out(self, thing: W) -> None:
        del self[thing]
        self._give_up(thing)


class Parked:
    """Decoder of sequences without a tokenizer: a later tokenizer gets all tokens without text when it opens them."""

    def __init__(self, room: WaitingRoom[DecodedSequence]) -> None:
        self._room = room

    def decode(self, sequence: DecodedSequence, token_ids: list[int]) -> None:
        pass

    def finish(self, sequence: DecodedSequence) -> None:
        pass

    def restart(self, sequence: DecodedSequence) -> None:
        pass

    def drop(self, sequence: DecodedSequence) -> None:
        self._room.dismiss(sequence)


class TokenizerPool:
    """All tokenizers. Work of a lost tokenizer moves to another, or waits a bounded time.

    All tokenizers of a model must have the same fingerprint, chat templates and defaults. The first ready tokenizer
    that tells them sets them; tokenizers with others get no work. If all tokenizers of the mesh serve a single model,
    they serve every model: workers compare fingerprints.

    Jobs queue per model while every able tokenizer is full. Answers, new tokenizers and losses move the queues, so
    while jobs are queued every able tokenizer has jobs to answer.
    """

    def __init__(
        self, metrics: RouterMetrics, on_agreed: Callable[[], None], *, expected: bool = True
    ) -> None:
        """Calls `on_agreed` when other tokenizers than before set what those of a model agree on."""
        # Without configured tokenizers there is none to wait for.
        wait_seconds = WAIT_SECONDS if expected else 0.0
        self._metrics = metrics
        self._on_agreed = on_agreed
        self._seen = asyncio.Event()
        if not expected:
            self._seen.set()
        self.tokenizers: dict[str, Tokenizer] = {}
        self.lookup_problem = ""
        """Why tokenizers may be missing that are configured, or ''."""
        self._agreed: dict[str, pb.GetTokenizerResponse] = {}
        """What the tokenizers of a model agree on; kept when all are lost, so that requests and ends stay alike."""
        self._able_of: dict[str, list[Tokenizer]] = {}
        self._most_bytes_of: dict[str, int] = {}
        self._end_ids_of: dict[str, tuple[int, ...]] = {}
        """Answers by model, until a tokenizer changes."""
        self._waiting_sequences = WaitingRoom[DecodedSequence](wait_seconds, self._fail_sequence)
        self._waiting_jobs = WaitingRoom[EncodeJob](wait_seconds, self._fail_job)
        self._queues: dict[str, WaitingRoom[EncodeJob]] = {}
        self._parked = Parked(self._waiting_sequences)

    @property
    def ready(self) -> bool:
        """Whether any tokenizer gets work."""
        return any(not self.problem(tokenizer) for tokenizer in self.tokenizers.values())

    def is_in_use(self, address: str) -> bool:
        """Whether discovery keeps an address that a name server leaves out."""
        tokenizer = self.tokenizers.get(address)
        return tokenizer is not None and tokenizer.ready

    async def wait_for_first(self) -> None:
        """Returns once a tokenizer has been ready, at the latest after FIRST_TOKENIZER_SECONDS."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TOKENIZER_SECONDS):
                await self._seen.wait()

    def fingerprint_of(self, model: str) -> str:
        """Fingerprint of the tokenizers of `model`; '' before the first one was ready."""
        return self._agreed.get(self._tokenizer_model(model), UNKNOWN).fingerprint

    def end_ids_of(self, model: str) -> tuple[int, ...]:
        """The end id of the tokenizers of `model`, if any; empty before the first tokenizer was ready."""
        if (known := self._end_ids_of.get(model)) is None:
            agreed = self.agreed(model)
            known = (agreed.eos_id,) if agreed.HasField("eos_id") else ()
            self._end_ids_of[model] = known
        return known

    def agreed(self, model: str) -> pb.GetTokenizerResponse:
        """What the tokenizers of `model` say of it; empty before the first was ready, and kept when all are lost."""
        return self._agreed.get(self._tokenizer_model(model), UNKNOWN)

    def problem(self, tokenizer: Tokenizer) -> str:
        """Why a tokenizer gets no work; '' if it gets some."""
        if not tokenizer.ready:
            return tokenizer.problem or LEAVING
        if not tokenizer.description.fingerprint:
            return (
                "it reports no fingerprint, so whether workers have the same tokenizer is unknown"
            )
        about = tokenizer.description
        agreed = self._agreed.get(about.model, UNKNOWN)
        if about.fingerprint != agreed.fingerprint:
            return (
                f"its fingerprint {about.fingerprint} differs from {agreed.fingerprint}, the one in use for"
                f" model {about.model}; serve the same tokenizer files from every tokenizer"
            )
        if agreed.door_fingerprint and about.door_fingerprint not in ("", agreed.door_fingerprint):
            return (
                "its chat templates or its generation_config.json are others than those in use for"
                f" model {about.model}; serve the same files from every tokenizer"
            )
        return ""

    def answers_elsewhere(self, tokenizer: Tokenizer) -> bool:
        """Whether another tokenizer of the same model is able and answers in time."""
        model = tokenizer.description.model
        return any(
            other.timely and not self.problem(other)
            for other in self.tokenizers.values()
            if other is not tokenizer and other.description.model == model
        )

    def twin_of(self, tokenizer: Tokenizer) -> Tokenizer | None:
        """Another tokenizer of this router in the same process; an unready tokenizer does not count."""
        instance, others = tokenizer.description.instance, self.tokenizers.values()
        same = (t for t in others if t is not tokenizer and t.description.instance == instance)
        return next((each for each in same if each.works), None) if instance else None

    def on_unanswered(self, command: str) -> None:
        """A tokenizer left a command of this kind unanswered."""
        self._metrics.unanswered[command] += 1

    def on_breach(self) -> None:
        """A tokenizer broke its contract."""
        self._metrics.breaches["tokenizer"] += 1

    def describe(self, model: str) -> pb.GetTokenizerResponse:
        """Special ids, size and chat template of the tokenizer of `model`. Raises NoTokenizer."""
        return self._able(model)[0].description

    def check_size(self, model: str, *texts: str) -> None:
        """Raises InvalidField for texts that every tokenizer of `model` would refuse, before they travel there."""
        most = self._most_bytes(model)
        if 4 * sum(map(len, texts)) <= most:
            return
        if most and (size := _least_bytes(texts, most)) > most:
            raise InvalidField(
                f"has {size} bytes with its words but must have at most {most} (a sixteenth of the"
                " tokenizer's max_message_bytes)",
                field="text",
                value=f"{size} bytes",
                limit=f"at most {most}",
            )

    async def encode(self, model: str, command: pb.EncodeCommand) -> pb.Encoded:
        """Ids of texts. Raises NoTokenizer, QueueFull, QueueTimeout, TokenizerLost, or the tokenizer's own error."""
        waiting, queue = self._waiting_jobs, self._queue_of(model)
        if len(waiting) + len(queue) >= MAX_QUEUED:
            raise self._queue_full()
        job = EncodeJob(model, command, asyncio.get_running_loop().create_future())
        self._place_job(job, queue)
        try:
            return await job.done
        except BaseException:
            # An answered or failed one is nowhere any more.
            waiting.dismiss(job)
            queue.dismiss(job)
            if job.tokenizer is not None:
                job.tokenizer.withdraw(job)
            raise

    async def decode(self, model: str, token_ids: Sequence[int], options: TextOptions) -> str:
        """Text of ids. Raises TokenizerLost, or the tokenizer's own error."""
        if not token_ids:
            return ""
        whole = WholeText(model, options, token_ids)
        self.attach(whole)
        try:
            return await whole.text
        finally:
            whole.close()

    def attach(self, sequence: DecodedSequence) -> None:
        """Gives a sequence to a tokenizer, now or within the recovery time; afterwards the sequence fails."""
        try:
            _least_busy(self._able(sequence.model)).open(sequence)
        except NoTokenizer:
            sequence.decoder = self._parked
            self._waiting_sequences.admit(sequence)

    def forget_leavers(self) -> list[Tokenizer]:
        """Removes and returns the tokenizers that are leaving and idle."""
        gone = [t for t in self.tokenizers.values() if t.leaving and not t.busy]
        for tokenizer in gone:
            del self.tokenizers[tokenizer.address]
        if gone:
            self.on_change()
        return gone

    def on_change(self) -> None:
        """The state of a tokenizer may have changed."""
        self._able_of.clear()
        self._most_bytes_of.clear()
        self._end_ids_of.clear()

    def on_ready(self, tokenizer: Tokenizer) -> None:
        """A tokenizer became ready: waiting work goes to it."""
        self._seen.set()
        told = tokenizer.description
        agreed = self._agreed.get(told.model, UNKNOWN)
        others = (other for other in self.tokenizers.values() if other is not tokenizer)
        is_alone = not any(
            other.ready and other.description.fingerprint and other.description.model == told.model
            for other in others
        )
        # It may be the first to tell its templates.
        adds = agreed.fingerprint == told.fingerprint and not agreed.door_fingerprint
        if told.fingerprint and (is_alone or (adds and told.door_fingerprint)):
            # No ready tokenizer disagrees: a restart of all tokenizers may change a model's files.
            self._agreed[told.model] = told
            self._on_agreed()
        self.on_change()
        self._move_queues()
        for job in self._waiting_jobs.leave():
            self._place_job(job, self._queue_of(job.model))
        for sequence in self._waiting_sequences.leave():
            self.attach(sequence)

    def on_room(self, tokenizer: Tokenizer) -> None:
        """A tokenizer has room for another job."""
        self._move_queues()

    def on_lost(self, jobs: Sequence[EncodeJob], sequences: Sequence[DecodedSequence]) -> None:
        """A tokenizer was lost. Work with too many losses is a likely cause and fails; all other work moves."""
        for job in jobs:
            job.losses += 1
            if job.losses >= MAX_LOST_TOKENIZERS and not job.done.done():
                job.done.set_exception(_too_many_losses(job))
        for sequence in sequences:
            if sequence.note_decoder_lost() >= MAX_LOST_TOKENIZERS:
                sequence.on_failure(_undecodable(sequence))
        self.move(
            [job for job in jobs if not job.done.done()],
            [sequence for sequence in sequences if not sequence.over],
        )

    def move(self, jobs: Sequence[EncodeJob], sequences: Sequence[DecodedSequence]) -> None:
        """Gives work of a lost or draining tokenizer to others."""
        for job in jobs:
            self._place_job(job, self._queue_of(job.model))
        self._move_queues()
        for sequence in sequences:
            self._metrics.moved_decodes += 1
            self.attach(sequence)

    @property
    def queued_encodes(self) -> int:
        """Jobs without a tokenizer."""
        return len(self._waiting_jobs) + sum(map(len, self._queues.values()))

    def _place_job(self, job: EncodeJob, queue: WaitingRoom[EncodeJob]) -> None:
        """Gives a job to a tokenizer with room, or to the queue of its model, unless its item has ended."""
        if job.done.done():
            return
        try:
            tokenizer = None if queue else self._roomy(job.model, job.tokenizer)
        except NoTokenizer:
            self._waiting_jobs.admit(job)
            return
        if tokenizer is None:
            queue.admit(job)
        else:
            tokenizer.encode(job)

    def _move_queues(self) -> None:
        for model, queue in [*self._queues.items()]:
            if queue:
                self._move_queue(model, queue)

    def _move_queue(self, model: str, queue: WaitingRoom[EncodeJob]) -> None:
        """Gives jobs to tokenizers with room, oldest first."""
        try:
            while queue and (tokenizer := self._roomy(model)) is not None:
                job = queue.leave_first()
                if not job.done.done():
                    tokenizer.encode(job)
        except NoTokenizer:
            for job in queue.leave():
                self._waiting_jobs.admit(job)

    def _roomy(self, model: str, last: Tokenizer | None = None) -> Tokenizer | None:
        """The least busy tokenizer with room for a job, if possible not its `last`; None if all are full. Raises
        NoTokenizer."""
        able = self._able(model)
        if len(able) == 1:
            return able[0] if able[0].encodes < MAX_PER_TOKENIZER else None
        roomy = [each for each in able if each.encodes < MAX_PER_TOKENIZER]
        if len(roomy) > 1:
            return _least_busy([each for each in roomy if each is not last])
        return roomy[0] if roomy else None

    def _queue_of(self, model: str) -> WaitingRoom[EncodeJob]:
        """The queue of a model; bounded in number by the models of the workers."""
        if (queue := self._queues.get(model)) is None:
            queue = WaitingRoom[EncodeJob](QUEUE_SECONDS, self._fail_queued)
            self._queues[model] = queue
        return queue

    def _able(self, model: str) -> list[Tokenizer]:
        """Returns the tokenizers of `model`, at least one. Raises NoTokenizer."""
        if (known := self._able_of.get(model)) is not None:
            return known
        able = [each for each in self._of(model) if not self.problem(each)]
        if not able:
            raise self._none_ready(model)
        self._able_of[model] = able
        return able

    def _most_bytes(self, model: str) -> int:
        """Most bytes of a text that a tokenizer of `model` takes; 0 without a limit."""
        if (known := self._most_bytes_of.get(model)) is not None:
            return known
        limits = [each.description.max_text_bytes for each in self._of(model)]
        most = max(limits) if limits and all(limits) else 0
        self._most_bytes_of[model] = most
        return most

    def _of(self, model: str) -> list[Tokenizer]:
        """The tokenizers of `model`, able or not."""
        wanted = self._tokenizer_model(model)
        return [each for each in self.tokenizers.values() if each.description.model == wanted]

    def _tokenizer_model(self, model: str) -> str:
        if model in self._agreed or len(self._agreed) != 1:
            return model
        return next(iter(self._agreed))

    def _none_ready(self, model: str) -> NoTokenizer:
        reasons = "; ".join(
            f"{tokenizer.address}: {self.problem(tokenizer) or 'serves another model'}"
            for tokenizer in self.tokenizers.values()
        )
        return NoTokenizer(
            f"no tokenizer of model {model} is ready ({reasons or self.lookup_problem or 'none is configured'}); send"
            " token ids and"
            " ask for no text, or try again later",
            retry_after_ms=RETRY_MS,
        )

    def _fail_sequence(self, sequence: DecodedSequence) -> None:
        cause = self._none_ready(sequence.model)
        sequence.on_failure(
            TokenizerLost(f"the sequence cannot be decoded further: {cause.message}")
        )

    def _fail_job(self, job: EncodeJob) -> None:
        if not job.done.done():
            job.done.set_exception(self._none_ready(job.model))

    def _fail_queued(self, job: EncodeJob) -> None:
        if not job.done.done():
            job.done.set_exception(
                QueueTimeout(
                    f"every tokenizer of model {job.model} had {MAX_PER_TOKENIZER} texts to encode for"
                    f" {QUEUE_SECONDS:g} s; try again later, or start"
                    " more tokenizers",
                    limit=f"{QUEUE_SECONDS:g}",
                    retry_after_ms=RETRY_MS,
                )
            )

    def _queue_full(self) -> QueueFull:
        most = MAX_QUEUED
        return QueueFull.of(
            most,
            f"{most} texts wait for a tokenizer; start more tokenizers",
            retry_after_ms=RETRY_MS,
        )


def _least_bytes(texts: Sequence[str], most: int) -> int:
    """Bytes of UTF-8, where their number can be at most `most`; else the number of characters, which are no more."""
    characters = sum(map(len, texts))
    if characters > most:
        return characters
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def _least_busy(tokenizers: Sequence[Tokenizer]) -> Tokenizer:
    if len(tokenizers) == 1:
        return tokenizers[0]
    return min(tokenizers, key=lambda tokenizer: tokenizer.load)


def _too_many_losses(job: EncodeJob) -> TokenizerLost:
    return TokenizerLost(
        f"{job.losses} tokenizers were lost, or gave no answer, while they encoded the {job.command.ByteSize()} bytes"
        " of this item; shorten the text, or check max_message_bytes of tokenizers and routers",
        value=str(job.losses),
    )


def _undecodable(sequence: DecodedSequence) -> TokenizerLost:
    return TokenizerLost(
        f"{sequence.decoder_losses} tokenizers in a row were lost with sequence {sequence.sequence_index} before one"
        f" decoded token {sequence.decoded}; see their logs",
        value=str(sequence.decoder_losses),
    )
