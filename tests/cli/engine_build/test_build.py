"""`trtmesh build` with a fake tool chain: results, faults, and interruptions at every step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cli.commands import STOP_SECONDS
from cli.engine_build.building import TINY, Workshop, plan_of

VERBS = ("download", "convert", "quantize", "build")
CALLS = ["download", "download", "convert", "build", "quantize", "build"]
"""The first download is that of config.json."""


FP8 = {"weights": "fp8", "kv_cache": "fp8"}


def branch_with(verb: str, **changes: Any) -> dict[str, Any]:
    """A plan with one precision, which has a step of the verb, and one of each verb before and behind."""
    precision = FP8 if verb == "quantize" else "bf16"
    return plan_of(model={"config": "tiny.json", "precisions": [precision]}, **changes)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path).write(plan_of())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Gives the results of an uninterrupted build of `branch_with`."""

    @cache
    def built(verb: str) -> dict[str, str]:
        workshop = Workshop(tmp_path_factory.mktemp("whole")).write(branch_with(verb))
        assert workshop.run().returncode == 0
        return workshop.results()

    return lambda verb: built("quantize" if verb == "quantize" else "build")


def wait_for(file: Path, process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + STOP_SECONDS
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.01)
    return file.read_text()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def published(workshop: Workshop) -> list[str]:
    """The directories under their final names that have engines, weights or configurations."""
    files = workshop.out.rglob("config.json")
    names = (str(file.parent.relative_to(workshop.out)) for file in files)
    return sorted(name for name in names if "/." not in f"/{name}")


def test_build_makes_engines_and_a_mesh_for_each(workshop: Workshop) -> None:
    result = workshop.run()
    assert (result.returncode, result.stderr) == (0, "")
    assert workshop.calls() == CALLS
    engine = workshop.out / "engines/tiny/fp8-kv_fp8-tp2-pp1/b8-i64-o32"
    assert sorted(file.name for file in engine.glob("*.engine")) == ["rank0.engine", "rank1.engine"]
    mesh = workshop.out / "mesh/tiny-fp8-kv_fp8-tp2-pp1-b8-i64-o32.yaml"
    assert f"trtmesh up --config {mesh.relative_to(workshop.directory)}" in result.stdout
    sections = yaml.safe_load(mesh.read_text())
    assert sections["mesh"] == {
        "model": str(workshop.out / "models/tiny"),
        "backend": "tensorrt_llm",
    }
    assert sections["engine"]["tensorrt_llm"] == {
        "engine_dir": str(engine),
        "parallel": {"tensor": 2, "pipeline": 1},
        "batching": {"max_step_tokens": 8192},
        "limits": {"max_batch_size": 8, "max_sequence_tokens": 96, "max_beam_width": 1},
    }
    # A second run starts no tool.
    before = workshop.results()
    again = workshop.run()
    assert again.returncode == 0
    assert workshop.calls() == CALLS
    assert workshop.results() == before
    assert again.stdout.count("done before") == 5


def test_changed_command_runs_again_with_what_follows(tmp_path: Path) -> None:
    bf16: dict[str, Any] = {"precisions": ["bf16"]}
    workshop = Workshop(tmp_path).write(plan_of(model=bf16))
    assert workshop.run().returncode == 0
    done = ["download", "download", "convert", "build"]
    assert workshop.calls() == done
    workshop.write(plan_of(model=bf16 | {"batch_sizes": [8, 16]}))
    assert workshop.run().returncode == 0
    assert workshop.calls()[len(done) :] == ["build"]
    workshop.write(plan_of(model=bf16 | {"batch_sizes": [8, 16], "revision": "v2"}))
    assert workshop.run().returncode == 0
    assert workshop.calls()[len(done) + 1 :] == ["download", "convert", "build", "build"]
    assert [file.name for file in (workshop.out / "models").iterdir()] == ["tiny"]


def test_pytorch_flow_quantizes_once_for_all_shapes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    plan = plan_of(
        flow="pytorch",
        model={
            "hub": None,
            "directory": "model",
            "precisions": ["bf16", {"weights": "nvfp4", "kv_cache": "fp8"}],
            "tensor": [1, 2],
        },
        gpu={"architecture": 100},
    )
    workshop = Workshop(tmp_path).write(plan)
    (model / "config.json").write_bytes((tmp_path / "tiny.json").read_bytes())
    result = workshop.run()
    assert (result.returncode, result.stderr) == (0, "")
    assert workshop.calls() == ["ptq"]
    files = sorted((workshop.out / "mesh").iterdir())
    sections = [yaml.safe_load(file.read_text()) for file in files]
    quantized = str(workshop.out / "quantized/tiny-nvfp4-kv_fp8")
    assert [each["mesh"]["model"] for each in sections] == [str(model)] * 2 + [quantized] * 2
    backend = sections[3]["engine"]["tensorrt_llm"]
    assert backend["parallel"] == {"tensor": 2, "pipeline": 1}
    assert backend["options"]["kv_cache_config"] == {"dtype": "fp8"}
    (model / "config.json").touch()
    assert workshop.run().returncode == 0
    assert workshop.calls() == ["ptq", "ptq"], "the model changed"


