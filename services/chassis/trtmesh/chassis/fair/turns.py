"""Shares out the time of the event loop.

asyncio has no priorities. So deferrable work is done in slices. Between two slices the loop rests: it makes a few
passes for streams and timers alone.

`ParseScheduler` gives connections turns to parse their input. 256 KiB of the cheapest frames take a second to parse. So
each connection parses for a short turn, and reads on once all of its input is parsed. `StartScheduler` starts handlers
and items: a handler runs up to its first wait, and an item is placed, in one pass. `Handshakes` paces TLS. In all
three, addresses take turns: an address with a thousand connections gets as much as an address with a single connection.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable
from time import perf_counter
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

REST_PASSES = 3
"""Passes of a rest. A token needs two to five passes to cross the router: commands to a tokenizer, writes to clients
and the flush of a connection wait for what else comes in their pass. With a slice in each pass, the token would wait
for as many slices; with rests, for one or two."""

MAX_REST_SECONDS = 0.005
"""Longest rest: passes full of running streams must not delay new work."""


def after_rest(callback: Callable[[], None]) -> None:
    """Calls `callback` in the pass after a rest."""
    until = perf_counter() + MAX_REST_SECONDS
    asyncio.get_running_loop().call_soon(_rest, REST_PASSES, until, callback)


# No closure: a closure over its own name is a cycle.
def _rest(passes: int, until: float, callback: Callable[[], None]) -> None:
    if passes and perf_counter() < until:
        asyncio.get_running_loop().call_soon(_rest, passes - 1, until, callback)
    else:
        callback()


class Rotation(Generic[T]):
    """A queue with an order for each owner. Owners take turns, an entry at a time."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, deque[T]] = OrderedDict()
        """Entries by owner, the next one in front. Read to see whether there are any: a start asks a dozen times."""

    def add(self, owner: Hashable, entry: T) -> None:
        entries = self.entries.get(owner)
        if entries is None:
            entries = self.entries[owner] = deque()
        entries.append(entry)

    def take(self) -> tuple[Hashable, T]:
        """Removes and returns the next entry with its owner. There must be an entry."""
        owner, entries = next(iter(self.entries.items()))
        entry = entries.popleft()
        if entries:
            self.entries.move_to_end(owner)
        else:
            del self.entries[owner]
        return owner, entry


TURN_SECONDS = 0.001
"""Time of a connection in a slice of parsing. A turn ends after the frame in progress, so the largest frame bounds the
excess."""

PARSE_SLICE_SECONDS = 0.002
"""Time of all connections together between two rests. An excess shortens the next slices."""


class Work(Protocol):
    """Input of a peer, to be parsed in turns."""

    def go_on(self, until: float) -> bool:
        """Works until `until`, a time of `perf_counter`, or to the end. Returns whether work may be left."""

    def completed(self) -> None:
        """Called when no work is left, unless `ParseScheduler.take` did all of it at once."""


class ParseScheduler:
    """The turns of all connections of a server, or of all links of a router."""

    def __init__(self) -> None:
        self._fresh = Rotation[Work]()
        """Work before the first turn. Alternates with `_waiting`: new, small work need not wait for all old work, and
        old work advances while new work keeps arriving."""
        self._waiting = Rotation[Work]()
        self._fresh_is_next = True
        self._spent = 0.0
        self._planned = False

    def take(self, work: Work, origin: Hashable = "") -> bool:
        """Gives the work a turn now, if this slice has time left. Returns whether the work waits for another turn.

        All work of an `origin`, the address of a client, shares its turns.
        """
        if self._spent < PARSE_SLICE_SECONDS and not self._fresh.entries:
            waits = self._turn(work)
            if waits:
                self._waiting.add(origin, work)
        else:
            waits = True
            self._fresh.add(origin, work)
        # A rest after each short turn would cost more than saved, so short turns add up.
        if waits or self._spent >= TURN_SECONDS:
            self._plan()
        return waits

    def charge(self, seconds: float) -> None:
        """Shortens the next slices by time spent on input outside a turn."""
        self._spent += seconds
        if self._spent >= TURN_SECONDS:
            self._plan()

    def _turn(self, work: Work) -> bool:
        began = perf_counter()
        try:
            return work.go_on(began + TURN_SECONDS)
        finally:
            self._spent += perf_counter() - began

    def _next(self) -> tuple[Hashable, Work] | None:
        """Removes and returns the next work with its origin, or None."""
        first, second = self._fresh, self._waiting
        if not self._fresh_is_next:
            first, second = second, first
        queue = first if first.entries else second
        if not queue.entries:
            return None
        self._fresh_is_next = queue is self._waiting
        return queue.take()

    def _plan(self) -> None:
        """Plans the next slice, unless it is planned."""
        if not self._planned:
            self._planned = True
            after_rest(self._slice)

    def _slice(self) -> None:
        self._planned = False
        self._spent = max(0.0, self._spent - PARSE_SLICE_SECONDS)
        try:
            while self._spent < PARSE_SLICE_SECONDS and (following := self._next()) is not None:
                origin, work = following
                if self._turn(work):
                    self._waiting.add(origin, work)
                else:
                    work.completed()
        finally:
            if self._fresh.entries or self._waiting.entries or self._spent >= TURN_SECONDS:
                self._plan()


