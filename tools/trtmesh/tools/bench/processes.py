"""Sends by several processes, where one cannot keep up: each has a share of the requests and connections of its own.

`python -m trtmesh.tools.bench.processes` is one of them. Its standard input has a line with the job, then one with the
start by the machine's monotonic clock; at the end of the input it cancels what is left. It prints `ready`, its answers
as lines of a record, and last how busy it was.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from pydantic import TypeAdapter
from trtmesh.chassis.errors import StartupError
from trtmesh.tools.bench.driver import Driver, Job
from trtmesh.tools.bench.record import Answer
from trtmesh.tools.bench.run_file import as_line, parse_line
from trtmesh.tools.bench.targets.opening import connect, opened
from trtmesh.tools.bench.targets.target import Connecting

LONGEST_LINE = 1 << 28
START_DELAY_S = 0.05
"""For the start to reach every process before it is there."""
END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Share:
    """What a process sends, and over which connections."""

    connecting: Connecting
    connections: int
    job: Job


_SHARE = TypeAdapter(_Share)


def _share(job: Job, count: int, at: int) -> Job:
    """Chains in turn, and a share of the requests at a time, one at least."""
    most_open = max(1, (job.most_open + count - 1 - at) // count)
    return replace(job, chains=job.chains[at::count], most_open=most_open)


class Sending:
    """The processes of a job, ready to send."""

    def __init__(
        self, processes: Sequence[asyncio.subprocess.Process], on_answer: Callable[[Answer], object]
    ) -> None:
        self._processes = processes
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time() + START_DELAY_S
        self._busy: list[float] = []

    def clock(self) -> float:
        return self._loop.time() - self._started

    def busy(self) -> float:
        """Of the busiest process, once all have ended."""
        return max(self._busy, default=0.0)

    async def send(self) -> None:
        """To cancel the task cancels the requests, with an answer each."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write(b"%r\n" % self._started)
        reading = asyncio.gather(*map(self._read, self._processes))
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:
            for process in self._processes:
                assert process.stdin
                process.stdin.close()
            # One that hangs is killed when the block ends; the answers of the others are here.
            with suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await reading
            raise

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout
        while line := await process.stdout.readline():
            if not line.startswith(b"{"):
                self._busy.append(float(line))
                return
            answer = parse_line("a process", line)
            assert isinstance(answer, Answer)
            self._on_answer(answer)
        raise StartupError("a process of the benchmark died; its last words are above")


@asynccontextmanager
async def sending(
    connecting: Connecting,
    connections: int,
    job: Job,
    count: int,
    on_answer: Callable[[Answer], object],
) -> AsyncIterator[Sending]:
    """Starts the processes, each with so many connections. They end with the block."""
    processes: list[asyncio.subprocess.Process] = []
    try:
        for at in range(count):
            share = _Share(connecting, connections, _share(job, count, at))
            processes.append(await _start(share))
        for process in processes:
            assert process.stdout
            if await process.stdout.readline() != b"ready\n":
                raise StartupError("a process of the benchmark did not start; see above")
        yield Sending(processes, on_answer)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _start(share: _Share) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trtmesh.tools.bench.processes"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
        # Ctrl-C is for the command alone, which then ends its processes.
        process_group=0,
    )
    assert process.stdin
    process.stdin.write(_SHARE.dump_json(share) + b"\n")
    await process.stdin.drain()
    return process


async def _run() -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.StreamReader(limit=LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    share = _SHARE.validate_json(await told.readline())
    async with opened(share.connecting, share.connections) as targets:
        await connect(targets, [plan for chain in share.job.chains[:1] for plan in chain])
        _tell(b"ready\n")
        if not (start := await told.readline()):
            return
        driver = Driver(targets, share.job, lambda answer: _tell(as_line(answer)), float(start))
        task = asyncio.create_task(driver.send())
        ended = asyncio.create_task(told.read())
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        for each in (task, ended):
            each.cancel()
        found = (await asyncio.gather(task, ended, return_exceptions=True))[0]
        if isinstance(found, Exception):
            raise found
        _tell(b"%r\n" % driver.busy())


def _tell(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(_run())
