"""The linear layers of a model that adapters update: found, and wrapped to add the updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from trtmesh.engine.adapters.lora import PARTS, Module, Place, Target, Update, place_of

Updates = Mapping[Place, Update]
"""The updates of an adapter, in the types and on the device of the layers."""
Rows = slice | Tensor
"""Rows of the flat batch; a tensor of their numbers where they do not lie side by side."""


def lora_targets(model: PreTrainedModel) -> dict[Place, Target]:
    """The targets of a model with the layers of transformers."""
    config: Any = model.config.get_text_config()
    targets = {}
    for name, layer in model.named_modules():
        if type(layer) not in (nn.Linear, Conv1D) or (place := place_of(name)) is None:
            continue
        inputs, outputs = layer.weight.shape if type(layer) is Conv1D else layer.weight.shape[::-1]
        targets[place] = Target(inputs, _parts(place[1], outputs, config))
    return targets


def _parts(module: Module, outputs: int, config: Any) -> tuple[int, ...]:
    if module is Module.MLP_GATE_UP:
        return outputs // 2, outputs // 2
    if module is not Module.ATTN_QKV:
        return (outputs,)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = outputs // (heads + 2 * kv_heads)
    return heads * size, kv_heads * size, kv_heads * size


class StepAdapters:
    """The adapters of the current step; shared by all layers of a model."""

    def __init__(self) -> None:
        self.rows: Sequence[tuple[Rows, Updates]] = ()
        """Rows of the flat batch with their updates; other tokens use the model alone."""


class AdaptedLinear(nn.Module):
    """A linear layer that adds B A x to the tokens with an update: two products per adapter."""

    def __init__(self, own: nn.Module, place: Place, step: StepAdapters) -> None:
        super().__init__()
        self.own = own
        self._place = place
        self._step = step

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.own.weight  # type: ignore[assignment]  # every linear layer has one
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        product: Tensor = self.own(tokens)
        if self._step.rows:
            self._add(tokens, product)
        return product

    def _add(self, tokens: Tensor, product: Tensor) -> None:
        given, output = tokens.flatten(0, -2), product.view(-1, product.shape[-1])
        for rows, updates in self._step.rows:
            if (update := updates.get(self._place)) is None:
                continue
            if isinstance(rows, slice):
                output[rows].addmm_(given[rows] @ update.a.t(), update.b.t())
            else:
                output.index_add_(0, rows, given[rows] @ update.a.t() @ update.b.t())


def adapt_layers(
    model: nn.Module, own: Mapping[Place, Target], step: StepAdapters
) -> dict[Place, Target]:
    """Wraps the layers of a model and returns their targets; `own` are those before a device fused layers."""
    found = {
        place: name
        for name, _ in model.named_modules()
        if (place := place_of(name)) is not None and (place in own or place[1] in PARTS)
    }
    targets = {}
    for place, name in found.items():
        if (target := _target(place, own)) is None:
            continue
        parent, _, leaf = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, leaf, AdaptedLinear(holder.get_submodule(leaf), place, step))
        targets[place] = target
    return targets


def _target(place: Place, own: Mapping[Place, Target]) -> Target | None:
    """The target of a layer, also of one that joins layers of the model."""
    if place in own:
        return own[place]
    parts = [own.get((place[0], part)) for part in PARTS[place[1]]]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Target(known[0].inputs, tuple(part.outputs for part in known))
