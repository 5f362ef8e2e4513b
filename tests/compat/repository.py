"""The sample model repositories, filled in as a user fills in TensorRT-LLM's templates."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from e2e.mesh import DEMO

SAMPLES = Path(__file__).parent / "repositories"
FILLED = {
    "triton_backend": "tensorrtllm",
    "triton_max_batch_size": "16",
    "decoupled_mode": "True",
    "batching_strategy": "inflight_fused_batching",
    "engine_dir": "/engines/llama",
    "tokenizer_dir": str(DEMO),
    "max_beam_width": "4",
    "max_tokens_in_paged_kv_cache": "8192",
    "preprocessing_instance_count": "4",
    "max_queue_delay_microseconds": "0",
}
"""Everything else stays `${...}`."""


def five_models(directory: Path, values: Mapping[str, str] | None = None, suffix: str = "") -> Path:
    """The five models in `directory`, each name with the suffix behind it."""
    filled = FILLED | dict(values or {})
    for sample in sorted((SAMPLES / "five_models").iterdir()):
        target = directory / (sample.name + suffix)
        shutil.copytree(sample, target)
        config = target / "config.pbtxt"
        text = config.read_text()
        for key, value in filled.items():
            text = text.replace(f"${{{key}}}", value)
        config.write_text(re.sub(r'(name: "(?:tensorrt|pre|post|ens)\w*)"', rf'\1{suffix}"', text))
    return directory


def llmapi(directory: Path, name: str = "tensorrt_llm", model: Path = DEMO) -> Path:
    """The llmapi model in `directory`, under a name."""
    shutil.copytree(SAMPLES / "llmapi" / "tensorrt_llm", directory / name)
    config = directory / name / "config.pbtxt"
    config.write_text(config.read_text().replace('"tensorrt_llm"', f'"{name}"'))
    arguments = directory / name / "1" / "model.yaml"
    arguments.write_text(arguments.read_text().replace("MODEL_DIRECTORY", str(model)))
    return directory


def replace(directory: Path, model: str, old: str, new: str) -> None:
    """Changes the text of a model's configuration."""
    config = directory / model / "config.pbtxt"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
