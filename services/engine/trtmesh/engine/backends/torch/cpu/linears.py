"""The fastest linear layers for a CPU.

PyTorch's BLAS packs a float32 weight anew in every call, at the cost of a product when a step has few tokens. Weights
packed once, in oneDNN's layout, are 1.2 to 1.8 times as fast for up to 32 tokens and as fast beyond. But every call of
oneDNN costs some 25 microseconds, so small weights stay with BLAS, in the transposed layout best for BLAS.

A CPU without instructions for half precision converts every element of a weight in every call. For one or two tokens
this still pays; beyond, a packed float32 copy is up to seven times as fast. On such a CPU, weights and KV are stored in
half precision and all is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D
from trtmesh.engine.backends.torch.model.fusing import replace_layers

SMALL_WEIGHT = 2**18
"""Up to so many elements of a weight, BLAS multiplies faster than oneDNN."""
HALF_TOKENS = 2
"""Up to so many tokens, a half-precision weight is read directly."""

Maker = Callable[[Tensor, Tensor | None], nn.Module]


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a model by faster equivalents."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch gives it no types
        return
    makers: dict[torch.dtype, Maker] = {torch.float32: float32_linear}
    if not lacks_instructions(torch.bfloat16):
        makers[torch.bfloat16] = NativeLinear
    _replace_linears(model, makers)


def lacks_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU must convert `dtype` to compute with it."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in supported and not supported[dtype]()


def widen(model: nn.Module) -> None:
    """Makes a half-precision model compute in float32. Linear layers get float32 copies of the weights, and keep the
    originals where faster for few tokens."""
    _replace_linears(model, dict.fromkeys((torch.bfloat16, torch.float16), _wide_linear))
    for module in model.modules():
        if type(module) is nn.Embedding:
            module.register_forward_hook(_to_float32)
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data


def _to_float32(_module: nn.Module, _given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.float()


def _replace_linears(model: nn.Module, makers: dict[torch.dtype, Maker]) -> None:
    def faster(own: nn.Module) -> nn.Module | None:
        # Not subclasses: these may compute something else.
        if type(own) is nn.Linear:
            weight = own.weight
        elif type(own) is Conv1D:
            weight = own.weight.t()
        else:
            return None
        make = makers.get(weight.dtype)
        return make(weight.detach(), own.bias) if make else None

    replace_layers(model, faster)


def float32_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The fastest layer for a weight [out_features, in_features] of this size."""
    return (TransposedLinear if weight.numel() <= SMALL_WEIGHT else PackedLinear)(weight, bias)


class TransposedLinear(nn.Module):
    """A float32 linear layer with the weight as [in_features, out_features] in memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.t().contiguous().t()
        self.bias = bias

    def forward(self, tokens: Tensor) -> Tensor:
        return linear(tokens, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A float32 linear layer with the weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        # Not a buffer: the layout is only good for the product.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def weight(self) -> Tensor:
        """Only shape and type are real; a product with NaN does not go unnoticed."""
        return torch.full((1,), torch.nan).expand(self.out_features, self.in_features)

    def forward(self, tokens: Tensor) -> Tensor:
        product: Tensor = self._multiply(tokens, self._packed, self.bias, "none", [], "")
        return product


class HalfLinear(nn.Module):
    """A float32 linear layer with the weight in half precision, used for up to HALF_TOKENS tokens, and as a packed
    float32 copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.contiguous()
        # Not a parameter: stays in half precision too.
        self.bias = None if bias is None else bias.detach()
        self.out_features, self.in_features = weight.shape
        self._wide = float32_linear(weight.float(), None if bias is None else bias.float())

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.numel() <= HALF_TOKENS * self.in_features:
            return linear(tokens.to(self.weight.dtype), self.weight, self.bias).float()
        product: Tensor = self._wide(tokens)
        return product


class NativeLinear(nn.Module):
    """A bfloat16 linear layer for a CPU with bfloat16 instructions; a single token takes a matrix-vector product."""

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
