"""A forked process is what `python -m` starts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import forks
import psutil
import pytest
from cli.commands import running_stack
from forks import Forked, ForkServer, fork_server, start_module
from processes import service_process

TESTS = Path(__file__).parent
PATIENCE_SECONDS = 60.0

FACTS = """
import ctypes, json, locale, os, resource, signal, sys, threading
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "main": [__name__, __file__, __spec__.name, sys.modules["__main__"].__dict__ is globals()],
    "env": dict(os.environ),
    "libc env": ctypes.CDLL(None).getenv(b"TRTMESH_GIVEN") != 0,
    "directory": os.getcwd(),
    "group, session": [os.getpgid(0), os.getsid(0)],
    "signals": {name: repr(signal.getsignal(name)) for name in sorted(signal.valid_signals())},
    "in the kernel": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Threads", "Umask")},
    "files": sorted(os.listdir("/proc/self/fd")),
    "streams": [
        [each.fileno(), each.encoding, each.errors, each.line_buffering, each.isatty()]
        for each in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "nice": os.nice(0),
    "locale": locale.getlocale(),
    "threads": [each.name for each in threading.enumerate()],
}))
"""

TALK = """
import os, random, signal, sys, time, uuid
print(os.getpid(), random.random(), uuid.uuid4(), flush=True)
while line := sys.stdin.readline():
    exec(line)
    sys.stdout.flush()
"""

COMPUTE = """
import torch
torch.set_num_threads(2)
a = torch.arange(512 * 512, dtype=torch.float64).reshape(512, 512).remainder(7)
print(torch.get_num_threads(), (a.float() @ a.float()).double().equal(a @ a), torch.randn(1).item())
"""

Start = Callable[..., "subprocess.Popen[Any]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Forks a process that runs a program."""
    file = tmp_path / "program.py"
    started = []

    def starts(program: str, *arguments: str, imports: tuple[str, ...] = ("json",)) -> Forked:
        if not file.exists() or file.read_text() != program:
            file.write_text(program)
        files: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        server = fork_server(imports)
        process = Forked(server, "program", arguments, cwd=tmp_path, text=True, **files)
        started.append(process)
        return process

    yield starts
    for process in started:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[Any]) -> str:
    assert process.stdout
    return str(process.stdout.readline())


def told(process: subprocess.Popen[Any], command: str) -> None:
    assert process.stdin
    process.stdin.write(command + "\n")
    process.stdin.flush()


def until(condition: Callable[[], object]) -> None:
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def facts(process: subprocess.Popen[Any]) -> Mapping[str, Any]:
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert stderr == ""
    return dict(json.loads(stdout))


