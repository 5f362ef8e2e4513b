"""Clients of OpenAI's API, each in an environment of its own, as their users call them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e.mesh import Mesh
from environments import node_environment, python_environment, run
from openai_clients.conftest import KEPT, MODEL

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]

HERE = Path(__file__).parent
CASE_SECONDS = 900.0
QUIET = {
    # No client may look for anything but the mesh.
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
}


@dataclass(frozen=True)
class Python:
    """A program of `python/` and what it needs."""

    program: str
    requirements: tuple[str, ...]

    def command(self) -> list[str]:
        python = python_environment(KEPT / self.program, self.requirements)
        return [str(python), str(HERE / "python" / f"{self.program}.py")]


@dataclass(frozen=True)
class Node:
    """A program of `node/`."""

    program: str

    def command(self) -> list[str]:
        modules = node_environment(KEPT / "node", HERE / "node")
        # A module finds its packages beside itself alone.
        place = modules.parent / f"{self.program}.mjs"
        shutil.copy(HERE / "node" / place.name, place)
        return [shutil.which("node") or "node", str(place)]


CLIENTS: tuple[Python | Node, ...] = (
    Python("openai_package", ("openai>=3.57,<4",)),
    Python("agents_package", ("openai-agents>=0.24,<0.25",)),
    Python("langchain_package", ("langchain-openai>=1.7,<2",)),
    Python("lite", ("litellm>=1.110,<2",)),
    Python("instructor_package", ("instructor>=1.17,<2",)),
    Python(
        "lm_evaluation",
        (
            "--no-binary=sqlitedict,word2number,rouge-score",
            "lm-eval[api]>=0.4.13,<0.5",
            "transformers>=5,<6",
        ),
    ),
    Python("aiperf_load", ("aiperf>=0.13,<0.14",)),
    Python("guidellm_load", ("guidellm>=0.8.1,<0.9",)),
    Node("openai_node"),
    Node("ai_sdk"),
)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.program)
async def test_client(client: Python | Node, mesh: Mesh, weights: Path, tmp_path: Path) -> None:
    """Each program asserts what it gets, and prints what it did as JSON."""
    command = await asyncio.to_thread(client.command)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **QUIET,
        "BASE_URL": f"http://{mesh.router.http_address}/v1",
        "OPENAI_API_KEY": "unused",
        "MODEL": MODEL,
        "TOKENIZER": str(weights),
        "HOME": str(tmp_path),
        "WORK": str(tmp_path),
    }
    printed = await run(command, environment, CASE_SECONDS)
    assert json.loads(printed.strip().splitlines()[-1])
    await mesh.idle()
