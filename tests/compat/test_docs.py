"""The commands and settings in `docs/triton.md` work as printed."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from cli.commands import trtmesh
from compat.repository import five_models
from e2e.mesh import DEMO
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.tools.triton_import.fields import refusal

PAGE = (Path(__file__).parents[2] / "docs" / "triton.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)


def test_import_prints_the_lines_of_the_page(tmp_path: Path) -> None:
    """The import of such a repository prints every line of the page."""
    values = {"sink_token_length": "4", "tokenizer_dir": "/hf/llama"}
    directory = five_models(tmp_path / "models", values)
    file = tmp_path / "mesh.yaml"
    result = trtmesh("import-triton", str(directory), "--model", str(DEMO), "--output", str(file))
    assert result.returncode == 0, result.stderr
    printed = result.stdout.replace(str(DEMO), "/hf/llama").replace(str(file), "triton.yaml")
    (told,) = [block for _, block in BLOCKS if block.startswith("ensemble:")]
    for line in told.splitlines():
        if line != "...":
            assert line.removesuffix("[...]") in printed


def test_models_of_the_page_are_valid() -> None:
    blocks = [yaml.safe_load(block) for language, block in BLOCKS if language == "yaml"]
    several, gpt = [
        triton_models(TritonSettings.model_validate(block["router"]["triton"]))
        for block in blocks
        if "router" in block
    ]
    assert (several["chat"].decoupled, several["chat_whole"].max_batch_size) == (True, 8)
    assert several["tensorrt_llm"].template.name == "llmapi"
    assert gpt["tensorrt_llm"].template.name == "gpt"


def test_engine_settings_of_the_page_are_valid() -> None:
    blocks = [yaml.safe_load(block) for language, block in BLOCKS if language == "yaml"]
    (engine,) = [block["engine"] for block in blocks if "engine" in block]
    assert EngineSettings.model_validate(engine).torch.adapters.host_bytes > 0


def test_vision_inputs_of_the_page_are_refused() -> None:
    assert all(refusal(name) for name in ("IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES"))
