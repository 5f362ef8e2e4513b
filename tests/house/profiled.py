"""Runs a service of trtmesh and counts how control crosses its files.

    python profiled.py SOCKET ROOT LIBRARIES trtmesh.router [flags]

ROOT is the folder of the services. LIBRARIES, with commas between, are imported before anything is counted, which they
would slow down. A connection to SOCKET, a path, sends `begin` and later `end`; each is answered by a
line with the entries of files since the line before: those of the event loop's thread, and those of all others. Control
enters a file when it comes from another file below ROOT, by a call or by a return; libraries between the two are not
seen. From `begin` to `end` no sleep of the event loop ends, so that nothing periodic is counted.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import runpy
import socket
import sys
import threading
from types import FrameType
from typing import Any


class Crossings:
    """The entries of one thread, in the order of the first."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._now = ""
        self.entries: dict[str, int] = {}

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """The profile function of a thread."""
        if event == "call":
            file = frame.f_code.co_filename
        elif event == "return" and frame.f_back is not None:
            file = frame.f_back.f_code.co_filename
        else:
            return
        if file != self._now and file.startswith(self._root):
            self._now = file
            self.entries[file] = self.entries.get(file, 0) + 1


class Threads:
    """The crossings of all threads of this process."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._loop = Crossings(root)
        self._others: list[Crossings] = []

    def watch(self) -> None:
        """Watches this thread, and all that start from now on."""
        threading.setprofile(self._watch_other)
        sys.setprofile(self._loop.see)

    def _watch_other(self, frame: FrameType, event: str, argument: Any) -> None:
        """The first event of another thread."""
        crossings = Crossings(self._root)
        self._others.append(crossings)
        sys.setprofile(crossings.see)
        crossings.see(frame, event, argument)

    def take(self) -> dict[str, dict[str, int]]:
        """The entries since the last call."""
        loop, self._loop.entries = self._loop.entries, {}
        others: dict[str, int] = {}
        for crossings in self._others:
            taken, crossings.entries = crossings.entries, {}
            for file, count in taken.items():
                others[file] = others.get(file, 0) + count
        return {"loop": loop, "others": others}


class Sleeps:
    """Takes the place of `asyncio.sleep`."""

    def __init__(self) -> None:
        self._sleep = asyncio.sleep
        self._held = False
        self._due: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def sleep(self, delay: float, result: Any = None) -> Any:
        if delay <= 0:
            return await self._sleep(delay, result)
        self._loop = loop = asyncio.get_running_loop()
        future = loop.create_future()
        timer = loop.call_later(delay, self._on_due, future)
        try:
            await future
        finally:
            timer.cancel()
        return result

    def _on_due(self, future: asyncio.Future[None]) -> None:
        if self._held:
            self._due.append(future)
        elif not future.done():
            future.set_result(None)

    def hold(self) -> None:
        """Lets no sleep end until `release`."""
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_due)

    def _end_due(self) -> None:
        due, self._due = self._due, []
        for future in due:
            self._on_due(future)


def answer(listener: socket.socket, threads: Threads, sleeps: Sleeps) -> None:
    """Answers each line with the entries since the one before."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                if line == "begin\n":
                    sleeps.hold()
                print(json.dumps(threads.take()), file=lines, flush=True)
                if line == "end\n":
                    sleeps.release()


def main(path: str, root: str, libraries: str, module: str, flags: list[str]) -> None:
    for library in filter(None, libraries.split(",")):
        importlib.import_module(library)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threads, sleeps = Threads(root), Sleeps()
    asyncio.sleep = sleeps.sleep
    threading.Thread(target=answer, args=(listener, threads, sleeps), daemon=True).start()
    threads.watch()
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _, path, root, libraries, module, *flags = sys.argv
    main(path, root, libraries, module, flags)
