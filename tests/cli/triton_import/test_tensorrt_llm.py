"""The import for TensorRT-LLM workers: ranks, GPUs and settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli.triton_import.importing import copy_of_demo, finding
from compat.repository import SAMPLES, disaggregated, five_models, replace
from e2e.mesh import DEMO
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.triton_import import Conversion, Outcome, convert_repository

IDS = "parameters.gpu_device_ids"


def convert(directory: Path, **models: Path) -> Conversion:
    return convert_repository(directory, models, backend="tensorrt_llm")


def repository(
    directory: Path, ids: str, count: int = 1, parameters: dict[str, str] | None = None
) -> Path:
    five_models(directory, {"gpu_device_ids": ids})
    replace(directory, "tensorrt_llm", "count: 1", f"count: {count}")
    with (directory / "tensorrt_llm" / "config.pbtxt").open("a") as file:
        for key, value in (parameters or {}).items():
            file.write(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')
    return directory


def backend_of(conversion: Conversion) -> dict[str, Any]:
    assert conversion.sections["mesh"]["backend"] == "tensorrt_llm"
    assert "torch" not in conversion.sections["engine"]
    backend: dict[str, Any] = conversion.sections["engine"]["tensorrt_llm"]
    return backend


@pytest.mark.parametrize(
    ("ids", "count", "devices", "tensor"),
    [
        ("2", 1, ["cuda:2"], 1),
        ("0,1", 1, ["cuda:0,cuda:1"], 2),
        ("0,1;2,3", 2, ["cuda:0,cuda:1", "cuda:2,cuda:3"], 2),
        ("0,1;2,3", 1, ["cuda:0,cuda:1", "cuda:2,cuda:3"], 2),
        ("4,5,6,7", 2, ["cuda:4,cuda:5,cuda:6,cuda:7"] * 2, 4),
    ],
)
def test_each_instance_is_a_worker_on_all_its_gpus(
    tmp_path: Path, ids: str, count: int, devices: list[str], tensor: int
) -> None:
    conversion = convert(repository(tmp_path / "models", ids, count))
    assert conversion.sections["mesh"]["devices"] == {"demo": devices}
    assert backend_of(conversion)["parallel"] == {"tensor": tensor, "pipeline": 1}
    outcome, text = finding(conversion, "tensorrt_llm", IDS)
    assert (outcome, text) == (Outcome.CARRIED, f"mesh.devices: {'; '.join(devices)}")


def engine(directory: Path, tensor: object, pipeline: int) -> Path:
    """What a TensorRT engine says about its ranks."""
    directory.mkdir()
    mapping = {"world_size": 4, "tp_size": tensor, "pp_size": pipeline}
    (directory / "config.json").write_text(json.dumps({"pretrained_config": {"mapping": mapping}}))
    return directory


def test_built_engine_says_how_its_gpus_divide_the_model(tmp_path: Path) -> None:
    directory = repository(tmp_path / "models", "0,1,2,3")
    built = engine(tmp_path / "engine", 2, 2)
    replace(directory, "tensorrt_llm", "/engines/llama", str(built))
    conversion = convert(directory)
    assert backend_of(conversion)["parallel"] == {"tensor": 2, "pipeline": 2}
    what = f"pipeline parallelism, by {built / 'config.json'}"
    expected = (Outcome.CARRIED, "engine.tensorrt_llm.parallel.pipeline: 2")
    assert finding(conversion, "tensorrt_llm", what) == expected


@pytest.mark.parametrize(
    ("ids", "tensor", "problem"),
    [
        ("0,1", 4, "an instance has 2 GPUs in gpu_device_ids, but .* says tensor 4 x pipeline 2"),
        ("0,1;2", 4, "gpu_device_ids has instances of 1 and 2 GPUs"),
        ("", "two", "has a parallel size of 'two' but it must be a whole number"),
    ],
)
def test_ranks_that_disagree_with_the_gpus_are_refused(
    tmp_path: Path, ids: str, tensor: object, problem: str
) -> None:
    directory = repository(tmp_path / "models", ids)
    replace(directory, "tensorrt_llm", "/engines/llama", str(engine(tmp_path / "e", tensor, 2)))
    with pytest.raises(SettingsError, match=problem):
        convert(directory)


def test_arguments_of_the_library_have_the_sizes(tmp_path: Path) -> None:
    directory = tmp_path / "models"
    model = directory / "tensorrt_llm"
    model.mkdir(parents=True)
    sample = SAMPLES / "llmapi"
    source = next(sample.rglob("config.pbtxt")).parent
    shutil.copytree(source, model, dirs_exist_ok=True)
    arguments = next(model.rglob("model.yaml"))
    arguments.write_text(
        f"model: {DEMO}\nbackend: pytorch\ntensor_parallel_size: 4\npipeline_parallel_size: 2\n"
        "moe_expert_parallel_size: 4\ngpus_per_node: 8\nmax_num_tokens: 4096\nmax_batch_size: 32\n"
        "kv_cache_config: {free_gpu_memory_fraction: 0.8, dtype: fp8, enable_block_reuse: false}\n"
    )
    backend = backend_of(convert(directory, **{"": DEMO}))
    assert backend["parallel"] == {"tensor": 4, "pipeline": 2}
    assert backend["options"] == {
        "moe_expert_parallel_size": 4,
        "gpus_per_node": 8,
        "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.8},
    }
    assert backend["kv_cache"] == {"prefix_reuse": False}
    assert backend["batching"] == {"max_step_tokens": 4096}
    assert backend["limits"] == {"max_batch_size": 32}


def test_parameters_become_settings_of_the_worker(tmp_path: Path) -> None:
    parameters = {
        "kv_cache_host_memory_bytes": "1024",
        "enable_kv_cache_reuse": "false",
        "batch_scheduler_policy": "max_utilization",
        "kv_cache_free_gpu_mem_fraction": "0.7",
    }
    directory = five_models(tmp_path / "models", parameters)
    with (directory / "tensorrt_llm" / "config.pbtxt").open("a") as file:
        file.write(
            'parameters { key: "guided_decoding_backend" value { string_value: "xgrammar" } }\n'
        )
    conversion = convert(directory)
    backend = backend_of(conversion)
    assert backend["kv_cache"] == {
        "tokens": 8192,
        "prefix_reuse": False,
    }
    assert backend["options"] == {
        "guided_decoding_backend": "xgrammar",
        "kv_cache_config": {"free_gpu_memory_fraction": 0.7, "host_cache_size": 1024},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    }
    assert backend["limits"]["max_beam_width"] == 4
    what = "parameters.kv_cache_host_memory_bytes"
    place = "engine.tensorrt_llm.options.kv_cache_config.host_cache_size"
    assert finding(conversion, "tensorrt_llm", what) == (Outcome.CARRIED, f"{place}: 1024")
    outcome, text = finding(conversion, "tensorrt_llm", "parameters.batch_scheduler_policy")
    assert (outcome, text.rpartition(": ")[2]) == (Outcome.CARRIED, "MAX_UTILIZATION")


def test_modes_of_the_executor_are_replaced(tmp_path: Path) -> None:
    directory = repository(
        tmp_path / "models", "0,1;2,3", 2, {"participant_ids": "1,2;3,4", "num_nodes": "2"}
    )
    conversion = convert(directory)
    for name in ("participant_ids", "executor_worker_path"):
        outcome, text = finding(conversion, "tensorrt_llm", f"parameters.{name}")
        assert (outcome, "starts its ranks itself" in text) == (Outcome.REPLACED, True)
    outcome, text = finding(conversion, "tensorrt_llm", "parameters.num_nodes")
    assert (outcome, "docs/parallel.md" in text) == (Outcome.UNSUPPORTED, True)


def test_halves_are_workers_of_a_role_on_their_gpus(tmp_path: Path) -> None:
    directory = disaggregated(tmp_path / "models")
    replace(directory, "context", 'string_value: "0"', 'string_value: "0,1"')
    replace(directory, "generation", 'string_value: "1"', 'string_value: "2,3;4,5"')
    mesh = convert(directory).sections["mesh"]
    assert (mesh["prefill"], mesh["decode"]) == (1, 2)
    assert mesh["devices"] == {"demo": ["cuda:0,cuda:1", "cuda:2,cuda:3", "cuda:4,cuda:5"]}


def test_models_of_other_sizes_cannot_share_a_stack(tmp_path: Path) -> None:
    one, two = copy_of_demo(tmp_path / "one"), copy_of_demo(tmp_path / "two")
    directory = five_models(tmp_path / "models", {"gpu_device_ids": "0,1"})
    five_models(directory, {"engine_dir": "/other", "gpu_device_ids": "2"}, suffix="_b")
    conversion = convert(directory, tensorrt_llm=one, tensorrt_llm_b=two)
    assert conversion.sections["mesh"]["devices"] == {"one": ["cuda:0,cuda:1"], "two": ["cuda:2"]}
    what = "tensor parallelism, by the GPUs of an instance"
    outcome, text = finding(conversion, "tensorrt_llm_b", what)
    assert outcome is Outcome.UNSUPPORTED
    assert "is 2 for model 'tensorrt_llm', and all engines of a stack share it" in text


def test_device_is_for_the_embedded_engine(tmp_path: Path) -> None:
    directory = repository(tmp_path / "models", "0")
    with pytest.raises(SettingsError, match="--device cuda:0 is for the embedded engine"):
        convert_repository(directory, {}, "cuda:0", backend="tensorrt_llm")
