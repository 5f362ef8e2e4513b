"""The bridge as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

from foreign.serving import stand_in
from processes import run_to_exit, service_process

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "isal", "nixl")
BLOCKED = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None
import trtmesh.engine.__main__, trtmesh.engine.backends.foreign.backend
"""
WITHOUT_STUBS = """
import sys
sys.modules["smg_grpc_proto"] = None
from trtmesh.chassis.service import run
from trtmesh.engine.__main__ import build
from trtmesh.engine.settings import EngineSettings
flags = ["--backend", "foreign", "--foreign-address", "vllm://127.0.0.1:1", "--port", "0"]
sys.exit(run(EngineSettings, build, flags))
"""


def test_bridge_needs_no_heavy_library() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED], check=True)


def test_missing_package_is_named() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_STUBS], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "pip install 'trtmesh[foreign]'" in result.stderr


async def test_wrong_address_is_a_wrong_setting() -> None:
    flags = ("--backend", "foreign", "--foreign-address", "vlm://127.0.0.1:1", "--port", "0")
    ended = await run_to_exit("engine", *flags)
    assert ended.status == 2
    assert "--foreign-address" in ended.stderr
    assert "vlm://127.0.0.1:1" in ended.stderr


async def test_absent_engine_ends_the_bridge() -> None:
    flags = ("--foreign-address", "vllm://127.0.0.1:1")
    ended = await run_to_exit("engine", "--backend", "foreign", "--port", "0", *flags)
    assert ended.status == 4
    assert "cannot use vllm://127.0.0.1:1" in ended.stderr


async def test_bridge_ends_as_asked() -> None:
    async with (
        stand_in("vllm") as engine,
        service_process(
            "engine", "--backend", "foreign", "--port", "0", "--foreign-address", engine.url
        ) as bridge,
    ):
        bridge.signal(signal.SIGTERM)
        assert await bridge.wait() == 0
