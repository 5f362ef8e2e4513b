"""The units of systemd: clean, longer-lived than a drain, and with arguments that the services take."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest
from deploy.chart import DEPLOY, SETTINGS
from trtmesh.chassis.settings import load_settings
from trtmesh.chassis.tls.settings import SecuredSettings

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
INSTANCE = "9101"
PYTHON = "/opt/trtmesh/bin/python"
CONFIG = """\
router: {engines: ["127.0.0.1:9101"], tokenizers: ["127.0.0.1:9001"]}
tokenizer: {model_dir: models}
engine: {model_dir: models}
"""
every_unit = pytest.mark.parametrize("unit", UNITS, ids=[unit.stem for unit in UNITS])


def text_of(unit: Path) -> str:
    return unit.read_text("utf-8").replace("%i", INSTANCE)


def options(unit: Path) -> dict[str, str]:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[method-assign,assignment]  # names have capitals
    parser.read_string(text_of(unit))
    return dict(parser["Service"])


def settings_of(unit: Path, directory: Path) -> SecuredSettings:
    """What the service makes of the unit's command, with a file of that place. Raises SettingsError."""
    python, dash, module, *flags = shlex.split(options(unit)["ExecStart"])
    assert (python, dash) == (PYTHON, "-m")
    file = directory / "mesh.yaml"
    file.write_text(CONFIG, "utf-8")
    assert flags[:2] == ["--config", "/etc/trtmesh/mesh.yaml"]
    return load_settings(
        SETTINGS[module.removeprefix("trtmesh.")], ["--config", str(file), *flags[2:]], {}
    )


def test_each_service_has_a_unit() -> None:
    names = {unit.stem.removeprefix("trtmesh-").removesuffix("@") for unit in UNITS}
    assert names == SETTINGS.keys()


@every_unit
def test_the_service_takes_its_command(unit: Path, tmp_path: Path) -> None:
    settings = settings_of(unit, tmp_path)
    assert settings.section in unit.stem
    if settings.section == "engine":
        assert settings.port == int(INSTANCE)


@every_unit
def test_a_stop_waits_for_the_drain(unit: Path, tmp_path: Path) -> None:
    said, settings = options(unit), settings_of(unit, tmp_path)
    assert float(said["TimeoutStopSec"]) > settings.grace_seconds + 10
    # SIGTERM to the service alone, which ends its own children.
    assert said["KillMode"] == "mixed"
    # Services do not notify systemd.
    assert said["Type"] == "exec"


@every_unit
def test_a_unit_gives_no_privileges(unit: Path) -> None:
    said = options(unit)
    assert said["User"] == "trtmesh"
    assert said["NoNewPrivileges"] == "yes"
    assert said["ProtectSystem"] == "strict"
    assert said["CapabilityBoundingSet"] == ""
    # Either would hide the GPUs of an engine: the latter allows devices by a list.
    hidden = {"PrivateDevices", "ProtectClock"} & said.keys()
    assert hidden == (set() if "engine" in unit.stem else {"PrivateDevices", "ProtectClock"})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@every_unit
def test_systemd_understands_a_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name.replace("@", f"@{INSTANCE}")
    copy.write_text(text_of(unit).replace(PYTHON, sys.executable), "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
