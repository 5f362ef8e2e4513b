"""Runs a service of trtmesh and counts how control crosses its files, and what its event loop does.

    python profiled.py SOCKET ROOT LIBRARIES trtmesh.router [flags]

ROOT is the folder of the services. LIBRARIES, with commas between, are imported before anything is counted, which they
would slow down. A connection to SOCKET, a path, sends `begin` and later `end`; each is answered by a
line with the entries of files since the line before: those of the event loop's thread, and those of all others. Control
enters a file when it comes from another file below ROOT, by a call or by a return; libraries between the two are not
seen. From `begin` to `end` no sleep of the event loop ends, so that nothing periodic is counted.

`counts` are of the event loop's thread: its passes, each with one epoll; reads, writes and sleeps by the kernel's own
count; tasks, futures and timers made through the loop; parsed messages; look-ups of the running loop, each a getpid in
Python 3.11; and calls of functions in Python, each resumption of a coroutine among them.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import runpy
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVarTuple, Unpack

import uvloop

Ts = TypeVarTuple("Ts")

INTERNAL_FIELDS = 40
"""Offset in libuv's uv_loop_t of a pointer to its own fields."""
LOOP_COUNT = 8
"""Offset there of the number of passes, 64 bits."""
C_CALLS = {
    "FromString": "parses",
    "ParseFromString": "parses",
    "MergeFromString": "parses",
    "get_running_loop": "running_loops",
}


class Crossings:
    """The entries of one thread, in the order of the first."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._now = ""
        self.entries: dict[str, int] = {}
        self.calls: Counter[str] = Counter()

    def see(self, frame: FrameType, event: str, called: Any) -> None:
        """The profile function of a thread."""
        if event == "call":
            file = frame.f_code.co_filename
            if file == __file__:
                return
            self.calls["calls"] += 1
        elif event == "c_call":
            if name := C_CALLS.get(called.__name__):
                self.calls[name] += 1
            return
        elif event == "return" and frame.f_back is not None:
            file = frame.f_back.f_code.co_filename
        else:
            return
        if file != self._now and file.startswith(self._root):
            self._now = file
            self.entries[file] = self.entries.get(file, 0) + 1


class CountedLoop(uvloop.Loop):
    """Counts what is made through it."""

    made: ClassVar[Counter[str]] = Counter()
    passes: ClassVar[ctypes.c_uint64] = ctypes.c_uint64()

    def __init__(self) -> None:
        super().__init__()
        read = ctypes.pythonapi.PyCapsule_GetPointer
        read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # uvloop has it for other extensions; its stubs do not.
        pointer_of = vars(uvloop.loop)["libuv_get_loop_t_ptr"]
        address = read(pointer_of(self), None)
        fields = ctypes.c_void_p.from_address(address + INTERNAL_FIELDS).value
        assert fields is not None
        CountedLoop.passes = ctypes.c_uint64.from_address(fields + LOOP_COUNT)

    def create_task(self, *given: Any, **named: Any) -> Any:
        self.made["tasks"] += 1
        return super().create_task(*given, **named)

    def create_future(self) -> Any:
        self.made["futures"] += 1
        return super().create_future()

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *given: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.made["timers"] += 1
        return super().call_later(delay, callback, *given, context=context)


class Threads:
    """The crossings of all threads of this process, and the counts of the event loop's."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._loop = Crossings(root)
        self._others: list[Crossings] = []
        self._before = self._counted()

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

    def _counted(self) -> Counter[str]:
        """The counts since the start of the process."""
        thread = Path(f"/proc/self/task/{os.getpid()}")
        kernel = {}
        for line in (*(thread / "io").open(), *(thread / "status").open()):
            name, _, value = line.partition(":")
            kernel[name] = value
        return Counter(
            passes=CountedLoop.passes.value,
            reads=int(kernel["syscr"]),
            writes=int(kernel["syscw"]),
            sleeps=int(kernel["voluntary_ctxt_switches"]),
            **CountedLoop.made,
            **self._loop.calls,
        )

    def take(self) -> dict[str, dict[str, int]]:
        """The entries and the counts since the last call."""
        now = self._counted()
        counts, self._before = {name: now[name] - self._before[name] for name in now}, now
        loop, self._loop.entries = self._loop.entries, {}
        others: dict[str, int] = {}
        for crossings in self._others:
            taken, crossings.entries = crossings.entries, {}
            for file, count in taken.items():
                others[file] = others.get(file, 0) + count
        return {"loop": loop, "others": others, "counts": counts}


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
    uvloop.new_event_loop = CountedLoop
    threading.Thread(target=answer, args=(listener, threads, sleeps), daemon=True).start()
    threads.watch()
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _, path, root, libraries, module, *flags = sys.argv
    main(path, root, libraries, module, flags)
