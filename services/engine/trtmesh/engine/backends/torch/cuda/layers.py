"""Layers of models as kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from trtmesh.engine.backends.torch.cuda.kernels.layers import (
    Scale,
    gated_silu,
    norm,
    norm_heads,
    turn,
)
from trtmesh.engine.backends.torch.cuda.kernels.products import FewRows
from trtmesh.engine.backends.torch.cuda.kernels.updates import (
    Inner,
    Updates,
    expand,
    expand_gated,
    shrink,
)
from trtmesh.engine.backends.torch.cuda.updates import KernelUpdates
from trtmesh.engine.backends.torch.model.attention import Angles
from trtmesh.engine.backends.torch.model.fused_layers import FusedLayer, FusedMlp, Norm, Rotation
from trtmesh.engine.backends.torch.model.lora_layers import AdaptedLinear
from trtmesh.engine.backends.torch.parallel.layers import SummedLinear


class KernelNorm(Norm):
    """For activations of any type."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__(weight, epsilon)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return norm(hidden, self.weight, self._epsilon)

    def added(self, hidden: Tensor, given: Tensor) -> Tensor:
        """The norm of `given`, plus `hidden`."""
        return norm(given, self.weight, self._epsilon, hidden)

    def scale(self) -> Scale:
        return Scale(self.weight, self._epsilon)


