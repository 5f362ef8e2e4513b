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
DISAGGREGATED_SERVING = """backend: "python" max_batch_size: 16
    model_transaction_policy { decoupled: true }
    input { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }
    input { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] }
    input { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] }
    input { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
    output { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }
    output { name: "sequence_length" data_type: TYPE_INT32 dims: [ -1 ] }
    instance_group { count: 8 kind: KIND_CPU }
    parameters { key: "context_model_name" value { string_value: "context" } }
    parameters { key: "generation_model_name" value { string_value: "generation" } }
"""


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


def disaggregated(directory: Path) -> Path:
    """The five models but BLS, set up as the manual of disaggregated serving says."""
    five_models(directory)
    core = directory / "tensorrt_llm"
    for gpu, half in enumerate(("context", "generation")):
        shutil.copytree(core, directory / half)
        replace(directory, half, 'name: "tensorrt_llm"', f'name: "{half}"')
        replace(directory, half, "${gpu_device_ids}", str(gpu))
        with (directory / half / "config.pbtxt").open("a") as file:
            rank = f'value {{ string_value: "{gpu + 1}" }}'
            file.write(f'parameters {{ key: "participant_ids" {rank} }}\n')
    shutil.rmtree(core)
    shutil.rmtree(directory / "tensorrt_llm_bls")
    replace(directory, "ensemble", '"tensorrt_llm"', '"disaggregated_serving_bls"')
    (directory / "disaggregated_serving_bls").mkdir()
    (directory / "disaggregated_serving_bls" / "config.pbtxt").write_text(DISAGGREGATED_SERVING)
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
