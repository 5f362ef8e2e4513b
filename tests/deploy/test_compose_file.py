"""The compose file as a file: services, profiles, and variables that are settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.stack import COMPOSE_FILE, VARIABLES
from trtmesh.chassis.device_names import DeviceNames
from trtmesh.chassis.settings import load_settings
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.tokenizer.settings import TokenizerSettings

TLS_FILE = COMPOSE_FILE.with_name("docker-compose.tls.yml")
CUDA_FILE = COMPOSE_FILE.with_name("docker-compose.cuda.yml")

SETTINGS: dict[str, type[SecuredSettings]] = {
    "router": RouterSettings,
    "second-router": RouterSettings,
    "tokenizer": TokenizerSettings,
    **dict.fromkeys(("engine", "prefill", "decode", "simulated"), EngineSettings),
}


MONITORING = {"prometheus", "grafana"}


def services(file: Path = COMPOSE_FILE) -> dict[str, Any]:
    """The services with the defaults of their variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", file.read_text("utf-8"))
    return dict(yaml.safe_load(text)["services"])


@pytest.mark.parametrize("name", SETTINGS)
def test_variables_of_a_service_are_its_settings(name: str) -> None:
    """Raises for an unknown or wrong one."""
    environment = services()[name]["environment"]
    settings = load_settings(SETTINGS[name], [], environment)
    own = [variable for variable in environment if variable.startswith("TRTMESH_")]
    prefix = f"TRTMESH_{settings.section.upper()}_"
    assert own
    assert [variable for variable in own if not variable.startswith(prefix)] == []


@pytest.mark.parametrize("name", SETTINGS)
def test_variables_over_tls_are_settings(name: str) -> None:
    secure = services(TLS_FILE)
    assert secure.keys() == SETTINGS.keys()
    both = {**services()[name]["environment"], **secure[name]["environment"]}
    tls = load_settings(SETTINGS[name], [], both).tls
    assert (str(tls.certificate), str(tls.client_ca)) == ("/tls/tls.crt", "/tls/ca.crt")
    probe = ClientTls.of_environment(both)
    assert probe is not None
    assert probe.server_name == "trtmesh.internal"


@pytest.mark.parametrize("name", ["engine", "prefill", "decode"])
def test_an_engine_on_a_gpu_has_one_device_and_a_place_for_kernels(name: str) -> None:
    gpu = services(CUDA_FILE)[name]
    both = {**services()[name]["environment"], **gpu["environment"]}
    settings = load_settings(EngineSettings, [], both)
    assert settings.torch.device == DeviceNames("cuda:0")
    (reserved,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (reserved["driver"], len(reserved["device_ids"])) == ("nvidia", 1)
    assert gpu["tmpfs"] == [f"{both['TRITON_CACHE_DIR']}:exec"]
    assert gpu["image"] != services()[name]["image"]


def test_the_image_for_gpus_is_built_by_an_argument_that_the_build_knows() -> None:
    device = services(CUDA_FILE)["engine"]["build"]["args"]["DEVICE"]
    text = COMPOSE_FILE.with_name("engine.Dockerfile").read_text("utf-8")
    assert "ARG DEVICE=cpu\n" in text
    assert f" {device}) " in text
    assert f"${{DEVICE}} != {device} " in text


@pytest.mark.slow
@pytest.mark.parametrize("file", [COMPOSE_FILE, TLS_FILE, CUDA_FILE], ids=lambda file: file.name)
def test_compose_knows_every_field(file: Path) -> None:
    program = [sys.executable, "-m", "check_jsonschema"]
    schema = ["--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*program, *schema, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_service_is_tested() -> None:
    assert services().keys() - MONITORING == SETTINGS.keys()


def test_prefill_and_decode_are_engines_of_a_role() -> None:
    found = services()
    for role in ("prefill", "decode"):
        service = dict(found[role])
        environment = dict(service.pop("environment"))
        assert environment.pop("TRTMESH_ENGINE_ROLE") == role
        assert environment == found["engine"]["environment"]
        assert service.pop("profiles") == ["disaggregated"]
        assert service == {name: v for name, v in found["engine"].items() if name != "environment"}


def test_routers_look_for_every_kind_of_engine() -> None:
    found = services()
    engines = {name for name, settings in SETTINGS.items() if settings is EngineSettings}
    looked_for = found["router"]["environment"]["TRTMESH_ROUTER_ENGINES"].split(",")
    assert {address.partition(":")[0] for address in looked_for} == engines


@pytest.mark.parametrize("name", VARIABLES)
def test_number_of_containers_is_a_variable(name: str) -> None:
    """Of each service that scales."""
    assert f"scale: ${{{VARIABLES[name]}:-1}}" in COMPOSE_FILE.read_text("utf-8")