FAULTS = {
    "fail": r"ended with status 1; its last line: CUDA out of memory; see ",
    "full": r"ended with status 1; its last line: OSError: \[Errno 28\] No space left on device; see ",
    "missing": r"its tool ended without an error, but .*(missing|no weights).*; see ",
    "truncated": r"its tool ended without an error, but \w+.safetensors is truncated; see ",
}


def run_with(
    workshop: Workshop, verb: str, fault: str, errors: int = 1
) -> subprocess.CompletedProcess[str]:
    """A build with a fault of a tool, each of which is one error with its log."""
    switch = workshop.switch(f"{verb}.{fault}")
    result = workshop.run()
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) == errors
    for error in lines:
        assert error.startswith(f"trtmesh: error: step '{verb} tiny")
        assert re.search(FAULTS[fault], error), error
        log = workshop.directory / error.rpartition("; see ")[2]
        assert f"{verb}: working" in log.read_text()
    switch.unlink()
    return result


@pytest.mark.parametrize("verb", VERBS)
def test_fault_of_a_tool_is_one_error_with_its_log(
    workshop: Workshop, verb: str, expected: Callable[[str], dict[str, str]]
) -> None:
    workshop.write(branch_with(verb))
    # A status is the same of every tool. An engine says nothing about its length.
    faults = {"download": ["full", "truncated"], "build": []}.get(verb, ["truncated"])
    for fault in ("missing", *faults):
        run_with(workshop, verb, fault)
    assert workshop.run().returncode == 0
    assert workshop.results() == expected(verb)


@pytest.mark.parametrize("verb", VERBS)
def test_other_steps_run_after_a_failure(workshop: Workshop, verb: str) -> None:
    workshop.write(plan_of(model={"config": "tiny.json"}))
    # An engine is built for each of the two precisions.
    result = run_with(workshop, verb, "fail", errors=2 if verb == "build" else 1)
    skipped = {"download": 4, "convert": 1, "quantize": 1, "build": 0}[verb]
    assert result.stdout.count("skipped") == skipped
    engines = {"download": 0, "convert": 1, "quantize": 1, "build": 0}[verb]
    assert result.stdout.count("wrote ") == engines
    assert len(list(workshop.out.rglob("*.engine"))) == 2 * engines


INTERRUPTS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 130}
"""The status of a build after each signal."""
OFTEN = {
    *(("download", signal.SIGINT), ("convert", signal.SIGKILL)),
    *(("quantize", signal.SIGTERM), ("build", signal.SIGINT)),
}


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        pytest.param(verb, number, marks=() if (verb, number) in OFTEN else pytest.mark.soak)
        for verb in VERBS
        for number in INTERRUPTS
    ],
)
def test_interrupted_step_leaves_no_half_and_resumes(
    workshop: Workshop,
    verb: str,
    number: signal.Signals,
    expected: Callable[[str], dict[str, str]],
) -> None:
    workshop.write(branch_with(verb))
    process, tool = stopped_inside(workshop, verb)
    before = published(workshop)
    process.send_signal(number)
    _, errors = process.communicate(timeout=STOP_SECONDS)
    assert (process.returncode, errors) == (INTERRUPTS[number], "")
    wait_for_end(tool)
    assert published(workshop) == before
    resumes(workshop, verb, expected(verb))


@pytest.mark.parametrize(
    "verb",
    [pytest.param(v, marks=() if v == "convert" else pytest.mark.soak) for v in VERBS],
)
def test_killed_tool_leaves_no_half_and_its_step_is_repeated(
    workshop: Workshop, verb: str, expected: Callable[[str], dict[str, str]]
) -> None:
    workshop.write(branch_with(verb))
    process, tool = stopped_inside(workshop, verb)
    os.kill(tool, signal.SIGKILL)
    _, errors = process.communicate(timeout=STOP_SECONDS)
    assert process.returncode == 1
    assert f"step '{verb} tiny" in errors
    assert "its tool was killed by signal 9" in errors
    resumes(workshop, verb, expected(verb))


def resumes(workshop: Workshop, verb: str, expected: dict[str, str]) -> None:
    """Repeats the interrupted step alone of those that had begun."""
    (workshop.control / f"{verb}.hang").unlink()
    result = workshop.run()
    assert result.returncode == 0, result.stderr
    assert workshop.results() == expected
    done = ["download", "quantize" if verb == "quantize" else "convert", "build"]
    assert sorted(workshop.calls()) == sorted([*done, verb])


