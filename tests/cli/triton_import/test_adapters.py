"""Parameters of LoRA adapters in a repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.triton_import.importing import convert, finding
from compat.repository import five_models, llmapi
from trtmesh.chassis.settings import load_settings
from trtmesh.engine.settings import EngineSettings
from trtmesh.tools.triton_import import Conversion, Outcome

CORE = "tensorrt_llm"
GIB = 1 << 30
LORA_INPUT = """
input { name: "lora_task_id" data_type: TYPE_UINT64 dims: [ 1 ] optional: true }
"""


def with_parameters(directory: Path, **parameters: object) -> Path:
    """The five models with more parameters of the core model."""
    five_models(directory, {"lora_prefetch_dir": str(parameters.pop("lora_prefetch_dir", ""))})
    with (directory / CORE / "config.pbtxt").open("a") as file:
        for key, value in parameters.items():
            text = f'{{ string_value: "{value}" }}'
            file.write(f'parameters: {{ key: "{key}" value: {text} }}\n')
    return directory


def adapters_of(conversion: Conversion) -> Mapping[str, Any]:
    """The settings of adapters, which the engine accepts."""
    adapters: Mapping[str, Any] = conversion.sections["engine"]["torch"].get("adapters", {})
    return adapters


def accepted(conversion: Conversion, folder: Path) -> EngineSettings:
    file = folder / "mesh.yaml"
    file.write_text(yaml.safe_dump(dict(conversion.sections)))
    return load_settings(EngineSettings, ["--config", str(file)], {})


def test_cache_of_adapters_is_carried_over(tmp_path: Path) -> None:
    prefetch = tmp_path / "adapters"
    prefetch.mkdir()
    directory = with_parameters(
        tmp_path / "models",
        lora_cache_optimal_adapter_size=8,
        lora_cache_max_adapter_size=96,
        lora_cache_gpu_memory_fraction=0.1,
        lora_cache_host_memory_bytes=123456789,
        lora_prefetch_dir=prefetch,
    )
    conversion = convert(directory, device="cuda:0")
    assert adapters_of(conversion) == {
        "host_bytes": 123456789,
        "max_rank": 96,
        "prefetch_directory": str(prefetch),
    }
    assert accepted(conversion, tmp_path).torch.adapters.max_rank == 96
    outcomes = {
        name: finding(conversion, CORE, f"parameters.lora_{name}")[0]
        for name in ("cache_optimal_adapter_size", "cache_max_adapter_size", "prefetch_dir",
                     "cache_gpu_memory_fraction", "cache_host_memory_bytes")
    }  # fmt: skip
    for replaced in ("cache_optimal_adapter_size", "cache_gpu_memory_fraction"):
        assert outcomes.pop(replaced) is Outcome.REPLACED
    assert set(outcomes.values()) == {Outcome.CARRIED}


@pytest.mark.parametrize(
    "parameters",
    [
        {"lora_cache_max_adapter_size": 64},
        {"lora_cache_optimal_adapter_size": 8},
        {"lora_cache_gpu_memory_fraction": 0.1},
    ],
)
def test_any_parameter_of_adapters_turns_them_on(
    parameters: dict[str, object], tmp_path: Path
) -> None:
    conversion = convert(with_parameters(tmp_path / "models", **parameters))
    assert adapters_of(conversion)["host_bytes"] == GIB
    assert accepted(conversion, tmp_path).torch.adapters.host_bytes == GIB


def test_inputs_of_adapters_are_served_where_a_parameter_asks_for_them(tmp_path: Path) -> None:
    for case, parameters in (("off", {}), ("on", {"lora_cache_max_adapter_size": 64})):
        directory = tmp_path / case
        for config in with_parameters(directory, **parameters).glob("*/config.pbtxt"):
            with config.open("a") as file:
                file.write(LORA_INPUT)
        conversion = convert(directory)
        refused = {f.model for f in conversion.findings if "lora_task_id" in f.value}
        assert refused == ({CORE, "ensemble", "tensorrt_llm_bls"} if case == "off" else set())
        models = [f.model for f in conversion.findings if f.model in conversion.served]
        assert models == sorted(models)


def test_absent_prefetch_directory_is_reported(tmp_path: Path) -> None:
    absent = tmp_path / "none"
    conversion = convert(with_parameters(tmp_path / "models", lora_prefetch_dir=absent))
    outcome, words = finding(conversion, CORE, "parameters.lora_prefetch_dir")
    assert outcome is Outcome.UNSUPPORTED
    assert "engine.torch.adapters.prefetch_directory" in words
    assert "prefetch_directory" not in adapters_of(conversion)


def test_models_with_different_caches_conflict(tmp_path: Path) -> None:
    directory = with_parameters(tmp_path / "models", lora_cache_max_adapter_size=64)
    five_models(directory, suffix="_b")
    with (directory / f"{CORE}_b" / "config.pbtxt").open("a") as file:
        text = '{ string_value: "7" }'
        file.write(f'parameters: {{ key: "lora_cache_host_memory_bytes" value: {text} }}\n')
    conversion = convert(directory)
    outcome, words = finding(conversion, f"{CORE}_b", "parameters.lora_cache_host_memory_bytes")
    assert outcome is Outcome.UNSUPPORTED
    assert f"{GIB} for model '{CORE}'" in words


def test_arguments_of_adapters_are_carried_over(tmp_path: Path) -> None:
    directory = llmapi(tmp_path / "models", "llm")
    arguments = directory / "llm" / "1" / "model.yaml"
    content = yaml.safe_load(arguments.read_text())
    content["enable_lora"] = True
    content["lora_config"] = {
        "max_lora_rank": 32,
        "max_loras": 4,
        "max_cpu_loras": 9,
        "lora_target_modules": ["attn_q"],
        "lora_dir": ["/adapters/one"],
        "lora_ckpt_source": "hf",
    }
    arguments.write_text(yaml.safe_dump(content))
    conversion = convert(directory)
    assert adapters_of(conversion) == {"host_bytes": GIB, "max_rank": 32, "max_batch_adapters": 4}
    accepted(conversion, tmp_path)
    told = {f.what.rpartition(".")[2]: f.outcome for f in conversion.findings if "lora" in f.what}
    assert told["lora_dir"] is Outcome.UNSUPPORTED
    assert len(told) == 7
