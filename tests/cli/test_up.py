from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli.commands import (
    FREE_PORTS,
    STOP_SECONDS,
    TRTMESH,
    Stack,
    run_program,
    running,
    running_stack,
    start_command,
    trtmesh,
)
from e2e.mesh import DEMO
from fork_server import name_of

SLOW_LOAD = {"TRTMESH_ENGINE_SIMULATED_TIMING_LOAD_MS": "600000"}


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_stack_serves_until_stopped() -> None:
    with running_stack("--engines", "2", "--tokenizers", "2", "--port", "0") as stack:
        router = stack.wait_ready()
        names = [child["name"] for child in stack.children]
        assert sorted(names) == ["engine-0", "engine-1", "router-0", "tokenizer-0", "tokenizer-1"]
        assert trtmesh("generate", "--router", router, "--max-tokens", "2", "hi").returncode == 0
        assert len(stack.descendants()) == 5
        stack.signal(signal.SIGINT)
        assert stack.wait() == 0
        assert stack.left_nothing()


def test_each_of_two_models_is_served_by_name_and_the_first_by_default() -> None:
    draft = DEMO.with_name("demo-draft")
    with running_stack("--model", str(DEMO), "--model", str(draft), "--port", "0") as stack:
        router = stack.wait_ready()
        ready = json.loads(stack.wait_for('"event": "ready"'))
        assert ready["models"] == ["demo", "demo-draft"]
        generate = ("generate", "--router", router, "--json", "--max-tokens", "2")
        for flags, served in (((), "demo"), (("--model", "demo-draft"), "demo-draft")):
            told = trtmesh(*generate, *flags, "hi")
            assert json.loads(told.stdout.splitlines()[0])["model"] == served, told.stderr
        url = f"http://{ready['http']}/v2"
        index = json.load(urllib.request.urlopen(f"{url}/repository/index", data=b""))
        names = [model["name"] for model in index if model["state"] == "READY"]
        assert len(names) == len(index) == 15
        for name in ("ensemble", "demo_ensemble", "demo-draft_ensemble"):
            assert name in names
            body = json.dumps({"text_input": "hi", "max_tokens": 4}).encode()
            answer = json.load(urllib.request.urlopen(f"{url}/models/{name}/generate", data=body))
            assert answer["model_name"] == name
        counted = urllib.request.urlopen(f"http://127.0.0.1:{_metrics(stack)}/metrics").read()
        line = 'nv_inference_count{model="demo-draft_tensorrt_llm",version="1"} 1'
        assert line in counted.decode()


def _metrics(stack: Stack) -> int:
    return int(stack.child("router-0")["metrics_port"])


def test_processes_stop_in_order() -> None:
    """Routers finish before engines, and engines before tokenizers."""
    with running_stack("--port", "0", "--tokenizers", "1") as stack:
        stack.wait_ready()
        stack.signal(signal.SIGTERM)
        assert stack.wait() == 0
        log = [line.split(" ")[0] for line in stack.err if "drain: draining" in line]
    assert log == ["router-0", "engine-0", "tokenizer-0"]


def test_killed_supervisor_leaves_no_process() -> None:
    with running_stack("--engines", "2", "--port", "0") as stack:
        stack.wait_ready()
        assert len(stack.descendants()) == 3
        stack.popen.kill()
        assert stack.left_nothing()


def test_supervisor_killed_during_the_start_leaves_no_process() -> None:
    """The children may not have read their standard input yet."""
    with running_stack("--engines", "2", "--port", "0") as stack:
        while len(stack.descendants()) < 3:
            assert stack.popen.poll() is None
        stack.popen.kill()
        assert stack.left_nothing()


def test_stack_never_serving_ends_with_an_error() -> None:
    with running_stack("--port", "0", "--start-seconds", "3", env=SLOW_LOAD) as stack:
        assert stack.wait() == 1
        assert "--start-seconds is 3 but the stack does not serve" in stack.err[-1]


