"""Kernels for `batch_invariant` give what their references give, and a row the same bits whatever the other rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.cuda.cached_sequences import BLOCK_TOKENS, LAYER, Cache, close, rule
from engine.torch.cuda.interpreted import Interpreted, small_model
from engine.torch.cuda.references import (
    invariant_product_reference,
    prefill_attention_reference,
    store_reference,
)
from torch import Tensor, nn
from transformers import LlamaConfig
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.compute import self_check
from trtmesh.engine.backends.torch.cuda.attention import KernelAttention
from trtmesh.engine.backends.torch.cuda.invariant_device import InvariantCuda
from trtmesh.engine.backends.torch.cuda.invariant_layers import Trial, make_invariant
from trtmesh.engine.backends.torch.cuda.kernels import decode_attention
from trtmesh.engine.backends.torch.cuda.kernels.invariant_products import (
    ROWS_AT_ONCE,
    InvariantProducts,
    shares_of,
)
from trtmesh.engine.backends.torch.cuda.kernels.pages import TableRows
from trtmesh.engine.backends.torch.cuda.kernels.store import store_tokens
from trtmesh.engine.backends.torch.cuda.step_inputs import GraphAttention
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.attention import Rule
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
@pytest.mark.parametrize(("outputs", "size"), [(128, 128), (70, 200), (12, 1030), (64, 2048)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_rows_of_products_do_not_depend_on_each_other(
    outputs: int,
    size: int,
    is_transposed: bool,
    dtype: torch.dtype,
    device: torch.device,
    products: InvariantProducts,
) -> None:
    dtype = of_type(dtype, device)
    dice = random.Random(size)
    count = dice.randrange(66, 140)
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


def test_more_rows_than_a_launch_takes(device: torch.device, products: InvariantProducts) -> None:
    torch.manual_seed(0)
    rows = torch.randn(ROWS_AT_ONCE + 3, 32, device=device)
    matrix = torch.randn(5, 32, device=device)
    every = products.product(rows, matrix)
    assert near(every, invariant_product_reference(rows, matrix))
    assert torch.equal(products.product(rows[-2:], matrix), every[-2:])


def attended(
    cache: Cache, queries: Tensor, kv: Tensor, given: Rule, positions: Tensor, owners: Tensor
) -> Tensor:
    workspace = decode_attention.DecodeWorkspace(
        queries.shape[1], cache.pages, len(queries), queries.device
    )
    output = decode_attention.decode_attention(
        queries,
        kv,
        positions,
        cache.table,
        cache.width,
        cache.pages,
        LAYER,
        given,
        workspace,
        writes=False,
        owners=owners,
        tiling=decode_attention.fixed_tiling(cache.pages),
    )
    assert not workspace.done.any(), "the next launch would merge too early"
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "window", "softcap", "sinks", "all"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
def test_tokens_of_chunks_attend_as_if_each_were_alone(
    name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Chunks of several sequences, the last beyond a run of keys."""
    dtype = of_type(dtype, device)
    starts, counts = [0, 50, 0, 590], [9, 3, 1, 4]
    cache = Cache([9, 53, 1, 594], kv_heads, dim, device, dtype)
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    positions = [
        start + place for start, count in zip(starts, counts, strict=True) for place in range(count)
    ]
    queries = torch.randn(len(owners), heads, dim, device=device).to(dtype)
    # Their own keys and values are stored.
    kv = torch.stack([stored(cache, *each) for each in zip(owners, positions, strict=True)])
    tiles = [
        [row, owners.index(row), start, count]
        for row, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    given = rule(name, heads, device)
    where = [torch.tensor(each, device=device) for each in (positions, owners)]
    expected = prefill_attention_reference(
        queries, torch.tensor(tiles), cache.table, cache.pages, LAYER, given
    )
    every = attended(cache, queries, kv, given, *where)
    assert close(every, expected, torch.float32 if dtype is torch.float32 else torch.bfloat16)
    for places in some_rows(len(owners), random.Random(dim)):
        alone = attended(cache, queries[places], kv[places], given, *(w[places] for w in where))
        assert torch.equal(alone, every[places])


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
        self, rows: Tensor, matrix: Tensor, bias: Tensor | None = None, *, shared: int | None = None
    ) -> Tensor:
        if len(rows) > 8:
            return super().product(rows, matrix, bias, shared=shared)
        return super().product(rows.flip(1), matrix.flip(1), bias, shared=shared)


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
