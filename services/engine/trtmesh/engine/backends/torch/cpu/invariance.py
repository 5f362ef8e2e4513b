"""Layers without influence of other tokens in the batch on the result for a token, to the last bit. The shape of the
operands decides in which order a kernel adds up, and some functions are computed differently in whole vectors and in
the rest. So each layer only ever sees shapes with the same bits in a trial at load.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import activations
from transformers.pytorch_utils import Conv1D
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.compute.slot_by_slot import SlotBySlot
from trtmesh.engine.backends.torch.compute.summation_order import cancelling_trial
from trtmesh.engine.backends.torch.cpu.linears import (
    HalfLinear,
    NativeLinear,
    PackedLinear,
    TransposedLinear,
)
from trtmesh.engine.backends.torch.model.fusing import replace_layers
from trtmesh.engine.backends.torch.model.lora_layers import UpdateTable

TILE_ROWS = 32
"""Most rows of a product."""
VECTOR = 64
"""A multiple of the elements computed at once by any CPU."""
UNSHARED = 2**15
"""From so many elements on, PyTorch shares an operation among threads."""

LINEARS = (nn.Linear, Conv1D, TransposedLinear, PackedLinear, HalfLinear, NativeLinear)
Product = Callable[[Tensor], Tensor]
"""Of rows with a matrix."""

ACTIVATIONS = (activations.__name__, nn.modules.activation.__name__)


def make_invariant(model: nn.Module, dtype: torch.dtype) -> None:
    """Wraps the layers of a model in `dtype`. Raises ModelUnusable where no shape of a product serves."""
    sizes: dict[tuple[object, ...], list[int]] = {}

    def wrapped(own: nn.Module) -> nn.Module | None:
        if type(own) in LINEARS:
            return TiledLinear(own, dtype, sizes)
        return TiledActivation(own) if type(own).__module__ in ACTIVATIONS else None

    replace_layers(model, wrapped)


class TiledLinear(nn.Module):
    """A linear layer for rows in tiles."""

    def __init__(
        self, layer: nn.Module, dtype: torch.dtype, sizes: dict[tuple[object, ...], list[int]]
    ) -> None:
        """`sizes` are the results of trials, by the shape of the layer."""
        super().__init__()
        self.layer = layer
        weight: Tensor = self.weight
        kind = (type(layer), tuple(weight.shape), weight.dtype)
        self.in_features = int(weight.shape[0 if isinstance(layer, Conv1D) else 1])
        if kind not in sizes:
            sizes[kind] = _agreeing_sizes_of(layer, dtype)
        self._sizes = sizes[kind]

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.layer.weight  # type: ignore[assignment]  # each of LINEARS has one
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens.reshape(-1, self.in_features)
        product = tiled(self.layer, rows, self._sizes)
        return product.view(*tokens.shape[:-1], -1)


class TiledProducts(SlotBySlot):
    """The rows of each adapter in tiles."""

    def __init__(self, tables: Iterable[UpdateTable]) -> None:
        super().__init__(torch.device("cpu"))
        self._sizes: dict[tuple[int, ...], list[int]] = {}
        """Of products with the transposed matrix, by shape."""
        for table in tables:
            for matrix in (table.a[0], table.b[0].t()):
                if matrix.shape not in self._sizes:
                    self._sizes[matrix.shape] = _agreeing_sizes_like(matrix)

    def _product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return tiled(lambda tile: linear(tile, matrix), rows, self._sizes[matrix.shape])


def tiled(product: Product, rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """A product of at most TILE_ROWS rows at once, in numbers of rows with equal results."""
    parts = []
    for part in torch.split(rows, TILE_ROWS):
        count = len(part)
        size = next(size for size in sizes if size >= count)
        padded = pad(part, (0, 0, 0, size - count)) if size > count else part
        parts.append(product(padded)[:count])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def agreeing_sizes(product: Product, rows: Tensor) -> list[int]:
    """The numbers of rows with the same bits as all TILE_ROWS of a trial [TILE_ROWS, in_features], in any place."""
    with torch.inference_mode():
        expected = product(rows)

        def agrees(size: int) -> bool:
            places = [torch.arange(first, first + size) for first in range(0, TILE_ROWS, size)]
            places += [each.flip(0) for each in places]
            return all(torch.equal(product(rows[each]), expected[each]) for each in places)

        sizes = [size for size in (1, 2, 4, 8, 16, TILE_ROWS) if agrees(size)]
    if TILE_ROWS not in sizes:
        raise ModelUnusable(
            f"batch_invariant is refused: on this CPU a product of {rows.shape[1]} inputs depends on the place of a row"
        )
    return sizes


def _agreeing_sizes_of(layer: nn.Module, dtype: torch.dtype) -> list[int]:
    """The sizes for a layer in `dtype`.

    Another order of additions shows in most float32 elements. Rounding to half precision hides the difference in all
    but one of 10,000, so the trial has a weight against rounding.
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]  # each of LINEARS has one
    inputs, outputs = weight.shape if isinstance(layer, Conv1D) else reversed(weight.shape)
    rows, matrix = cancelling_trial(TILE_ROWS, inputs, outputs, dtype)
    if dtype == torch.float32:
        return agreeing_sizes(layer, rows)
    tried: Any = copy.deepcopy(layer)
    with torch.no_grad():
        tried.weight.copy_(matrix.t() if isinstance(layer, Conv1D) else matrix)
        if tried.bias is not None:
            tried.bias.zero_()
    return agreeing_sizes(tried, rows)


def _agreeing_sizes_like(like: Tensor) -> list[int]:
    """The sizes for a matrix [out_features, in_features] with the shape and layout of `like`."""
    rows, matrix = cancelling_trial(TILE_ROWS, like.shape[1], like.shape[0], like.dtype)
    laid_out = torch.empty_like(like).copy_(matrix)
    return agreeing_sizes(lambda tile: linear(tile, laid_out), rows)


class TiledActivation(nn.Module):
    """A function of single numbers, in whole vectors and by a single thread."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        width = hidden.shape[-1]
        rows = hidden.reshape(-1, width)
        if width % VECTOR:
            rows = pad(rows, (0, -width % VECTOR))
        at_once = max(1, (UNSHARED - 1) // rows.shape[1])
        parts = [self.function(part.contiguous()) for part in torch.split(rows, at_once)]
        result = parts[0] if len(parts) == 1 else torch.cat(parts)
        return result[:, :width].view(hidden.shape)