def stopped_inside(workshop: Workshop, verb: str) -> tuple[subprocess.Popen[str], int]:
    """A build whose tool waits in the middle of its output, and the tool."""
    begun = workshop.control / f"{verb}.begun"
    begun.unlink(missing_ok=True)
    workshop.switch(f"{verb}.hang")
    process = workshop.start()
    return process, int(wait_for(begun, process))


def test_second_build_waits_for_its_turn(workshop: Workshop) -> None:
    workshop.write(branch_with("convert"))
    hang = workshop.switch("convert.hang")
    first = workshop.start()
    wait_for(workshop.control / "convert.begun", first)
    second = workshop.run()
    assert second.returncode == 1
    assert "another build or one of its tools writes to out" in second.stderr
    hang.unlink()
    assert first.wait(STOP_SECONDS) == 0
    first.communicate()


def test_build_that_waits_for_another_can_be_interrupted(workshop: Workshop) -> None:
    workshop.write(branch_with("convert"))
    hang = workshop.switch("convert.hang")
    first = workshop.start()
    wait_for(workshop.control / "convert.begun", first)
    second = workshop.start()
    lock = str(workshop.out / ".lock")
    deadline = time.monotonic() + STOP_SECONDS
    while lock not in [each.path for each in psutil.Process(second.pid).open_files()]:
        assert second.poll() is None, second.communicate()
        assert time.monotonic() < deadline, "the second build did not open the lock"
        time.sleep(0.01)
    second.send_signal(signal.SIGINT)
    _, errors = second.communicate(timeout=STOP_SECONDS)
    assert (second.returncode, errors) == (130, "")
    hang.unlink()
    assert first.wait(STOP_SECONDS) == 0
    first.communicate()


def test_steps_run_at_the_same_time(workshop: Workshop) -> None:
    workshop.write(plan_of(parallel=2))
    switches = [workshop.switch(f"{verb}.hang") for verb in ("convert", "quantize")]
    process = workshop.start()
    for verb in ("convert", "quantize"):
        wait_for(workshop.control / f"{verb}.begun", process)
    for switch in switches:
        switch.unlink()
    process.communicate(timeout=STOP_SECONDS)
    assert process.returncode == 0


def test_directory_of_somebody_else_is_never_replaced(workshop: Workshop) -> None:
    foreign = workshop.out / "checkpoints/tiny/bf16-tp2-pp1"
    foreign.mkdir(parents=True)
    (foreign / "mine").write_text("precious")
    result = workshop.run()
    assert result.returncode == 2
    assert "exists, but `trtmesh build` did not make it" in result.stderr
    assert (foreign / "mine").read_text() == "precious"
    assert workshop.calls() == ["download"], "config.json alone"


def test_full_disk_is_foreseen(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path).write(plan_of(model={"config": "huge.json"}))
    huge = TINY | {"num_hidden_layers": 2**20, "hidden_size": 2**16}
    (tmp_path / "huge.json").write_text(json.dumps(huge))
    result = workshop.run()
    assert result.returncode == 1
    assert "step 'download tiny' needs about" in result.stderr
    assert workshop.calls() == []


def test_missing_tool_is_named_before_the_first_step(workshop: Workshop) -> None:
    plan = plan_of()
    plan["tools"]["trtllm_build"] = "no-such-program"
    workshop.write(plan)
    result = workshop.run()
    assert result.returncode == 2
    assert "'no-such-program', which is not on PATH; set tools" in result.stderr
    assert workshop.calls() == ["download"], "config.json alone"


def test_dry_run_runs_and_writes_nothing(workshop: Workshop) -> None:
    workshop.write(plan_of(model={"config": "tiny.json"}))
    before = sorted(workshop.directory.rglob("*"))
    result = workshop.run("--dry-run")
    assert result.returncode == 0
    assert sorted(workshop.directory.rglob("*")) == before
    commands = [line for line in result.stdout.splitlines() if "fake_tools.py" in line]
    assert len(commands) == 5
    assert workshop.run().returncode == 0
    made = [
        line for file in (workshop.out / "logs").iterdir() for line in file.read_text().splitlines()
    ]
    executed = {line[2:].strip().replace(".partial-", "") for line in made if line[:2] == "$ "}
    assert {command.strip() for command in commands} == executed


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_config_that_is_no_file_is_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    workshop = Workshop(tmp_path).write(plan_of(model={"config": "missing.json"}))
    result = workshop.run(*options)
    assert result.returncode == 2
    assert "models[0] (tiny): config is 'missing.json', which is no file" in result.stderr
    assert workshop.calls() == []


def test_words_of_a_plan_reach_no_shell(workshop: Workshop) -> None:
    evil = "$(touch pwned); touch pwned & `touch pwned`"
    workshop.write(branch_with("quantize", calibration={"dataset": evil}))
    assert workshop.run().returncode == 0
    assert not list(workshop.directory.rglob("pwned"))
