"""What ranks cannot share is refused at start, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.short_names import by_short_names
from engine.torch.harness import running
from engine.torch.parallel.followers import followers
from oracle import tiny_models
from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.engine.backends.torch.loading import load_engine
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.parallel.group import RankPlace
from trtmesh.engine.backends.torch.parallel.layers import divide
from trtmesh.engine.backends.torch.settings import TorchSettings

IDENTITY = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("settings", "setting", "problem"),
    [
        ({"device": "cpu,auto"}, "engine.torch.device", "must be different GPUs by number"),
        (
            {"device": f"cuda:0,{IDENTITY}"},
            "engine.torch.device",
            "must be different GPUs by number",
        ),
        ({"device": "cpu,cuda:99"}, "engine.torch.device", "finds . CUDA devices"),
        (
            {"device": "cpu,cpu", "batch_invariant": True},
            "engine.torch.batch_invariant",
            "needs a single device",
        ),
        (
            {"device": "cpu,cpu", "adapters_host_bytes": 2**20},
            "engine.torch.adapters.host_bytes",
            "needs a single device",
        ),
    ],
)
def test_settings(llama: Path, settings: dict[str, Any], setting: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as refused:
        load_engine(llama, weight_files(llama), by_short_names(TorchSettings, **settings))
    assert refused.value.setting == setting


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3", "mixtral", "gpt_oss"])
def test_models_without_known_layers(family: str, tmp_path: Path) -> None:
    model = tiny_models.reference_model(tiny_models.build(tmp_path, family))
    with pytest.raises(ModelUnusable, match="runs on one device"):
        divide(model, RankPlace(0, 2))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "num_attention_heads",
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
        ),
        ("num_key_value_heads", {"num_key_value_heads": 2}),
        ("intermediate_size", {"intermediate_size": 98}),
    ],
)
def test_models_that_do_not_divide(name: str, changes: dict[str, int], tmp_path: Path) -> None:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    folder = tiny_models.build(tmp_path, "llama", **{**shape, **changes})
    with pytest.raises(ModelUnusable, match=f"{name} {changes[name]},"):
        divide(tiny_models.reference_model(folder), RankPlace(0, 4))


async def test_a_refused_start_leaves_no_process(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, "gpt2")
    with pytest.raises(ModelUnusable, match="gpt2 runs on one device"):
        async with running(folder, device="cpu,cpu"):
            pass
    assert followers() == []