def test_every_process_of_a_stack_serves_metrics(stack: Stack) -> None:
    for child in stack.children:
        address = f"http://127.0.0.1:{child['metrics_port']}/metrics"
        with urllib.request.urlopen(address) as answer:
            assert answer.status == 200


def test_every_router_serves_grpc_and_http(stack: Stack) -> None:
    for name in ("router-0", "router-1"):
        router = stack.child(name)
        with urllib.request.urlopen(f"http://{router['http_address']}/v2/health/live") as answer:
            assert answer.status == 200
        result = trtmesh("generate", "--router", router["address"], "--max-tokens", "2", "hi")
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("stage", "shape"),
    [
        ("engine-0 starts", ()),
        ("router-0 reads the tokenizer", ()),
        ("router-0 starts", ("--one-process",)),
        ("router-0 reads the tokenizer", ("--one-process",)),
    ],
)
def test_ctrl_c_while_starting_leaves_no_process(stage: str, shape: tuple[str, ...]) -> None:
    with running_stack("--port", "0", *shape, env=SLOW_LOAD) as stack:
        stack.wait_for(stage)
        assert stack.descendants()
        stack.signal(signal.SIGINT)
        assert stack.wait() == 130
        assert stack.left_nothing()
        assert "Traceback" not in "".join(stack.err)


def test_ctrl_c_before_the_first_listener_leaves_no_process() -> None:
    # However late the signal is, no stack serves yet.
    with running_stack("--port", "0", env=SLOW_LOAD) as stack:
        while not stack.descendants():
            assert stack.popen.poll() is None
        stack.signal(signal.SIGINT)
        assert stack.wait() == 130
        assert stack.left_nothing()


@pytest.mark.parametrize("shape", [(), ("--one-process",)])
def test_second_ctrl_c_ends_everything_at_once(shape: tuple[str, ...]) -> None:
    """The request in flight would occupy the router's whole grace period."""
    flags = ("--port", "0", "--grace-seconds", "3600", *shape)
    with running_stack(*flags) as stack:
        router = stack.wait_ready()
        arguments = ("--router", router, "--max-tokens", "30000", "--json", "hi")
        with running("generate", *arguments) as request:
            request.wait_for('"tokens"')
            stack.signal(signal.SIGINT)
            stack.wait_for("a second Ctrl-C ends all processes at once")
            stack.wait_for("waiting for 1 request to finish, 3600 s at most")
            stack.wait_for("drain: draining")
            stack.signal(signal.SIGINT)
            assert stack.wait() == 130
            assert stack.left_nothing()


STUBBORN = """
import asyncio, os, signal
from trtmesh.cli import supervisor
from trtmesh.cli.session import run

async def start(stack):
    while True:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

supervisor.Stack.start = start
supervisor.KILL_AFTER_SECONDS = 0.01
run(supervisor.supervise({}, None))
"""


def test_second_ctrl_c_waits_for_nothing_that_does_not_end(tmp_path: Path) -> None:
    ended = run_program(STUBBORN, tmp_path)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr


def test_killed_processes_are_restarted_on_their_ports() -> None:
    with running_stack("--port", "0", "--tokenizers", "1") as stack:
        router = stack.wait_ready()
        for name in ("engine-0", "tokenizer-0", "router-0"):
            os.kill(stack.child(name)["pid"], signal.SIGKILL)
            stack.wait_for(f"{name} ended with status -9; starting it again")
            line = stack.wait_for(f"{name} serves again at")
            assert line.split()[-1] == stack.child(name)["address"]
            # The process serves before the router has reconnected.
            while trtmesh("status", "--admin", stack.admin).returncode:
                pass
            result = trtmesh("generate", "--router", router, "--max-tokens", "2", "hi")
            assert result.returncode == 0, result.stderr