class _Steps(Generic[T]):
    """Runs a generator, which yields between steps."""

    def __init__(self, steps: Generator[None, None, T]) -> None:
        self._steps = steps
        self.result: T
        self.error: Exception | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self, until: float) -> bool:
        try:
            while True:
                next(self._steps)
                if perf_counter() >= until:
                    return True
        except StopIteration as end:
            self.result = end.value
        except Exception as error:  # noqa: BLE001 - `ConnectionQueue.run` raises it
            self.error = error
        return False

    def completed(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class ConnectionQueue:
    """The work of a connection, in order. All of the work shares the turns of the connection."""

    def __init__(self, turns: ParseScheduler, origin: Hashable = "") -> None:
        self._turns, self._origin = turns, origin
        self._works: deque[Work] = deque()
        self.arrivals: list[Callable[[], None]] = []
        """Take the messages that arrived in a turn of parsing, once it is over: what is done with messages is none of
        it."""

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Runs a generator, which yields between steps. Returns the result, or raises the error."""
        work = _Steps(steps)
        self.take(work)
        try:
            await work.done
            if work.error is not None:
                raise work.error
            return work.result
        finally:
            steps.close()
            # A cycle would keep the variables of the error's frames, also those of a cancelled call.
            work.error = None

    def take(self, work: Work) -> None:
        """Queues work, and gives a first turn now if there is time."""
        self._works.append(work)
        if len(self._works) == 1:
            self._turns.take(self, self._origin)

    def go_on(self, until: float) -> bool:
        while self._works:
            if self._works[0].go_on(until):
                return True
            self._works.popleft().completed()
            if perf_counter() >= until:
                break
        return bool(self._works)

    def completed(self) -> None:
        """Each work was notified on its own."""

    def hand_over(self) -> None:
        """Has the messages taken."""
        arrivals, self.arrivals = self.arrivals, []
        for take in arrivals:
            take()


START_SLICE_SECONDS = 0.003
"""Time for starts between two rests. Starts run as tasks, so the slice is a number of them, by their mean time."""

MAX_IN_SLICE = 32
"""Most starts in a slice, in case the mean has suddenly become wrong."""

FIRST_GUESS_SECONDS = 0.0005
"""Mean time of a start before the first measurement."""

WEIGHT = 0.2
"""Weight of a slice in the mean."""


class PacedCall(Protocol):
    """A call with a handler, or a waiting task."""

    def proceed(self) -> None:
        """Has the handler or task start, end or continue in the next pass."""


class _Waiter:
    __slots__ = ("turn",)

    def __init__(self) -> None:
        self.turn = asyncio.get_running_loop().create_future()

    def proceed(self) -> None:
        if not self.turn.done():
            self.turn.set_result(None)


class StartQueue:
    """The waiting calls of a connection, or items of a request, in order."""

    def __init__(self, scheduler: StartScheduler, origin: Hashable = "") -> None:
        self._scheduler = scheduler
        self.origin = origin
        """The address of the client. All queues of an address share turns."""
        self.waiting: dict[PacedCall, None] = {}
        self.queued = False
        """Whether this queue, possibly empty, is in the rotation of the scheduler."""

    def add(self, call: PacedCall) -> None:
        """Has the call proceed once: now if this slice has room, else in turn."""
        if self._scheduler.enter():
            call.proceed()
        else:
            self._scheduler.wait(self, call)

    def add_later(self, call: PacedCall) -> None:
        """Has the call proceed in the next turn. Calls may ask for another turn during a turn."""
        self._scheduler.wait(self, call)

    def remove(self, call: PacedCall) -> None:
        """Forgets a call."""
        self.waiting.pop(call, None)

    def enter(self) -> bool:
        """Returns whether a call may proceed now, and counts it if so: if this slice has room and nobody else waits."""
        return self._scheduler.enter()

    async def turn(self) -> None:
        """Waits for a turn of the running task. Returns at once if this slice has room and nobody else waits."""
        if not self._scheduler.enter():
            await self._wait(self._scheduler.wait)

    async def turn_before_rest(self) -> None:
        """Waits for a turn of the running task. Returns at once if no other task had a turn since the last rest.

        For tasks of several milliseconds: otherwise many would run in this pass.
        """
        if not self._scheduler.enter_before_rest():
            await self._wait(self._scheduler.wait)

    async def turn_if_late(self) -> None:
        """For a task during a turn. Waits for another turn if earlier tasks of this pass took a whole slice: a mean of
        cheap tasks admits too many expensive tasks."""
        while self._scheduler.is_late:
            await self._wait(self._scheduler.postpone)

    async def _wait(self, wait: Callable[[StartQueue, PacedCall], None]) -> None:
        waiter = _Waiter()
        wait(self, waiter)
        try:
            await waiter.turn
        finally:
            self.remove(waiter)


class StartScheduler:
    """The turns of all handlers of a server, or of all items of a router at a stage."""

    def __init__(self) -> None:
        self._queues = Rotation[StartQueue]()
        self._mean = FIRST_GUESS_SECONDS
        self._room = _room(self._mean)
        self._proceeding = 0
        """Number of calls in this slice."""
        self._slice_began = 0.0
        """Start of a slice without a planned rest, since no call waits for the next slice."""
        self._is_another_pass = True
        """Whether a pass has ended since the last call entered."""
        self._began = 0.0
        self._postponed = 0
        """Number of calls in this slice whose turns came too late."""
        self._planned = False

    def enter(self) -> bool:
        """Returns whether a call may proceed now, and counts the call if so."""
        if self._queues.entries:
            return False
        if self._is_another_pass and not self._planned:
            # Within a pass, slow calls must not have slice after slice.
            now = perf_counter()
            if now - self._slice_began > MAX_REST_SECONDS:
                self._slice_began, self._proceeding = now, 0
        if self._proceeding >= self._room:
            return False
        self._proceeding += 1
        if self._is_another_pass:
            self._is_another_pass = False
            asyncio.get_running_loop().call_soon(self._pass)
        return True

    def _pass(self) -> None:
        self._is_another_pass = True
        self._began = perf_counter()

    @property
    def is_late(self) -> bool:
        """Whether the calls of this pass have taken a slice."""
        return perf_counter() - self._began > START_SLICE_SECONDS

    def enter_before_rest(self) -> bool:
        """Returns whether a call may proceed now. No other may until the next rest is over."""
        if self._planned:
            return False
        self._plan()
        return True

    def wait(self, queue: StartQueue, call: PacedCall) -> None:
        """Has a call proceed in turn, after a rest."""
        queue.waiting[call] = None
        if not queue.queued:
            queue.queued = True
            self._queues.add(queue.origin, queue)
        if not self._planned:
            self._plan()

    def postpone(self, queue: StartQueue, call: PacedCall) -> None:
        """Has a call whose turn came too late in a slice proceed in the next. Without other calls of its address,
        it goes before addresses whose calls proceeded."""
        self._postponed += 1
        is_alone = queue.origin not in self._queues.entries
        self.wait(queue, call)
        if is_alone:
            self._queues.entries.move_to_end(queue.origin, last=False)

    def _plan(self) -> None:
        self._planned = True
        after_rest(self._slice)

    def _slice(self) -> None:
        self._proceeding = 0
        self._planned = bool(self._queues.entries)
        if not self._planned:
            return
        loop, room = asyncio.get_running_loop(), self._room
        # The next pass runs these callbacks in a row: begin, the tasks, end.
        loop.call_soon(self._begin)
        try:
            while self._queues.entries and self._proceeding < room:
                self._proceed()
        finally:
            # If a call raises, the others still get their turns.
            loop.call_soon(self._end, self._proceeding)

    def _proceed(self) -> None:
        """Gives the next queue a turn."""
        _, queue = self._queues.take()
        call = next(iter(queue.waiting), None)
        if call is not None:
            del queue.waiting[call]
        if queue.waiting:
            self._queues.add(queue.origin, queue)
        else:
            queue.queued = False
        if call is not None:
            self._proceeding += 1
            call.proceed()

    def _begin(self) -> None:
        self._began = perf_counter()
        self._postponed = 0

    def _end(self, proceeded: int) -> None:
        if proceeded:
            # With the others in the mean, expensive calls would seem cheap for several slices.
            mean = (perf_counter() - self._began) / max(1, proceeded - self._postponed)
            self._mean += WEIGHT * (mean - self._mean)
            self._room = _room(self._mean)
        after_rest(self._slice)


def _room(mean: float) -> int:
    """Returns how many calls of a mean time fit into a slice."""
    return max(1, min(MAX_IN_SLICE, int(START_SLICE_SECONDS / mean)))


class Handshakes:
    """Spaces the starts of TLS handshakes, in turn between addresses: each costs the event loop a millisecond, so a
    flood of them must not delay streams."""

    def __init__(self, per_second: float) -> None:
        self._pause_seconds = 1 / per_second
        self._waiting = Rotation[asyncio.Future[None]]()
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self, address: str) -> None:
        """Waits until a client of this address may begin."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(address, turn)
        self._plan()
        await turn

    def _plan(self) -> None:
        if self._waiting.entries and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._next_at), self._admit)

    def _admit(self) -> None:
        self._timer = None
        while self._waiting.entries:
            _, turn = self._waiting.take()
            # Cancelled if the client has left.
            if not turn.done():
                turn.set_result(None)
                self._next_at = asyncio.get_running_loop().time() + self._pause_seconds
                break
        self._plan()
