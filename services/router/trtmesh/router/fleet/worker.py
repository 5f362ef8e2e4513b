"""A worker: an engine process, the stream to it, and the sequences there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from trtmesh.chassis.errors import (
    Draining,
    InvalidRequest,
    Mismatch,
    QueueTimeout,
    TrtmeshError,
    WorkerLost,
)
from trtmesh.chassis.forwarding import Outbox
from trtmesh.chassis.grpc.client import Call, Connection, Method
from trtmesh.chassis.process_facts import clock_ahead_ms
from trtmesh.chassis.revisions import SCHEMA_REVISION, check_revision
from trtmesh.chassis.tasks import next_tick, until_first_ends
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.adapters.adapters import Adapters, ItemAdapter
from trtmesh.router.adapters.registry import VersionKey
from trtmesh.router.fleet.assignments import (
    UNACKNOWLEDGED_STEPS,
    Assignments,
    Held,
    Steps,
    StepWatcher,
)
from trtmesh.router.fleet.bridge import Bridge
from trtmesh.router.fleet.deliveries import Deliveries
from trtmesh.router.fleet.leases import Leases
from trtmesh.router.fleet.liveness import TICK_SECONDS, LivenessMonitor
from trtmesh.router.fleet.worker_capabilities import (
    WorkerCapabilities,
    changes_of,
    check_engine,
    check_load,
    check_states,
    report_of,
    role_of,
    tokenizer_mismatch,
)
from trtmesh.router.kv_index import KvFeed, KvIndex
from trtmesh.router.links.contract import ContractBroken
from trtmesh.router.links.local import LocalService
from trtmesh.router.links.replica import (
    DRAINED,
    DRAINED_HERE,
    LEAVING,
    TWIN,
    LinkRules,
    Replica,
    ReplicaState,
)
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import Role, WorkerAdapters, WorkerSnapshot
from trtmesh.router.placement.load_guard import Booking, LoadGuard
from trtmesh.router.placement.rates import Typical
from trtmesh.router.placement.snapshot import LOAD_AT
from trtmesh.router.streams.sequence import Mover
from trtmesh.v1 import engine_pb2 as pb
from trtmesh.v1 import generation_pb2 as generation_pb

DRAIN_MARGIN_MS = 1000
"""Remaining grace at which items leave a draining worker instead of being cut off."""

HANDOVER_MARGIN_MS = 6000
"""Remaining grace at which a draining worker begins to hand its sequences over."""

DRAIN_SECONDS = 1.0
"""Time for a worker to report a drain, after it was told."""

MOVES_PER_TICK = 16
"""Items that a worker tries to move at once, again and again: each try costs a placement."""

MESSAGE_OVERHEAD_BYTES = 256
"""Bytes of a message beside the large command."""

CONNECT: Method[pb.EngineServiceConnectRequest, pb.EngineServiceConnectResponse] = Method(
    "/trtmesh.v1.EngineService/Connect",
    pb.EngineServiceConnectRequest.SerializeToString,
    pb.EngineServiceConnectResponse.FromString,
)

_Call = Call[pb.EngineServiceConnectRequest, pb.EngineServiceConnectResponse]


class Worker(Replica):
    """An engine process as this router sees it."""

    def __init__(
        self,
        address: str,
        rules: LinkRules,
        *,
        router_name: str,
        first_tokenizer: Callable[[], Awaitable[None]],
        fingerprint_of: Callable[[str], str],
        metrics: RouterMetrics,
        kv_index: KvIndex,
        adapters: Adapters,
        on_change: Callable[[], None],
        on_touch: Callable[[str], None],
        on_load: Callable[[str], None],
        bridge: Bridge | None = None,
        local: LocalService | None = None,
        twin_of: Callable[[Worker, str], Worker | None] = lambda *_: None,
    ) -> None:
        """`bridge` is the process in front of a foreign engine, None for an engine of ours. `on_touch` and `on_load`
        take the address."""
        super().__init__(address, rules, local)
        self._bridge = bridge
        self._twin_of = twin_of
        self.twin = ""
        """Address of another link to the same process. The other link counts, and this link does not."""
        self._drain_due_at = 0.0
        """From this time on, a report without the drain asked for by this router means that another router ended the
        drain."""
        self._resume_due = False
        """Whether the worker is to be resumed once it is connected."""
        self._on_change = on_change
        self._on_touch = on_touch
        self._liveness = LivenessMonitor(rules.deadlines)
        self._metrics = metrics
        self._moving: TrtmeshError | None = None
        self._evicted: TrtmeshError | None = None
        self._handing_over = ""
        """Cause of handing every sequence over, or ''."""
        self._moves_tried = 0
        """Items tried so far, of those to move."""
        self._generated_at = float("-inf")
        """Time of the last report with new tokens, of any router."""
        self._router_name = router_name
        self._first_tokenizer = first_tokenizer
        self._fingerprint_of = fingerprint_of
        self.description = pb.GetEngineResponse()
        self.capabilities = WorkerCapabilities()
        self.load = pb.Load()
        self.role = Role.MIXED
        self._rests = ""
        """Why this router drained the worker by itself, or ''."""
        self.streams = 0
        """Number of streams so far."""
        self.since = 0.0
        """Time at which the process was first seen."""
        self.last_turn = 0
        """Number of the last placement on the worker."""
        self.guard = LoadGuard(partial(on_load, address))
        self._assignments = Assignments(
            address, self.guard, self._send, rules.deadlines.queue_seconds
        )
        self.sequences: Mapping[int, Held] = self._assignments.sequences
        """Live sequences by handle."""
        self._steps = Steps(self._assignments, self.guard, metrics, self._new_command)
        self.leases = Leases(address, self._send)
        self._kv_feed = KvFeed(kv_index, address, self._ask_for_kv_snapshot)
        self._adapters = adapters
        self.deliveries = Deliveries(self._new_command, adapters.usages, metrics)
        self._outbox = _new_outbox()

    async def run(self) -> None:
        """Keeps a stream open, and the bridge running, until cancelled."""
        if self._bridge is None:
            await super().run()
        else:
            bridging = self._bridge.run(lambda: self.check_dialled)
            await until_first_ends(super().run(), bridging)

    def _dialled(self) -> str:
        return self._bridge.address() if self._bridge else self.address

    @property
    def name(self) -> str:
        return self.description.worker or self.address

    @property
    def handles(self) -> int:
        """Handles in use, even by released sequences."""
        return len(self.sequences) + len(self._assignments.released)

    @property
    def silent_seconds(self) -> float:
        """Time since its last message."""
        return self._liveness.silent_seconds

    def watch(self, watcher: StepWatcher) -> None:
        self._steps.watcher = watcher

    @property
    def adapters(self) -> WorkerAdapters:
        """Adapters as reported, and in use by this router."""
        return self.guard.adapters

    @property
    def takes_adapters(self) -> bool:
        return "lora.id" in self.capabilities.supported_fields

    @property
    def connected(self) -> bool:
        """Whether commands reach the worker."""
        return self.state in (ReplicaState.READY, ReplicaState.STALLED, ReplicaState.DRAINING)

    @property
    def busy(self) -> bool:
        return bool(self.sequences or self.leases)

    @property
    def stays(self) -> bool:
        """Whether KV may wait there: neither the process nor this router's stream is about to end."""
        return not (self.leaving or self.stops)

    @property
    def stops(self) -> bool:
        """Whether the process is about to end."""
        return self.load.draining and self.load.HasField("drain_ms")

    @property
    def drains_itself(self) -> bool:
        """Whether the worker can be told to drain: for all routers, and beyond the life of this one."""
        return self.connected and bool(self.description.instance)

    @property
    def hands_over(self) -> bool:
        """Whether running sequences are on their way off the worker, with their KV."""
        return bool(self._handing_over and self.sequences and self.leases)

    @property
    def expecting(self) -> bool:
        """Always: a worker reports load at a steady pace."""
        return True

    @property
    def mismatch(self) -> str:
        """Why the worker cannot serve this router, or ''."""
        return tokenizer_mismatch(self.description, self._fingerprint_of(self.description.model))

    @property
    def unusable(self) -> str:
        """Why the worker takes no items, or ''."""
        return self.mismatch if self.ready else self._unready

    @property
    def _unready(self) -> str:
        return self._rests or self.problem or (DRAINED_HERE if self.drained else LEAVING)

    def touch(self) -> None:
        """Marks the snapshot as stale."""
        self._on_touch(self.address)

    def snapshot(self, typical: Typical) -> WorkerSnapshot:
        """The worker with everything dispatched until now; stale after the next `touch`."""
        able = self.capabilities
        return WorkerSnapshot(
            address=self.address,
            worker=self.name,
            model=self.description.model,
            problem=self.mismatch if self.ready else self._unready,
            supported_fields=able.supported_fields,
            is_exact=able.is_exact,
            max_sequence_tokens=able.max_sequence_tokens,
            max_sequences=able.max_sequences,
            max_beams=able.max_beams,
            tokens_per_block=able.tokens_per_block,
            most_sequences=able.most_present,
            role=self.role,
            kv=able.kv,
            **self._figures(typical),
        )

    def reloaded(self, former: WorkerSnapshot, typical: Typical) -> WorkerSnapshot:
        """The snapshot after a change of the load alone."""
        return WorkerSnapshot._make((*former[:LOAD_AT], *self._figures(typical).values()))

    def _figures(self, typical: Typical) -> dict[str, Any]:
        """The fields of the load."""
        now, able = asyncio.get_running_loop().time(), self.capabilities
        most, token_bytes = self.description.max_batch_size, able.kv.token_bytes if able.kv else 0
        return {
            "last_turn": self.last_turn,
            "refuses_handoffs": able.refuses_handoffs(self.load),
            **self.guard.figures(typical, most, token_bytes, now),
        }

    def submit(self, runs: Sequence[Held], command: pb.SubmitCommand, booking: Booking) -> None:
        """Starts sequences of an item under `booking` and fills in `command.handle`.

        Raises InvalidRequest for an item larger than a message, before the item breaks the stream for all others.
        """
        size, most = command.ByteSize(), self._rules.max_message_bytes - MESSAGE_OVERHEAD_BYTES
        if size > most:
            raise InvalidRequest(
                f"the item takes {size} bytes on its way to worker {self.name} but may have at most {most}"
                " (max_message_bytes); send a shorter prompt or less data",
                value=str(size),
                limit=f"at most {most} bytes",
                worker=self.name,
            )
        command.handle = self._assignments.assign(runs, booking)
        self._outbox.add(size).submit.CopyFrom(command)
        self._liveness.submitted()

    async def hold(self, adapter: ItemAdapter, *, pinned: bool = False) -> None:
        """Has the worker load a version. Raises the error of the worker or of the content, or WorkerLost."""
        if self.adapters.holds(adapter.identity) and not pinned:
            # It arrived between the placement of an item and this call.
            return
        load = partial(self._adapters.content, adapter)
        try:
            await self.deliveries.deliver(adapter.identity, load, pinned=pinned)
        except TrtmeshError as error:
            error.worker = error.worker or self.name
            raise

    def pin(self, adapter: Adapter) -> None:
        """Has the worker keep a held version."""
        named = generation_pb.LoraConfig(id=adapter.id, name=adapter.name, version=adapter.version)
        self._send(pb.EngineCommand(load_adapter=pb.LoadAdapterCommand(adapter=named, pinned=True)))

    def set_role(self, role: pb.WorkerRole.ValueType) -> None:
        """Asks the worker for another role. The worker's load reports show the role to every router."""
        self._send(pb.EngineCommand(set_role=pb.SetRoleCommand(role=role)))

    def drain(self) -> None:
        """Places nothing more on the worker, and has it refuse the items of all routers."""
        self.drained = True
        self._tell_drain()

    def rest(self, why: str) -> None:
        """Drains a worker whose results are wrong: its sequences leave, without the KV."""
        self._rests = why
        self.drain()
        self.migrate_all(self._left(why, Draining))

    def resume(self) -> None:
        """Undoes `drain`, of any router."""
        self._end_rest()
        self.drained = False
        self._tell_drain()
        self.evict("")

    def _end_rest(self) -> None:
        """Takes sequences again, unless they leave for want of progress."""
        self._rests = ""
        if self.state is not ReplicaState.STALLED:
            self._moving = None

    def _tell_drain(self) -> None:
        self._drain_due_at = asyncio.get_running_loop().time() + DRAIN_SECONDS
        self._resume_due = not (self.drained or self.drains_itself)
        if self.drains_itself:
            self._send(pb.EngineCommand(drain=pb.DrainCommand(resume=not self.drained)))

    def unload(self, key: VersionKey, *, unpin: bool = False) -> None:
        """Has the worker forget a version once no sequence uses it, or only the pin."""
        number, version = key
        unload = pb.UnloadAdapterCommand(id=number, version=version, unpin=unpin)
        self._send(pb.EngineCommand(unload_adapter=unload))

    def forget_adapter(self, adapter: Adapter) -> None:
        """The worker refused an item because it does not hold the version."""
        gone = {(adapter.id, adapter.version): None}
        self.guard.adapters_moved(gone, asyncio.get_running_loop().time())

    def _new_command(self, size: int) -> pb.EngineCommand:
        return self._outbox.add(size)

    def _send(self, command: pb.EngineCommand) -> None:
        self._outbox.add().CopyFrom(command)

    def _ask_for_kv_snapshot(self) -> None:
        self._outbox.add().kv_snapshot.SetInParent()

    async def before_connecting(self) -> None:
        await self._first_tokenizer()

    async def serve_stream(self, connection: Connection) -> None:
        self._outbox = _new_outbox()
        self._steps.opened()
        call = connection.open(CONNECT)
        try:
            await self._serve_unless_silent(
                call.each(self._receive), self._write(call), self._watch()
            )
        finally:
            call.cancel()

    async def _write(self, call: _Call) -> None:
        hello = pb.HelloCommand(
            router=self._router_name,
            schema_revision=SCHEMA_REVISION,
            tokenizer_fingerprint=self._fingerprint_of(self.description.model),
            unacknowledged_steps=UNACKNOWLEDGED_STEPS,
        )
        await call.write(pb.EngineServiceConnectRequest(commands=[pb.EngineCommand(hello=hello)]))
        await self._outbox.forward(call, self.deliveries.written.set)

    def _receive(self, response: pb.EngineServiceConnectResponse) -> None:
        self._heard()
        self._liveness.heard()
        for event in response.events:
            match event.WhichOneof("event"):
                case "step":
                    self._steps.distribute(event.step)
                case "load":
                    check_load(event.load)
                    self._on_load(event.load)
                case "kv_events":
                    self._kv_feed.apply(event.kv_events)
                case "adapter_states":
                    check_states(event.adapter_states)
                    self._on_adapter_states(event.adapter_states)
                case "blocks_reserved":
                    self.leases.on_reserved(event.blocks_reserved)
                case "handoff_offered":
                    self.leases.on_offered(event.handoff_offered)
                case "handoff_failed":
                    self.leases.on_failed(event.handoff_failed)
                case "welcome":
                    self.clock_ahead_ms = clock_ahead_ms(event.welcome.unix_ms)
                    self._on_welcome(event.welcome.engine)

    def _on_welcome(self, engine: pb.GetEngineResponse) -> None:
        self._greeted()
        check_revision(f"worker {engine.worker}", engine.schema_revision, "this router")
        check_engine(engine)
        self._check_twin(engine.instance)
        if engine.instance != self.description.instance:
            self.since = asyncio.get_running_loop().time()
        self.description, able = engine, WorkerCapabilities.of(engine)
        # Nobody can fetch KV from the worker inside this process, which has no port.
        self.capabilities = able if self._local is None else replace(able, kv=None)
        self._steps.most_tokens = self.capabilities.max_sequence_tokens
        self.role = role_of(engine, self.load)
        self.streams += 1
        if engine.tokens_per_block:
            self._kv_feed.opened()
        self.guard.joined(asyncio.get_running_loop().time())
        self._liveness = LivenessMonitor(self._rules.deadlines, engine.load_interval_ms / 1000)
        self._become(ReplicaState.READY, "")
        if self.drained or self._resume_due:
            self._tell_drain()
        self._on_change()

    def _check_twin(self, instance: str) -> None:
        """Raises Mismatch at the second link to a process, which would count as two workers."""
        twin = self._twin_of(self, instance)
        self.twin = twin.address if twin else ""
        if twin is not None:
            self.description, self.capabilities = pb.GetEngineResponse(), WorkerCapabilities()
            raise Mismatch(TWIN.format(address=twin.address), worker=twin.name)

    def _on_adapter_states(self, states: pb.AdapterStates) -> None:
        before, usages = self.adapters.held, self._adapters.usages
        changes = changes_of(states.adapters)
        self.guard.adapters_moved(changes, asyncio.get_running_loop().time())
        for key, residency in changes.items():
            if residency is None and key in before and key not in self._adapters.removed:
                usages.of_key(key).evictions += 1
        for state in states.adapters:
            if state.rank:
                usages.of_key((state.id, state.version)).rank = state.rank
        self.deliveries.on_states(states.adapters)
        if any(residency and key not in before for key, residency in changes.items()):
            # Items may wait for a worker with the adapter.
            self._on_change()

    def _on_load(self, load: pb.Load) -> None:
        self._liveness.on_load(load)
        now = asyncio.get_running_loop().time()
        if load.generated_tokens > self.load.generated_tokens:
            self._generated_at = now
        before, self.load = self.role, load
        self.role = role_of(self.description, load)
        self.guard.take_report(report_of(load, now))
        if not load.waiting_sequences and not self._liveness.unread:
            self._assignments.none_queued(now)
        if self.role is not before:
            self._on_role()
        self._on_draining(load)
        if load.draining and load.HasField("drain_ms"):
            self._on_grace(load.drain_ms)

    def _on_draining(self, load: pb.Load) -> None:
        if load.draining and self.state is ReplicaState.READY:
            self._become(ReplicaState.DRAINING, "draining" if self.stops else DRAINED)
        elif not load.draining and self.state is ReplicaState.DRAINING:
            self._become(ReplicaState.READY, "")
            self._on_change()
        now = asyncio.get_running_loop().time()
        if load.draining:
            self._drain_due_at = now
        elif self.drained and self.drains_itself and now >= self._drain_due_at:
            self._end_rest()
            self.drained = False
            self.evict("")
            self._on_change()

    def _on_grace(self, milliseconds: int) -> None:
        """Moves the sequences of a worker that stops soon, with their KV as long as there is time."""
        if milliseconds <= DRAIN_MARGIN_MS:
            self.migrate_all(self._left("it drains and has no time left", Draining))
        elif milliseconds <= HANDOVER_MARGIN_MS:
            self._handing_over = "drain"
            self.retry_migrations()

    def _on_role(self) -> None:
        """After a change of the role, moves sequences that no longer fit to workers with room."""
        self.touch()
        if self.role is not Role.PREFILL:
            if self._handing_over == "role":
                self._handing_over = ""
        else:
            self._handing_over = self._handing_over or "role"
            self.retry_migrations(self._left("its role is prefill now", Draining))
        self._on_change()

    async def _watch(self) -> None:
        """Detects a worker without progress, and the recovery."""
        while True:
            await next_tick(TICK_SECONDS)
            self._judge(self._liveness.tick())
            if not self.handles:
                continue
            if self.state is not ReplicaState.STALLED:
                self._assignments.look(round(self._rules.deadlines.queue_seconds / TICK_SECONDS))
            self._move_late()
            # Room elsewhere shows in nothing but the next try.
            self.retry_migrations(most=MOVES_PER_TICK)

    def _judge(self, problem: str) -> None:
        if problem and self.state in (ReplicaState.READY, ReplicaState.DRAINING):
            self._become(ReplicaState.STALLED, problem)
            self.migrate_all(self._left(problem, WorkerLost))
        elif not problem and self.state == ReplicaState.STALLED:
            self._check_twin(self.description.instance)
            self._moving = None
            self._become(ReplicaState.READY, "")
            self._on_draining(self.load)
            self._on_change()

    def _move_late(self) -> None:
        """Moves late sequences off a worker with progress. Raises ContractBroken if they stay, and it reports none."""
        now = asyncio.get_running_loop().time()
        for run in self._assignments.late(now):
            # The next worker may be no faster, so the item must not restart again and again.
            run.times.patience *= 2
            left = run.owner.migrate([run], self.address, self._late(run))
            if not left and run.assignment is not None and self.works and self._reports_nothing:
                raise ContractBroken(
                    f"it reports no sequence, but did not end {run.sequence_index} of request {run.request_id!r}"
                )

    @property
    def _reports_nothing(self) -> bool:
        """Whether the worker read every item, and has no sequence."""
        load = self.load
        counts = (load.running_sequences, load.waiting_sequences, load.paused_sequences)
        known = load.HasField("received_items") and not self._liveness.unread
        return known and not any(counts) and not load.receiving_tokens

    def _late(self, run: Held) -> TrtmeshError:
        """Why a late sequence leaves.

        The worker is at fault if the sequence had started, or if no sequence got tokens meanwhile. Otherwise other
        sequences hold up the queue, which is back-pressure.
        """
        busy = not run.times.has_begun and self._generated_at > run.times.assigned
        return (QueueTimeout if busy else WorkerLost)(
            f"worker {self.name} kept sequence {run.sequence_index} waiting for too long",
            worker=self.name,
        )

    def _left(self, cause: str, kind: type[TrtmeshError]) -> TrtmeshError:
        return kind(f"worker {self.name} is left: {cause}", worker=self.name)

    def migrate_all(self, error: TrtmeshError) -> None:
        """Moves every sequence away at once, without KV; retries until the worker recovers."""
        self._moving = error
        self.deliveries.lost(error)
        self.retry_migrations()

    def evict(self, cause: str) -> int:
        """Moves every sequence away through no fault of the worker, until a call with ''; returns the number that
        leaves now."""
        self._evicted = self._left(cause, Draining) if cause else None
        if self._evicted is not None:
            self.deliveries.lost(self._evicted)
        self._handing_over = "drain" if cause else ""
        return self.retry_migrations()

    def retry_migrations(self, error: TrtmeshError | None = None, most: int = 2**32) -> int:
        """Moves sequences of at most `most` items to workers with room, with the KV unless time is short. Returns the
        number of sequences leaving now. With an error, sequences without a handoff leave without KV. All others
        stay."""
        error = self._moving or self._evicted or error
        if error is None and not self._handing_over:
            return 0
        leaving = 0
        for owner, runs in self._next_owners(most):
            rest: Sequence[Held] = runs
            if self._moving is None:
                rest = owner.hand_over(runs, self.address, self._handing_over)
            left = error is not None and rest and owner.migrate(rest, self.address, error)
            leaving += len(runs) if left else len(runs) - len(rest)
        return leaving

    def _next_owners(self, most: int) -> Sequence[tuple[Mover, list[Held]]]:
        """Returns the next `most` items in turn, so an item without a taker holds up no other."""
        owners = [*self._assignments.by_owner().items()]
        if len(owners) <= most:
            return owners
        start = self._moves_tried % len(owners)
        self._moves_tried = start + most
        return [*owners[start:], *owners[:start]][:most]

    def count_breach(self) -> None:
        self._metrics.breaches["worker"] += 1

    def lost(self, problem: str) -> None:
        """Returns every sequence to the item, for another worker."""
        runs = self._assignments.clear()
        self._moving, self._handing_over = None, ""
        error = WorkerLost(f"worker {self.name} was lost: {problem}", worker=self.name)
        # A draining worker announced the end of the stream.
        self.guard.lose(asyncio.get_running_loop().time(), None if self.load.draining else error)
        self._kv_feed.lost()
        self.deliveries.lost(error)
        self.load = pb.Load()
        for run in runs:
            # A handoff that fails with one of its sequences takes the others off, too.
            if run.assignment is not None:
                run.on_worker_lost(error)
        self.leases.lost(error)


def _new_outbox() -> Outbox[pb.EngineServiceConnectRequest, pb.EngineCommand]:
    return Outbox(pb.EngineServiceConnectRequest, attrgetter("commands"))
