"""Linear layers as a CPU multiplies them fastest.

PyTorch hands a plain float32 weight to a BLAS that packs it anew in every call, which costs as much as the product
when a step has few tokens. Weights that are packed once, in oneDNN's layout, are 1.2 to 1.8 times as fast for up to
32 tokens and as fast beyond. A call of oneDNN costs some 30 microseconds whatever it multiplies, though, so small
weights are left to BLAS, transposed, which suits it best. Half precision is the opposite: on a CPU without instructions
for it every element is converted in every call, which only pays while a weight is read for one or two tokens; beyond
that a packed float32 copy is up to seven times as fast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

SMALL_WEIGHT = 2**18
"""Most elements of a weight that a product by BLAS is over sooner with than oneDNN would begin."""
HALF_TOKENS = 2
"""Most tokens for which a half-precision weight is read as it is."""


def pack_linears(model: nn.Module, *, copies: bool) -> None:
    """Replaces the linear layers of a model on a CPU, except where their types have nothing to gain.

    Float32 weights are laid out anew. Half-precision ones are kept and get a float32 copy beside them if `copies`.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    half = _make_half if copies else None
    makers: dict[torch.dtype, Callable[[Tensor, Tensor | None], nn.Module] | None] = {
        torch.float32: float32_linear,
        torch.bfloat16: NativeLinear if torch.ops.mkldnn._is_mkldnn_bf16_supported() else half,
        torch.float16: None if torch.ops.mkldnn._is_mkldnn_fp16_supported() else half,
    }
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses may compute something else.
            if type(child) is nn.Linear:
                weight = child.weight
            elif type(child) is Conv1D:
                weight = child.weight.t()
            else:
                continue
            make = makers.get(weight.dtype)
            if make:
                setattr(parent, name, make(weight.detach(), child.bias))


def float32_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The layer that is the fastest for a weight [out_features, in_features] of this size."""
    return (TransposedLinear if weight.numel() <= SMALL_WEIGHT else PackedLinear)(weight, bias)


class TransposedLinear(nn.Module):
    """A float32 linear layer that holds its weight as [in_features, out_features] in memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.t().contiguous().t()
        self.bias = bias

    def forward(self, tokens: Tensor) -> Tensor:
        return linear(tokens, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A float32 linear layer that holds its weight in oneDNN's layout alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        # Not a buffer: nothing but the product can be done with its layout.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def weight(self) -> Tensor:
        """Shape and type for code that asks for them; no one gets to multiply with it unnoticed."""
        return torch.full((1,), torch.nan).expand(self.out_features, self.in_features)

    def forward(self, tokens: Tensor) -> Tensor:
        product: Tensor = self._multiply(tokens, self._packed, self.bias, "none", [], "")
        return product


class HalfLinear(nn.Module):
    """A half-precision linear layer with a packed float32 copy for more than HALF_TOKENS tokens."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.contiguous()
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._wide = float32_linear(weight.float(), None if bias is None else bias.float())

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.numel() <= HALF_TOKENS * self.in_features:
            return linear(tokens, self.weight, self.bias)
        product: Tensor = self._wide(tokens.float())
        return product.to(tokens.dtype)


class NativeLinear(nn.Module):
    """A bfloat16 linear layer of a CPU that has instructions for it; one token is a product of matrix and vector."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.contiguous()
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.numel() > self.in_features:
            return linear(tokens, self.weight, self.bias)
        vector = tokens.reshape(-1)
        product = torch.mv(self.weight, vector)
        if self.bias is not None:
            product += self.bias
        return product.view(*tokens.shape[:-1], -1)


def _make_half(weight: Tensor, bias: Tensor | None) -> nn.Module:
    return HalfLinear(weight, bias)
