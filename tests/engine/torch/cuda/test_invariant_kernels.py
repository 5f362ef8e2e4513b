"""Kernels for `batch_invariant` give what their references give, and a row the same bits whatever the other rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.cuda.cached_sequences import BLOCK_TOKENS, LAYER, PLAIN, Cache, close, rule
from engine.torch.cuda.interpreted import Interpreted, add_up_in_order, small_model
from engine.torch.cuda.references import (
    invariant_product_reference,
    prefill_attention_reference,
    store_reference,
)
from torch import Tensor, nn
from transformers import LlamaConfig
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.compute import self_check
from trtmesh.engine.backends.torch.cuda.attention import GraphAttention, KernelAttention
from trtmesh.engine.backends.torch.cuda.invariant_device import InvariantCuda
from trtmesh.engine.backends.torch.cuda.invariant_layers import Trial, make_invariant
from trtmesh.engine.backends.torch.cuda.kernels import invariant_attention
from trtmesh.engine.backends.torch.cuda.kernels.attention import NewTokens, RunWorkspace
from trtmesh.engine.backends.torch.cuda.kernels.invariant_products import (
    SHARED_ROWS,
    InvariantProducts,
    shares_of,
)
from trtmesh.engine.backends.torch.cuda.kernels.layers import gated_silu, turn
from trtmesh.engine.backends.torch.cuda.kernels.pages import TableRows, store_tokens
from trtmesh.engine.backends.torch.cuda.kernels.prefill_attention import tiles_of
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.model import load_model

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Rounding, as a share of the largest value."""


@pytest.fixture(autouse=True)
def sums_in_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        add_up_in_order(monkeypatch)


@pytest.fixture
def products(device: torch.device) -> InvariantProducts:
    return InvariantProducts(device)


