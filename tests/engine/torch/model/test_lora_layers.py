"""Adapters in slots: every way to compute a step's updates gives each row its own adapter's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from trtmesh.engine.adapters.lora import Module, Place, Target, Update
from trtmesh.engine.backends.torch.accelerator import SlotProducts
from trtmesh.engine.backends.torch.cpu.grouped_products import FEW_ROWS, GroupedProducts
from trtmesh.engine.backends.torch.cpu.invariance import TiledProducts
from trtmesh.engine.backends.torch.model.lora_layers import (
    AdapterRows,
    DeviceAdapters,
    Products,
    Room,
    UpdateTable,
    adapt_layers,
)

SLOTS, MAX_RANK, TOKENS = 6, 20, 64
Q, K, V, OUT = Module.ATTN_Q, Module.ATTN_K, Module.ATTN_V, Module.ATTN_DENSE
OWN: Mapping[Place, Target] = {
    (0, Q): Target(24, (32,)),
    (0, K): Target(24, (16,)),
    (0, V): Target(24, (16,)),
    (0, OUT): Target(32, (24,)),
}
Maker = Callable[[Collection[UpdateTable]], Products]
MAKERS: Mapping[str, Maker] = {
    "grouped": lambda _: GroupedProducts(),
    "slots": lambda tables: SlotProducts(tables, TOKENS),
    "tiled": TiledProducts,
}


class Layers(nn.Module):
    """A decoder layer whose first projections a device joined."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        attention = nn.Module()
        attention.qkv = nn.Linear(24, 64, dtype=dtype)
        attention.o_proj = nn.Linear(32, 24, bias=False, dtype=dtype)
        self.layers[0].self_attn = attention
        self.requires_grad_(requires_grad=False)

    def qkv(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.get_submodule("layers.0.self_attn.qkv")(tokens)
        return result

    def o_proj(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.get_submodule("layers.0.self_attn.o_proj")(tokens)
        return result


Updates = Mapping[Place, Update]


def updates(generator: torch.Generator, ranks: Mapping[Module, int]) -> Updates:
    return {
        (0, module): Update(
            torch.randn(rank, OWN[0, module].inputs, generator=generator),
            torch.randn(OWN[0, module].outputs, rank, generator=generator) / rank,
        )
        for module, rank in ranks.items()
    }


ADAPTERS: Sequence[Mapping[Module, int]] = [
    {Q: 4, K: 4, V: 4, OUT: 4},
    {Q: 20, V: 8},
    {OUT: 16},
    {K: 1},
    {Q: 8, K: 16, V: 4, OUT: 20},
    {Q: 2, OUT: 1},
]


@pytest.fixture(params=MAKERS)
def products(request: pytest.FixtureRequest) -> Maker:
    return MAKERS[request.param]


def adapted(
    products: Maker, dtype: torch.dtype = torch.float32
) -> tuple[Layers, DeviceAdapters, list[Updates]]:
    model = Layers(dtype)
    room = Room(MAX_RANK, SLOTS, products)
    targets, adapters = adapt_layers(model, OWN, room, dtype, torch.device("cpu"))
    assert adapters
    assert targets == OWN
    generator = torch.Generator().manual_seed(3)
    loaded = [updates(generator, ranks) for ranks in ADAPTERS]
    for slot, each in enumerate(loaded):
        adapters.load(slot, each)
    return model, adapters, loaded


def expected(
    own: nn.Module, given: Tensor, modules: Sequence[Module], by_row: Sequence[Updates | None]
) -> Tensor:
    """One row after another, in float64."""
    rows = []
    for row, updates in zip(given.double(), by_row, strict=True):
        output = own.double()(row)
        first = 0
        for module in modules:
            width = OWN[0, module].outputs
            if updates and (update := updates.get((0, module))):
                output[first : first + width] += update.b.double() @ (update.a.double() @ row)
            first += width
        rows.append(output)
    own.to(given.dtype)
    return torch.stack(rows)


def step_of(slots: Sequence[int | None]) -> list[AdapterRows]:
    present = dict.fromkeys(slot for slot in slots if slot is not None)
    return [
        AdapterRows(slot, [row for row, each in enumerate(slots) if each == slot])
        for slot in present
    ]


def check(
    model: Layers, adapters: DeviceAdapters, loaded: list[Updates], slots: Sequence[int | None]
) -> None:
    generator = torch.Generator().manual_seed(len(slots))
    hidden = torch.randn(1, len(slots), 24, generator=generator)
    attended = torch.randn(len(slots), 32, generator=generator)
    by_row = [None if slot is None else loaded[slot] for slot in slots]
    adapters.begin(step_of(slots))
    qkv, output = model.qkv(hidden), model.o_proj(attended)
    adapters.begin(())
    own_qkv = model.get_submodule("layers.0.self_attn.qkv")
    own_o = model.get_submodule("layers.0.self_attn.o_proj")
    assert type(own_qkv) is nn.Linear, "a step without adapters uses the plain layers"
    torch.testing.assert_close(
        qkv[0].double(), expected(own_qkv, hidden[0], (Q, K, V), by_row), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        output.double(), expected(own_o, attended, (OUT,), by_row), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "slots",
    [
        [0],
        [None, 3, None],
        [0, 1, 2, 3, 4, 5],
        [5, 0, 5, None, 2, 0, 5],
        [4] * (FEW_ROWS + 1) + [None] + [5, 3, 3],
        [0] * 30 + [2] * 30,
    ],
    ids=["one", "one_among_base", "all", "uneven", "few_beside_many", "many"],
)
def test_each_row_gets_the_update_of_its_own_adapter(
    products: Maker, slots: list[int | None]
) -> None:
    check(*adapted(products), slots)


def test_random_steps_equal_rows_one_by_one(products: Maker) -> None:
    model, adapters, loaded = adapted(products)
    dice = Random(0)
    for _ in range(40):
        count = dice.randrange(1, TOKENS + 1)
        check(model, adapters, loaded, [dice.choice([None, *range(SLOTS)]) for _ in range(count)])


def test_slot_keeps_nothing_of_the_adapter_before(products: Maker) -> None:
    model, adapters, loaded = adapted(products)
    generator = torch.Generator().manual_seed(9)
    for ranks in ({Q: 20, K: 20, V: 20, OUT: 20}, {Q: 3}, {V: 5, OUT: 2}, {K: 20}):
        loaded[2] = updates(generator, ranks)
        adapters.load(2, loaded[2])
        check(model, adapters, loaded, [2, 1, None, 2])


def test_infinite_row_spoils_no_other_row(products: Maker) -> None:
    model, adapters, _ = adapted(products)
    hidden = torch.randn(1, 5, 24)
    adapters.begin(step_of([0, 1, None, 1, 4]))
    alone = model.qkv(hidden)
    hidden[0, 1] = torch.inf
    spoiled = model.qkv(hidden)
    assert not spoiled[0, 1].isfinite().all()
    assert torch.equal(spoiled[0, [0, 2, 3, 4]], alone[0, [0, 2, 3, 4]])


def test_static_products_read_the_step_from_memory_that_stays() -> None:
    """What a captured graph of the first step would compute after the second `begin`."""
    model, adapters, loaded = adapted(MAKERS["slots"])

    def forward(hidden: Tensor) -> Tensor:
        return model.qkv(hidden)

    adapters.begin(step_of([0, None, 1, 2]))
    graph = make_fx(forward)(torch.randn(1, 4, 24))
    hidden = torch.randn(1, 4, 24)
    adapters.begin(step_of([5, 3, None, 0]))
    assert torch.equal(graph(hidden), model.qkv(hidden))
    adapters.load(5, loaded[4])
    assert torch.equal(graph(hidden), model.qkv(hidden))