def test_one_process_serves_and_is_restarted() -> None:
    with running_stack("--port", "0", "--one-process") as stack:
        router = stack.wait_ready()
        (child,) = stack.children
        assert (child["name"], child["service"]) == ("router-0", "router")
        (process,) = stack.descendants()
        process.kill()
        stack.wait_for("router-0 ended with status -9; starting it again")
        assert stack.wait_for("router-0 serves again at").split()[-1] == router
        result = trtmesh("generate", "--router", router, "--max-tokens", "2", "hi")
        assert result.returncode == 0, result.stderr
        told = trtmesh("status", "--admin", stack.admin, "--json")
        assert [each["worker"] for each in json.loads(told.stdout)["workers"]] == ["engine-0"]
        long = ("--router", router, "--max-tokens", "500", "--json", "hi")
        with running("generate", *long) as request:
            request.wait_for('"tokens"')
            stack.signal(signal.SIGTERM)
            assert request.wait() == 0
            assert '"length"' in request.out[-1]
        assert stack.wait() == 0
        assert stack.left_nothing()


@pytest.mark.parametrize(("tokenizers", "name"), [("0", "router-0"), ("1", "tokenizer-0")])
def test_process_unable_to_start_ends_the_command_with_the_reason(
    tmp_path: Path, tokenizers: str, name: str
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    flags = ("--port", "0", "--tokenizers", tokenizers, "--model", str(tmp_path))
    with running_stack(*flags) as stack:
        assert stack.wait() == 4, stack.err
        assert stack.left_nothing()
        last = stack.err[-1]
    # The cause alone, without other lines of the log.
    assert last.startswith(f"trtmesh: error: {name}: {tmp_path}/tokenizer.json is not a usable")


def test_process_ending_while_another_loads_ends_the_command() -> None:
    with running_stack("--port", "0", "--tokenizers", "1", env=SLOW_LOAD) as stack:
        stack.wait_for("tokenizer-0 serves")
        (tokenizer,) = [p for p in stack.descendants() if p.name() == name_of("trtmesh.tokenizer")]
        tokenizer.kill()
        assert stack.wait() == 1
        assert "tokenizer-0 ended with status -9" in stack.err[-1]


def test_requested_port_in_use_is_an_error() -> None:
    with taken_port() as port, running_stack("--port", str(port)) as stack:
        assert stack.wait() == 3
        assert f"127.0.0.1:{port}" in stack.err[-1]


def test_default_port_in_use_is_replaced_with_a_note() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 8001))
            listener.listen()
        except OSError:
            pass  # Already in use by another process: equally suitable.
        with running_stack() as stack:
            router = stack.wait_ready()
            assert not router.endswith(":8001")
            stack.wait_for("port 8001 is in use")
            assert not any("error" in line for line in stack.err)
            assert trtmesh("status", "--admin", stack.admin).returncode == 0


@pytest.mark.parametrize(
    "flag",
    ["--port", "--http-port", "--metrics-port", "--admin-port"],
)
def test_requested_ports_in_use_are_errors_before_anything_starts(flag: str) -> None:
    with taken_port() as port:
        flags = ("--port", "0", *FREE_PORTS, flag, str(port))
        result = trtmesh("up", "--backend", "simulated", *flags)
        assert result.returncode == 3
        told = f"trtmesh: error: {flag} is {port}, but another process listens on 127.0.0.1:{port}"
        assert result.stderr.startswith(told)
        assert "choose another, or 0" in result.stderr


def test_a_healthy_start_says_how_far_it_is_and_alarms_nobody() -> None:
    with running_stack("--port", "0", "--backend", "torch") as stack:
        stack.wait_ready()
        # Up to here: afterwards the end is told, too.
        told = "".join(stack.err)
    for doing in (
        *("router-0 reads the tokenizer", "engine-0 reads the weights of demo, 28 MB"),
        *("engine-0 checks the model", "engine-0 serves", "router-0 serves"),
    ):
        assert f"{doing}\n" in told
    for word in ("not serving", "UNAVAILABLE", "No module", "rror", "arning"):
        assert word not in told
    for said_already in ("health: starting", "listening", "health: serving"):
        assert said_already not in told


