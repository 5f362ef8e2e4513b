"""Products of few rows, with norm, activation and sum, give what the reference gives."""

from __future__ import annotations

from random import Random

import pytest
import torch
from engine.torch.cuda.references import product_reference
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.layers import Scale
from trtmesh.engine.backends.torch.cuda.kernels.products import FewRows, shares

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

CLOSE = 1e-2
"""Rounding of half precision, as a share of the largest value."""


def close(got: Tensor, expected: Tensor) -> bool:
    difference = (got.double() - expected.double()).abs().amax()
    # Refuses NaN too.
    return bool(difference <= CLOSE * expected.double().abs().amax())


@pytest.fixture
def few(device: torch.device) -> FewRows:
    return FewRows(device)


def randn(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "size"), [(128, 128), (70, 200), (12, 20_000)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_one_row(
    outputs: int,
    size: int,
    gated: bool,
    scaled: bool,
    dtype: torch.dtype,
    device: torch.device,
    few: FewRows,
) -> None:
    given = randn(1, size, device=device, dtype=dtype)
    weight = randn(outputs, size, device=device, dtype=dtype) / size**0.5
    scale = Scale(torch.linspace(0.5, 2, size, device=device), 1e-5) if scaled else None
    added = randn(1, outputs // 2 if gated else outputs, device=device, dtype=dtype)
    assert few.takes(given, weight)
    for more in (None, added):
        got = few.product(given, weight, scale=scale, added=more, gated=gated)
        expected = product_reference(given, weight, scale=scale, added=more, gated=gated)
        assert close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 16, 17, 64])
@pytest.mark.parametrize(("outputs", "size"), [(128, 128), (256, 2048)])
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows(
    rows: int,
    outputs: int,
    size: int,
    gated: bool,
    dtype: torch.dtype,
    device: torch.device,
    few: FewRows,
) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        dtype = torch.float16  # the interpreter multiplies no matrices of bfloat16
    given = randn(rows, size, device=device, dtype=dtype)
    weight = randn(outputs, size, device=device, dtype=dtype) / size**0.5
    added = randn(rows, outputs // 2 if gated else outputs, device=device, dtype=dtype)
    assert few.takes(given, weight)
    for more in (None, added):
        got = few.product(given, weight, added=more, gated=gated)
        assert close(got, product_reference(given, weight, added=more, gated=gated))
        assert not few._done.any(), "the next launch would add up too early"
    # The same in any order of the programs.
    assert torch.equal(got, few.product(given, weight, added=added, gated=gated))


@pytest.mark.parametrize("seed", range(12))
def test_products_of_random_shapes(seed: int, device: torch.device, few: FewRows) -> None:
    dice = Random(seed)
    # One row takes any shape.
    rows = dice.choice([1, dice.randint(2, 64)])
    outputs = 2 * dice.randint(1, 300) if rows == 1 else 128 * dice.randint(1, 5)
    size = dice.randint(8, 5000) if rows == 1 else 128 * dice.randint(1, 20)
    # 16-bit floats: aligned rows alone are read.
    size -= size % 8
    given = randn(rows, size, device=device, dtype=torch.float16)
    weight = randn(outputs, size, device=device, dtype=torch.float16) / size**0.5
    gated = dice.random() < 0.5
    added = randn(rows, outputs // 2 if gated else outputs, device=device, dtype=torch.float16)
    assert few.takes(given, weight)
    got = few.product(given, weight, added=added, gated=gated)
    assert close(got, product_reference(given, weight, added=added, gated=gated))


def test_other_shapes_are_left_to_others(device: torch.device, few: FewRows) -> None:
    given = randn(2, 128, device=device, dtype=torch.bfloat16)
    weight = randn(128, 128, device=device, dtype=torch.bfloat16)
    assert few.takes(given, weight)
    more = given[:1].expand(65, 128)
    assert not few.takes(more, weight)
    assert not few.takes(more, weight, shrinks=True)
    assert not few.takes(given, weight[:100].contiguous())
    assert not few.takes(given, weight.t())
    assert not few.takes(given.float(), weight.float())


def test_shares_divide_the_inputs() -> None:
    assert shares(32, 2048) == 4
    assert shares(32, 8192) == 4
    assert shares(128, 2048) == 1
    assert shares(48, 2048) == 2
    assert shares(200, 8192) == 1
    assert shares(1, 14336) == 8
    assert shares(1, 640) == 1
