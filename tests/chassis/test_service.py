"""The life cycle of a process with a scripted service."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

PROGRAM = textwrap.dedent(
    """
    import asyncio, gc, sys, threading
    from typing import ClassVar
    from trtmesh.chassis.errors import ModelUnusable
    from trtmesh.chassis.service import run
    from trtmesh.chassis.tls.settings import SecuredSettings

    class ExampleSettings(SecuredSettings):
        section: ClassVar[str] = "engine"
        start: str = "well"
        drain: str = "well"
        stop: str = "well"

    class Example:
        service_names = ("example.Service",)

        def __init__(self, settings, runtime):
            self.settings, self.runtime = settings, runtime

        def register(self, server):
            pass

        async def start(self):
            print("starting", file=sys.stderr, flush=True)
            if self.settings.start == "hang":
                await asyncio.Event().wait()
            if self.settings.start == "refuse":
                raise ModelUnusable("no such model")
            if self.settings.start == "break":
                self.runtime.fail(RuntimeError("broke at once"))
            print("started", file=sys.stderr, flush=True)

        async def drain(self):
            print("draining", file=sys.stderr, flush=True)
            if self.settings.drain == "break":
                self.runtime.fail(RuntimeError("broke while draining"))
            if self.settings.drain == "grow":
                return grow()
            if self.settings.drain != "well":
                await asyncio.Event().wait()
            print("drained", file=sys.stderr, flush=True)

        async def stop(self):
            print("stopped", file=sys.stderr, flush=True)
            if self.settings.stop == "hang":
                await asyncio.to_thread(threading.Event().wait)

    def grow():
        # Objects that stay, as those of thousands of calls.
        examined = []

        def record(phase, info):
            if phase == "start":
                young = range(info["generation"] + 1)
                examined.append(sum(len(gc.get_objects(generation)) for generation in young))

        gc.callbacks.append(record)
        kept = [[] for _ in range(1_200_000)]
        print(f"collections of {len(kept)} objects examined {examined} objects", file=sys.stderr)

    sys.exit(run(ExampleSettings, Example, sys.argv[1:]))
    """
)
PATIENCE_SECONDS = 60
MOST_EXAMINED = 100_000
"""Objects, of which a collection examines some three million a second."""
SERVING = "trtmesh.chassis.health: serving"


class Example:
    """A process under test."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.seen = ""

    async def until(self, word: str) -> None:
        """Reads standard error until `word` appears."""
        assert self.process.stderr
        async with asyncio.timeout(PATIENCE_SECONDS):
            while word not in self.seen:
                line = await self.process.stderr.readline()
                assert line, f"{word!r} never came:\n{self.seen}"
                self.seen += line.decode()

    async def end(self) -> int:
        assert self.process.stderr
        async with asyncio.timeout(PATIENCE_SECONDS):
            self.seen += (await self.process.stderr.read()).decode()
            return await self.process.wait()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
    except OSError:
        return False
    return True


@asynccontextmanager
async def example(
    tmp_path: Path, *flags: str, hangups: signal.Handlers = signal.SIG_DFL
) -> AsyncIterator[Example]:
    program = tmp_path / "example.py"
    program.write_text(PROGRAM)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # With an unreachable name server, an unknown name may take half a minute.
        env=os.environ | {"RES_OPTIONS": "timeout:1 attempts:1"},
        # Tests that run under nohup would hand down that SIGHUP is ignored.
        preexec_fn=partial(signal.signal, signal.SIGHUP, hangups),
    )
    try:
        yield Example(process)
    finally:
        if process.returncode is None:
            process.kill()
        if process.stdin:
            process.stdin.close()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signal_drains_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    async with example(tmp_path) as process:
        await process.until(SERVING)
        process.process.send_signal(number)
        assert await process.end() == 0
        order = [process.seen.index(word) for word in ("started", "draining", "drained", "stopped")]
        assert order == sorted(order)
        assert process.seen.count("stopped") == 1
        # A supervisor sends SIGTERM; Ctrl-C comes from a person.
        assert ("a second Ctrl-C exits at once" in process.seen) == (number == signal.SIGINT)


async def test_hangups_and_foreign_signals_cut_nothing_off(tmp_path: Path) -> None:
    async with example(tmp_path, "--drain", "hang", "--grace-seconds", "0.5") as process:
        await process.until(SERVING)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            process.process.send_signal(number)
            await process.until(f"{number.name} means nothing to this process")
        # A terminal that closes may send several.
        for _ in range(3):
            process.process.send_signal(signal.SIGHUP)
        await process.until("draining\n")
        process.process.send_signal(signal.SIGHUP)
        assert await process.end() == 0
        assert "grace period of 0.5 s" in process.seen


