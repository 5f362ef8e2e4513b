"""Runs a program in a process of its own. A question that takes too long kills the process; the next starts another."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trtmesh.chassis.errors import Draining, InternalError, QueueFull
from trtmesh.tokenizer.chat.frames import LENGTH_BYTES, framed

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Longest start of a process: its imports take a second of CPU time."""
WALL_SECONDS = 30.0
"""Longest wait for an answer, for a machine too busy to give the process CPU time."""
LAST_SECONDS = 0.1
"""Time for a failed process to end. The exit status then explains the failure."""
MAX_WAITING = 1024
"""Most waiting questions; beyond, QUEUE_FULL."""


class TookTooLongError(Exception):
    """A question took more than CPU_SECONDS."""


class Program:
    """Answers questions in the order of arrival."""

    def __init__(self, module: str, first: Mapping[str, Any], asked: str) -> None:
        """`first` is what the program gets before all questions; `asked` names those in errors."""
        self._module, self._first, self._asked = module, first, asked
        self._waiting: deque[tuple[bytes, asyncio.Future[bytes]]] = deque()
        self._work: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    async def ask(self, *frames: bytes) -> bytes:
        """The answer to a question in frames. Raises TookTooLongError, Draining, QueueFull or InternalError."""
        if self._closed:
            raise Draining("the tokenizer is stopping")
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull.of(MAX_WAITING, f"{self._asked} wait for their template")
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((b"".join(map(framed, frames)), answered))
        if self._work is None:
            self._work = asyncio.create_task(self._answer_waiting())
        return await answered

    async def close(self) -> None:
        """Ends the process."""
        self._closed = True
        if self._work is not None:
            self._work.cancel()
            with suppress(asyncio.CancelledError):
                await self._work
        for _, answered in self._waiting:
            answered.cancel()
        await self._end()

    async def _answer_waiting(self) -> None:
        while self._waiting:
            question, answered = self._waiting.popleft()
            if answered.done():
                continue
            try:
                answer: bytes | Exception = await self._answer(question)
            except asyncio.CancelledError:
                answered.cancel()
                raise
            except (TookTooLongError, InternalError) as error:
                answer = error.with_traceback(None)
            except Exception as error:
                # Broad on purpose: the questions behind this one are still to be answered.
                log.exception("a program failed unexpectedly")
                answer = InternalError(f"{type(error).__name__}: {error}")
            if answered.done():
                continue
            if isinstance(answer, bytes):
                answered.set_result(answer)
            else:
                answered.set_exception(answer)
        self._work = None

    async def _answer(self, question: bytes) -> bytes:
        try:
            if self._process is None or self._process.returncode is not None:
                await self._start()
            return await self._told(question, WALL_SECONDS)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            if (status := await self._end()) == -signal.SIGPROF:
                raise TookTooLongError from None
            problem = f"the process of the chat template ended with status {status}"
            raise InternalError(problem) from None

    async def _told(self, said: bytes, seconds: float) -> bytes:
        assert self._process is not None
        to_process, from_process = self._process.stdin, self._process.stdout
        assert to_process is not None
        assert from_process is not None
        async with asyncio.timeout(seconds):
            to_process.write(said)
            await to_process.drain()
            length = await from_process.readexactly(LENGTH_BYTES)
            return await from_process.readexactly(int.from_bytes(length, "big"))

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._told(framed(json.dumps(self._first).encode()), START_SECONDS)

    async def _end(self) -> int:
        """Ends the process, if there is one, even while the caller is being cancelled. Returns the exit status."""
        if (process := self._process) is None:
            return 0
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_SECONDS):
                    await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            status = await process.wait()
            self._process = None
        return status