def test_forked_process_is_as_an_executed_one(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTMESH_GIVEN", "yes")
    path = [str(tmp_path / "library"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    forked = facts(start(FACTS, "--flag", "ä b"))
    command = [sys.executable, "-m", "program", "--flag", "ä b"]
    files: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Of a library's own variables, `os.environ` knows none.
    process: subprocess.Popen[Any] = subprocess.Popen(
        command, cwd=tmp_path, text=True, env=os.environ, **files
    )
    executed = facts(process)
    assert forked == executed
    assert forked["argv"][1:] == ["--flag", "ä b"]


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os._exit(9)", 9, ""),
        ("os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT, ""),
        ("import atexit; atexit.register(sys.stderr.write, 'last words')", 0, "last words"),
    ],
)
def test_process_ends_with_its_status(start: Start, command: str, status: int, said: str) -> None:
    process = start(TALK)
    _, stderr = process.communicate(command + "\n", timeout=PATIENCE_SECONDS)
    assert process.returncode == status
    assert said in stderr
    assert bool(said) == bool(stderr)


def test_process_that_cannot_write_its_last_words_says_so(tmp_path: Path, start: Start) -> None:
    forked = start("import sys\nsys.stdout = open('/dev/full', 'w')\nprint('words')")
    _, said = forked.communicate(timeout=PATIENCE_SECONDS)
    command = [sys.executable, "-m", "program"]
    executed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (forked.returncode, said) == (executed.returncode, executed.stderr)
    assert executed.returncode == 120


# Not SIGHUP, which is ignored under nohup.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_process_ends_by_a_signal(start: Start, number: signal.Signals) -> None:
    process = start(TALK)
    # At once, and where it waits for input.
    for _ in range(2):
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == -number
        process = start(TALK)
        first_line(process)


def test_process_is_frozen_and_goes_on(start: Start) -> None:
    process = start(TALK)
    first_line(process)
    process.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert process.poll() is None
    told(process, "print('on')")
    process.send_signal(signal.SIGCONT)
    assert first_line(process) == "on\n"


def test_pipes_carry_much_and_end(start: Start) -> None:
    process = start(TALK)
    many = "sys.stdout.write('o' * 3_000_000), sys.stderr.write('e' * 3_000_000)\n"
    stdout, stderr = process.communicate(many, timeout=PATIENCE_SECONDS)
    assert stdout.splitlines()[1] == "o" * 3_000_000
    assert stderr == "e" * 3_000_000
    assert process.returncode == 0


def test_processes_draw_numbers_of_their_own(start: Start) -> None:
    lines = [first_line(start(TALK)).split() for _ in range(4)]
    assert all(len(set(each)) == 4 for each in zip(*lines, strict=True))


def test_threads_fork_at_once(start: Start) -> None:
    start(TALK)
    with ThreadPoolExecutor(8) as threads:
        processes = list(threads.map(start, [TALK] * 24))
        statuses = range(24)
        for process, status in zip(processes, statuses, strict=True):
            assert first_line(process).split()[0] == str(process.pid)
            told(process, f"sys.exit({status})")
        waits = threads.map(lambda each: each.wait(PATIENCE_SECONDS), processes)
        assert list(waits) == list(statuses)


def test_forked_processes_compute_in_threads_of_their_own(start: Start) -> None:
    processes = [start(COMPUTE, imports=("torch",)) for _ in range(3)]
    assert len({first_line(each) for each in processes}) == 1
    assert first_line(start(COMPUTE, imports=("torch",))).startswith("2 True")


PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
import subprocess
from forks import Forked, fork_server
server = fork_server(("json",))
child = Forked(server, "timeit", ["-n1", "-r1", "import time; time.sleep(600)"])
print(server.pid, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path: Path) -> Mapping[str, str]:
    """Variables of tests that share nothing with these."""
    return {**os.environ, forks.PLACE: str(tmp_path)}


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_outlives_killed_tests(frozen: bool, other_run: Mapping[str, str]) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PARENT, str(TESTS)]
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, env=other_run) as parent:
        left = [psutil.Process(int(pid)) for pid in first_line(parent).split()]
        if frozen:
            left[1].suspend()
        parent.kill()
    assert len(left) == 2
    until(lambda: not any(map(psutil.Process.is_running, left)))


def test_nothing_outlives_tests_that_end(other_run: Mapping[str, str]) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PARENT, str(TESTS)]
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, env=other_run) as parent:
        left = [psutil.Process(int(pid)) for pid in first_line(parent).split()]
        parent.communicate("")
        assert parent.returncode == 0
    until(lambda: not any(map(psutil.Process.is_running, left)))


def test_end_of_the_server_is_told(start: Start) -> None:
    server = ForkServer(("json", "csv"))
    server.wait_ready()
    psutil.Process(server.pid).kill()
    with pytest.raises(RuntimeError, match="the fork server ended with -9"):
        Forked(server, "timeit", [])


def test_workers_share_a_server_until_the_last_ends(other_run: Mapping[str, str]) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PARENT, str(TESTS)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, env=other_run)
            )
            for _ in range(3)
        ]
        servers, left = zip(*(map(int, first_line(each).split()) for each in workers), strict=True)
        assert len({*servers}) == 1
        assert len({*left}) == 3
        for each in workers[:2]:
            each.kill()
            each.wait()
        assert psutil.Process(left[2]).is_running()
        workers[2].kill()
    until(lambda: not any(map(psutil.pid_exists, (*servers, *left))))


