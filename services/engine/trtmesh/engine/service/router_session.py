"""A router's stream from hello to end: commands in, live sequences, events out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import (
    AlreadyExists,
    BackendFailed,
    InvalidField,
    InvalidRequest,
    QueueFull,
    SlowClient,
    TokenizerMismatch,
    TrtmeshError,
    UnsupportedCall,
)
from trtmesh.chassis.fingerprint import tokenizer_fits
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.process_facts import unix_ms
from trtmesh.chassis.revisions import check_revision, unknown_numbers
from trtmesh.chassis.rpc import ServedContext
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import HeldAdapter, SequenceEnd
from trtmesh.engine.handoff.handoffs import Lease
from trtmesh.engine.handoff.receive_run import ReceivedState
from trtmesh.engine.service.adapter_commands import AdapterCommands
from trtmesh.engine.service.event_outbox import (
    MOST_TENSOR_BYTES,
    EventOutbox,
    StepPart,
    end_message,
)
from trtmesh.engine.service.handoff_commands import HandoffCommands
from trtmesh.engine.service.streams import HANDLE_BITS, HANDLE_MASK, LoadedEngine, Stream
from trtmesh.engine.service.submission import (
    MAX_HANDLES,
    adapter_of,
    handles_of,
    never_fits,
    parse_submit,
)
from trtmesh.engine.service.tracing import WorkerTrace
from trtmesh.engine.service.wire import kv_event_message
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

log = logging.getLogger(__name__)

WHOLE_LOADS_EVERY = 10
"""An unchanged load is told in whole so often, and else as a message without events: a sign of life."""

STOP_REASONS = frozenset(
    {pb.FINISH_REASON_STOPPED, pb.FINISH_REASON_CANCELLED, pb.FINISH_REASON_STOP_WORD}
)


@dataclass(slots=True)
class _Item:
    """An item with live sequences."""

    prompt_tokens: int
    live: int
    adapter: Adapter | None
    handoffs: dict[int, Lease]
    """Handoff of each sequence, by handle."""
    timer: asyncio.TimerHandle | None = None
    trace: WorkerTrace | None = None


class RouterSession(Stream):
    """The sequences of a router between the backend and the outbox. An invalid item fails alone. A protocol violation
    (a handle in use, an acknowledgement of unsent steps) raises and ends the stream: tokens could reach the wrong
    client, whereas a router recovers from a lost stream.
    """

    def __init__(self, engine: LoadedEngine, hello: epb.HelloCommand) -> None:
        self.router = hello.router
        self._revision = hello.schema_revision
        self.outbox = EventOutbox(
            hello.unacknowledged_steps,
            engine.metrics,
            min(MOST_TENSOR_BYTES, engine.settings.max_message_bytes // 4),
            lambda: engine.streams.step_count,
        )
        self._engine = engine
        self._live: dict[int, _Item] = {}
        self._continuing: dict[int, ReceivedState] = {}
        """Sequences with a state of another worker, before their first token here, by handle."""
        self._traced: dict[int, WorkerTrace] = {}
        """Traced sequences before their first token here, by handle."""
        self._received_items = 0
        self._told = epb.Load()
        """The load as told last, and how many unchanged ones followed."""
        self._unchanged = 0
        self._open = True
        self._failed = False
        self._number = engine.streams.add(self)
        welcome = epb.Welcome(engine=engine.description, unix_ms=unix_ms())
        self.outbox.put_answer(epb.EngineEvent(welcome=welcome))
        self._adapters = AdapterCommands(engine, self.outbox, self.router)
        self._handoffs = HandoffCommands(engine, self.outbox)
        # The router may place items right away, without waiting for the next report.
        self.take_load(engine.load())
        engine.metrics.open_streams += 1

    @property
    def unacknowledged_steps(self) -> int:
        return self.outbox.unacknowledged_steps

    @property
    def busy(self) -> bool:
        return bool(self._live) or (self._open and (self.outbox.holds_steps or self._owes))

    @property
    def _owes(self) -> bool:
        """Whether other workers may still need KV of the router's sequences."""
        handoffs = self._engine.handoffs
        return handoffs is not None and handoffs.owes(self._handoffs)

    def execute(self, command: epb.EngineCommand) -> None:
        """Executes a command. Raises an error only to end the stream."""
        match command.WhichOneof("command"):
            case "submit":
                self._submit(command.submit)
            case "stop":
                self._stop(command.stop)
            case "acknowledge":
                self.outbox.acknowledge(command.acknowledge.received_steps)
            case "kv_snapshot":
                self._tell_kv_snapshot()
            case "load_adapter":
                self._adapters.load(command.load_adapter)
            case "unload_adapter":
                self._adapters.unload(command.unload_adapter)
            case "reserve_blocks":
                self._handoffs.reserve(command.reserve_blocks)
            case "attach_sender":
                self._handoffs.attach(command.attach_sender)
            case "hand_over":
                self._hand_over(command.hand_over)
            case "renew_leases":
                self._handoffs.renew(command.renew_leases)
            case "release_lease":
                self._handoffs.release(command.release_lease)
            case "set_role":
                self._set_role(command.set_role)
            case "drain":
                self._drain(resume=command.drain.resume)
            case "hello":
                raise InvalidRequest("hello came again, but it opens a stream and comes once")
            case _:
                raise UnsupportedCall(
                    f"the worker does not know command {unknown_numbers(command)}; is the router newer?"
                )

    def take_step(self, part: StepPart) -> None:
        if self._continuing:
            for handle in self._continuing.keys() & part.handles:
                self._continuing.pop(handle).continued()
        if self._traced:
            for handle in self._traced.keys() & part.handles:
                self._traced.pop(handle).first_token(part.step_count)
        if self._open:
            self.outbox.put_step(part)

    def take_end(self, handle: int, end: SequenceEnd) -> None:
        item = self._live.pop(handle, None)
        if item is None:
            # After `fail` the backend may still end the same sequences.
            level = logging.DEBUG if self._failed else logging.ERROR
            log.log(
                level, "the backend ended handle %d of %s, which is not live", handle, self.router
            )
            return
        item.live -= 1
        self._continuing.pop(handle, None)
        if item.timer and not item.live:
            item.timer.cancel()
        handoff = item.handoffs.pop(handle, None)
        descriptor = _end_handoff(handoff, end) if handoff else None
        self._engine.metrics.ended(end, time.monotonic())
        if item.trace is not None:
            self._traced.pop(handle, None)
            item.trace.ended(end, self._engine.streams.step_count)
            if not item.live:
                item.trace.close()
        if end.error and not end.error.worker:
            end.error.worker = self._engine.name
        if self._open:
            self.outbox.put_end(end_message(handle, end, descriptor))
        elif not self._live:
            self._engine.streams.remove(self._number)

    def take_load(self, load: epb.Load) -> None:
        if not self._open:
            return
        own = epb.Load(received_items=self._received_items)
        own.MergeFrom(load)
        self._unchanged = self._unchanged + 1 if _says_the_same(own, self._told) else 0
        if self._unchanged % WHOLE_LOADS_EVERY:
            self.outbox.put_sign_of_life()
        else:
            self._told = own
            self.outbox.put_load(own)

    def take_adapters(self, held: Sequence[HeldAdapter]) -> None:
        if not self._open:
            return
        try:
            self._adapters.take_states(held)
        except SlowClient as error:
            self.finish(error)

    def take_kv_events(self, epoch: int, first: int, events: list[epb.KvEvent]) -> None:
        if self._open:
            self.outbox.put_kv_events(epoch, first, events)

    def sent(self) -> None:
        """Called after a message was sent. A drain waits until every stream is idle."""
        if self._engine.drain_ends_at is not None and not self.busy:
            self._engine.streams.calmed()

    def fail(self, error: TrtmeshError) -> None:
        """Ends every sequence with `error`, in place of the broken backend."""
        self._failed = True
        for handle, item in list(self._live.items()):
            key = self._key(handle)
            reason = pb.FINISH_REASON_ERROR
            self.take_end(handle, SequenceEnd(key, reason, item.prompt_tokens, 0, 0, error=error))

    def finish(self, farewell: TrtmeshError) -> None:
        """Sends the waiting events, then ends the stream with `farewell`."""
        self.outbox.finish(farewell)

    def close(self) -> None:
        """Stops the live sequences at once, because the stream is over."""
        self._open = False
        self._adapters.close()
        self._handoffs.close()
        self._engine.metrics.open_streams -= 1
        if self._live:
            keys = [self._key(handle) for handle in self._live]
            log.info("stopping %d sequences of %s, whose stream is over", len(keys), self.router)
            self._engine.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
        else:
            self._engine.streams.remove(self._number)

    def _key(self, handle: int) -> int:
        return self._number << HANDLE_BITS | handle

    def _submit(self, command: epb.SubmitCommand) -> None:
        self._received_items += 1
        handles = handles_of(command)
        self._check_handles(handles)
        trace = self._trace_of(command)
        try:
            self._check_room(len(handles))
            keys = tuple(map(self._key, handles))
            item = parse_submit(command, keys, self._engine, self._revision)
            handoff = None
            if item.sender_lease_id or item.receiver_lease_id or item.handoff_state:
                handoff = self._handoffs.submit(command, item)
            else:
                self._engine.backend.submit(item)
        except TrtmeshError as error:
            self._refuse(handles, command, error, trace)
            return
        except Exception as error:
            # Broad on purpose: a defect of the backend fails this item alone.
            with request_id_bound(command.request_id):
                log.exception("the backend could not take item %d", command.batch_index)
            defect = BackendFailed(f"{type(error).__name__}: {error}")
            self._refuse(handles, command, defect, trace)
            return
        prompt_tokens = item.prompt_tokens
        of_handles = dict.fromkeys(handles, handoff) if handoff else {}
        adapter = adapter_of(item.config)
        live = _Item(prompt_tokens, len(handles), adapter, of_handles, trace=trace)
        self._live.update(dict.fromkeys(handles, live))
        if trace is not None:
            self._traced.update(dict.fromkeys(handles, trace))
        if isinstance(handoff, ReceivedState):
            self._continuing[handles[0]] = handoff
        self._engine.metrics.submitted(
            item.keys,
            prompt_tokens,
            time.monotonic(),
            awaits_kv=bool(command.receiver_lease_id or item.handoff_state),
        )
        if command.HasField("timeout_ms"):
            loop = asyncio.get_running_loop()
            live.timer = loop.call_later(command.timeout_ms / 1000, self._time_out, handles, live)

    def _hand_over(self, command: transfer.HandOverCommand) -> None:
        item = self._live.get(command.handle)
        if item is None:
            self._handoffs.hand_over(command, None, None, None)
        else:
            key = self._key(command.handle)
            present = item.handoffs.get(command.handle)
            handoff = self._handoffs.hand_over(command, key, item.adapter, present)
            if handoff is not None:
                item.handoffs[command.handle] = handoff

    def _set_role(self, command: epb.SetRoleCommand) -> None:
        known = self._engine.description.roles
        if command.role not in known:
            limit = f"one of {', '.join(map(epb.WorkerRole.Name, known))}"
            raise InvalidField.of("set_role.role", command.role, limit)
        log.info("router %s sets the role %s", self.router, epb.WorkerRole.Name(command.role))
        self._engine.role = command.role
        self._engine.streams.tell_load(self._engine.load())

    def _drain(self, *, resume: bool) -> None:
        """Drains or resumes the worker for all routers, for longer than this stream lives."""
        log.info("router %s %s this worker", self.router, "resumes" if resume else "drains")
        self._engine.drained = not resume
        self._engine.streams.tell_load(self._engine.load())

    def _check_handles(self, handles: range) -> None:
        # Refusals exist in the outbox only, so this bounds them.
        if len(self.outbox.ending) >= 2 * MAX_HANDLES:
            raise SlowClient(
                f"{len(self.outbox.ending)} ends wait to be read; acknowledge steps before submitting more"
            )
        if handles[-1] > HANDLE_MASK:
            limit = f"at most {HANDLE_MASK + 1 - len(handles)} for {len(handles)} sequences"
            raise InvalidField.of("submit.handle", handles[0], limit)
        for handle in handles:
            if handle in self._live or handle in self.outbox.ending:
                raise AlreadyExists(
                    f"{handle} names a live sequence; a handle is free again once its end was received",
                    field="submit.handle",
                    value=str(handle),
                )

    def _check_room(self, sequences: int) -> None:
        limit = MAX_HANDLES
        if sequences > limit:
            raise never_fits(sequences, limit)
        live, ending = len(self._live), len(self.outbox.ending)
        if live + ending + sequences > limit:
            raise QueueFull(
                f"the stream has {live} sequences and {ending} unread ends of at most {limit};"
                " try again later or elsewhere",
                value=str(live + ending + sequences),
                limit=f"at most {limit}",
            )

    def _trace_of(self, command: epb.SubmitCommand) -> WorkerTrace | None:
        engine = self._engine
        if engine.tracer is None or not command.traceparent:
            return None
        step = engine.streams.step_count
        return WorkerTrace.begin(engine.tracer, command, engine.name, engine.info.model, step)

    def _refuse(
        self,
        handles: range,
        command: epb.SubmitCommand,
        error: TrtmeshError,
        trace: WorkerTrace | None,
    ) -> None:
        """Ends the handles of a refused item."""
        if trace is not None:
            trace.refused(error.reason)
        error.worker = error.worker or self._engine.name
        self._engine.metrics.errors[error.reason] += 1
        with request_id_bound(command.request_id):
            log.info("item %d refused: %s", command.batch_index, error.message)
        prompt_tokens = max(0, len(command.token_ids) - command.emitted_tokens)
        for handle in handles:
            end = SequenceEnd(
                handle,
                pb.FINISH_REASON_ERROR,
                prompt_tokens,
                0,
                command.emitted_tokens,
                error=error,
            )
            self.outbox.put_end(end_message(handle, end))

    def _stop(self, command: epb.StopCommand) -> None:
        if command.reason not in STOP_REASONS:
            limit = "FINISH_REASON_STOPPED, FINISH_REASON_CANCELLED or FINISH_REASON_STOP_WORD"
            raise InvalidField.of("stop.reason", command.reason, limit)
        self._stop_live(command.handles, command.reason)

    def _time_out(self, handles: Iterable[int], item: _Item) -> None:
        same = [handle for handle in handles if self._live.get(handle) is item]
        self._stop_live(same, pb.FINISH_REASON_CANCELLED)

    def _stop_live(self, handles: Iterable[int], reason: int) -> None:
        """Stops the live handles; the ends of the others are already under way."""
        keys = [self._key(handle) for handle in handles if handle in self._live]
        if keys:
            self._engine.backend.stop(keys, reason)

    def _tell_kv_snapshot(self) -> None:
        kv = self._engine.streams.kv
        snapshot = epb.KvEvents(
            epoch=kv.epoch,
            first_sequence=kv.next_sequence,
            events=map(kv_event_message, kv.snapshot()),
            snapshot=True,
        )
        self.outbox.put_kv_snapshot(snapshot)


