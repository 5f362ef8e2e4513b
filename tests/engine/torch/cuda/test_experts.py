"""The kernels of a mixture's experts give what its layers give, and a token the same bits whatever the other tokens."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from engine.torch.cuda.interpreted import Interpreted, add_up_in_order, make_small
from oracle import tiny_models
from torch import Tensor
from trtmesh.engine.backends.torch.compute import self_check
from trtmesh.engine.backends.torch.cuda.device import Cuda
from trtmesh.engine.backends.torch.cuda.experts import KernelExperts
from trtmesh.engine.backends.torch.cuda.invariant_device import InvariantCuda
from trtmesh.engine.backends.torch.cuda.kernels import experts as kernels
from trtmesh.engine.backends.torch.cuda.kernels.experts import experts
from trtmesh.engine.backends.torch.model.model import load_model

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

NEAR = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Rounding, as a share of the largest value."""


@pytest.fixture(autouse=True)
def sums_in_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        add_up_in_order(monkeypatch)


def experts_reference(
    given: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, factors: Tensor
) -> Tensor:
    found = torch.zeros(given.shape, dtype=torch.float64, device=given.device)
    for token, (chosen, own) in enumerate(zip(ids.tolist(), factors.tolist(), strict=True)):
        for expert, factor in zip(chosen, own, strict=True):
            gate, up = (gate_up[expert].double() @ given[token].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            found[token] += factor * (down[expert].double() @ inner)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "chosen", "count", "size", "inner"),
    [(1, 2, 4, 64, 96), (3, 2, 8, 128, 64), (50, 2, 2, 72, 40), (40, 3, 5, 130, 64)],
)
def test_tokens_go_through_their_experts(
    tokens: int,
    chosen: int,
    count: int,
    size: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu":
        # The interpreter multiplies no matrices of bfloat16.
        dtype = torch.float16 if dtype is torch.bfloat16 else dtype
        monkeypatch.setattr(kernels, "LISTED", 32)
    dice = Random(tokens)
    torch.manual_seed(tokens)

    def drawn(*shape: int, over: float = 1) -> Tensor:
        wide = torch.randn(shape, device=device) / math.sqrt(over)
        return wide.to(dtype)

    weights = drawn(count, 2 * inner, size, over=size), drawn(count, size, inner, over=inner)
    given = drawn(tokens, size)
    # No token chooses the last one, where others are enough.
    few = max(chosen, count - 1)
    ids = torch.stack([torch.randperm(few)[:chosen] for _ in range(tokens)]).to(device)
    factors = torch.rand(tokens, chosen, device=device)
    every = experts(given, *weights, ids, factors)
    expected = experts_reference(given, *weights, ids, factors)
    assert (every - expected).abs().amax() <= NEAR[dtype] * expected.abs().amax()
    for some in ([0], [tokens - 1], dice.sample(range(tokens), dice.randrange(1, tokens + 1))):
        assert torch.equal(experts(given[some], *weights, ids[some], factors[some]), every[some])


class OnCpu(Interpreted, Cuda):
    pass


class InvariantOnCpu(Interpreted, InvariantCuda):
    pass


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_model_passes_the_checks_at_load(
    family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if device.type == "cuda":
        pytest.skip("test_batch_invariant.py loads models on a GPU")
    make_small(monkeypatch)
    folder = tiny_models.build(tmp_path, family, num_hidden_layers=1, num_key_value_heads=1)
    for kind in (OnCpu, InvariantOnCpu):
        accelerator = kind(torch.device("cpu"))
        model = load_model(folder, torch.float32, accelerator.name, accelerator.fit)
        assert model.plain
        assert any(isinstance(layer, KernelExperts) for layer in model.module.modules())
        self_check.check_model(model, accelerator)
    self_check.check_invariance(model, accelerator)


def test_many_pairs_go_to_the_replaced_layer(device: torch.device) -> None:
    class Own(torch.nn.Module):
        gate_up_proj = torch.zeros(2, 8, 4, device=device)
        down_proj = torch.zeros(2, 4, 4, device=device)

        def forward(self, hidden: Tensor, _ids: Tensor, _factors: Tensor) -> Tensor:
            return hidden + 1

    given = torch.zeros(3, 4, device=device)
    ids = torch.zeros(3, 1, dtype=torch.int64, device=device)
    few = partial(KernelExperts(Own(), most_pairs=2), given)
    assert few(ids, ids.float()).all()
    assert not KernelExperts(Own(), most_pairs=3)(given, ids, ids.float()).any()