async def test_hangup_is_ignored_under_nohup(tmp_path: Path) -> None:
    async with example(tmp_path, hangups=signal.SIG_IGN) as process:
        await process.until(SERVING)
        process.process.send_signal(signal.SIGHUP)
        process.process.send_signal(signal.SIGUSR1)
        await process.until("SIGUSR1 means nothing")
        assert "SIGHUP" not in process.seen
        process.process.terminate()
        assert await process.end() == 0


async def test_process_announces_itself_in_one_line(tmp_path: Path) -> None:
    async with example(tmp_path, "--metrics-port", "0") as process:
        assert process.process.stdout
        announced = json.loads(await process.process.stdout.readline())
        assert announced["service"] == "engine"
        assert announced["pid"] == process.process.pid
        assert announced["metrics_port"] > 0
        host, port = announced["address"].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        await writer.wait_closed()
        await process.until(SERVING)
        process.process.terminate()
        assert await process.end() == 0
        assert await process.process.stdout.read() == b""


async def test_signal_during_start_stops(tmp_path: Path) -> None:
    async with example(tmp_path, "--start", "hang") as process:
        await process.until("starting")
        process.process.terminate()
        assert await process.end() == 0
        assert "started" not in process.seen
        assert process.seen.count("stopped") == 1


async def test_process_stops_after_the_grace_period(tmp_path: Path) -> None:
    async with example(tmp_path, "--drain", "hang", "--grace-seconds", "0.05") as process:
        await process.until(SERVING)
        process.process.terminate()
        assert await process.end() == 0
        assert "grace period of 0.05 s" in process.seen
        assert "drained" not in process.seen
        assert process.seen.count("stopped") == 1


async def test_second_signal_exits_at_once(tmp_path: Path) -> None:
    async with example(tmp_path, "--drain", "hang") as process:
        await process.until(SERVING)
        process.process.terminate()
        await process.until("draining\n")
        process.process.terminate()
        assert await process.end() == 130


@pytest.mark.parametrize(("drain", "status"), [("well", 0), ("break", 1)])
async def test_stuck_service_does_not_block_the_exit(
    tmp_path: Path, drain: str, status: int
) -> None:
    async with example(tmp_path, "--stop", "hang", "--drain", drain) as process:
        await process.until(SERVING)
        process.process.terminate()
        assert await process.end() == status
        assert "did not stop within" in process.seen


async def test_end_of_standard_input_stops(tmp_path: Path) -> None:
    async with example(tmp_path, "--stop-on-stdin-eof", "true") as process:
        await process.until(SERVING)
        assert process.process.stdin
        process.process.stdin.write(b"ignored\n")
        process.process.stdin.close()
        assert await process.end() == 0
        assert "parent process ended" in process.seen


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("--start", "refuse"), 4, "trtmesh engine: error: no such model"),
        (("--start", "break"), 1, "cannot continue: broke at once"),
        (("--port", "x"), 2, "flag --port is 'x'"),
        (
            ("--host", "192.0.2.1"),
            2,
            "192.0.2.1:0: host '192.0.2.1' is not an address of this machine",
        ),
        # No name server is asked for a label this long.
        (("--host", "a" * 64), 2, f"host '{'a' * 64}' cannot be resolved"),
    ],
)
async def test_failed_start_has_an_exit_status_and_a_message(
    tmp_path: Path, flags: tuple[str, ...], status: int, words: str
) -> None:
    async with example(tmp_path, *flags) as process:
        assert await process.end() == status
        assert words in process.seen
        assert process.seen.count("stopped") == (0 if "flag" in words else 1)


async def test_service_listens_on_an_ipv6_address(tmp_path: Path) -> None:
    async with example(tmp_path, "--host", "::1", "--metrics-port", "0") as process:
        assert process.process.stdout
        if not has_ipv6():
            assert await process.end() == 2
            assert "on [::1]:0: host '::1' is not an address of this machine" in process.seen
            return
        address = json.loads(await process.process.stdout.readline())["address"]
        host, port = address.rsplit(":", 1)
        assert host == "[::1]"
        _, writer = await asyncio.open_connection("::1", int(port))
        writer.close()
        await writer.wait_closed()
        process.process.terminate()
        assert await process.end() == 0


async def test_failure_while_draining_fails_the_process(tmp_path: Path) -> None:
    async with example(tmp_path, "--drain", "break") as process:
        await process.until(SERVING)
        process.process.terminate()
        assert await process.end() == 1
        assert "cannot continue: broke while draining" in process.seen


async def test_collections_of_garbage_examine_few_objects(tmp_path: Path) -> None:
    """A collection that examines a million objects stops every stream for a third of a second."""
    async with example(tmp_path, "--drain", "grow") as process:
        await process.until(SERVING)
        process.process.send_signal(signal.SIGTERM)
        assert await process.end() == 0
        found = re.search(r"examined \[(.*)\] objects", process.seen)
        assert found, process.seen
        examined = [int(count) for count in found[1].split(",")]
        assert 0 < max(examined) <= MOST_EXAMINED
