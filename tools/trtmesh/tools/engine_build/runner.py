"""Runs the steps of a build: in order, resumable, each with a log."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from trtmesh.chassis.errors import SettingsError, StartupError
from trtmesh.chassis.quoting import cut
from trtmesh.tools.engine_build import outputs
from trtmesh.tools.engine_build.sizes import as_gib
from trtmesh.tools.engine_build.steps import Step

STOP_SECONDS = 10.0
"""Time for a tool to end after SIGTERM."""
LOCK_SECONDS = 10.0
"""Time for the tools of a killed build to end."""
REPORT_SECONDS = 15.0
"""Time between two reports on a running step."""
LAST_BYTES = 65536
"""Bytes of a log that are searched for its last line."""

Tell = Callable[[str], None]


class StepFailed(Exception):
    """A step ended without its output; the message names the step and its log."""


@asynccontextmanager
async def locked(directory: Path) -> AsyncIterator[int]:
    """Keeps other builds out of the directory; the tools hold the lock too. Raises StartupError."""
    descriptor = _lock_file(directory)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StartupError(
                        f"another build or one of its tools writes to {directory}; wait for its end"
                    ) from None
                await asyncio.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock_file(directory: Path) -> int:
    """A descriptor of the file that is locked; makes the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)


class Runner:
    """Runs each step once the one that it needs is done, in the given order. Others run even if one failed."""

    def __init__(self, logs: Path, lock: int, parallel: int, tell: Tell, complain: Tell) -> None:
        self._logs = logs
        self._lock = lock
        self._parallel = parallel
        self._tell = tell
        self._complain = complain
        self._made: dict[Step, bool] = {}

    @property
    def failed(self) -> bool:
        return not all(self._made.values())

    def is_made(self, step: Step) -> bool:
        return self._made[step]

    async def run(self, steps: Sequence[Step]) -> None:
        """Runs the steps, each after the one that it needs."""
        waiting = {step: f"[{number}/{len(steps)}]" for number, step in enumerate(steps, 1)}
        running: dict[asyncio.Task[bool], Step] = {}
        try:
            while waiting or running:
                for step in [step for step in waiting if self._is_settled(step)]:
                    if step.needs is not None and not self._made[step.needs]:
                        self._skip(step, step.needs, waiting.pop(step))
                    elif len(running) < self._parallel:
                        task = asyncio.create_task(self._run(step, waiting.pop(step)))
                        running[task] = step
                # A skipped step may have settled the next one.
                if running:
                    ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    self._made |= {running.pop(task): task.result() for task in ended}
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _is_settled(self, step: Step) -> bool:
        return step.needs is None or step.needs in self._made

    def _skip(self, step: Step, failed: Step, count: str) -> None:
        self._made[step] = False
        self._tell(f"{count} {step.name}: skipped, for want of '{failed.name}'")

    async def _run(self, step: Step, count: str) -> bool:
        """Whether the output is there in the end."""
        try:
            await self._make(step, count)
        except StepFailed as failure:
            self._complain(str(failure))
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self._complain(
                f"step '{step.name}' failed: {error.strerror}{where}; see {self._log(step)}"
            )
        else:
            return True
        return False

    def _log(self, step: Step) -> Path:
        return self._logs / f"{step.slug}.log"

    async def _make(self, step: Step, count: str) -> None:
        if outputs.is_done(step):
            outputs.remove_rest(step)
            self._tell(f"{count} {step.name}: done before, {step.output}")
            return
        if not outputs.is_publishable(step):
            outputs.prepare(step)
            self._check_space(step)
            self._tell(f"{count} {step.name}: started, log {self._log(step)}")
            start = time.monotonic()
            await self._execute(step, count)
            try:
                # Hundreds of gigabytes reach the disk here: in a thread, so that Ctrl-C still acts.
                await asyncio.to_thread(outputs.stamp, step)
            except outputs.OutputIncomplete as problem:
                raise self._failed(step, f"ended without an error, but {problem}") from None
            seconds = time.monotonic() - start
            size = as_gib(outputs.size_of(step.partial))
            self._tell(f"{count} {step.name}: done in {seconds:.0f} s, {size} in {step.output}")
        outputs.publish(step)

    def _check_space(self, step: Step) -> None:
        free = shutil.disk_usage(step.partial).free
        needed = step.size - outputs.size_of(step.partial)
        if free < needed:
            raise StepFailed(
                f"step '{step.name}' needs about {as_gib(needed)} in {step.output.parent}, which has"
                f" {as_gib(free)} free"
            )

    async def _execute(self, step: Step, count: str) -> None:
        command = step.command(step.partial)
        log = self._log(step)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            stream.write(f"$ {shlex.join(command)}\n".encode())
            stream.flush()
            status = await run_guarded(
                command, stream, self._lock, lambda: self._report(step, count)
            )
        if status:
            ended = (
                f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            )
            last = _last_line(log)
            raise self._failed(step, f"{ended}; its last line: {last}" if last else ended)

    def _report(self, step: Step, count: str) -> None:
        expected = f" of about {as_gib(step.size)}" if step.size else ""
        size = as_gib(outputs.size_of(step.partial))
        self._tell(f"{count} {step.name}: {size}{expected} written")

    def _failed(self, step: Step, how: str) -> StepFailed:
        return StepFailed(f"step '{step.name}' failed: its tool {how}; see {self._log(step)}")


def _last_line(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    written = [line.strip() for line in lines if line.strip() and not line.startswith("$ ")]
    return cut(written[-1]) if written else ""


async def run_guarded(
    command: Sequence[str], log: IO[bytes], lock: int, report: Callable[[], None]
) -> int:
    """Runs a tool to its end, and ends it and its descendants on every other path."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trtmesh.tools.engine_build.guard", *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=(lock,),
        start_new_session=True,
    )
    end = asyncio.ensure_future(process.wait())
    try:
        while not (await asyncio.wait({end}, timeout=REPORT_SECONDS))[0]:
            report()
        return end.result()
    except asyncio.CancelledError:
        _signal_group(process.pid, signal.SIGTERM)
        await asyncio.wait({end}, timeout=STOP_SECONDS)
        raise
    finally:
        # What a tool left behind in its group ends too.
        _signal_group(process.pid, signal.SIGKILL)
        await end


def _signal_group(leader: int, number: int) -> None:
    # macOS denies permission for a group of processes that have ended, and any system for one of another user that has
    # the number by now.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def check_tools(steps: Sequence[Step]) -> None:
    """Raises SettingsError for a program or a script that does not exist."""
    for step in steps:
        program = step.before[0]
        if shutil.which(program) is None:
            raise SettingsError(
                f"step '{step.name}' runs {program!r}, which is not on PATH; set tools"
            )
        script = next((word for word in step.before[1:] if word.endswith(".py")), None)
        # A program such as `docker` has the script elsewhere.
        if (
            script is not None
            and Path(program).name.startswith("python")
            and not Path(script).is_file()
        ):
            raise SettingsError(
                f"step '{step.name}' runs {script}, which does not exist; set tools"
            )
