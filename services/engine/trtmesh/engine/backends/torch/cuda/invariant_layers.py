"""Linear layers, and the updates of adapters, without influence of other tokens of a batch on a token's result."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.compute.slot_by_slot import SlotBySlot
from trtmesh.engine.backends.torch.compute.summation_order import cancelling_trial
from trtmesh.engine.backends.torch.cuda.experts import KernelExperts
from trtmesh.engine.backends.torch.cuda.kernels.invariant_products import (
    InvariantProducts,
    shares_of,
)
from trtmesh.engine.backends.torch.cuda.kernels.layers import gated_silu
from trtmesh.engine.backends.torch.cuda.kernels.products import LINES
from trtmesh.engine.backends.torch.model.fusing import fuse_routers, replace_layers
from trtmesh.engine.backends.torch.model.lora_layers import UpdateTable

TRIAL_ROWS = 390
"""More than any but the largest tile is for."""

Kind = tuple[int, int, bool, torch.dtype]


def make_invariant(model: PreTrainedModel, products: InvariantProducts) -> None:
    """Replaces the linear layers of a model. Raises ModelUnusable where other layers multiply, or where a product
    depends on the number of rows."""

    def invariant(own: nn.Module) -> nn.Module | None:
        # Not subclasses: these may compute something else.
        return InvariantLinear(own, products) if type(own) in (nn.Linear, Conv1D) else None

    replace_layers(model, invariant)
    fuse_routers(model, partial(InvariantRouter, products))
    trial = Trial(products)
    for name, layer in model.named_modules():
        if isinstance(layer, (InvariantLinear, InvariantRouter)):
            trial.check(layer.matrix)
        elif not isinstance(layer, (nn.Embedding, KernelExperts)) and _multiplies(layer):
            raise ModelUnusable(
                f"batch_invariant is refused: {name} of model type {model.config.model_type} multiplies with weights of"
                " its own, in an order that may depend on the batch"
            )


class InvariantLinear(nn.Module):
    """A linear layer with the same order of additions in a row for any other rows."""

    def __init__(self, own: nn.Module, products: InvariantProducts) -> None:
        super().__init__()
        assert isinstance(own, (nn.Linear, Conv1D))
        self.weight: Tensor = own.weight
        self.bias: Tensor | None = own.bias
        self._is_transposed = isinstance(own, Conv1D)
        self._products = products

    @property
    def matrix(self) -> Tensor:
        """[outputs, inputs]"""
        return self.weight.t() if self._is_transposed else self.weight

    def forward(self, tokens: Tensor) -> Tensor:
        matrix = self.matrix
        rows = tokens.reshape(-1, matrix.shape[1])
        product = self._products.product(rows, matrix, self.bias)
        return product.view(*tokens.shape[:-1], len(matrix))


class InvariantRouter(nn.Module):
    """Chooses the experts of tokens, with their factors."""

    def __init__(self, products: InvariantProducts, own: Any) -> None:
        super().__init__()
        self.matrix: Tensor = own.weight
        self._products = products
        self._chosen: int = own.top_k
        self._norms: bool = getattr(own, "norm_topk_prob", True)
        # Mixtral's are float32.
        self._dtype = own.weight.dtype if hasattr(own, "norm_topk_prob") else torch.float32

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, factors and experts."""
        logits = self._products.product(hidden.reshape(-1, self.matrix.shape[1]), self.matrix)
        factors, ids = logits.softmax(-1, torch.float32).topk(self._chosen, -1)
        if self._norms:
            # In order: a sum of PyTorch may depend on the number of rows.
            total = factors[:, :1]
            for place in range(1, self._chosen):
                total = total + factors[:, place : place + 1]
            factors = factors / total
        return logits, factors.to(self._dtype), ids


class InvariantLayerProducts:
    """Implements ProductsOfLayers: sums and activations come with the products, rounded as by operations of their
    own, so a layer with adapters gives the same bits to tokens without one."""

    def __init__(self, products: InvariantProducts) -> None:
        self._products = products

    def of_norm(
        self, hidden: Tensor, before: nn.Module, linear: nn.Module, *, gated: bool = False
    ) -> Tensor:
        given = before(hidden)
        if not gated:
            product: Tensor = linear(given)
            return product
        if not isinstance(linear, InvariantLinear):
            return gated_silu(linear(given))
        return self._products.product(given, linear.matrix, linear.bias, gated=True)

    def sum(self, hidden: Tensor, given: Tensor, linear: nn.Module) -> Tensor:
        if not isinstance(linear, InvariantLinear):
            output: Tensor = hidden + linear(given)
            return output
        return self._products.product(given, linear.matrix, linear.bias, added=hidden)


class InvariantUpdates(SlotBySlot):
    """The rows of each adapter by the products of the layers."""

    def __init__(self, products: InvariantProducts, tables: list[UpdateTable]) -> None:
        super().__init__(tables[0].a.device)
        self._products = products
        trial = Trial(products)
        for table in tables:
            trial.check(table.a[0])
            trial.check(table.b[0].t())

    def _product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return self._products.product(rows, matrix)


class Trial:
    """Compares the bits of rows alone and among others, once for each kind of product. Half precision hides most
    differences, so the trial's products cancel to the rounding errors."""

    def __init__(self, products: InvariantProducts) -> None:
        self._products = products
        self._checked: set[Kind] = set()

    def check(self, matrix: Tensor) -> None:
        """Raises ModelUnusable where the bits of a product with matrices like `matrix` [outputs, inputs] differ."""
        inputs, shared = matrix.shape[1], shares_of(matrix)
        kind = (inputs, shared, matrix.stride(1) == 1, matrix.dtype)
        if kind in self._checked:
            return
        self._checked.add(kind)
        given, cancelling = (
            each.to(matrix.device)
            for each in cancelling_trial(TRIAL_ROWS, inputs, LINES, matrix.dtype)
        )
        like = cancelling if matrix.stride(1) == 1 else cancelling.t().contiguous().t()

        def product(places: Tensor) -> Tensor:
            return self._products.product(given[places], like, shared=shared)

        every = torch.arange(TRIAL_ROWS, device=matrix.device)
        expected = product(every)
        parts = [every[:1], every[-1:], every[3:23], every[60:100], every[60:140], every.flip(0)]
        if not all(torch.equal(product(places), expected[places]) for places in parts):
            raise ModelUnusable(
                f"batch_invariant is refused: on {matrix.device}, the rows of a product of {inputs} inputs depend on"
                " each other"
            )


def _multiplies(layer: nn.Module) -> bool:
    return any(each.dim() > 1 for each in layer.parameters(recurse=False))
