"""Engines on the GPUs that a repository names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from cli.triton_import.importing import convert, copy_of_demo, finding
from compat.repository import disaggregated, five_models, replace
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.triton_import import Outcome

HALVES = ("context", "generation")
IDS = "parameters.gpu_device_ids"


def repository(directory: Path, ids: str, count: int = 1) -> Path:
    five_models(directory, {"gpu_device_ids": ids})
    replace(directory, "tensorrt_llm", "count: 1", f"count: {count}")
    return directory


@pytest.mark.parametrize(
    ("ids", "count", "devices"),
    [
        ("2", 1, ["cuda:2"]),
        ("0;1", 2, ["cuda:0", "cuda:1"]),
        ("0;1", 1, ["cuda:0", "cuda:1"]),
        ("3", 2, ["cuda:3", "cuda:3"]),
    ],
)
def test_each_instance_has_an_engine_on_its_gpu(
    tmp_path: Path, ids: str, count: int, devices: list[str]
) -> None:
    conversion = convert(repository(tmp_path / "models", ids, count))
    mesh = conversion.sections["mesh"]
    assert (mesh["devices"], "engines" in mesh) == ({"demo": devices}, False)
    outcome, reason = finding(conversion, "tensorrt_llm", IDS)
    assert outcome is Outcome.CARRIED
    is_shared = len({*devices}) < len(devices)
    assert is_shared == ("cuda:3 has several engines" in reason)
    assert is_shared == ("set engine.torch.kv_cache.bytes" in reason)
    assert "device" not in conversion.sections["engine"]["torch"]


def test_model_over_several_gpus_runs_on_the_first_of_each_instance(tmp_path: Path) -> None:
    conversion = convert(repository(tmp_path / "models", "0,1;2,3", 2))
    assert conversion.sections["mesh"]["devices"] == {"demo": ["cuda:0", "cuda:2"]}
    outcome, reason = finding(conversion, "tensorrt_llm", IDS)
    assert outcome is Outcome.UNSUPPORTED
    assert "cuda:0, cuda:2" in reason
    assert "an entry of mesh.devices may name them, such as cuda:0,cuda:1" in reason


def test_models_have_devices_of_their_own(tmp_path: Path) -> None:
    one, two = copy_of_demo(tmp_path / "one"), copy_of_demo(tmp_path / "two")
    directory = five_models(tmp_path / "models", {"gpu_device_ids": "0"})
    five_models(directory, {"engine_dir": "/other", "gpu_device_ids": "1"}, suffix="_b")
    given = (f"tensorrt_llm={one}", f"tensorrt_llm_b={two}")
    fraction = "parameters.kv_cache_free_gpu_mem_fraction"
    replace(directory, "tensorrt_llm", "${kv_cache_free_gpu_mem_fraction}", "0.4")
    conversion = convert(directory, *given)
    assert conversion.sections["mesh"]["devices"] == {"one": ["cuda:0"], "two": ["cuda:1"]}
    assert finding(conversion, "tensorrt_llm", fraction)[0] is Outcome.CARRIED
    # A share of a GPU's memory is no limit for an engine on a CPU.
    replace(directory, "tensorrt_llm_b", 'string_value: "1"', 'string_value: ""')
    mixed = convert(directory, *given)
    assert mixed.sections["mesh"]["devices"] == {"one": ["cuda:0"]}
    assert finding(mixed, "tensorrt_llm", fraction)[0] is Outcome.REPLACED


def test_triton_models_with_the_same_weights_share_their_engines(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models", {"gpu_device_ids": "0"})
    five_models(directory, {"gpu_device_ids": "0;1"}, suffix="_b")
    mesh = convert(directory).sections["mesh"]
    assert mesh["devices"] == {"demo": ["cuda:0", "cuda:1"]}


def test_device_of_the_command_line_wins(tmp_path: Path) -> None:
    conversion = convert(repository(tmp_path / "models", "0;1", 2), device="cuda:7")
    assert conversion.sections["engine"]["torch"]["device"] == "cuda:7"
    assert conversion.sections["mesh"]["engines"] == 2
    assert "devices" not in conversion.sections["mesh"]
    assert finding(conversion, "tensorrt_llm", IDS) == (Outcome.REPLACED, "--device says cuda:7")


def test_device_of_the_command_line_may_be_an_identity(tmp_path: Path) -> None:
    gpu = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    directory = repository(tmp_path / "models", "")
    replace(directory, "tensorrt_llm", "${kv_cache_free_gpu_mem_fraction}", "0.4")
    conversion = convert(directory, device=gpu)
    assert conversion.sections["engine"]["torch"]["device"] == gpu
    fraction = finding(conversion, "tensorrt_llm", "parameters.kv_cache_free_gpu_mem_fraction")
    assert fraction[0] is Outcome.CARRIED


@pytest.mark.parametrize("device", ["gpu0", "0", "cuda:0,cuda:1"])
def test_wrong_device_of_the_command_line_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(SettingsError, match=f"--device is '{device}' but must be auto"):
        convert(repository(tmp_path / "models", ""), device=device)


def test_instances_without_gpus_are_engines(tmp_path: Path) -> None:
    conversion = convert(repository(tmp_path / "models", "", 2))
    assert conversion.sections["mesh"]["engines"] == 2


@pytest.mark.parametrize("ids", ["gpu0", "0,", "-1", "0;;1"])
def test_wrong_gpu_ids_are_refused(tmp_path: Path, ids: str) -> None:
    with pytest.raises(SettingsError, match=r"gpu_device_ids is .* but must be numbers of GPUs"):
        convert(repository(tmp_path / "models", ids))


def halves(directory: Path, **gpus: str) -> Path:
    """A disaggregated repository with the halves on these GPUs."""
    disaggregated(directory)
    for half, (old, new) in {n: (str(i), gpus.get(n, "")) for i, n in enumerate(HALVES)}.items():
        replace(directory, half, f'string_value: "{old}"', f'string_value: "{new}"')
    return directory


@pytest.mark.parametrize(
    ("context", "generation", "expected"),
    [
        ("0", "1;2", {"prefill": 1, "decode": 2, "devices": {"demo": ["cuda:0", "cuda:1", "cuda:2"]}}),
        ("2;0", "0", {"prefill": 2, "decode": 1, "devices": {"demo": ["cuda:2", "cuda:0", "cuda:0"]}}),
        ("", "", {"prefill": 1, "decode": 1}),
        # An engine without a GPU of its own would run on the CPU.
        ("0", "", {"devices": {"demo": ["cuda:0"]}}),
    ],
)  # fmt: skip
def test_halves_are_engines_of_a_role(
    tmp_path: Path, context: str, generation: str, expected: Mapping[str, object]
) -> None:
    conversion = convert(halves(tmp_path / "models", context=context, generation=generation))
    mesh = dict(conversion.sections["mesh"])
    del mesh["model"]
    assert mesh == expected
    outcome, text = finding(
        conversion, "disaggregated_serving_bls", "parameters.context_model_name"
    )
    assert (outcome is Outcome.CARRIED) is ("prefill" in expected)
    assert ("mesh.prefill" in text) is ("prefill" in expected)


def test_other_models_share_the_engines_of_halves(tmp_path: Path) -> None:
    directory = halves(tmp_path / "models", context="0", generation="1")
    five_models(directory, {"gpu_device_ids": "1;3"}, suffix="_b")
    mesh = convert(directory).sections["mesh"]
    assert (mesh["prefill"], mesh["decode"]) == (1, 1)
    assert mesh["devices"] == {"demo": ["cuda:0", "cuda:1", "cuda:3"]}
    assert "engines" not in mesh


def test_roles_need_halves_and_a_single_model(tmp_path: Path) -> None:
    one, two = copy_of_demo(tmp_path / "one"), copy_of_demo(tmp_path / "two")
    directory = halves(tmp_path / "models", context="0", generation="1")
    five_models(directory, {"engine_dir": "/other", "gpu_device_ids": "2"}, suffix="_b")
    given = (f"context={one}", f"generation={one}", f"tensorrt_llm_b={two}")
    mesh = convert(directory, *given).sections["mesh"]
    assert not {"prefill", "decode"} & mesh.keys()
    same = halves(tmp_path / "same", context="0", generation="1")
    replace(same, "disaggregated_serving_bls", '"context"', '"generation"')
    assert not {"prefill", "decode"} & convert(same).sections["mesh"].keys()