def test_stack_runs_without_http_and_metrics() -> None:
    flags = ("--port", "0", "--http-port", "none", "--metrics-port", "none")
    with running_stack(*flags) as stack:
        stack.wait_ready()
        assert stack.child("router-0")["http_address"] is None
        assert {child["metrics_port"] for child in stack.children} == {None}


@pytest.mark.parametrize(
    ("flags", "status", "complaint"),
    [
        (("--engines", "0"), 2, "--engines"),
        (("--backend", "magic"), 2, "--backend"),
        (("--model", "/nowhere/at/all"), 4, "/nowhere/at/all"),
        (("--model", "owner/name"), 4, "hf download owner/name"),
        (("--nonsense", "1"), 2, "--nonsense"),
        (("--config", "/nowhere.yaml"), 2, "/nowhere.yaml"),
        (("--engines-at", "http://a:1"), 2, "--engines-at has an entry that is not host:port"),
        (("--tokenizers", "-1"), 2, "--tokenizers is '-1' but must be at least 0"),
        (("--one-process", "--engines", "2"), 2, "--engines has no place in one process"),
    ],
)
def test_wrong_settings_are_named(flags: tuple[str, ...], status: int, complaint: str) -> None:
    result = trtmesh("up", *flags)
    assert result.returncode == status
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("flags", "variables", "file", "spelling"),
    [
        (("--log-dir", "/dev/null"), {}, "", "--log-dir"),
        ((), {"TRTMESH_MESH_LOG_DIR": "/dev/null"}, "", "TRTMESH_MESH_LOG_DIR"),
        ((), {}, "mesh: {log_dir: /dev/null}", "mesh.yaml: mesh.log_dir"),
    ],
)
def test_setting_found_wrong_later_is_spelt_as_given(
    tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str], file: str, spelling: str
) -> None:
    (tmp_path / "mesh.yaml").write_text(file)
    config = ("--config", str(tmp_path / "mesh.yaml")) if file else ()
    result = trtmesh("up", *flags, *config, env=variables)
    assert result.returncode == 2
    assert f"{spelling} is '/dev/null'" in result.stderr


def test_setting_found_wrong_by_an_engine_is_spelt_as_given() -> None:
    variable = "TRTMESH_ENGINE_TORCH_DEVICE"
    flags = ("--port", "0", "--backend", "torch")
    with running_stack(*flags, env={variable: "cuda:64"}) as stack:
        assert stack.wait() == 2
        assert stack.err[-1].startswith(f"trtmesh: error: engine-0: {variable} is 'cuda:64'")


def test_unknown_field_of_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("mesh: {engins: 2}\n")
    result = trtmesh("up", "--config", str(file))
    assert result.returncode == 2
    assert "mesh.engins" in result.stderr
    file.write_text("engine: {bakend: simulated}\n")
    result = trtmesh("up", "--config", str(file))
    assert result.returncode == 2
    assert "engine.bakend" in result.stderr


