"""Adapters as TensorRT-LLM's arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trtmesh.chassis.errors import InvalidRequest, TrtmeshError, UnsupportedField
from trtmesh.engine.adapters.arrays import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_arrays,
    read_files,
    write_arrays,
    write_files,
)
from trtmesh.engine.adapters.lora import Lora, Module, Place, Target, Update, fit

MOST = 1 << 20
RANK, HIDDEN, INNER = 2, 6, 10
SEPARATE: dict[Place, Target] = {
    (0, Module.ATTN_Q): Target(HIDDEN, (HIDDEN,)),
    (0, Module.ATTN_K): Target(HIDDEN, (4,)),
    (0, Module.ATTN_V): Target(HIDDEN, (4,)),
    (0, Module.MLP_H_TO_4H): Target(HIDDEN, (INNER,)),
    (0, Module.MLP_GATE): Target(HIDDEN, (INNER,)),
}
FUSED: dict[Place, Target] = {
    (0, Module.ATTN_QKV): Target(HIDDEN, (HIDDEN, 4, 4)),
    (0, Module.MLP_GATE_UP): Target(HIDDEN, (INNER, INNER)),
}


def _update(outputs: int, seed: int = 0) -> Update:
    generator = torch.Generator().manual_seed(seed)
    return Update(
        torch.randn(RANK, HIDDEN, generator=generator),
        torch.randn(outputs, RANK, generator=generator),
    )


def same(one: Lora, other: Lora) -> bool:
    """Whether two adapters have equal values of equal types."""
    return one.updates.keys() == other.updates.keys() and all(
        torch.equal(update.a, other.updates[place].a)
        and torch.equal(update.b, other.updates[place].b)
        and update.a.dtype == other.updates[place].a.dtype
        for place, update in one.updates.items()
    )


def _row(update: Update, width: int = 0) -> Tensor:
    row = torch.cat((update.a.flatten(), update.b.flatten()))
    return torch.nn.functional.pad(row, (0, max(0, width - len(row))))[None]


def _config(*rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_rows_are_a_then_scaled_b_then_zeros() -> None:
    q, gate = _update(HIDDEN), _update(INNER, 1)
    lora = Lora({(0, Module.ATTN_Q): q, (0, Module.MLP_H_TO_4H): gate})
    weights, config = write_arrays(lora, torch.float32)
    width = RANK * (HIDDEN + INNER)
    assert config.tolist() == [[1, 0, RANK], [5, 0, RANK]]
    assert torch.equal(weights, torch.cat((_row(q, width), _row(gate))))
    assert same(read_arrays(weights, config, SEPARATE), lora)


def test_fused_gate_and_up_are_stored_up_first() -> None:
    whole = _update(2 * INNER)
    weights, config = write_arrays(Lora({(0, Module.MLP_GATE_UP): whole}), torch.float32)
    swapped = torch.cat((whole.b[INNER:], whole.b[:INNER]))
    assert torch.equal(weights, _row(Update(whole.a, swapped)))
    assert torch.equal(
        read_arrays(weights, config, FUSED).updates[0, Module.MLP_GATE_UP].b, whole.b
    )


@pytest.mark.parametrize("targets", [FUSED, SEPARATE], ids=["fused_model", "separate_model"])
def test_gate_up_under_the_id_of_the_gate(targets: dict[Place, Target]) -> None:
    """hf_lora_convert.py files a fused gate and up projection, halves exchanged, under id 5."""
    whole = _update(2 * INNER)
    row = _row(Update(whole.a, torch.cat((whole.b[INNER:], whole.b[:INNER]))))
    if targets is SEPARATE:
        with pytest.raises(InvalidRequest):
            read_arrays(row, _config((5, 0, RANK)), targets)
        return
    lora = fit(read_arrays(row, _config((5, 0, RANK)), targets), targets)
    assert torch.equal(lora.updates[0, Module.MLP_GATE_UP].b, whole.b)


def test_zeros_for_missing_projections_are_left_out() -> None:
    q = _update(HIDDEN)
    weights = torch.cat((_row(q), torch.zeros(1, RANK * 2 * HIDDEN)))
    lora = read_arrays(weights, _config((1, 0, RANK), (2, 0, RANK)), SEPARATE)
    assert list(lora.updates) == [(0, Module.ATTN_Q)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_files_keep_values_and_type(dtype: torch.dtype, tmp_path: Path) -> None:
    q = _update(HIDDEN)
    lora = Lora({(0, Module.ATTN_Q): Update(q.a.to(dtype), q.b.to(dtype))})
    write_files(lora, tmp_path, dtype)
    assert np.load(tmp_path / WEIGHTS_FILE).shape == (1, 1, RANK * 2 * HIDDEN)
    assert same(read_files(tmp_path, SEPARATE, MOST), lora)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ((16, 0, RANK), "lora_config[0]"),
        ((99, 0, RANK), "lora_config[0]"),
        ((1, 7, RANK), "adapter.layer_7.attn_q"),
        ((1, -1, RANK), "adapter.layer_-1.attn_q"),
        ((1, 0, 0), "adapter.layer_0.attn_q"),
        ((1, 0, -3), "adapter.layer_0.attn_q"),
        ((1, 0, RANK + 1), "adapter.layer_0.attn_q"),
        ((1, 0, 1), "adapter.layer_0.attn_q"),
        ((1, 0, RANK, 1), "lora_config[0]"),
        ((1, 0), "lora_config"),
    ],
    ids=["router", "unknown_id", "layer", "negative_layer", "no_rank", "negative_rank", "more_rank",
         "less_rank", "dora", "two_columns"],
)  # fmt: skip
def test_config_that_does_not_fit_is_refused_by_row(config: tuple[int, ...], field: str) -> None:
    with pytest.raises(TrtmeshError) as refused:
        read_arrays(_row(_update(HIDDEN)), _config(config), SEPARATE)
    assert isinstance(refused.value, InvalidRequest | UnsupportedField)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("weights", "field"),
    [
        (torch.zeros(1, 24), "lora_weights"),
        (torch.ones(2, 24), "lora_weights"),
        (torch.ones(24), "lora_weights"),
        (torch.ones(1, 24).int(), "lora_weights"),
    ],
    ids=["zeros", "rows", "dimensions", "dtype"],
)
def test_weights_that_do_not_fit_are_refused(weights: Tensor, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_arrays(weights, _config((1, 0, RANK)), SEPARATE)
    assert refused.value.field == field


def test_layer_named_twice_is_refused() -> None:
    row = _row(_update(HIDDEN))
    with pytest.raises(InvalidRequest) as refused:
        read_arrays(torch.cat((row, row)), _config((1, 0, RANK), (1, 0, RANK)), SEPARATE)
    assert refused.value.field == "lora_config[1]"


def test_files_are_never_unpickled(tmp_path: Path) -> None:
    write_files(Lora({(0, Module.ATTN_Q): _update(HIDDEN)}), tmp_path, torch.float32)
    np.save(tmp_path / CONFIG_FILE, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidRequest) as refused:
        read_files(tmp_path, SEPARATE, MOST)
    assert refused.value.field == str(tmp_path / CONFIG_FILE)


def test_torn_and_huge_files_are_refused_by_name(tmp_path: Path) -> None:
    write_files(Lora({(0, Module.ATTN_Q): _update(HIDDEN)}), tmp_path, torch.float32)
    file = tmp_path / WEIGHTS_FILE
    with pytest.raises(InvalidRequest) as huge:
        read_files(tmp_path, SEPARATE, 100)
    assert huge.value.limit == "at most 100 bytes"
    assert str(tmp_path) in huge.value.problem
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InvalidRequest) as torn:
        read_files(tmp_path, SEPARATE, MOST)
    assert torn.value.field == str(file)


@pytest.mark.parametrize(
    "shape", [f"({2**70},)", "(True, 16)", "(-1, 16)", "(0, 2**64)", "(16.0,)", "((16,),)", "16"]
)
@pytest.mark.parametrize(
    "header", ["{{'descr': '<f4', 'fortran_order': False, 'shape': {}, }}", "{{({}"]
)
def test_headers_of_no_array_are_refused_by_name(shape: str, header: str, tmp_path: Path) -> None:
    write_files(Lora({(0, Module.ATTN_Q): _update(HIDDEN)}), tmp_path, torch.float32)
    text = header.format(shape).encode() + b"\n"
    file = tmp_path / WEIGHTS_FILE
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    with pytest.raises(InvalidRequest) as refused:
        read_files(tmp_path, SEPARATE, MOST)
    assert refused.value.field == str(file)
