"""A tokenizer process: its stream, and the texts and sequences there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Protocol

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import Draining, Mismatch, TrtmeshError, Unavailable
from trtmesh.chassis.forwarding import Outbox
from trtmesh.chassis.grpc.client import Connection, Method
from trtmesh.chassis.process_facts import clock_ahead_ms
from trtmesh.chassis.revisions import SCHEMA_REVISION, check_revision
from trtmesh.chassis.tasks import next_tick
from trtmesh.router.links.contract import ContractBroken, check_names
from trtmesh.router.links.local import LocalService
from trtmesh.router.links.replica import TWIN, LinkRules, Replica, ReplicaState
from trtmesh.router.tokenizers.decoding import DecodedSequence, TextOptions, WholeText
from trtmesh.v1 import tokenizer_pb2 as pb

UNANSWERED_DECODES = 2
"""Decode commands in flight: under load they grow, since more of them would only add latency."""

ID_BYTES = 4
"""About the size of an id in a message."""

CLOSE_SECONDS = 0.05
"""Longest wait of handles to close for a message that takes them along."""

MOST_CLOSED = 1024
"""Handles to close for which no message waits."""

DESCRIBE_SECONDS = 5.0

DECODE_SECONDS = 1.5
"""Time to answer a decode; afterwards the work moves, if another tokenizer answers."""

ENCODE_SECONDS = 10.0
"""Time with texts below LONG_BYTES to answer any text; afterwards the work moves, if another tokenizer answers."""

LONG_BYTES = 2**16
"""Size of texts that may take longer than ENCODE_SECONDS, on a busy machine."""

MOST_PATIENCE = 6
"""How many times ENCODE_SECONDS a long text may wait for the answer, or any text while others are answered."""

MOST_TOKEN_CHARACTERS = 4096
"""Most characters of a token."""

MOST_IDS_OF_CHARACTER, MOST_ADDED_IDS = 64, 1024
"""Most ids of a character, made longer by a normalizer, and most ids before and after a text."""

MOST_RENDERED_CHARACTERS = 2**22
"""Most characters that a chat template makes of a conversation."""

TRIAL_TEXT = "a"
"""A tokenizer that left a command unanswered must encode and decode this text before further work."""

GET_TOKENIZER: Method[pb.GetTokenizerRequest, pb.GetTokenizerResponse] = Method(
    "/trtmesh.v1.TokenizerService/GetTokenizer",
    pb.GetTokenizerRequest.SerializeToString,
    pb.GetTokenizerResponse.FromString,
)

CONNECT: Method[pb.TokenizerServiceConnectRequest, pb.TokenizerServiceConnectResponse] = Method(
    "/trtmesh.v1.TokenizerService/Connect",
    pb.TokenizerServiceConnectRequest.SerializeToString,
    pb.TokenizerServiceConnectResponse.FromString,
)

LOOKS = 15
"""Looks at the same unanswered command until the tokenizer counts as frozen."""


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """A DecodeCommand in flight: tokens per sequence, and finished sequences."""

    counts: list[tuple[DecodedSequence, int]]
    finished: list[DecodedSequence]


class Unanswered:
    """The commands in flight, oldest first.

    A tokenizer answers tokens at once, so a missing answer means a frozen process or a silent network. The age of the
    oldest command is counted in looks: a router that stood still looks once, and blames no tokenizer.
    """

    def __init__(self) -> None:
        self.batches: deque[DecodeBatch] = deque()
        """Read for every message."""
        self._looked_at: DecodeBatch | None = None
        self._looks = 0

    def clear(self) -> None:
        self.batches.clear()
        self.look()

    def look(self) -> None:
        oldest = self.batches[0] if self.batches else None
        self._looks = self._looks + 1 if oldest and oldest is self._looked_at else 0
        self._looked_at = oldest

    @property
    def overdue(self) -> bool:
        """Whether the oldest command is overdue."""
        return self._looks >= LOOKS

    @property
    def timely(self) -> bool:
        """Whether every command has been in flight for less than half the limit."""
        return self._looks < LOOKS // 2


@dataclass(slots=True, eq=False)
class EncodeJob:
    """Texts on their way to ids. Each tokenizer sets its own handle in `command`."""

    model: str
    command: pb.EncodeCommand
    done: asyncio.Future[pb.Encoded]
    tokenizer: Tokenizer | None = None
    """The current tokenizer; None in the first queue."""
    losses: int = 0
    """Tokenizers lost with the job, or without an answer to the job."""
    looks: int = 0
    """Looks at the job on the current tokenizer."""
    is_long: bool = False


class Pool(Protocol):
    """The owner of all tokenizers, which assigns jobs and sequences to them."""

    def on_change(self) -> None:
        """The state of a tokenizer may have changed."""

    def on_ready(self, tokenizer: Tokenizer) -> None:
        """The tokenizer accepts jobs and sequences."""

    def on_room(self, tokenizer: Tokenizer) -> None:
        """The tokenizer has room for another job."""

    def on_lost(self, jobs: Sequence[EncodeJob], sequences: Sequence[DecodedSequence]) -> None:
        """A tokenizer was lost with these."""

    def move(self, jobs: Sequence[EncodeJob], sequences: Sequence[DecodedSequence]) -> None:
        """A draining tokenizer rejects these."""

    def answers_elsewhere(self, tokenizer: Tokenizer) -> bool:
        """Whether another tokenizer could take over in time."""

    def twin_of(self, tokenizer: Tokenizer) -> Tokenizer | None:
        """Another tokenizer of this router in the same process."""

    def on_breach(self) -> None:
        """A tokenizer broke its contract."""

    def on_unanswered(self, command: str) -> None:
        """A tokenizer left a command of this kind unanswered."""


class Tokenizer(Replica):
    """A tokenizer process as this router sees it."""

    def __init__(
        self, address: str, rules: LinkRules, pool: Pool, local: LocalService | None = None
    ) -> None:
        super().__init__(address, rules, local)
        self._pool = pool
        self.description = pb.GetTokenizerResponse()
        self._jobs: dict[int, EncodeJob] = {}
        self._sequences: dict[int, DecodedSequence] = {}
        self._next_handle = 0
        self._outbox = _new_outbox()
        self._waiting: dict[int, list[int]] = {}
        self._finished: list[int] = []
        self._unopened: set[int] = set()
        """Handles of which the tokenizer learns with their first tokens."""
        self._dropped: list[int] = []
        """Handles to close."""
        self._close_planned = False
        self._unanswered = Unanswered()
        self._without_encoded = 0
        """Looks since a text was answered, while there are any that are not long."""
        self._on_trial = False
        """Whether it left a command unanswered, and has not answered the same on another stream."""
        self._flush_planned = False

    def touch(self) -> None:
        self._pool.on_change()

    @property
    def encodes(self) -> int:
        """Jobs on the stream."""
        return len(self._jobs)

    @property
    def decodes(self) -> int:
        """Sequences on the stream."""
        return len(self._sequences)

    @property
    def load(self) -> int:
        """Sequences and jobs on the stream."""
        return len(self._sequences) + len(self._jobs)

    @property
    def busy(self) -> bool:
        return bool(self.load)

    @property
    def timely(self) -> bool:
        """Whether answers to tokens are in time."""
        return self._unanswered.timely

    @property
    def expecting(self) -> bool:
        return bool(self._unanswered.batches or self._jobs)

    def encode(self, job: EncodeJob) -> None:
        """Takes a job; the answer, here or from another tokenizer after `on_lost`, goes to `job.done`."""
        if not self.expecting:
            self._heard()
        handle = job.command.handle = self._free_handle(self._jobs)
        is_older = self.description.schema_revision < SCHEMA_REVISION
        job.command.schema_revision = SCHEMA_REVISION if is_older else 0
        self._jobs[handle] = job
        size = job.command.ByteSize()
        job.tokenizer, job.looks, job.is_long = self, 0, size >= LONG_BYTES
        if self._dropped:
            self._close_dropped()
        self._outbox.add(size).encode.CopyFrom(job.command)

    def withdraw(self, job: EncodeJob) -> None:
        """Cancels a job unless it was answered or lost."""
        handle = job.command.handle
        if self._jobs.get(handle) is job:
            del self._jobs[handle]
            self._outbox.add().cancel_encode.handles.append(handle)
            self._pool.on_room(self)

    def open(self, sequence: DecodedSequence) -> None:
        """Takes over the decoding of a sequence, from the first token without text."""
        handle = sequence.decode_handle = self._free_handle(self._sequences)
        self._sequences[handle] = sequence
        self._unopened.add(handle)
        sequence.decoder = self
        if sequence.decoded < len(sequence.token_ids):
            self.decode(sequence, sequence.token_ids[sequence.decoded :])
        if sequence.ended:
            self.finish(sequence)

    def decode(self, sequence: DecodedSequence, token_ids: list[int]) -> None:
        """Queues tokens; queued tokens of a sequence leave together."""
        waiting = self._waiting.get(sequence.decode_handle)
        if waiting is None:
            self._waiting[sequence.decode_handle] = token_ids
        else:
            waiting += token_ids
        self._plan_flush()

    def finish(self, sequence: DecodedSequence) -> None:
        self._waiting.setdefault(sequence.decode_handle, [])
        self._finished.append(sequence.decode_handle)
        self._plan_flush()

    def restart(self, sequence: DecodedSequence) -> None:
        self.drop(sequence)
        self.open(sequence)

    def drop(self, sequence: DecodedSequence) -> None:
        handle = sequence.decode_handle
        if self._sequences.pop(handle, None) is None:
            return
        self._waiting.pop(handle, None)
        if handle in self._finished:
            self._finished.remove(handle)
        if handle in self._unopened:
            self._unopened.remove(handle)
        else:
            self._close(handle)

    def _close(self, handle: int) -> None:
        """Closes a handle on the tokenizer, with the next message if one follows soon."""
        self._dropped.append(handle)
        if len(self._dropped) >= MOST_CLOSED:
            self._close_dropped()
        elif not self._close_planned:
            self._close_planned = True
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._close_late)

    def _close_late(self) -> None:
        self._close_planned = False
        if self._dropped:
            self._close_dropped()

    def _close_dropped(self) -> None:
        self._outbox.add().close_decode.handles.extend(self._dropped)
        self._dropped.clear()

    def _free_handle(self, used: dict[int, DecodedSequence] | dict[int, EncodeJob]) -> int:
        while True:
            self._next_handle = (self._next_handle + 1) % 2**32
            if self._next_handle not in used:
                return self._next_handle

    def _plan_flush(self) -> None:
        """Flushes after everything that arrived together was queued."""
        if not self._flush_planned and len(self._unanswered.batches) < UNANSWERED_DECODES:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        waiting = self._waiting
        if not waiting or len(self._unanswered.batches) >= UNANSWERED_DECODES:
            return
        sequences = self._sequences
        if not self.expecting:
            self._heard()
        counts = [(sequences[handle], len(ids)) for handle, ids in waiting.items()]
        finished = [sequences[handle] for handle in self._finished]
        self._unanswered.batches.append(DecodeBatch(counts, finished))
        if self._dropped:
            self._close_dropped()
        for handle in self._unopened & waiting.keys():
            self._open_late(sequences[handle])
        decode = self._outbox.add().decode
        decode.handles.extend(waiting)
        decode.token_counts.extend(map(len, waiting.values()))
        decode.token_ids.extend(chain.from_iterable(waiting.values()))
        decode.finished_handles.extend(self._finished)
        self._waiting = {}
        self._finished = []

    def _open_late(self, sequence: DecodedSequence) -> None:
        """Opens a sequence on the tokenizer, before its first tokens."""
        self._unopened.remove(sequence.decode_handle)
        size = ID_BYTES * sequence.decoded + sum(map(len, sequence.text_options.stop_texts))
        fill_opening(self._outbox.add(size).open_decode, sequence)

    async def before_connecting(self) -> None:
        """The greeting names nothing."""

    async def serve_stream(self, connection: Connection) -> None:
        self._outbox = _new_outbox()
        self.description = await connection.ask(
            GET_TOKENIZER, pb.GetTokenizerRequest(), DESCRIBE_SECONDS
        )
        self._greeted()
        described = self.description
        self.clock_ahead_ms = clock_ahead_ms(described.unix_ms)
        check_names(model=described.model, fingerprint=described.fingerprint, kind=described.kind)
        check_revision(f"tokenizer {self.address}", described.schema_revision, "this router")
        if (twin := self._pool.twin_of(self)) is not None:
            raise Mismatch(TWIN.format(address=twin.address))
        call = connection.open(CONNECT)
        halves = [call.each(self._receive), self._outbox.forward(call), self._watch()]
        try:
            if self._on_trial:
                halves.append(self._prove())
            else:
                self._begin()
            await self._serve_unless_silent(*halves)
        finally:
            call.cancel()

    def _begin(self) -> None:
        self._become(ReplicaState.READY, "")
        self._pool.on_ready(self)

    async def _prove(self) -> None:
        """Gives the tokenizer work again once a text was encoded and decoded. No client waits until then."""
        model = self.description.model
        job = EncodeJob(
            model, pb.EncodeCommand(text=TRIAL_TEXT), asyncio.get_running_loop().create_future()
        )
        self.encode(job)
        try:
            encoded = await job.done
        finally:
            self.withdraw(job)
            job.done.cancel()
        whole = WholeText(model, TextOptions(), encoded.token_ids)
        self.open(whole)
        try:
            await whole.text
        finally:
            whole.close()
        self._on_trial = False
        self._begin()
        await asyncio.get_running_loop().create_future()

    async def _watch(self) -> None:
        """Raises Unavailable if commands stay unanswered while another tokenizer answers: slow together is not frozen.
        Time is counted in looks, so a router that stood still blames no tokenizer."""
        while True:
            await next_tick(DECODE_SECONDS / LOOKS)
            self._unanswered.look()
            self._look_at_jobs(ENCODE_SECONDS / DECODE_SECONDS * LOOKS)
            if self._unanswered.overdue:
                self._leave_unless_alone("tokens", DECODE_SECONDS)
            if self._jobs and not self._unanswered.batches:
                # Long texts are slow to encode; the answer to an empty batch proves a live process.
                self._unanswered.batches.append(DecodeBatch([], []))
                self._outbox.add().decode.SetInParent()

    def _leave_unless_alone(self, unanswered: str, seconds: float) -> None:
        """Raises Unavailable, unless no other tokenizer could do better."""
        if self._on_trial or self._pool.answers_elsewhere(self):
            self._on_trial = True
            self._pool.on_unanswered(unanswered)
            raise Unavailable(f"it left {unanswered} unanswered for {seconds:g} s")

    def _look_at_jobs(self, most: float) -> None:
        """Leaves a tokenizer without an answer to any text within `most` looks. Takes back a text without an answer for
        many times as many looks."""
        waits = any(not job.is_long for job in self._jobs.values())
        self._without_encoded = self._without_encoded + 1 if waits else 0
        if self._without_encoded >= most:
            self._leave_unless_alone("texts", ENCODE_SECONDS)
        overdue = []
        for job in self._jobs.values():
            job.looks += 1
            if job.looks >= most * MOST_PATIENCE:
                overdue.append(job)
        for job in overdue:
            self._pool.on_unanswered("texts")
            self.withdraw(job)
            self._pool.on_lost([job], [])

    def _receive(self, response: pb.TokenizerServiceConnectResponse) -> None:
        self._heard()
        for event in response.events:
            match event.WhichOneof("event"):
                case "decoded":
                    self._on_decoded(event.decoded)
                case "encoded":
                    self._on_encoded(event.encoded)

    def _on_decoded(self, decoded: pb.Decoded) -> None:
        """Gives each sequence its text. Runs for every token: no per-token objects, no logging."""
        stops = {stop.handle: stop for stop in decoded.stops} if decoded.stops else {}
        failures = {failure.handle: failure for failure in decoded.failures}
        batch = self._unanswered.batches.popleft()
        sequences = self._sequences
        if not len(batch.counts) == len(decoded.handles) == len(decoded.texts):
            raise ContractBroken(
                f"it answered {len(batch.counts)} sequences with {len(decoded.handles)} handles and"
                f" {len(decoded.texts)} texts"
            )
        answers = zip(batch.counts, decoded.handles, decoded.texts, strict=True)
        for (sequence, count), handle, text in answers:
            if sequences.get(handle) is not sequence:
                # Over, or rewritten under another handle.
                continue
            if len(text) > MOST_TOKEN_CHARACTERS * len(sequence.token_ids):
                raise ContractBroken(
                    f"it made {len(text)} characters of {len(sequence.token_ids)} tokens"
                )
            if handle in stops:
                _check_stop(stops[handle], sequence, count)
                sequence.on_stop_text(stops[handle].token_count, text, stops[handle].stop_index)
            elif handle in failures:
                self._on_decode_failed(handle, from_proto(failures[handle].error))
            else:
                sequence.on_text(count, text)
        for sequence in batch.finished:
            if sequence.decoder is self:
                sequence.on_text_complete()
        if self._waiting:
            self._plan_flush()

    def _on_decode_failed(self, handle: int, error: TrtmeshError) -> None:
        """Fails a sequence, or moves it off a draining tokenizer."""
        sequence = self._sequences.get(handle)
        if sequence is None:
            # Answers to commands in flight at the first failure.
            return
        if not isinstance(error, Draining):
            sequence.on_failure(error)
            return
        self.drop(sequence)
        self._become(ReplicaState.DRAINING, error.message)
        self._pool.move([], [sequence])

    def _on_encoded(self, encoded: pb.Encoded) -> None:
        self._without_encoded = 0
        job = self._jobs.get(encoded.handle)
        if job is None:
            return
        if not encoded.HasField("error"):
            _check_encoded(encoded, job.command)
        del self._jobs[encoded.handle]
        error = from_proto(encoded.error) if encoded.HasField("error") else None
        if isinstance(error, Draining):
            self._become(ReplicaState.DRAINING, error.message)
            self._pool.move([job], [])
        elif job.done.done():
            pass
        elif error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(encoded)
        self._pool.on_room(self)

    def count_breach(self) -> None:
        self._pool.on_breach()

    def lost(self, problem: str) -> None:
        """Returns all jobs and sequences to the pool."""
        del problem
        jobs, sequences = list(self._jobs.values()), list(self._sequences.values())
        self._jobs.clear()
        self._sequences.clear()
        self._waiting.clear()
        self._finished.clear()
        self._unopened.clear()
        self._dropped.clear()
        self._unanswered.clear()
        self._without_encoded = 0
        self._pool.on_lost(jobs, sequences)


def fill_opening(command: pb.OpenDecodeCommand, sequence: DecodedSequence) -> None:
    """Writes the opening of a sequence after the tokens with text."""
    options = sequence.text_options
    command.handle, command.request_id = sequence.decode_handle, sequence.request_id
    command.skip_special_tokens = options.skip_special_tokens
    command.stop_texts.extend(options.stop_texts)
    command.include_stop_text = options.include_stop_text
    command.min_tokens = options.min_tokens
    command.prompt_token_ids.extend(options.prompt_token_ids)
    command.prompt_is_cut = options.prompt_is_cut
    command.delivered_token_ids.extend(sequence.token_ids[: sequence.decoded])


def _check_stop(stop: pb.StopTextFound, sequence: DecodedSequence, count: int) -> None:
    """Raises ContractBroken for a stop text that the sequence does not have, or after more tokens than were sent."""
    if stop.stop_index >= len(sequence.text_options.stop_texts) or stop.token_count > count:
        raise ContractBroken(
            f"it found stop text {stop.stop_index} of {len(sequence.text_options.stop_texts)} after"
            f" {stop.token_count} of {count} tokens"
        )


def _check_encoded(encoded: pb.Encoded, command: pb.EncodeCommand) -> None:
    """Raises ContractBroken for more ids than texts can have, for other words, or where wanted ids are left out."""
    if omitted := encoded.omitted_token_ids:
        # All else is unset.
        if not 0 < command.max_token_ids < omitted:
            raise ContractBroken(
                f"it left out {omitted} ids of a text, of which {command.max_token_ids or 'all'} are wanted"
            )
        return
    if command.HasField("answer") != encoded.HasField("read_answer"):
        raise ContractBroken("it read an answer that nobody sent, or left one unread")
    ids = len(encoded.token_ids) + sum(len(word.ids) for word in encoded.words)
    characters = len(command.text) + sum(map(len, command.words))
    if command.HasField("chat"):
        characters += MOST_RENDERED_CHARACTERS
    most = MOST_IDS_OF_CHARACTER * characters + MOST_ADDED_IDS * (1 + len(command.words))
    if len(encoded.token_bytes) not in (0, len(command.described_token_ids)):
        raise ContractBroken(
            f"it described {len(encoded.token_bytes)} ids, which is another number"
        )
    if ids > most or len(encoded.words) != len(command.words):
        raise ContractBroken(
            f"it made {ids} ids of {characters} characters, and {len(encoded.words)} of"
            f" {len(command.words)} words"
        )


def _new_outbox() -> Outbox[pb.TokenizerServiceConnectRequest, pb.TokenizerCommand]:
    return Outbox(pb.TokenizerServiceConnectRequest, attrgetter("commands"))
