"""The life cycle of a replica: connect, serve a stream, lose the connection, reconnect."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc
from trtmesh.chassis.addresses import AddressCheck
from trtmesh.chassis.channels import GREETING_SECONDS
from trtmesh.chassis.error_wire import from_status
from trtmesh.chassis.errors import Mismatch, TrtmeshError, Unavailable
from trtmesh.chassis.fair.turns import ParseScheduler
from trtmesh.chassis.grpc.client import Connection, connected
from trtmesh.chassis.grpc.client.call import ENDED
from trtmesh.chassis.tasks import Ticks, next_tick, until_first_ends
from trtmesh.chassis.tls.client import TlsOfPeers, plain_text
from trtmesh.router.links.contract import (
    FIRST_REST_SECONDS,
    LONGEST_REST_SECONDS,
    ContractBroken,
)
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.router.links.local import LocalService

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.25
REFUSED_RECONNECT_SECONDS = 2.0

LONGEST_GREETING_SECONDS = 4 * GREETING_SECONDS
"""Longest time to connect. It doubles after each attempt that used it up, as on a busy machine that starts a fleet."""

MOST_TURNS = 32
"""Most turns at a time, each from the look-up of an address to the answer to the greeting."""

MOST_DOUBTFUL = 24
"""Most turns at a time for replicas that let their last turn pass. Each may take its whole deadline again, and a
replica that answered must not wait behind hundreds of them."""

LEAVING = "it was removed, or its address is gone; it finishes what it has"

DRAINED = "an admin drains it"

DRAINED_HERE = "an admin drains it, on this router alone"

TWIN = "it is the process at {address}, to which this router has a link already; list one of the addresses"

LOST_AFTER = 10
"""Multiple of `deadlines.silence_seconds` for which a connection with a message due may be silent."""

SILENCE_CHECKS = 10
"""Checks for silence during the longest permitted silence."""


class ReplicaState(Enum):
    """Usability of a replica."""

    CONNECTING = "connecting"
    READY = "ready"
    STALLED = "stalled"
    """Connected but without progress."""
    DRAINING = "draining"
    """Connected but without room for new work."""
    GONE = "gone"
    """Removed."""
    REFUSED = "refused"
    """Connected but unfit for this mesh."""


class Turn:
    def __init__(self) -> None:
        self._taken: list[asyncio.Semaphore] = []

    async def take(self, places: asyncio.Semaphore) -> None:
        """Waits for one of the places."""
        await places.acquire()
        self._taken.append(places)

    def end(self) -> None:
        """Lets the next replica begin. May be called again."""
        while self._taken:
            self._taken.pop().release()


class ConnectTurns:
    """The turns of all replicas of a router to connect, first come, first served; those that let their last turn pass
    first wait for one another.

    A router that starts before hundreds of replicas must not greet all of them at once, or on a busy machine every
    greeting outlasts its deadline, and all begin again together.
    """

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(MOST_TURNS)
        self._doubtful = asyncio.Semaphore(MOST_DOUBTFUL)

    @asynccontextmanager
    async def turn(self, seconds: float, *, is_doubtful: bool) -> AsyncIterator[Turn]:
        """Waits for a turn, which ends after `seconds` or with the block: one that is slow to answer, or never does,
        may go on, and keeps nobody out."""
        turn = Turn()
        try:
            if is_doubtful:
                await turn.take(self._doubtful)
            await turn.take(self._all)
            ticks = Ticks(seconds, turn.end)
            try:
                yield turn
            finally:
                ticks.cancel()
        finally:
            turn.end()


@dataclass(frozen=True, slots=True)
class LinkRules:
    """What all links of a router have in common."""

    deadlines: Deadlines
    max_message_bytes: int
    tls_of_peers: TlsOfPeers = plain_text
    turns: ParseScheduler = field(default_factory=ParseScheduler)
    """Many bad peers take no more time than one."""
    connect_turns: ConnectTurns = field(default_factory=ConnectTurns)


class Replica(ABC):
    """A tokenizer or worker at an address, with a state for operators and placement.

    `run` owns the connection and the stream; both end with `run`. Subclasses implement `serve_stream`, `lost` and the
    questions `busy` and `expecting`.
    """

    def __init__(self, address: str, rules: LinkRules, local: LocalService | None = None) -> None:
        """`local` is the service in this process, None for one at the address."""
        self.address = address
        self._rules = rules
        self._local = local
        self.state = ReplicaState.CONNECTING
        self.problem = "connecting"
        self._leaving = False
        self._drained = False
        self._lost_seconds = LOST_AFTER * rules.deadlines.silence_seconds
        self._connect_turn: Turn | None = None
        """The turn of the latest attempt; None before the first, and for a service of this process."""
        self._greeting_seconds = GREETING_SECONDS
        self._has_answered = False
        """Whether the greeting of the latest attempt was answered."""
        self._silent_checks = 0
        self._rest_seconds = 0.0
        self.clock_ahead_ms: int | None = None
        """How far the peer's clock was ahead when it connected; None for unknown."""
        self.check_dialled: AddressCheck | None = None
        """Refuses IP addresses; None for an address that needs no check."""

    @property
    def leaving(self) -> bool:
        """Whether an admin or discovery removed the address."""
        return self._leaving

    @leaving.setter
    def leaving(self, leaving: bool) -> None:
        self._leaving = leaving
        self.touch()

    @property
    def drained(self) -> bool:
        """Whether an admin drains it."""
        return self._drained

    @drained.setter
    def drained(self, drained: bool) -> None:
        self._drained = drained
        self.touch()

    @abstractmethod
    def touch(self) -> None:
        """Readiness may have changed."""

    @property
    def works(self) -> bool:
        """Whether it is connected and makes progress."""
        return self.state in (ReplicaState.READY, ReplicaState.DRAINING)

    @property
    def ready(self) -> bool:
        return self.state is ReplicaState.READY and not (self._leaving or self._drained)

    @property
    def answered(self) -> bool:
        """Whether there is a peer at the address, fit or not."""
        return self.state not in (ReplicaState.CONNECTING, ReplicaState.GONE)

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether it has work of this router."""

    async def run(self) -> None:
        """Keeps a stream open until cancelled, when the replica leaves the fleet."""
        try:
            while True:
                await self.before_connecting()
                await self._connect_once()
                refused = self.state == ReplicaState.REFUSED
                pause = REFUSED_RECONNECT_SECONDS if refused else RECONNECT_SECONDS
                await asyncio.sleep(max(pause, self._rest_seconds))
        finally:
            self._become(ReplicaState.GONE, "removed")

    @abstractmethod
    async def before_connecting(self) -> None:
        """Waits for what the greeting names."""

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        """A block with a connection to the replica. Raises Unavailable."""
        if self._local is not None:
            return self._local.connect()
        return connected(
            self._dialled(),
            self._rules.max_message_bytes,
            self._greeting_seconds,
            self._rules.tls_of_peers(),
            check=self.check_dialled,
            turns=self._rules.turns,
        )

    def _dialled(self) -> str:
        """The address to connect to. Raises a TrtmeshError while there is none."""
        return self.address

    async def _connect_once(self) -> None:
        state, problem = ReplicaState.CONNECTING, ENDED
        rested, self._rest_seconds = self._rest_seconds, 0.0
        began = asyncio.get_running_loop().time()
        try:
            # A service of this process may take minutes to load.
            await (self._serve_in_turn() if self._local is None else self._serve_once())
        except ContractBroken as error:
            log.warning("%s broke the contract and is left: %s", self.address, error.message)
            state, problem = ReplicaState.REFUSED, f"it broke the contract: {error.message}"
            self.count_breach()
            if asyncio.get_running_loop().time() - began < LONGEST_REST_SECONDS:
                self._rest_seconds = min(2 * rested, LONGEST_REST_SECONDS)
            self._rest_seconds = self._rest_seconds or FIRST_REST_SECONDS
        except Mismatch as error:
            state, problem = ReplicaState.REFUSED, error.message
        except TrtmeshError as error:
            problem = error.message
        except grpc.aio.AioRpcError as error:
            problem = _describe(error)
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                state = ReplicaState.REFUSED
        except asyncio.CancelledError:
            self.lost("it was removed from the fleet")
            raise
        except Exception as error:
            # Broad on purpose: after a defect the router must still reconnect to this replica.
            log.exception("link to %s failed", self.address)
            problem = f"{type(error).__name__}: {error}"
        self._become(state, problem)
        self.lost(problem)

    async def _serve_in_turn(self) -> None:
        """Connects and serves a stream once few enough others are greeted."""
        seconds, self._has_answered = self._greeting_seconds, False
        is_doubtful = seconds > GREETING_SECONDS
        async with self._rules.connect_turns.turn(seconds, is_doubtful=is_doubtful) as turn:
            self._connect_turn = turn
            began = asyncio.get_running_loop().time()
            try:
                await self._serve_once()
            finally:
                took = asyncio.get_running_loop().time() - began
                # Not all: timers may end a little early.
                if not self._has_answered and took > self._greeting_seconds / 2:
                    longer = min(2 * self._greeting_seconds, LONGEST_GREETING_SECONDS)
                    self._greeting_seconds = longer

    async def _serve_once(self) -> None:
        async with self.connect() as connection:
            await self.serve_stream(connection)

    def _greeted(self) -> None:
        """The replica answered the greeting: another one may be greeted."""
        self._greeting_seconds, self._has_answered = GREETING_SECONDS, True
        if self._connect_turn is not None:
            self._connect_turn.end()

    @property
    @abstractmethod
    def expecting(self) -> bool:
        """Whether the peer owes a message: silence then means a dead, frozen or disconnected peer."""

    def _heard(self) -> None:
        """Restarts the measured silence, after a message or a new debt of the peer."""
        self._silent_checks = 0

    async def _serve_unless_silent(self, *halves: Coroutine[Any, Any, None]) -> None:
        """Runs the halves of a stream until the first ends. Raises Unavailable after too long a silence."""
        self._heard()
        await until_first_ends(*halves, self._watch_silence())

    async def _watch_silence(self) -> None:
        while True:
            await next_tick(self._lost_seconds / SILENCE_CHECKS)
            # Counted, not timed: whatever arrived while this process stood still is read before the next check.
            self._silent_checks += self.expecting
            if self._silent_checks > SILENCE_CHECKS:
                raise Unavailable(f"it was silent for {self._lost_seconds:g} s")

    def _become(self, state: ReplicaState, problem: str) -> None:
        if (state, problem) != (self.state, self.problem):
            log.info("%s is %s%s", self.address, state.value, f": {problem}" if problem else "")
        self.state, self.problem = state, problem
        self.touch()

    @abstractmethod
    async def serve_stream(self, connection: Connection) -> None:
        """Opens the stream and serves until the end. Calls `_become` once the replica is ready."""

    @abstractmethod
    def count_breach(self) -> None:
        """The replica broke the contract."""

    @abstractmethod
    def lost(self, problem: str) -> None:
        """Gives up all work on the stream; `problem` says why."""


def _describe(error: grpc.aio.AioRpcError) -> str:
    known = from_status(error.code(), error.details() or "", error.trailing_metadata())
    message = known.message or known.reason
    # Of a peer that starts or stops; a code in capitals reads like a fault.
    return message if type(known) is Unavailable else f"{error.code().name}: {message}"
