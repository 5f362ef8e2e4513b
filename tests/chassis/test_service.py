"""The life cycle of a process with a scripted service."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from chassis.example_service import HANGUPS
from forks import fork_server, start_module
from processes import end_of, reading

TESTS = Path(__file__).parents[1]
PROGRAM = "chassis.example_service"
IMPORTS = ("trtmesh.chassis.service", "trtmesh.chassis.tls.settings")
PATIENCE_SECONDS = 60
MOST_EXAMINED = 100_000
"""Objects, of which a collection examines some three million a second."""
SERVING = "trtmesh.chassis.health: serving"


class Example:
    """A process under test."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        self.process = process
        self.stdout, self._stderr = stdout, stderr
        self.seen = ""

    async def until(self, word: str) -> None:
        """Reads standard error until `word` appears."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while word not in self.seen:
                line = await self._stderr.readline()
                assert line, f"{word!r} never came:\n{self.seen}"
                self.seen += line.decode()

    async def end(self) -> int:
        async with asyncio.timeout(PATIENCE_SECONDS):
            self.seen += (await self._stderr.read()).decode()
            return await end_of(self.process)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
    except OSError:
        return False
    return True


@asynccontextmanager
async def example(*flags: str, hangups: signal.Handlers = signal.SIG_DFL) -> AsyncIterator[Example]:
    """Tests that run under nohup would hand down that SIGHUP is ignored."""
    server = fork_server(IMPORTS)
    await asyncio.to_thread(server.wait_ready)
    environment = os.environ | {HANGUPS: str(int(hangups))}
    process = start_module(server, PROGRAM, flags, environment, bufsize=0, cwd=TESTS)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    async with reading(process.stdout) as stdout, reading(process.stderr) as stderr:
        try:
            yield Example(process, stdout, stderr)
        finally:
            process.kill()
            process.stdin.close()
            await end_of(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signal_drains_and_stops(number: signal.Signals) -> None:
    async with example() as process:
        await process.until(SERVING)
        process.process.send_signal(number)
        assert await process.end() == 0
        order = [process.seen.index(word) for word in ("started", "draining", "drained", "stopped")]
        assert order == sorted(order)
        assert process.seen.count("stopped") == 1
        # A supervisor sends SIGTERM; Ctrl-C comes from a person.
        assert ("a second Ctrl-C exits at once" in process.seen) == (number == signal.SIGINT)


async def test_hangups_and_foreign_signals_cut_nothing_off() -> None:
    async with example("--drain", "hang", "--grace-seconds", "0.5") as process:
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


async def test_hangup_is_ignored_under_nohup() -> None:
    async with example(hangups=signal.SIG_IGN) as process:
        await process.until(SERVING)
        process.process.send_signal(signal.SIGHUP)
        process.process.send_signal(signal.SIGUSR1)
        await process.until("SIGUSR1 means nothing")
        assert "SIGHUP" not in process.seen
        process.process.terminate()
        assert await process.end() == 0


async def test_process_announces_itself_in_one_line() -> None:
    async with example("--metrics-port", "0") as process:
        announced = json.loads(await process.stdout.readline())
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
        assert await process.stdout.read() == b""


async def test_signal_during_start_stops() -> None:
    async with example("--start", "hang") as process:
        await process.until("starting")
        process.process.terminate()
        assert await process.end() == 0
        assert "started" not in process.seen
        assert process.seen.count("stopped") == 1


async def test_process_stops_after_the_grace_period() -> None:
    async with example("--drain", "hang", "--grace-seconds", "0.05") as process:
        await process.until(SERVING)
        process.process.terminate()
        assert await process.end() == 0
        assert "grace period of 0.05 s" in process.seen
        assert "drained" not in process.seen
        assert process.seen.count("stopped") == 1


async def test_second_signal_exits_at_once() -> None:
    async with example("--drain", "hang") as process:
        await process.until(SERVING)
        process.process.terminate()
        await process.until("draining\n")
        process.process.terminate()
        assert await process.end() == 130


@pytest.mark.parametrize(("drain", "status"), [("well", 0), ("break", 1)])
async def test_stuck_service_does_not_block_the_exit(drain: str, status: int) -> None:
    async with example("--stop", "hang", "--drain", drain) as process:
        await process.until(SERVING)
        process.process.terminate()
        assert await process.end() == status
        assert "did not stop within" in process.seen


async def test_end_of_standard_input_stops() -> None:
    async with example("--stop-on-stdin-eof", "true") as process:
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
    flags: tuple[str, ...], status: int, words: str
) -> None:
    async with example(*flags) as process:
        assert await process.end() == status
        assert words in process.seen
        assert process.seen.count("stopped") == (0 if "flag" in words else 1)


async def test_service_listens_on_an_ipv6_address() -> None:
    async with example("--host", "::1", "--metrics-port", "0") as process:
        if not has_ipv6():
            assert await process.end() == 2
            assert "on [::1]:0: host '::1' is not an address of this machine" in process.seen
            return
        address = json.loads(await process.stdout.readline())["address"]
        host, port = address.rsplit(":", 1)
        assert host == "[::1]"
        _, writer = await asyncio.open_connection("::1", int(port))
        writer.close()
        await writer.wait_closed()
        process.process.terminate()
        assert await process.end() == 0


async def test_failure_while_draining_fails_the_process() -> None:
    async with example("--drain", "break") as process:
        await process.until(SERVING)
        process.process.terminate()
        assert await process.end() == 1
        assert "cannot continue: broke while draining" in process.seen


async def test_collections_of_garbage_examine_few_objects() -> None:
    """A collection that examines a million objects stops every stream for a third of a second."""
    async with example("--drain", "grow") as process:
        await process.until(SERVING)
        process.process.send_signal(signal.SIGTERM)
        assert await process.end() == 0
        found = re.search(r"examined \[(.*)\] objects", process.seen)
        assert found, process.seen
        examined = [int(count) for count in found[1].split(",")]
        assert 0 < max(examined) <= MOST_EXAMINED
