"""A tokenizer: one tokenizer process, the one stream to it, and what is on that stream."""

from __future__ import annotations

import asyncio
from itertools import chain

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import Draining, SchemaMismatch, TrtmeshError, Unavailable
from trtmesh.chassis.grpc.client import ClientCall, ClientConnection, Method
from trtmesh.chassis.outbox import Outbox
from trtmesh.chassis.service import SCHEMA_REVISION
from trtmesh.router.links.replica import LinkSettings, Replica, ReplicaState
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.tokenizers.encode_job import EncodeJob
from trtmesh.router.tokenizers.owner import Pool
from trtmesh.router.tokenizers.unanswered import LOOKS, DecodeBatch, Unanswered
from trtmesh.v1 import tokenizer_pb2 as pb

UNANSWERED_DECODES = 2
"""Decode commands on their way at once: more only add latency under load, where they grow instead."""

DESCRIBE_SECONDS = 5.0

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

_Call = ClientCall[pb.TokenizerServiceConnectRequest, pb.TokenizerServiceConnectResponse]


class Tokenizer(Replica):
    """One tokenizer process as this router sees it."""

    def __init__(
        self,
        address: str,
        *,
        settings: LinkSettings,
        decode_seconds: float,
        pool: Pool,
    ) -> None:
        super().__init__(address, settings)
        self._decode_seconds = decode_seconds
        self._pool = pool
        self.description = pb.GetTokenizerResponse()
        self.runs: dict[int, SequenceRun] = {}
        self._encodes: dict[int, EncodeJob] = {}
        self._next_handle = 0
        self._outbox: Outbox[pb.TokenizerCommand] = Outbox()
        self._waiting: dict[int, list[int]] = {}
        self._finished: list[int] = []
        self._unanswered = Unanswered()
        self._flush_planned = False

    def touch(self) -> None:
        """Nothing: what a tokenizer takes is looked at each time."""

    @property
    def encodes(self) -> int:
        """Texts that it has to encode."""
        return len(self._encodes)

    @property
    def sequences(self) -> int:
        """Sequences and encodes on the stream."""
        return len(self.runs) + len(self._encodes)

    @property
    def busy(self) -> bool:
        return bool(self.sequences)

    @property
    def timely(self) -> bool:
        """Whether it answers tokens in time."""
        return self._unanswered.timely

    @property
    def expecting(self) -> bool:
        """Whether something is unanswered."""
        return bool(self._unanswered or self._encodes)

    def encode(self, job: EncodeJob) -> None:
        """Takes texts; `job.done` gets the answer from here or from wherever `on_lost` moves the job."""
        if not self.expecting:
            self._heard()
        handle = job.command.handle = self._free_handle(self._encodes)
        self._encodes[handle] = job
        job.tokenizer = self
        self._outbox.put(pb.TokenizerCommand(encode=job.command), job.command.ByteSize())

    def withdraw(self, job: EncodeJob) -> None:
        """Takes texts back that nobody waits for; nothing when they were answered or lost."""
        handle = job.command.handle
        if self._encodes.get(handle) is job:
            del self._encodes[handle]
            cancel = pb.CancelEncodeCommand(handles=[handle])
            self._outbox.put(pb.TokenizerCommand(cancel_encode=cancel))
            self._pool.on_room(self)

    def open(self, run: SequenceRun) -> None:
        """Takes over the decoding of a sequence, from its first token that has no text yet."""
        handle = run.decode_handle = self._free_handle(self.runs)
        self.runs[handle] = run
        run.decoder = self
        command = pb.OpenDecodeCommand(
            handle=handle,
            request_id=run.request_id,
            skip_special_tokens=run.skip_special_tokens,
            stop_texts=run.stop_texts,
            include_stop_text=run.include_stop_text,
            delivered_token_ids=run.token_ids[: run.decoded],
        )
        self._outbox.put(pb.TokenizerCommand(open_decode=command), command.ByteSize())
        if run.decoded < len(run.token_ids):
            self.decode(run, run.token_ids[run.decoded :])
        if run.end is not None:
            self.finish(run)

    def decode(self, sequence: SequenceRun, token_ids: list[int]) -> None:
        """Queues tokens; tokens of a sequence that still wait are sent together."""
        waiting = self._waiting.get(sequence.decode_handle)
        if waiting is None:
            self._waiting[sequence.decode_handle] = token_ids
        else:
            waiting += token_ids
        self._plan_flush()

    def finish(self, sequence: SequenceRun) -> None:
        self._waiting.setdefault(sequence.decode_handle, [])
        self._finished.append(sequence.decode_handle)
        self._plan_flush()

    def restart(self, sequence: SequenceRun) -> None:
        self.drop(sequence)
        self.open(sequence)

    def drop(self, sequence: SequenceRun) -> None:
        handle = sequence.decode_handle
        if self.runs.pop(handle, None) is None:
            return
        self._waiting.pop(handle, None)
        if handle in self._finished:
            self._finished.remove(handle)
        close = pb.CloseDecodeCommand(handles=[handle])
        self._outbox.put(pb.TokenizerCommand(close_decode=close))

    def _free_handle(self, used: dict[int, SequenceRun] | dict[int, EncodeJob]) -> int:
        while True:
            self._next_handle = (self._next_handle + 1) % 2**32
            if self._next_handle not in used:
                return self._next_handle

    def _plan_flush(self) -> None:
        """Sends what waits once everything that arrived together has been queued."""
        if not self._flush_planned and len(self._unanswered) < UNANSWERED_DECODES:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        waiting = self._waiting
        if not waiting or len(self._unanswered) >= UNANSWERED_DECODES:
            return
        decode = pb.DecodeCommand(
            handles=waiting,
            token_counts=map(len, waiting.values()),
            token_ids=chain.from_iterable(waiting.values()),
            finished_handles=self._finished,
        )
        runs = self.runs
        if not self.expecting:
            self._heard()
        counts = [(runs[handle], len(ids)) for handle, ids in waiting.items()]
        self._unanswered.add(DecodeBatch(counts, [runs[handle] for handle in self._finished]))
        self._waiting = {}
        self._finished = []
        self._outbox.put(pb.TokenizerCommand(decode=decode))

    async def talk(self, connection: ClientConnection) -> None:
        self._outbox = Outbox()
        self.description = await connection.ask(
            GET_TOKENIZER, pb.GetTokenizerRequest(), DESCRIBE_SECONDS
        )
        if self.description.schema_revision != SCHEMA_REVISION:
            raise SchemaMismatch(
                f"tokenizer {self.address} speaks schema revision {self.description.schema_revision},"
                f" this router {SCHEMA_REVISION}; run the same release"
            )
        call = connection.open(CONNECT)
        try:
            self._become(ReplicaState.READY, "")
            self._pool.on_ready(self)
            await self._talk_unless_silent(
                self._read(call), self._write(call), self._watch_decodes()
            )
        finally:
            call.cancel()

    async def _write(self, call: _Call) -> None:
        while True:
            commands = await self._outbox.take()
            await call.write(pb.TokenizerServiceConnectRequest(commands=commands))

    async def _watch_decodes(self) -> None:
        """Raises Unavailable when it leaves tokens unanswered and another one would answer them. Where all are slow
        together none is frozen."""
        while True:
            await asyncio.sleep(self._decode_seconds / LOOKS)
            self._unanswered.look()
            if self._unanswered.overdue and self._pool.answers_elsewhere(self):
                raise Unavailable(f"it left tokens unanswered for {self._decode_seconds:g} s")
            if self._encodes and not self._unanswered:
                # A text may take long; that no tokens are answered shows that the tokenizer goes on.
                self._unanswered.add(DecodeBatch([], []))
                self._outbox.put(pb.TokenizerCommand(decode=pb.DecodeCommand()))

    async def _read(self, call: _Call) -> None:
        async for response in call:
            self._heard()
            for event in response.events:
                match event.WhichOneof("event"):
                    case "decoded":
                        self._on_decoded(event.decoded)
                    case "encoded":
                        self._on_encoded(event.encoded)

    def _on_decoded(self, decoded: pb.Decoded) -> None:
        """Hands each sequence its text. This runs once for every token: no per-token objects, no logging."""
        stops = {stop.handle: stop for stop in decoded.stops} if decoded.stops else {}
        failures = {failure.handle: failure for failure in decoded.failures}
        batch = self._unanswered.take()
        runs = self.runs
        answers = zip(batch.counts, decoded.handles, decoded.texts, strict=True)
        for (run, count), handle, text in answers:
            if runs.get(handle) is not run:
                # It is over, or it was rewritten and has another handle.
                continue
            if handle in stops:
                run.on_stop_text(stops[handle].token_count, text, stops[handle].stop_index)
            elif handle in failures:
                self._on_decode_failed(handle, from_proto(failures[handle].error))
            else:
                run.on_text(count, text)
        for run in batch.finished:
            if run.decoder is self:
                run.on_text_complete()
        if self._waiting:
            self._plan_flush()

    def _on_decode_failed(self, handle: int, error: TrtmeshError) -> None:
        """Fails a sequence, or moves one that a draining tokenizer does not take."""
        run = self.runs.get(handle)
        if run is None:
            # Answers to what was on its way when the first one came.
            return
        if not isinstance(error, Draining):
            run.fail(error)
            return
        self.drop(run)
        self._become(ReplicaState.DRAINING, error.message)
        self._pool.move([], [run])

    def _on_encoded(self, encoded: pb.Encoded) -> None:
        job = self._encodes.pop(encoded.handle, None)
        if job is None:
            return
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

    def lost(self, problem: str) -> None:
        """Gives everything on the stream back, to be moved to another tokenizer."""
        del problem
        encodes, runs = list(self._encodes.values()), list(self.runs.values())
        self._encodes.clear()
        self.runs.clear()
        self._waiting.clear()
        self._finished.clear()
        self._unanswered.clear()
        self._pool.on_lost(encodes, runs)
