"""The layers of a model divided among ranks.

A rank keeps some heads of attention and some inner values of the MLP: rows of the weights before and columns of the
weights after these. Both results are then parts of a sum over all ranks, once in attention and once in the MLP. The
embedding, the norms and the head are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.model.fused_layers import FusedAttention, FusedMlp
from trtmesh.engine.backends.torch.model.fusing import has_plain_layers
from trtmesh.engine.backends.torch.parallel.group import RankGroup, RankPlace

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes in the configuration of a model, shared equally by the ranks."""


def divide(model: Any, place: RankPlace) -> None:
    """Keeps the weights of a rank. Raises ModelUnusable for an indivisible model."""
    kind = model.config.model_type
    if not has_plain_layers(model):
        raise ModelUnusable(_refusal(kind))
    for name in DIVIDED:
        size = getattr(model.config, name)
        if size % place.ranks:
            raise ModelUnusable(
                f"names {place.ranks} devices, but the model has {name} {size}, which they cannot share equally;"
                " name fewer",
                setting="engine.torch.device",
            )
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        before = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
        for linear in before:
            _keep_outputs(linear, place)
        for linear in (attention.o_proj, mlp.down_proj):
            _keep_inputs(linear, place)


def add_up(model: Any, group: RankGroup) -> None:
    """Adds up the results of the fused layers of a divided model over the ranks."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if not (isinstance(attention, FusedAttention) and isinstance(mlp, FusedMlp)):
            raise ModelUnusable(_refusal(model.config.model_type))
        # The same layer for both ways of computing attention.
        attention.o_proj = attention.own.o_proj = SummedLinear(attention.o_proj, group)
        mlp.down_proj = SummedLinear(mlp.down_proj, group)


class SummedLinear(nn.Module):
    """A linear layer with inputs divided among the ranks."""

    def __init__(self, own: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.own = own
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        return self.group.add(self.own(tokens))


def _refusal(kind: str) -> str:
    return (
        f"model type {kind} runs on one device: only layers like Llama's are divided among several; name one in"
        " engine.torch.device, or use the backend tensorrt_llm"
    )


def _keep_outputs(linear: nn.Linear, place: RankPlace) -> None:
    part = place.part_of(linear.out_features)
    linear.weight = _kept(linear.weight[part])
    if linear.bias is not None:
        linear.bias = _kept(linear.bias[part])
    linear.out_features = len(linear.weight)


def _keep_inputs(linear: nn.Linear, place: RankPlace) -> None:
    linear.weight = _kept(linear.weight[:, place.part_of(linear.in_features)])
    if place.rank:
        # The sum has the bias once.
        linear.register_parameter("bias", None)
    linear.in_features = linear.weight.shape[1]


def _kept(part: Tensor) -> nn.Parameter:
    """A copy, to free the rest."""
    copy = part.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copy, requires_grad=False)
