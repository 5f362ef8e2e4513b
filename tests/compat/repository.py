"""The sample model repositories, filled in as a user fills in TensorRT-LLM's templates."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from compat.releases import MODELS, releases_of, tensors
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


OLD_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "v0.5.0": {"max_num_sequences": "32", "enable_trt_overlap": "false"},
    "v0.6.1": {"max_num_sequences": "32", "max_kv_cache_length": "4096"},
}
"""Parameters of the core model that only old releases have."""
STEPS = "".join(
    f'step {{ model_name: "{name}" model_version: -1 }}\n'
    for name in ("preprocessing", "tensorrt_llm", "postprocessing")
)


def of_release(directory: Path, release: str, *, decoupled: bool = False) -> Path:
    """The models of a release with the tensors that it declares."""
    for model in MODELS:
        if release in releases_of(model):
            (directory / model / "1").mkdir(parents=True)
            text = _config_of_release(model, release, decoupled=decoupled)
            (directory / model / "config.pbtxt").write_text(text)
    return directory


def _config_of_release(model: str, release: str, *, decoupled: bool) -> str:
    lines = [f'name: "{model}"', "max_batch_size: 16"]
    for kind in ("inputs", "outputs"):
        for tensor in tensors(model, kind, release).values():
            data_type = tensor.data_type.replace("BYTES", "STRING") or "FP32"
            rest = f"data_type: TYPE_{data_type} dims: {list(tensor.dims)}"
            optional = " optional: true" if kind == "inputs" and not tensor.required else ""
            lines.append(f'{kind[:-1]} {{ name: "{tensor.name}" {rest}{optional} }}')
    if model == "ensemble":
        return "\n".join([*lines, 'platform: "ensemble"', f"ensemble_scheduling {{ {STEPS} }}"])
    parameters: dict[str, str] = {}
    if model in ("preprocessing", "postprocessing"):
        parameters = {"tokenizer_dir": str(DEMO), "tokenizer_type": "auto"}
    else:
        lines.append(f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}")
    if model == "tensorrt_llm":
        own = {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": "/engines/gpt"}
        parameters = own | dict(OLD_PARAMETERS.get(release, {}))
    old = release.startswith(("v0.5", "v0.6")) and model == "tensorrt_llm"
    backend = "inflight_batcher_llm" if old else "tensorrtllm"
    lines.append(f'backend: "{backend if model == "tensorrt_llm" else "python"}"')
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    return "\n".join(lines)


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
