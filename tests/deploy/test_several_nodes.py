"""Workers over several nodes: the Slurm script and the chart's LeaderWorkerSet, with launchers that print words."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest
from deploy.chart import EXAMPLES, Pod, named, pods, render, selects, settings_of
from trtmesh.chassis.settings import load_settings
from trtmesh.engine.settings import EngineSettings

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "deploy" / "slurm" / "engine.sbatch"
LAUNCHER = "#!/bin/bash\nprintf '%s\\n' \"$@\"\n"


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment whose launchers print their arguments, one a line."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("srun", "mpirun"):
        (directory / name).write_text(LAUNCHER)
    (directory / "scontrol").write_text("#!/bin/bash\nprintf 'node-a\\nnode-b\\n'\n")
    for file in directory.iterdir():
        file.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def check_engine(words: list[str], config: str) -> None:
    """The words after the launcher start an engine whose settings exist."""
    at = words.index("trtllm-llmapi-launch")
    assert words[at + 1 : at + 4] == ["python3", "-m", "trtmesh.engine"]
    flags = words[at + 4 :]
    assert (flags[:2], flags[4:6]) == (["--config", config], ["--backend", "tensorrt_llm"])
    settings = load_settings(EngineSettings, [*flags[2:4], *flags[6:]], {})
    assert (settings.host, settings.port) == ("0.0.0.0", 9101)


def test_slurm_starts_the_engine_on_all_ranks(programs: dict[str, str]) -> None:
    given = {"CONFIG": "a b.yaml", "MODEL_DIR": "/m", "SLURM_JOB_NODELIST": "node-[a-b]"}
    result = run(["bash", str(SLURM)], programs | given)
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    assert words[0] == "--mpi=pmix"
    check_engine(words, "a b.yaml")
    assert "the worker is node-a:9101" in result.stderr


def test_slurm_names_what_is_missing(programs: dict[str, str]) -> None:
    result = run(["bash", str(SLURM)], programs)
    assert result.returncode != 0
    assert "CONFIG: the configuration file" in result.stderr


def groups() -> tuple[Pod, Pod]:
    """The leader and the other pods of a group."""
    leader, ranks = (
        pod for pod in pods(render(EXAMPLES["nodes"])) if pod.owner["kind"] == "LeaderWorkerSet"
    )
    return leader, ranks


def test_scripts_are_bash() -> None:
    scripts = [SLURM.read_text()]
    for pod in groups():
        assert pod.container["command"] == ["bash", "-c"]
        scripts += pod.container["args"]
    leader, _ = groups()
    scripts.append(leader.container["lifecycle"]["preStop"]["exec"]["command"][-1])
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_leader_starts_the_ranks_of_its_group(programs: dict[str, str], tmp_path: Path) -> None:
    leader, _ = groups()
    # The keys are those of the secret.
    script = re.sub(
        r"^install .*$", "mkdir -p ~/.ssh", leader.container["args"][0], flags=re.MULTILINE
    )
    variables = {each["name"]: each["value"] for each in leader.container["env"]}
    variables |= {"LWS_LEADER_ADDRESS": "e-0.e.default", "LWS_GROUP_SIZE": "3"}
    result = run(["bash", "-c", script], programs | variables)
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    assert words[words.index("-np") + 1] == "24"
    hosts = "e-0.e.default:8,e-0-1.e.default:8,e-0-2.e.default:8"
    assert words[words.index("--host") + 1] == hosts
    at = words.index("trtllm-llmapi-launch")
    assert words[at + 1 : at + 4] == ["python3", "-m", "trtmesh.engine"]
    # What bash makes of the script is what the chart's tests read there.
    assert words[at + 4 :] == leader.flags
    settings = settings_of(leader, render(EXAMPLES["nodes"]), tmp_path)
    assert isinstance(settings, EngineSettings)
    assert (settings.backend, settings.port) == ("tensorrt_llm", 9101)


def test_a_stopping_leader_waits_for_its_engine_to_drain(tmp_path: Path) -> None:
    """The hook finds the engine among other processes, and does not end before it."""
    (tmp_path / "trtmesh.engine").write_text(
        "trap 'sleep 0.5; touch drained; exit' TERM\necho ready\nwhile :; do sleep 0.1; done\n"
    )
    leader, _ = groups()
    bash, dash, script = leader.container["lifecycle"]["preStop"]["exec"]["command"]
    other = subprocess.Popen(["sleep", "600"])
    # A shell with the words of an engine. Its parent waits for it, as the launcher does.
    launcher = subprocess.Popen(
        ["bash", "-c", "(exec -a python3 bash -m trtmesh.engine --port=9101); exit 0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout
    try:
        assert launcher.stdout.readline() == "ready\n"
        (engine,) = psutil.Process(launcher.pid).children()
        # Nobody else's engines.
        assert script.count("/proc/[0-9]*") == 1
        seen = f"/proc/{other.pid} /proc/{launcher.pid} /proc/{engine.pid}"
        hook = [bash, dash, script.replace("/proc/[0-9]*", seen)]
        subprocess.run(hook, check=True, timeout=60)
        assert (tmp_path / "drained").exists()
        assert other.poll() is None
        assert launcher.wait() == 0
    finally:
        for process in (launcher, other):
            process.kill()
            process.wait()
        launcher.stdout.close()


def test_the_leader_alone_is_found_by_routers() -> None:
    leader, ranks = groups()
    service = named(render(EXAMPLES["nodes"]), "Service", leader.name)
    assert selects(service["spec"]["selector"], leader)
    assert not selects(service["spec"]["selector"], ranks)
    devices = [pod.container["resources"]["limits"]["nvidia.com/gpu"] for pod in (leader, ranks)]
    assert devices == ["8", "8"]
