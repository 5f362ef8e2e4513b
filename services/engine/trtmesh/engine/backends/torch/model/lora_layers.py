"""Finds the linear layers for adapters in a model, and exchanges them for layers with updates. Adapters on the device
lie in slots: each layer has a table with an update per slot. A step names the slots of tokens, never tensors of an
adapter, so shapes do not depend on the adapters. A device chooses how to multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from trtmesh.engine.adapters.lora import PARTS, Module, Place, Target, Update, place_of

ALIGNED_RANKS = 16
"""Ranks of a table are a multiple: every slot begins at an address suited to all kernels alike."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The tokens of an adapter in a step."""

    slot: int
    rows: Sequence[int]
    """Ascending rows of the flat batch."""


class UpdateTable:
    """The updates of a linear layer by slot; ranks beyond an update's are 0."""

    def __init__(
        self, target: Target, slots: int, ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.a = torch.zeros(slots, ranks, target.inputs, dtype=dtype, device=device)
        self.b = torch.zeros(slots, ranks, target.outputs, dtype=dtype, device=device)
        self.ranks = [0] * slots
        """By slot; 0 where the adapter leaves the layer alone."""

    def put(self, slot: int, update: Update | None) -> None:
        rank, before = update.rank if update else 0, self.ranks[slot]
        if update:
            self.a[slot, :rank] = update.a
            self.b[slot, :rank] = update.b.t()
        self.a[slot, rank:before] = 0
        self.b[slot, rank:before] = 0
        self.ranks[slot] = rank


class SlotMemory:
    """A device's memory for tables."""

    def table(
        self, target: Target, slots: int, ranks: int, dtype: torch.dtype, device: torch.device
    ) -> UpdateTable:
        return UpdateTable(target, slots, ranks, dtype, device)

    def filling(self, slot: int) -> AbstractContextManager[None]:
        """To be held while a slot of the tables is filled, on any thread; at its end the adapter is there."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """Outputs of a layer with a table of their own: all, or the outputs of a layer joined with others by a device."""

    table: UpdateTable
    outputs: slice


class Products(Protocol):
    """A device's way to compute the updates of a step."""

    def begin(self, step: Sequence[AdapterRows]) -> None:
        """Prepares a step with adapters for all layers."""

    def add(self, parts: Sequence[AdaptedPart], given: Tensor, output: Tensor) -> None:
        """Adds B A x to the rows with an update; `given` is [tokens, inputs], `output` [tokens, outputs]."""


class AdaptedLinear(nn.Module):
    """A linear layer with the updates of the step."""

    def __init__(self, own: nn.Module, parts: Sequence[AdaptedPart], products: Products) -> None:
        super().__init__()
        self.own = own
        self.parts = parts
        self.products = products

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.own.weight  # type: ignore[assignment]  # every linear layer has one
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.own(tokens)
        self.products.add(self.parts, tokens.flatten(0, -2), output.view(-1, output.shape[-1]))
        return output


@dataclass(frozen=True, slots=True)
class Room:
    max_rank: int
    slots: int
    products: Callable[[Collection[UpdateTable]], Products]
    memory: SlotMemory = SlotMemory()  # noqa: RUF009 - has no state

    def ranks(self, target: Target) -> int:
        """Ranks of a table. The updates of a fused layer's parts lie below each other."""
        return -(-self.max_rank // ALIGNED_RANKS) * ALIGNED_RANKS * len(target.parts)


class Layer(NamedTuple):
    """A layer of the model, for steps without adapters and with them."""

    holder: nn.Module
    name: str
    plain: nn.Module
    adapted: AdaptedLinear


class DeviceAdapters:
    def __init__(
        self,
        tables: Mapping[Place, UpdateTable],
        layers: Sequence[Layer],
        products: Products,
        memory: SlotMemory,
    ) -> None:
        self.products = products
        self._tables = tables
        self._layers = layers
        self._memory = memory
        self._adapted = False

    @property
    def slots(self) -> int:
        return min(len(table.ranks) for table in self._tables.values())

    @property
    def in_use(self) -> bool:
        """Whether the present step has adapters."""
        return self._adapted

    def load(self, slot: int, updates: Mapping[Place, Update]) -> None:
        """Copies an adapter into an unused slot; on any thread."""
        with self._memory.filling(slot):
            for place, table in self._tables.items():
                table.put(slot, updates.get(place))

    def begin(self, step: Sequence[AdapterRows]) -> None:
        """Prepares the model for a step. A step without adapters costs no more than without this class."""
        self._use(adapted=bool(step))
        if step:
            self.products.begin(step)

    @contextmanager
    def adapted(self) -> Iterator[None]:
        """Within it, the model computes with adapters, for which its products were prepared."""
        self._use(adapted=True)
        try:
            yield
        finally:
            self._use(adapted=False)

    def _use(self, *, adapted: bool) -> None:
        if adapted != self._adapted:
            self._adapted = adapted
            for layer in self._layers:
                layer.holder._modules[layer.name] = layer.adapted if adapted else layer.plain


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


def adapt_layers(
    model: nn.Module,
    own: Mapping[Place, Target],
    room: Room,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[Place, Target], DeviceAdapters | None]:
    """The layers for adapters, and the room for adapters; None without such layers.

    `own` are the targets before a device joined layers: an adapter updates each of these alone.
    """
    found = {name: each for name, _ in model.named_modules() if (each := _places(name, own))}
    targets = {place: own[place] for places in found.values() for place in places}
    if not targets:
        return {}, None
    tables = {
        place: room.memory.table(target, room.slots, room.ranks(target), dtype, device)
        for place, target in targets.items()
    }
    products = room.products(tables.values())
    layers = [
        _layer(model, name, [*_parts_of(places, targets, tables)], products)
        for name, places in found.items()
    ]
    return targets, DeviceAdapters(tables, layers, products, room.memory)


def _parts_of(
    places: Sequence[Place], targets: Mapping[Place, Target], tables: Mapping[Place, UpdateTable]
) -> Iterator[AdaptedPart]:
    """The places of a layer with their ranges of outputs."""
    first = 0
    for place in places:
        after = first + targets[place].outputs
        yield AdaptedPart(tables[place], slice(first, after))
        first = after


def _layer(model: nn.Module, name: str, parts: Sequence[AdaptedPart], products: Products) -> Layer:
    holder, _, leaf = name.rpartition(".")
    plain = model.get_submodule(name)
    return Layer(model.get_submodule(holder), leaf, plain, AdaptedLinear(plain, parts, products))


def _places(name: str, own: Mapping[Place, Target]) -> list[Place]:
    """The places of a layer: several where a device joined layers, none for a layer without updates."""
    if (place := place_of(name)) is None:
        return []
    if place in own:
        return [place]
    members = [(place[0], module) for module in PARTS.get(place[1], ())]
    return members if all(member in own for member in members) else []
