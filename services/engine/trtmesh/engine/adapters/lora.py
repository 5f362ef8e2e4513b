"""A LoRA adapter in memory: low-rank updates of a model's linear layers.

A layer with weight W [out, in] and an update of rank r computes W x + B A x, with A [r, in] and B [out, r]. The scale
of the adapter (alpha / r, with rsLoRA alpha / sqrt(r)) is part of B.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad
from trtmesh.chassis.errors import InvalidRequest

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Module(IntEnum):
    """The linear layers of a decoder layer, by TensorRT-LLM's module ids.

    Its names are those of a plain MLP: with a gate, `MLP_H_TO_4H` is the gate and `MLP_GATE` the up projection.
    """

    ATTN_QKV = 0
    ATTN_Q = 1
    ATTN_K = 2
    ATTN_V = 3
    ATTN_DENSE = 4
    MLP_H_TO_4H = 5
    MLP_4H_TO_H = 6
    MLP_GATE = 7
    MLP_GATE_UP = 18
    """Gate and up projection in one layer, in this order."""


QKV = (Module.ATTN_Q, Module.ATTN_K, Module.ATTN_V)
GATE_UP = (Module.MLP_H_TO_4H, Module.MLP_GATE)
PARTS = {Module.ATTN_QKV: QKV, Module.MLP_GATE_UP: GATE_UP}
"""The layers that a fused layer joins, in the order of its outputs."""

MODULE_BY_NAME = {
    "q_proj": Module.ATTN_Q,
    "k_proj": Module.ATTN_K,
    "v_proj": Module.ATTN_V,
    "qkv_proj": Module.ATTN_QKV,
    "qkv": Module.ATTN_QKV,
    "c_attn": Module.ATTN_QKV,
    "o_proj": Module.ATTN_DENSE,
    "attn.c_proj": Module.ATTN_DENSE,
    "gate_proj": Module.MLP_H_TO_4H,
    "c_fc": Module.MLP_H_TO_4H,
    "up_proj": Module.MLP_GATE,
    "down_proj": Module.MLP_4H_TO_H,
    "mlp.c_proj": Module.MLP_4H_TO_H,
    "gate_up_proj": Module.MLP_GATE_UP,
    "gate_up": Module.MLP_GATE_UP,
}
"""By the name of the layer in transformers or here, with the name of its parent where that alone tells layers apart."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.([a-z_]+)\.([a-z_]+)$")

Place = tuple[int, Module]
"""A linear layer by the number of its decoder layer and its kind."""


@dataclass(frozen=True, slots=True)
class Target:
    """Sizes of a linear layer of the model."""

    inputs: int
    parts: tuple[int, ...]
    """The outputs of each part of a fused layer; a single number otherwise."""

    @property
    def outputs(self) -> int:
        return sum(self.parts)


def place_of(name: str) -> Place | None:
    """The place of a linear layer by its name in transformers; None for a layer without a kind here."""
    if (found := _LAYER.search(name)) is None:
        return None
    layer, parent, own = found.groups()
    module = MODULE_BY_NAME.get(own, MODULE_BY_NAME.get(f"{parent}.{own}"))
    return None if module is None else (int(layer), module)


@dataclass(frozen=True, slots=True)
class Update:
    """The update of one linear layer."""

    a: Tensor
    """[rank, in_features]"""
    b: Tensor
    """[out_features, rank], scaled"""

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def inputs(self) -> int:
        return self.a.shape[1]

    @property
    def outputs(self) -> int:
        return len(self.b)


@dataclass(frozen=True, slots=True)
class Lora:
    """The updates of an adapter by place; none is empty."""

    updates: Mapping[Place, Update]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(update.rank for update in self.updates.values())

    @property
    def size_bytes(self) -> int:
        return sum(each.a.nbytes + each.b.nbytes for each in self.updates.values())


def fit(lora: Lora, targets: Mapping[Place, Target]) -> Lora:
    """The adapter in terms of a model's linear layers, each update checked.

    Where the model fuses layers, the updates of their parts become one; where it does not, the update of a fused layer
    becomes one of each part. Raises InvalidRequest that names the layer.
    """
    fitted: dict[Place, Update] = {}
    parts: dict[Place, dict[int, Update]] = {}
    for place, update in lora.updates.items():
        layer, module = place
        _check_values(place, update)
        if place in targets:
            fitted[place] = update
        elif module in PARTS:
            fitted |= _split(layer, module, update, targets)
        else:
            whole, index = _part_of(place, targets)
            if update.outputs == targets[whole].outputs:
                # TensorRT-LLM's converter files a fused gate and up projection under the id of the gate.
                fitted[whole] = swap_halves(update)
            else:
                parts.setdefault(whole, {})[index] = update
    for whole, known in parts.items():
        if whole in fitted:
            raise misfit(whole, "is updated as a whole and in parts; keep one of both")
        fitted[whole] = _join(whole, known, targets[whole])
    for place, update in fitted.items():
        _check_sizes(place, update, targets[place].inputs, targets[place].outputs)
    return Lora(fitted)


