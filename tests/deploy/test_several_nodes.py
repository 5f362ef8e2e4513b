"""Workers over several nodes: the Slurm script and the LeaderWorkerSet, with launchers that print what they get."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from trtmesh.chassis.settings import load_settings
from trtmesh.engine.settings import EngineSettings

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "deploy" / "slurm" / "engine.sbatch"
KUBERNETES = ROOT / "deploy" / "leaderworkerset.yaml"
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


def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(KUBERNETES.read_text())}


def test_scripts_are_bash() -> None:
    group = documents()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    scripts = [SLURM.read_text()]
    for role in ("leaderTemplate", "workerTemplate"):
        (container,) = group[role]["spec"]["containers"]
        assert container["command"] == ["bash", "-c"]
        scripts += container["args"]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_leader_starts_the_ranks_of_its_group(programs: dict[str, str]) -> None:
    group = documents()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    (leader,) = group["leaderTemplate"]["spec"]["containers"]
    # The keys are those of the secret.
    script = re.sub(r"^install .*$", "mkdir -p ~/.ssh", leader["args"][0], flags=re.MULTILINE)
    variables = {each["name"]: each["value"] for each in leader["env"]}
    variables |= {"LWS_LEADER_ADDRESS": "e-0.e.default", "LWS_GROUP_SIZE": "3"}
    result = run(["bash", "-c", script], programs | variables)
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    assert words[words.index("-np") + 1] == "24"
    hosts = "e-0.e.default:8,e-0-1.e.default:8,e-0-2.e.default:8"
    assert words[words.index("--host") + 1] == hosts
    check_engine(words, "/config/mesh.yaml")


def test_parts_of_the_set_fit_each_other() -> None:
    both = documents()
    service, group = both["Service"], both["LeaderWorkerSet"]
    name = group["metadata"]["name"]
    selector = service["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/name"] == name
    template = group["spec"]["leaderWorkerTemplate"]
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert selector.items() - {("leaderworkerset.sigs.k8s.io/name", name)} <= labels.items()
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    assert leader["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"]
    for role in ("leaderTemplate", "workerTemplate"):
        spec = template[role]["spec"]
        (container,) = spec["containers"]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in spec["volumes"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == leader["env"][0]["value"]
