"""The updates of adapters by kernels: each row gets its own adapter's, in steps of any mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest
import torch
from engine.torch.cuda.references import updates_reference
from torch import Tensor, nn
from trtmesh.engine.adapters.lora import Module, Place, Target, Update
from trtmesh.engine.backends.torch.cuda.kernels.layers import Scale, norm_reference
from trtmesh.engine.backends.torch.cuda.kernels.products import LINES, PROGRAMS, FewRows
from trtmesh.engine.backends.torch.cuda.kernels.updates import (
    FEW_ROWS,
    MANY_ROWS,
    expand,
    expand_gated,
    shrink,
)
from trtmesh.engine.backends.torch.cuda.layers import KernelNorm, LayerProducts
from trtmesh.engine.backends.torch.cuda.updates import (
    KernelTable,
    KernelUpdates,
    PinnedSlots,
    StepTiles,
)
from trtmesh.engine.backends.torch.model.lora_layers import (
    AdaptedLinear,
    AdaptedPart,
    AdapterRows,
    DeviceAdapters,
)

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

SLOTS, MOST_RANK = 5, 48
RANKS: Sequence[Sequence[int]] = [[4, 4, 4], [20, 8, 0], [0, 0, 0], [1, 0, 33], [48, 16, 17]]
"""By slot and part; 0 where the adapter leaves the part alone."""
WIDE = (LINES * PROGRAMS, 2 * LINES)
"""Outputs whose programs do not run at once."""
MODULES = (Module.ATTN_Q, Module.ATTN_K, Module.ATTN_V)


class Filled:
    """The tables of a layer with up to three parts."""

    def __init__(
        self, inputs: int, outputs: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(inputs)
        memory = PinnedSlots(device)
        self.tables: Mapping[Place, KernelTable] = {}
        self.parts: list[AdaptedPart] = []
        first = 0
        for module, each in zip(MODULES, outputs, strict=False):
            table = memory.table(Target(inputs, (each,)), SLOTS, MOST_RANK, dtype, device)
            assert isinstance(table, KernelTable)
            self.tables = {**self.tables, (0, module): table}
            self.parts.append(AdaptedPart(table, slice(first, first + each)))
            first += each
        self.inputs, self.outputs = inputs, first
        self.products = KernelUpdates([*self.tables.values()], 256)
        self.adapters = DeviceAdapters(self.tables, [], self.products, memory)
        for slot, ranks in enumerate(RANKS):
            self.load(slot, ranks)

    def load(self, slot: int, ranks: Sequence[int]) -> None:
        updates = {
            place: Update(self.randn(rank, self.inputs), self.randn(table.b.shape[2], rank) / rank)
            for (place, table), rank in zip(self.tables.items(), ranks, strict=False)
            if rank
        }
        self.adapters.load(slot, updates)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def check(self, slots: Sequence[int], tile_rows: int) -> None:
        """By tiles of a step with more rows."""
        tiles = StepTiles(self.tables.values(), len(slots) + 9, tile_rows, SLOTS)
        tiles.fill(step_of(slots))
        self.products.use(tiles)
        given = self.randn(len(slots), self.inputs).to(self.device)
        output = self.randn(len(slots), self.outputs).to(self.device)
        before = output.clone()
        self.products.add(self.parts, given, output)
        factors = [table.factors for table in self.tables.values()]
        expected = updates_reference(slots, factors, given, before)
        close = 1e-5 if self.dtype == torch.float32 else 1e-2
        assert (output - expected).abs().amax() <= close * expected.abs().amax()
        alone = torch.tensor([slot < 0 for slot in slots])
        assert torch.equal(output[alone], before[alone])


def step_of(slots: Sequence[int]) -> list[AdapterRows]:
    present = dict.fromkeys(slot for slot in slots if slot >= 0)
    return [
        AdapterRows(slot, [row for row, each in enumerate(slots) if each == slot])
        for slot in present
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile_rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(128, (256, 128, 128)), (1280, (192, 192)), (200, (70,))]
)
def test_rows_of_any_slots(
    inputs: int, outputs: Sequence[int], tile_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies no matrices of bfloat16")
    filled = Filled(inputs, outputs, dtype, device)
    filled.check([1], tile_rows)
    filled.check([-1, 3, -1, 2], tile_rows)
    filled.check([4] * (tile_rows + 1) + [-1, 3, 0, 0, 1], tile_rows)
    dice = Random(inputs)
    filled.check([dice.randrange(-1, SLOTS) for _ in range(40)], tile_rows)
    # The next adapter of a slot may have fewer ranks, or none.
    filled.load(4, [3, 0, 20])
    filled.check([4, 1, 4], tile_rows)


def test_tiles_have_every_row_once(device: torch.device) -> None:
    dice = Random(3)
    tables = Filled(16, (16,), torch.float32, device).tables.values()
    tiles = StepTiles(tables, 40, FEW_ROWS, SLOTS)
    for count in (40, 1, 17, 40):
        slots = [dice.randrange(-1, SLOTS) for _ in range(count)]
        tiles.fill(step_of(slots))
        found = tiles.of(count)
        rows = [
            (int(row), int(slot))
            for slot, first, rows, _ in found.words.tolist()
            for row in found.order[first : first + rows].tolist()
            if row < count
        ]
        assert sorted(rows) == list(enumerate(slots))


# Of triton's interpreter.
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_infinite_row_spoils_no_other_row(device: torch.device) -> None:
    filled = Filled(128, (128,), torch.float32, device)
    filled.products.begin(step_of([0, 1, 1, 4]))
    given = torch.randn(4, 128, device=device)
    alone, spoiled = torch.zeros(2, 4, 128, device=device)
    filled.products.add(filled.parts, given, alone)
    given[1] = torch.inf
    filled.products.add(filled.parts, given, spoiled)
    assert not spoiled[1].isfinite().all()
    assert torch.equal(spoiled[[0, 2, 3]], alone[[0, 2, 3]])


def near(got: Tensor, expected: Tensor) -> bool:
    close = 1e-5 if got.dtype == torch.float32 else 1e-2
    # Refuses NaN too.
    return bool((got - expected).abs().amax() <= close * expected.abs().amax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_activation_after(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies no matrices of bfloat16")
    filled = Filled(200, (192, 192), dtype, device)
    slots = [4, -1, 1, *([3] * 20), *([-1] * 17)][:rows]
    tiles = StepTiles(filled.tables.values(), 48, FEW_ROWS, SLOTS)
    tiles.fill(step_of(slots))
    filled.products.use(tiles)
    updates = filled.products.of(filled.parts, rows)
    given = filled.randn(rows, 200).to(device)
    inner = shrink(updates, given)
    output = filled.randn(rows, 384).to(device)
    factors = [table.factors for table in filled.tables.values()]
    expected = updates_reference(slots, factors, given, output)
    gate, up = expected.chunk(2, 1)
    assert near(expand_gated(updates, inner, output), nn.functional.silu(gate) * up)
    expand(updates, inner, output)
    assert near(output, expected)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(256, (96, 160)), (2048, (64, 32, 32)), (128, WIDE)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_shrink_within_a_product(
    inputs: int, outputs: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies no matrices of bfloat16")
    filled = Filled(inputs, outputs, dtype, device)
    few = FewRows(device)
    weight = filled.randn(filled.outputs, inputs).to(device)
    scale = Scale(torch.linspace(0.5, 2, inputs, device=device), 1e-5)
    factors = [table.factors for table in filled.tables.values()]
    dice = Random(inputs)
    steps = [[slot] for slot in range(-1, SLOTS)]
    steps += [[dice.randrange(-1, SLOTS) for _ in range(rows)] for rows in (2, 19, 64)]
    if outputs is WIDE:
        steps = [[dice.randrange(-1, SLOTS) for _ in range(rows)] for rows in (65, 128)]
    for slots in [*steps, [4] * 33]:
        tiles = StepTiles(filled.tables.values(), 128, FEW_ROWS, SLOTS)
        tiles.fill(step_of(slots))
        filled.products.use(tiles)
        updates = filled.products.of(filled.parts, len(slots))
        given = filled.randn(len(slots), inputs).to(device)
        assert few.takes(given, weight, shrinks=True)
        added = filled.randn(len(slots), filled.outputs).to(device)
        base = added.double() + given.double() @ weight.t().double()
        output, inner = few.product_and_shrink(given, weight, updates, added=added)
        assert near(output, base)
        expand(updates, inner, output)
        assert near(output, updates_reference(slots, factors, given, base))
        if len(slots) == 1:
            normed = norm_reference(given.double(), scale.weight, scale.epsilon)
            base = normed @ weight.t().double()
            output, inner = few.product_and_shrink(given, weight, updates, scale=scale)
            expand(updates, inner, output)
            assert near(output, updates_reference(slots, factors, normed, base))


@torch.inference_mode()
def test_next_adapter_of_a_slot_may_have_other_ranks(device: torch.device) -> None:
    filled = Filled(256, (128,), torch.float16, device)
    few = FewRows(device)
    weight, given = filled.randn(128, 256).to(device), filled.randn(2, 256).to(device)
    tiles = StepTiles(filled.tables.values(), 2, FEW_ROWS, SLOTS)
    filled.products.use(tiles)
    factors = [table.factors for table in filled.tables.values()]
    for rank in (16, 48, 0, 7):
        filled.load(1, [rank])
        # The same rows of the same slot.
        tiles.fill(step_of([1, -1]))
        updates = filled.products.of(filled.parts, 2)
        output, inner = few.product_and_shrink(given, weight, updates)
        base = output.clone()
        expand(updates, inner, output)
        assert near(output, updates_reference([1, -1], factors, given, base))


@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("outputs", [(128, 128), (256,)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_layers_with_norm_activation_and_sum(
    rows: int, outputs: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies no matrices of bfloat16")
    filled = Filled(128, outputs, dtype, device)
    own = nn.Linear(128, 256, bias=False, device=device, dtype=dtype)
    linear = AdaptedLinear(own, filled.parts, filled.products)
    products = LayerProducts(device)
    before = KernelNorm(torch.linspace(0.5, 2, 128, device=device), 1e-5)
    slots = [4, -1, 1, *([3] * 62)][:rows]
    filled.products.begin(step_of(slots))
    factors = [table.factors for table in filled.tables.values()]

    def expected(given: Tensor) -> Tensor:
        return updates_reference(slots, factors, given, own(given))

    given = filled.randn(rows, 128).to(device)
    wanted_outputs = expected(before(given))
    gate, up = wanted_outputs.chunk(2, 1)
    added = filled.randn(rows, 256).to(device)
    for got, wanted in (
        (products.of_norm(given, before, linear), wanted_outputs),
        (products.of_norm(given, before, linear, gated=True), nn.functional.silu(gate) * up),
        (products.sum(added.clone(), given, linear), added + expected(given)),
    ):
        # The outputs of a single part are rounded before the activation.
        assert (got - wanted).abs().amax() <= 2e-2 * wanted.abs().amax()