def converted(lora: Lora, dtype: torch.dtype) -> Lora:
    """The adapter in a type of numbers. Raises InvalidRequest that names the layer with a value outside the type."""
    updates = {}
    for place, update in lora.updates.items():
        a, b = update.a.to(dtype).contiguous(), update.b.to(dtype).contiguous()
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            name = str(dtype).removeprefix("torch.")
            raise misfit(
                place, f"has a value that is NaN, infinite or outside {name}", f"finite in {name}"
            )
        updates[place] = Update(a, b)
    return Lora(updates)


def of_one_rank(lora: Lora) -> Lora:
    """The same adapter with every rank the largest, filled up with zeros."""
    updates = {}
    for place, update in lora.updates.items():
        missing = lora.rank - update.rank
        updates[place] = Update(pad(update.a, (0, 0, 0, missing)), pad(update.b, (0, missing)))
    return Lora(updates)


def sizes_at(place: Place, targets: Mapping[Place, Target]) -> tuple[int, int]:
    """Inputs and outputs of a layer, also where the model fuses it or has only its parts."""
    layer, module = place
    if place in targets:
        return targets[place].inputs, targets[place].outputs
    if module in PARTS:
        parts = [targets.get((layer, part)) for part in PARTS[module]]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            raise misfit(place, "updates a linear layer that the model does not have")
        return known[0].inputs, sum(part.outputs for part in known)
    whole, index = _part_of(place, targets)
    return targets[whole].inputs, targets[whole].parts[index]


def swap_halves(update: Update) -> Update:
    """Exchanges the halves of the outputs: TensorRT-LLM orders a fused gate and up projection the other way round."""
    half = update.outputs // 2
    return Update(update.a, torch.cat((update.b[half:], update.b[:half])))


def misfit(place: Place, problem: str, limit: str = "") -> InvalidRequest:
    layer, module = place
    return InvalidRequest(
        problem, field=f"adapter.layer_{layer}.{module.name.lower()}", limit=limit
    )


def _check_values(place: Place, update: Update) -> None:
    rank, columns = update.rank, update.b.shape[1]
    if rank < 1 or rank != columns:
        raise misfit(place, f"has A of rank {rank} and B of rank {columns}", "equal ranks above 0")
    for tensor in (update.a, update.b):
        if not torch.isfinite(tensor).all():
            raise misfit(place, "has a value that is NaN or infinite")


def _check_sizes(place: Place, update: Update, inputs: int, outputs: int) -> None:
    if (update.inputs, update.outputs) != (inputs, outputs):
        raise misfit(
            place,
            f"has an update of {update.inputs} inputs and {update.outputs} outputs, but the layer has {inputs} and"
            f" {outputs}: the adapter was made for another model",
        )


def _part_of(place: Place, targets: Mapping[Place, Target]) -> tuple[Place, int]:
    """The fused layer of the model that contains the layer, and the layer's position there."""
    layer, module = place
    for whole, members in PARTS.items():
        if module in members and (layer, whole) in targets:
            return (layer, whole), members.index(module)
    raise misfit(place, "updates a linear layer that the model does not have")


def _split(
    layer: int, module: Module, update: Update, targets: Mapping[Place, Target]
) -> Iterator[tuple[Place, Update]]:
    """An update per part; the parts share A."""
    _check_sizes((layer, module), update, *sizes_at((layer, module), targets))
    places = [(layer, part) for part in PARTS[module]]
    blocks = torch.split(update.b, [targets[place].outputs for place in places])
    return zip(places, (Update(update.a, block) for block in blocks), strict=True)


def _join(place: Place, known: Mapping[int, Update], target: Target) -> Update:
    """One update of a fused layer: the As below each other, the Bs along a diagonal, zeros for the rest."""
    a = torch.cat([known[index].a for index in sorted(known)])
    b = a.new_zeros(target.outputs, len(a))
    column = 0
    for index in sorted(known):
        update, first = known[index], sum(target.parts[:index])
        _check_sizes(place, update, target.inputs, target.parts[index])
        b[first : first + update.outputs, column : column + update.rank] = update.b
        column += update.rank
    return Update(a, b)