def of_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The interpreter multiplies no matrices of bfloat16."""
    return torch.float16 if dtype is torch.bfloat16 and device.type == "cpu" else dtype


def near(got: Tensor, expected: Tensor) -> bool:
    difference = (got.double() - expected.double()).abs().amax()
    # Refuses NaN too.
    return bool(difference <= NEAR[got.dtype] * expected.double().abs().amax())


def some_rows(count: int, dice: random.Random) -> Iterator[list[int]]:
    """A row alone, and others in other places."""
    yield [0]
    yield [count - 1]
    for _ in range(2):
        yield dice.sample(range(count), dice.randrange(1, count + 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "size", "count"), [(128, 128, 97), (70, 200, 300), (12, 1030, 70), (64, 2048, 300)]
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_rows_of_products_do_not_depend_on_each_other(
    outputs: int,
    size: int,
    count: int,
    is_transposed: bool,
    dtype: torch.dtype,
    device: torch.device,
    products: InvariantProducts,
) -> None:
    dtype = of_type(dtype, device)
    dice = random.Random(size)
    torch.manual_seed(size)
    rows = torch.randn(count, size, device=device).to(dtype)
    matrix = (torch.randn(outputs, size, device=device) / size**0.5).to(dtype)
    if is_transposed:
        matrix = matrix.t().contiguous().t()
    bias = torch.randn(outputs, device=device).to(dtype)
    for given in (None, bias):
        every = products.product(rows, matrix, given)
        assert near(every, invariant_product_reference(rows, matrix, given))
        for places in some_rows(count, dice):
            assert torch.equal(products.product(rows[places], matrix, given), every[places])
    assert not products._done.any(), "the next launch would add up too early"


def test_inputs_are_shared_by_the_shape_of_the_matrix() -> None:
    def shares(outputs: int, size: int) -> int:
        return shares_of(torch.empty(outputs, size, device="meta"))

    assert shares(64, 2048) == 4
    assert shares(2048, 8192) == 4
    assert shares(2000, 8192) == 4
    assert shares(16384, 2048) == 1
    assert shares(64, 1030) == 1


@pytest.mark.parametrize("rows", [5, 40, SHARED_ROWS + 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "size"), [(256, 128), (70, 1024)])
def test_sums_and_activations_within_products_round_as_on_their_own(
    outputs: int,
    size: int,
    dtype: torch.dtype,
    rows: int,
    device: torch.device,
    products: InvariantProducts,
) -> None:
    dtype = of_type(dtype, device)
    torch.manual_seed(rows)
    given = torch.randn(rows, size, device=device).to(dtype)
    matrix = (torch.randn(outputs, size, device=device) / size**0.5).to(dtype)
    hidden = torch.randn(rows, outputs, device=device).to(dtype)
    for bias in (None, torch.randn(outputs, device=device).to(dtype)):
        plain = products.product(given, matrix, bias)
        assert torch.equal(products.product(given, matrix, bias, added=hidden), hidden + plain)
        assert torch.equal(products.product(given, matrix, bias, gated=True), gated_silu(plain))
    assert not products._done.any(), "the next launch would add up too early"


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant_attention, "RUN", 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "window", "softcap", "sinks", "all"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
@pytest.mark.usefixtures("short_runs")
def test_tokens_attend_as_if_each_were_alone(
    name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """In chunks of several sequences, in others, and decoded together or alone."""
    dtype = of_type(dtype, device)
    starts, counts = [0, 50, 0, 90], [9, 3, 1, 70]
    cache = Cache([9, 53, 1, 160], kv_heads, dim, device, dtype)
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    positions = [
        start + place for start, count in zip(starts, counts, strict=True) for place in range(count)
    ]
    queries = torch.randn(len(owners), heads, dim, device=device).to(dtype)
    # Their own keys and values are stored.
    kv = torch.stack([stored(cache, *each) for each in zip(owners, positions, strict=True)])
    given = rule(name, heads, device)

    def in_chunks(starts: list[int], counts: list[int], rows: list[int]) -> Tensor:
        tiles = torch.tensor(tiles_of(starts, counts, first_row=0, first=0), device=device)
        tiles[:, 0] = torch.tensor(rows, device=device)[tiles[:, 0]]
        # A tile without tokens.
        tiles = torch.cat((tiles, torch.zeros_like(tiles[:1])))
        return invariant_attention.attend_chunks(
            queries, tiles, cache.table, cache.width, cache.pages, LAYER, given
        )

    every = in_chunks(starts, counts, [0, 1, 2, 3])
    tiles = torch.tensor(tiles_of(starts, counts, first_row=0, first=0))
    expected = prefill_attention_reference(queries, tiles, cache.table, cache.pages, LAYER, given)
    assert close(every, expected, torch.float32 if dtype is torch.float32 else torch.bfloat16)
    others = in_chunks([0, 4, 50, 0, 90, 91, 130], [4, 5, 3, 1, 1, 39, 30], [0, 0, 1, 2, 3, 3, 3])
    assert torch.equal(others, every)
    workspace = RunWorkspace(heads, cache.pages, 3, device)
    where = torch.tensor(positions, device=device)
    tables = cache.table[owners]
    for places in some_rows(len(owners), random.Random(dim)):
        before = cache.pages.pool.clone()
        new = NewTokens(where[places], tables[places], cache.width)
        decoded = invariant_attention.attend_tokens(
            queries[places], kv[places], new, cache.pages, LAYER, given, workspace
        )
        assert torch.equal(decoded, every[places])
        assert torch.equal(cache.pages.pool, before)
    assert not workspace.done.any(), "the next launch would merge too early"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [16, 8])
def test_a_rotation_within_attention_gives_the_bits_of_one_before(
    turned: int, dtype: torch.dtype, device: torch.device
) -> None:
    dtype = of_type(dtype, device)
    heads, kv_heads, dim = 4, 2, 16
    cache = Cache([63, 40, 7], kv_heads, dim, device, dtype)
    # A row that only fills a graph.
    cache.table[2] = 0
    qkv = torch.randn(3, heads + 2 * kv_heads, dim, device=device).to(dtype)
    angles = torch.randn(3, turned, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    workspace = RunWorkspace(heads, cache.pages, 1, device)

    def attended(given: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        cache.pages.pool.copy_(before)
        new = NewTokens(cache.positions, cache.table, cache.width, angles=angles)
        output = invariant_attention.attend_tokens(
            given[:, :heads], given[:, heads:], new, cache.pages, LAYER, PLAIN, workspace
        )
        return output, cache.pages.pool.clone()

    before = cache.pages.pool.clone()
    within, stored_within = attended(qkv, (cos, sin))
    apart = qkv.clone()
    turn(apart[:, : heads + kv_heads], cos, sin)
    assert torch.equal(within, attended(apart, None)[0])
    assert torch.equal(stored_within, attended(apart, None)[1])
    assert not torch.equal(stored_within, before)
    assert not stored_within[0].any()


def stored(cache: Cache, row: int, position: int) -> Tensor:
    """[2 * kv_heads, dim]"""
    block = int(cache.table[row, position // BLOCK_TOKENS])
    return cache.pages.pool[block, LAYER, :, :, position % BLOCK_TOKENS].flatten(0, 1)


@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 16), (3, 24)])
def test_store(kv_heads: int, dim: int, device: torch.device) -> None:
    cache = Cache([63, 40, 7], kv_heads, dim, device)
    # A row for tokens that only fill a graph.
    cache.table[2] = 0
    owners = torch.tensor([1, 0, 2, 0, 1, 0], device=device)
    positions = torch.tensor([5, 62, 7, 63, 40, 0], device=device)
    tokens = TableRows(positions, owners, cache.table, cache.width)
    kv = torch.randn(6, 3 + 2 * kv_heads, dim, device=device)[:, 3:]
    before = cache.pages.pool.clone()
    store_tokens(kv, tokens, cache.pages, LAYER)
    got = cache.pages.pool.clone()
    cache.pages.pool.copy_(before)
    store_reference(kv, tokens, cache.pages, LAYER)
    assert torch.equal(got, cache.pages.pool)
    assert not torch.equal(got, before)
    assert not got[0].any()


class Dependent(InvariantProducts):
    """Adds up backwards where there are few rows."""

    def product(
        self, rows: Tensor, matrix: Tensor, bias: Tensor | None = None, **others: Any
    ) -> Tensor:
        if len(rows) > 8:
            return super().product(rows, matrix, bias, **others)
        return super().product(rows.flip(1), matrix.flip(1), bias, **others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_trial_refuses_products_that_depend_on_the_number_of_rows(
    is_transposed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    like = torch.zeros(70, 130, dtype=of_type(dtype, device), device=device)
    if is_transposed:
        like = like.t().contiguous().t()
    Trial(InvariantProducts(device)).check(like)
    with pytest.raises(ModelUnusable, match="product of 130 inputs"):
        Trial(Dependent(device)).check(like)


def test_layers_that_multiply_in_their_own_way_are_refused(
    device: torch.device, products: InvariantProducts
) -> None:
    class Own(nn.Linear):
        pass

    model: Any = nn.ModuleDict({"table": nn.Embedding(4, 8), "layer": nn.Linear(8, 8)}).to(device)
    model.config = LlamaConfig()
    make_invariant(model, products)
    model["experts"] = Own(8, 8)
    with pytest.raises(ModelUnusable, match="experts of model type llama"):
        make_invariant(model, products)


class OnCpu(Interpreted, InvariantCuda):
    pass


class WithTiles(OnCpu):
    """Chunks take another kernel than decoded tokens."""

    def _attention(self, cache: KvCache, tables: BlockTables) -> GraphAttention:
        return KernelAttention(cache, tables)


@pytest.fixture
def small(device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    if device.type == "cuda":
        pytest.skip("test_batch_invariant.py loads models on a GPU")
    return small_model(tmp_path, monkeypatch)


def test_a_model_passes_the_checks_at_load(small: Path) -> None:
    device = OnCpu(torch.device("cpu"))
    model = load_model(small, torch.float32, device.name, device.fit)
    self_check.check_model(model, device)
    self_check.check_invariance(model, device)


# Tokens that only fill up belong to no tile, and have what was in memory.
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_chunks_with_another_kernel_are_refused_at_load(small: Path) -> None:
    device = WithTiles(torch.device("cpu"))
    model = load_model(small, torch.float32, device.name, device.fit)
    self_check.check_model(model, device)
    with pytest.raises(ModelUnusable, match="depend on the batch"):
        self_check.check_invariance(model, device)
