"""The tasks of a request's items.

A request may have thousands of items. Each starts, and is cancelled, in a turn of its own, whatever ends the request:
a client that sends many and leaves at once must not hold up those that stay.
"""

from __future__ import annotations

import asyncio
from functools import partial

from trtmesh.router.admission import Account, Permit
from trtmesh.router.requests.live_request import LiveRequest


class ItemTasks:
    """Runs the items of a request from `start` to `end`, as a call of its start queues."""

    def __init__(self, live: LiveRequest, account: Account) -> None:
        self._live = live
        self._account = account
        self._running: dict[asyncio.Task[None], None] = {}
        """Those that were not cancelled."""
        self._left = len(live.waiting)
        self._ending = False
        self._over = asyncio.Event()

    def start(self) -> None:
        """Starts the first item at once, as part of the request's own turn, and the others in turns."""
        if self._live.waiting:
            self._start_next()
        if self._live.waiting:
            self._live.context.starting.add(self)

    async def end(self) -> None:
        """Ends all items, even if this wait is cancelled. Those that have not started never do."""
        self._ending = True
        context = self._live.context
        context.starting.remove(self)
        while self._live.waiting:
            self._leave(self._live.waiting.popleft()[1])
        if self._running:
            context.running.add(self)
        self._end_with_last()
        await self._over.wait()

    def proceed(self) -> None:
        """Starts or cancels the next item."""
        context = self._live.context
        if not self._ending:
            self._start_next()
            if self._live.waiting:
                context.starting.add_later(self)
        elif self._running:
            task = next(iter(self._running))
            del self._running[task]
            # Its end never waits, but only queues commands.
            task.cancel()
            if self._running:
                context.running.add_later(self)

    def _start_next(self) -> None:
        permit = self._live.waiting[0][1]
        task = asyncio.create_task(self._live.run(self._live.begin_next()))
        self._running[task] = None
        # A callback, because a task cancelled before the first step runs no code.
        task.add_done_callback(partial(self._ended, permit))

    def _ended(self, permit: Permit, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._leave(permit)
        self._end_with_last()

    def _leave(self, permit: Permit) -> None:
        permit.give_back()
        self._account.item_ended()
        self._left -= 1

    def _end_with_last(self) -> None:
        if self._ending and not self._left:
            self._live.dissolve()
            self._over.set()