def test_wrong_router_setting_is_reported_before_models_load(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("router: {polcy: auto}\n")
    with running_stack("--port", "0", "--config", str(file), env=SLOW_LOAD) as stack:
        assert stack.wait() == 2
        assert stack.left_nothing()
        assert "router.polcy" in stack.err[-1]


def test_logs_may_go_to_files(tmp_path: Path) -> None:
    flags = ("--port", "0", "--tokenizers", "1", "--log-dir", str(tmp_path / "logs"))
    with running_stack(*flags) as stack:
        stack.wait_ready()
        stack.signal(signal.SIGINT)
        assert stack.wait() == 0
    files = {path.name for path in (tmp_path / "logs").iterdir()}
    assert files == {"router-0.log", "engine-0.log", "tokenizer-0.log"}
    assert "listening on" in (tmp_path / "logs" / "engine-0.log").read_text()
    assert not any("listening on" in line for line in stack.err)


def test_end_of_standard_input_stops_the_stack() -> None:
    with running_stack("--port", "0", "--stop-on-stdin-eof", "true") as stack:
        stack.wait_ready()
        stack.close_stdin()
        assert stack.wait() == 0
        assert stack.left_nothing()


def test_stack_survives_an_unread_log() -> None:
    """Ctrl-C in `trtmesh up 2>&1 | head` ends head first."""
    flags = (*FREE_PORTS, "--backend", "simulated", "--output", "json")
    with start_command("up", *flags, env=os.environ) as stack:
        try:
            assert stack.stdout
            assert stack.stderr
            told: list[dict[str, Any]] = []
            while not told or told[-1]["event"] != "ready":
                told.append(json.loads(stack.stdout.readline()))
            served = [each["pid"] for each in told if each["event"] == "serving"]
            processes = [psutil.Process(pid) for pid in served]
            assert len(processes) == 2
            stack.stderr.close()
            # Their refusals fill a pipe with lines of the router's log.
            router = ("--router", told[-1]["router"])
            for _ in range(2):
                result = trtmesh("generate", *router, "--json", *[""] * 400)
                assert result.stdout.count("PROMPT_EMPTY") == 400, result.stderr
            stack.terminate()
            assert stack.wait(STOP_SECONDS) == 0
            _, left = psutil.wait_procs(processes, STOP_SECONDS)
            assert left == []
        finally:
            stack.kill()


def test_unwritable_logs_are_reported_as_lost(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").symlink_to("/dev/full")
    with running_stack("--port", "0", "--log-dir", str(tmp_path)) as stack:
        stack.wait_ready()
        stack.signal(signal.SIGINT)
        assert stack.wait() == 0
    said = [line for line in stack.err if "lines are lost" in line]
    assert said == [
        f"lines are lost: {tmp_path}/engine-0.log cannot be written: No space left on device\n"
    ]
    assert "Traceback" not in "".join(stack.err)


IN_A_CALLBACK = """
class Ending:
    def __del__(self):
        import os, signal
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass
Ending()
"""
"""Where Python would print a KeyboardInterrupt and go on: in destructors and callbacks, one for each import."""


@pytest.mark.parametrize("imported", ["typer", "rich"])
@pytest.mark.parametrize(
    "program", ["import os, signal; os.kill(os.getpid(), signal.SIGINT)", IN_A_CALLBACK]
)
def test_ctrl_c_while_the_command_loads_is_quiet(
    tmp_path: Path, imported: str, program: str
) -> None:
    """With the application, or with the module of the command."""
    (tmp_path / f"{imported}.py").write_text(program)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = trtmesh("up", env={"PYTHONPATH": path})
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_process_that_never_served_is_killed_at_once() -> None:
    """A process loading a model has no work to finish."""
    with running_stack("--port", "0", env=SLOW_LOAD) as stack:
        stack.wait_for("engine-0 starts")
        stack.wait_for("tokenizer demo:")
        (engine,) = [p for p in stack.descendants() if p.name() == name_of("trtmesh.engine")]
        engine.suspend()
        stack.signal(signal.SIGINT)
        assert stack.wait() == 130
        assert stack.left_nothing()
        assert not any("did not end in time" in line for line in stack.err)


def test_standard_input_without_an_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.touch()
    with file.open() as stdin:
        command = [TRTMESH, "up", "--stop-on-stdin-eof", "true"]
        result = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "mesh.stop_on_stdin_eof needs a pipe" in result.stderr


def test_absent_device_is_one_error_before_the_model_loads(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in DEMO.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).symlink_to(file)
    # Weights that are refused only when they are loaded.
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    devices = json.dumps({"model": ["cuda:64"]})
    flags = ("--backend", "torch", "--model", str(model), "--devices", devices)
    result = trtmesh("up", "--port", "0", *flags)
    assert result.returncode == 2
    assert "engine.torch.device is 'cuda:64' but" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
