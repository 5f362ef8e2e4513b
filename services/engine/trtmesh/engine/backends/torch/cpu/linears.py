"""Linear layers as a CPU multiplies them fastest.

PyTorch hands a plain float32 weight to a BLAS that packs it anew in every call, which costs as much as the product
when a step has few tokens. Weights that are packed once, in oneDNN's layout, are 1.2 to 1.8 times as fast for up to
32 tokens and as fast beyond. A call of oneDNN costs some 25 microseconds whatever it multiplies, though, so small
weights are left to BLAS, transposed, which suits it best.

A CPU without instructions for half precision converts every element of such a weight in every call, which only pays
while the weight is read for one or two tokens; beyond that a packed float32 copy is up to seven times as fast. So there
half precision is how weights and KV are stored, and everything is computed in float32.
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

Maker = Callable[[Tensor, Tensor | None], nn.Module]


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a model on a CPU by those that compute the same faster."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch gives it no types
        return
    makers: dict[torch.dtype, Maker] = {torch.float32: float32_linear}
    if not lacks_instructions(torch.bfloat16):
        makers[torch.bfloat16] = NativeLinear
    _replace(model, makers)


def lacks_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU converts numbers of `dtype` to compute with them."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in supported and not supported[dtype]()


def widen(model: nn.Module) -> None:
    """Makes a model in half precision compute in float32; its linear layers get float32 copies of their weights, and
    keep the others where those are still faster for few tokens."""
    _replace(model, dict.fromkeys((torch.bfloat16, torch.float16), _wide_linear))
    for module in model.modules():
        if type(module) is nn.Embedding:
            module.register_forward_hook(_to_float32)
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data


def _to_float32(_module: nn.Module, _given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.float()


def _replace(model: nn.Module, makers: dict[torch.dtype, Maker]) -> None:
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
    """A float32 linear layer that reads its weight in half precision for up to HALF_TOKENS tokens, and else from a
    packed float32 copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.contiguous()
        # No parameter, so it stays in half precision too.
        self.bias = None if bias is None else bias.detach()
        self.out_features, self.in_features = weight.shape
        self._wide = float32_linear(weight.float(), None if bias is None else bias.float())

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.numel() <= HALF_TOKENS * self.in_features:
            return linear(tokens.to(self.weight.dtype), self.weight, self.bias).float()
        product: Tensor = self._wide(tokens)
        return product


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


def _wide_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    if weight.numel() <= SMALL_WEIGHT:
        return TransposedLinear(weight.float(), None if bias is None else bias.float())
    return HalfLinear(weight, bias)
