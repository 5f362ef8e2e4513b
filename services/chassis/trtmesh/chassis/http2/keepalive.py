"""Notices peers that are gone without a word."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

SILENCE_SECONDS, ANSWER_SECONDS = 10.0, 5.0
"""A peer that sent nothing for so long is asked for a sign, and given up when none comes."""


def give_up_unacknowledged(endpoint: socket.socket) -> None:
    """Ends a connection, or those of a listener, whose network acknowledges nothing for `ANSWER_SECONDS`, where the
    system can. A worker whose network is gone has then nothing in flight soon, and can stop."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(ANSWER_SECONDS * 1000)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class Keepalive:
    """Calls `ask` when a peer was silent for long, and `give_up` where it stays silent."""

    def __init__(self, ask: Callable[[], None], give_up: Callable[[], None]) -> None:
        self._ask = ask
        self._give_up = give_up
        self._heard = False
        self._asked = False
        self._timer = self._later(SILENCE_SECONDS)

    def heard(self) -> None:
        """Something came."""
        self._heard = True

    def close(self) -> None:
        """Ends the watch."""
        self._timer.cancel()

    def _later(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        if self._asked and not self._heard:
            self._give_up()
            return
        self._asked, self._heard = not self._heard, False
        if self._asked:
            self._ask()
        self._timer = self._later(ANSWER_SECONDS if self._asked else SILENCE_SECONDS)