def test_server_that_has_ended_is_started_again() -> None:
    first = ForkServer(("json", "html"))
    first.wait_ready()
    first.close()
    first.wait()
    second = ForkServer(("json", "html"))
    second.wait_ready()
    assert second.pid
    process = Forked(second, "timeit", ["-n1", "-r1", "0"], stdout=subprocess.DEVNULL)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_import_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="the fork server ended with 1"):
        ForkServer(("no_such_module",)).wait_ready()
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "forked"),
    [
        *(("TRTMESH_X", True), ("TOKENIZERS_PARALLELISM", True), ("OMP_NUM_THREADS", False)),
    ],
)
def test_process_is_executed_where_its_imports_read_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, forked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(FACTS)
    process = start_module(fork_server(("json",)), "program", [], {**os.environ, name: "3"})
    stdout, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert json.loads(stdout)["env"][name] == "3"
    assert isinstance(process, Forked) is forked


def test_process_is_executed_where_it_imports_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "EARLY", {**forks.EARLY, "PYTHONPATH": "ours"})
    for path in (["theirs"], ["ours", "theirs"], []):
        assert not forks.is_like_ours({**os.environ, "PYTHONPATH": os.pathsep.join(path)})
    more = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), "b", "ours"])}
    (tmp_path / "no_such_module.py").touch()
    assert forks.is_like_ours(more)
    assert forks.added_directories(more) == [str(tmp_path), "b"]
    (tmp_path / "sitecustomize.py").touch()
    assert forks.is_like_ours(more)
    (tmp_path / "typer.py").touch()
    assert not forks.is_like_ours(more)


def test_module_of_a_start_is_imported(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text("import sys\nsys.started_with = sys.argv[1:]\n")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")])
    )
    process = start("import sys\nprint(sys.started_with)", "--flag")
    assert process.communicate(timeout=PATIENCE_SECONDS) == ("['--flag']\n", "")


def test_process_is_executed_where_an_import_starts_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setattr(forks, "EARLY", {**forks.EARLY, "PYTHONPATH": str(tmp_path)})
    server = ForkServer(("busy",))
    process = start_module(server, "timeit", ["-n1", "-r1", "0"], forks.EARLY)
    assert process.wait(PATIENCE_SECONDS) == 0
    process.communicate()
    assert not isinstance(process, Forked)


@pytest.mark.parametrize("name", ["TRTMESH_X", "OMP_NUM_THREADS"], ids=["forked", "executed"])
def test_process_has_other_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    program = f"import tabnanny\nprint(tabnanny.verbose, end=' ')\n{FACTS}"
    (tmp_path / "program.py").write_text(program)
    constants = {"tabnanny:verbose": 7}
    variables = {**os.environ, name: "3"}
    process = start_module(fork_server(("json",)), "program", ["-v"], variables, constants)
    stdout, _ = process.communicate(timeout=PATIENCE_SECONDS)
    verbose, facts = stdout.split(maxsplit=1)
    assert int(verbose) == 7
    assert json.loads(facts)["argv"][1:] == ["-v"]
    assert json.loads(facts)["path"][0] == str(tmp_path)


HELPED = """
import subprocess, sys
said = "print('fork_' 'server' in open('/proc/self/cmdline').read(), os.getpgid(0) == os.getpid())"
for module in ("timeit", "other"):
    command = [sys.executable, "-m", module, "-n1", "-r1", "-s", "import os", said]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, process_group=0)
    print(done.stdout.splitlines()[0])
"""


def test_module_that_the_server_has_imported_is_forked_by_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(HELPED)
    (tmp_path / "other.py").write_text("import timeit\ntimeit.main()\n")
    process = start_module(fork_server(("timeit",)), "program", [], os.environ, forks=True)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (stdout.splitlines(), stderr) == ([b"True True", b"False True"], b"")


async def test_service_is_forked() -> None:
    async with service_process("router", "--port", "0", "--engines", "127.0.0.1:1") as router:
        assert "fork_server.py" in " ".join(psutil.Process(router.pid).cmdline())
        assert router.exit_status is None
        assert await router.stop() == 0
        assert router.exit_status == 0
    await asyncio.sleep(0)


def test_services_of_a_stack_are_forked() -> None:
    with running_stack("--port", "0") as stack:
        stack.wait_ready()
        services = {each.pid: each for each in stack.descendants()}
        assert services.keys() == {child["pid"] for child in stack.children}
        for pid, service in services.items():
            assert "fork_server.py" in " ".join(service.cmdline())
            assert os.getsid(pid) == pid
            os.kill(pid, signal.SIGKILL)
        for name in ("engine-0", "router-0"):
            stack.wait_for(f"{name} ended with status -9")
