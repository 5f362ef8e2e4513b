"""The trial at load finds every number of rows whose products are added up in another order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.compute.summation_order import cancelling_trial
from trtmesh.engine.backends.torch.cpu.invariance import TILE_ROWS, agreeing_sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 64), (64, 8), (8, 64), (65, 3), (1024, 16))
"""Inputs and outputs."""


def added(rows: Tensor, matrix: Tensor, *, backwards: bool) -> Tensor:
    """A product that adds one input after another in float32."""
    terms = rows.float()[:, None, :] * matrix.float()[None]
    ordered = terms.flip(-1) if backwards else terms
    total = torch.zeros(ordered.shape[:-1])
    for place in range(ordered.shape[-1]):
        total = total + ordered[..., place]
    return total.to(rows.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_numbers_of_rows_with_another_order_are_left_out(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    rows, matrix = cancelling_trial(TILE_ROWS, inputs, outputs, dtype)

    def product(tile: Tensor) -> Tensor:
        return added(tile, matrix, backwards=len(tile) in (2, 8))

    assert agreeing_sizes(product, rows) == [1, 4, 16, TILE_ROWS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_that_depend_on_the_place_of_a_row_are_refused(dtype: torch.dtype) -> None:
    rows, matrix = cancelling_trial(TILE_ROWS, 64, 8, dtype)

    def product(tile: Tensor) -> Tensor:
        first = added(tile[:1], matrix, backwards=True)
        return torch.cat((first, added(tile[1:], matrix, backwards=False)))

    with pytest.raises(ModelUnusable, match="place of a row"):
        agreeing_sizes(product, rows)