class KernelRotation(Rotation):
    """Norms queries and keys, and turns them, in a single operation each."""

    def norm(self, heads: Tensor, queries: int, of_queries: nn.Module, of_keys: nn.Module) -> None:
        if isinstance(of_queries, KernelNorm) and isinstance(of_keys, KernelNorm):
            scale, of_key = of_queries.scale(), of_keys.scale()
            if scale.epsilon == of_key.epsilon:
                norm_heads(heads, queries, scale, of_key)
                return
        super().norm(heads, queries, of_queries, of_keys)

    def turn(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        turn(heads, cos[0], sin[0])


class RotaryTable(nn.Module):
    """Cosines and sines of all positions, found in a single operation instead of computed in seven."""

    def __init__(self, own: nn.Module, positions: int, dtype: torch.dtype) -> None:
        """`own` is the rotary embedding of a model."""
        super().__init__()
        device = next(own.buffers()).device
        like = torch.empty(0, dtype=dtype, device=device)
        cos, sin = own(like, torch.arange(positions, device=device)[None])
        # [positions, 2 * turned dimensions]
        self._table = torch.cat((cos[0], sin[0]), 1)
        self._size = cos.shape[-1]

    def forward(self, _hidden: Tensor, position_ids: Tensor) -> Angles:
        both = torch.nn.functional.embedding(position_ids, self._table)
        return both[..., : self._size], both[..., self._size :]


class KernelMlp(FusedMlp):
    """With an activation on gate and up in place."""

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self.is_silu = "silu" in type(self.act_fn).__name__.lower()

    def gated(self, both: Tensor) -> Tensor:
        return gated_silu(both) if self.is_silu else super().gated(both)


class ProductsOfLayers(Protocol):
    """Linear layers with the norm before, and the activation or sum after."""

    def of_norm(
        self, hidden: Tensor, before: nn.Module, linear: nn.Module, *, gated: bool = False
    ) -> Tensor:
        """linear(before(hidden)); silu(first half of it) * second half where `gated`. `hidden` is [tokens, size]."""

    def sum(self, hidden: Tensor, given: Tensor, linear: nn.Module) -> Tensor:
        """hidden + linear(given); may change `hidden`."""


class LayerProducts:
    """Implements ProductsOfLayers by the fastest computation."""

    def __init__(self, device: torch.device) -> None:
        self._few = FewRows(device)
        untyped: Any = torch.cuda
        self._aside = untyped.Stream(device) if device.type == "cuda" else None

    def of_norm(
        self, hidden: Tensor, before: nn.Module, linear: nn.Module, *, gated: bool = False
    ) -> Tensor:
        own, updates = _own(linear), _updates(linear, len(hidden))
        weight = self._weight_for_few(hidden, own, shrinks=updates is not None)
        if updates:
            return self._updated(hidden, before, own, weight, updates, gated=gated)
        if weight is None:
            output = linear(before(hidden))
            return gated_silu(output) if gated else output
        if len(hidden) == 1 and isinstance(before, KernelNorm):
            return self._few.product(hidden, weight, scale=before.scale(), gated=gated)
        return self._few.product(before(hidden), weight, gated=gated)

    def _updated(
        self,
        hidden: Tensor,
        before: nn.Module,
        own: nn.Module,
        weight: Tensor | None,
        updates: Updates,
        *,
        gated: bool,
    ) -> Tensor:
        """`of_norm` with updates; `weight` is None where no kernel of few rows computes `own`."""
        if weight is not None:
            scale = before.scale() if isinstance(before, KernelNorm) and len(hidden) == 1 else None
            given = hidden if scale else before(hidden)
            output, inner = self._few.product_and_shrink(given, weight, updates, scale=scale)
        else:
            given = before(hidden)
            output, inner = self._beside_shrink(partial(own, given), updates, given)
        # Not where gate and up are a single part, as in Phi-3.
        if gated and len(updates.parts) == 2:
            return expand_gated(updates, inner, output)
        expand(updates, inner, output)
        return gated_silu(output) if gated else output

    def sum(self, hidden: Tensor, given: Tensor, linear: nn.Module) -> Tensor:
        if isinstance(linear, SummedLinear):
            return self._sum_of_ranks(hidden, given, linear)
        if updates := _updates(linear, len(given)):
            weight = self._weight_for_few(given, _own(linear), shrinks=True)
            if weight is not None:
                summed, inner = self._few.product_and_shrink(given, weight, updates, added=hidden)
            else:
                product = partial(self.sum, hidden, given, _own(linear))
                summed, inner = self._beside_shrink(product, updates, given)
            expand(updates, inner, summed)
            return summed
        weight = self._weight_for_few(given, linear)
        if weight is not None:
            return self._few.product(given, weight, added=hidden)
        weight = _plain_weight(linear)
        if weight is not None:
            return hidden.addmm_(given, weight.t())
        output: Tensor = hidden + linear(given)
        return output

    def _beside_shrink(
        self, product: Callable[[], Tensor], updates: Updates, given: Tensor
    ) -> tuple[Tensor, Inner]:
        """The product, and at the same time the result of `shrink` for its rows."""
        if self._aside is None:
            return product(), shrink(updates, given)
        own = torch.cuda.current_stream(given.device)
        self._aside.wait_stream(own)
        output = product()
        with torch.cuda.stream(self._aside):
            inner = shrink(updates, given, aside=True)
        own.wait_stream(self._aside)
        return output, inner

    def _sum_of_ranks(self, hidden: Tensor, given: Tensor, linear: SummedLinear) -> Tensor:
        """The same with the sum over all ranks; the first one's part includes `hidden`."""
        own: Any = linear.own
        if linear.group.place.rank:
            return linear.group.add(self.head(given, own.weight, own.bias))
        return linear.group.add(self.sum(hidden, given, own))

    def head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of [..., tokens, size]."""
        rows = hidden.flatten(0, -2)
        if bias is None and self._few.takes(rows, weight):
            return self._few.product(rows, weight).view(*hidden.shape[:-1], -1)
        return torch.nn.functional.linear(hidden, weight, bias)

    def _weight_for_few(
        self, given: Tensor, linear: nn.Module, *, shrinks: bool = False
    ) -> Tensor | None:
        weight = _plain_weight(linear)
        takes = weight is not None and self._few.takes(given, weight, shrinks=shrinks)
        return weight if takes else None


def _own(linear: nn.Module) -> nn.Module:
    """The layer without updates."""
    return linear.own if isinstance(linear, AdaptedLinear) else linear


def _updates(linear: nn.Module, rows: int) -> Updates | None:
    """The updates of a layer with adapters, in a step with so many rows."""
    if not isinstance(linear, AdaptedLinear):
        return None
    assert isinstance(linear.products, KernelUpdates)
    return linear.products.of(linear.parts, rows)


def _plain_weight(linear: nn.Module) -> Tensor | None:
    """The weight of a plain layer, without the updates of adapters."""
    untyped: Any = linear
    return untyped.weight if type(linear) is nn.Linear and untyped.bias is None else None


class KernelLayer(FusedLayer):
    """Computes sums and activations with the products."""

    def __init__(self, products: ProductsOfLayers, own: Any) -> None:
        super().__init__(own)
        self._products = products
        self._same = nn.Identity()

    def attend(self, hidden: Tensor, angles: Angles) -> Tensor:
        attention = self.self_attn
        qkv = self._products.of_norm(hidden, self.input_layernorm, attention.qkv)
        attended: Tensor = attention.attended(qkv, angles)
        return attended

    def complete(self, hidden: Tensor, attended: Tensor) -> Tensor:
        mlp, products = self.mlp, self._products
        hidden = self._sum(hidden, attended, self.self_attn.o_proj, self.after_attention)
        if not isinstance(mlp, KernelMlp):
            # Experts want the shape given by transformers.
            output: Tensor = mlp(self.before_mlp(hidden)[None])[0]
            return hidden + (self.after_mlp(output) if self.after_mlp else output)
        both = products.of_norm(hidden, self.before_mlp, mlp.gate_up, gated=mlp.is_silu)
        gated = both if mlp.is_silu else mlp.gated(both)
        return self._sum(hidden, gated, mlp.down_proj, self.after_mlp)

    def _sum(
        self, hidden: Tensor, given: Tensor, linear: nn.Module, norm_after: nn.Module | None
    ) -> Tensor:
        """hidden + linear(given), with a norm of the product if there is one."""
        if norm_after is None:
            return self._products.sum(hidden, given, linear)
        product = self._products.of_norm(given, self._same, linear)
        if isinstance(norm_after, KernelNorm):
            return norm_after.added(hidden, product)
        output: Tensor = hidden + norm_after(product)
        return output


class KernelHead(nn.Module):
    """The linear layer of the logits."""

    def __init__(self, products: LayerProducts, own: nn.Linear) -> None:
        super().__init__()
        self.weight = own.weight
        self.bias = own.bias
        self._products = products

    def forward(self, hidden: Tensor) -> Tensor:
        return self._products.head(hidden, self.weight, self.bias)
