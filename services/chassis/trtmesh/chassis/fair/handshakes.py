"""The pace of handshakes: each costs the event loop a millisecond, so a flood of them must not stall streams."""

from __future__ import annotations

import asyncio

from trtmesh.chassis.fair.rotation import Rotation


class Handshakes:
    """Lets handshakes begin one after the other, the addresses of clients in turn."""

    def __init__(self, per_second: float) -> None:
        self._pause_seconds = 1 / per_second
        self._waiting = Rotation[asyncio.Future[None]]()
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self, address: str) -> None:
        """Returns when a client of this address may begin."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(address, turn)
        self._plan()
        await turn

    def _plan(self) -> None:
        if self._waiting and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._next_at), self._admit)

    def _admit(self) -> None:
        self._timer = None
        while self._waiting:
            _, turn = self._waiting.take()
            # A client that has left is cancelled.
            if not turn.done():
                turn.set_result(None)
                self._next_at = asyncio.get_running_loop().time() + self._pause_seconds
                break
        self._plan()