def _says_the_same(load: epb.Load, before: epb.Load) -> bool:
    """Whether loads differ in nothing that a router acts on: resident memory is never quite still."""
    memory, load.host_memory_bytes = load.host_memory_bytes, before.host_memory_bytes
    same: bool = load == before
    load.host_memory_bytes = memory
    return same


def _end_handoff(handoff: Lease, end: SequenceEnd) -> transfer.HandoffDescriptor | None:
    """Completes an end by the sequence's lease. A defect of the lease fails this sequence alone."""
    try:
        return handoff.sequence_ended(end)
    except Exception as error:
        log.exception("unexpected error of lease %s", handoff.lease_id)
        end.reason = pb.FINISH_REASON_ERROR
        end.error = BackendFailed(f"{type(error).__name__}: {error}")
        return None


async def serve_stream(loaded: Callable[[], LoadedEngine], context: ServedContext) -> None:
    """Serves one router until it half-closes or disconnects. Raises the error of the stream."""
    # Read before any refusal: a failed write would hide the status from the router.
    opening = await context.read()
    if not isinstance(opening, epb.EngineServiceConnectRequest):
        return
    engine = loaded()
    session = RouterSession(engine, _hello(engine, opening))
    log.info("router %s connected", session.router)
    try:
        for command in opening.commands[1:]:
            session.execute(command)
        await until_first_ends(_read(session, context), _write(session, context))
    finally:
        # Before any await: the blocks are free within a step.
        session.close()
        log.info("router %s is gone", session.router)


def _hello(engine: LoadedEngine, opening: epb.EngineServiceConnectRequest) -> epb.HelloCommand:
    if not opening.commands or opening.commands[0].WhichOneof("command") != "hello":
        raise InvalidRequest("the first command of a stream must be hello")
    hello = opening.commands[0].hello
    check_revision(f"router {hello.router}", hello.schema_revision, f"worker {engine.name}")
    own, other = engine.info.tokenizer_fingerprint, hello.tokenizer_fingerprint
    if not tokenizer_fits(own, other):
        known = own or "none beside its weights"
        raise TokenizerMismatch(
            f"router {hello.router} has tokenizer {other} and worker {engine.name} {known}; serve one model's files,"
            " the tokenizer files included"
        )
    if hello.unacknowledged_steps < 1:
        raise InvalidField.of(
            "hello.unacknowledged_steps", hello.unacknowledged_steps, "at least 1"
        )
    return hello


async def _read(session: RouterSession, context: ServedContext) -> None:
    def execute(request: epb.EngineServiceConnectRequest) -> None:
        for command in request.commands:
            session.execute(command)

    await context.each(execute)


async def _write(session: RouterSession, context: ServedContext) -> None:
    await session.outbox.forward(context, session.sent)
    session.outbox.check_open()
