"""Pickles become safetensors with equal tensors, or are refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from engine.torch.model.pickled import GPT2, UNUSABLE, old_layout, sharded, tied
from safetensors.torch import load_file
from torch import Tensor
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.model.pickles import convert


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """Names and shapes of a small gpt2."""
    made = torch.Generator().manual_seed(3)
    shapes = {"wte.weight": (64, 8), "ln_f.weight": (8,)}
    shapes |= {f"h.{layer}.attn.c_attn.weight": (8, 24) for layer in range(2)}
    return {
        f"transformer.{name}": torch.randn(shape, generator=made) for name, shape in shapes.items()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.mark.parametrize("layout", [dict, tied, old_layout])
@pytest.mark.parametrize("zipped", [True, False])
def test_weights_are_equal(
    source: Path,
    target: Path,
    weights: dict[str, Tensor],
    layout: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    zipped: bool,
) -> None:
    content = layout(weights)
    torch.save(content, source / GPT2, _use_new_zipfile_serialization=zipped)
    convert(source, target)
    written = load_file(target / "model.safetensors")
    assert written.keys() == content.keys()
    assert all(torch.equal(written[name], content[name]) for name in content)
    assert [file.name for file in target.iterdir()] == ["model.safetensors"]


def test_shards_get_an_index(source: Path, target: Path, weights: dict[str, Tensor]) -> None:
    convert(sharded(source, weights), target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(target / file)[name], weights[name])


@pytest.mark.parametrize("damage", UNUSABLE)
def test_unusable_weights_are_refused_with_the_reason(
    source: Path, target: Path, weights: dict[str, Tensor], damage: str
) -> None:
    prepare, complaint = UNUSABLE[damage]
    prepare(source, weights)
    with pytest.raises(ModelUnusable) as caught:
        convert(source, target)
    assert complaint in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not (source / "executed").exists()
