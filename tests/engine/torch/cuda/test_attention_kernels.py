"""Attention kernels give what their references give."""

from __future__ import annotations

from random import Random

import pytest
import torch
from engine.torch.cuda.cached_sequences import LAYER, PLAIN, Cache, close, rule
from engine.torch.cuda.references import (
    decode_attention_reference,
    prefill_attention_reference,
    turn_reference,
)
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.attention import (
    MOST_SPLITS,
    NewTokens,
    RunWorkspace,
    splits,
)
from trtmesh.engine.backends.torch.cuda.kernels.decode_attention import decode_attention
from trtmesh.engine.backends.torch.cuda.kernels.prefill_attention import (
    prefill_attention,
    tiles_of,
)
from trtmesh.engine.backends.torch.model.attention import Rule

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def decoded(
    cache: Cache,
    queries: Tensor,
    kv: Tensor,
    rule: Rule,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The kernel's result."""
    workspace = RunWorkspace(queries.shape[1], cache.pages, MOST_SPLITS, queries.device)
    new = NewTokens(cache.positions, cache.table, cache.width, angles=angles)
    output = decode_attention(queries, kv, new, cache.pages, LAYER, rule, workspace)
    assert not workspace.done.any(), "the next launch would merge too early"
    return output


@pytest.mark.parametrize("name", ["plain", "window", "softcap", "sinks", "all"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 2, 24), (2, 2, 64)])
def test_decode_equals_the_reference(
    name: str, heads: int, kv_heads: int, dim: int, device: torch.device
) -> None:
    cache = Cache([0, 1, 63, 64, 700], kv_heads, dim, device)
    queries = torch.randn(5, heads, dim, device=device)
    kv = torch.randn(5, 2 * kv_heads, dim, device=device)
    given = rule(name, heads, device)
    expected = decode_attention_reference(
        queries, kv, cache.positions, cache.table, cache.pages, LAYER, given
    )
    before = cache.pages.pool.clone()
    got = decoded(cache, queries, kv, given)
    for row in range(5):
        assert close(got[row], expected[row]), row
        assert torch.equal(cache.stored(row).flatten(0, 1), kv[row])
        cache.stored(row).copy_(before.new_zeros(2, kv_heads, dim))
    changed = (cache.pages.pool != before).flatten(1).any(1).sum()
    assert int(changed) <= 5, "other tokens were overwritten"


@pytest.mark.parametrize("turned", [16, 24])
def test_decode_rotates_queries_and_keys(turned: int, device: torch.device) -> None:
    cache = Cache([0, 1, 63, 300], 2, 24, device)
    queries, kv = torch.randn(4, 6, 24, device=device), torch.randn(4, 4, 24, device=device)
    angles = torch.randn(4, turned // 2, device=device)
    both = torch.cat((angles, angles), 1)
    cos, sin = both.cos(), both.sin()
    keys = turn_reference(kv[:, :2], cos, sin)
    rotated = torch.cat((keys, kv[:, 2:]), 1)
    expected = decode_attention_reference(
        turn_reference(queries, cos, sin),
        rotated,
        cache.positions,
        cache.table,
        cache.pages,
        LAYER,
        PLAIN,
    )
    got = decoded(cache, queries, kv, PLAIN, (cos, sin))
    assert close(got, expected)
    for row in range(4):
        torch.testing.assert_close(cache.stored(row).flatten(0, 1), rotated[row])


def test_rows_do_not_depend_on_their_mates_and_the_split(device: torch.device) -> None:
    """Steps of other sizes share a sequence's keys among other numbers of programs."""
    lengths = [5000, 900, 3, *[40] * 600]
    cache = Cache(lengths, 2, 32, device)
    few, many = splits(3, 2), splits(len(lengths), 2)
    assert few > many == 1
    queries = torch.randn(len(lengths), 4, 32, device=device)
    kv = torch.randn(len(lengths), 4, 32, device=device)
    # Not all rows: the interpreter is slow.
    whole = slice(None) if device.type == "cuda" else slice(len(lengths) - 530, None)
    rows = [0, 1, 2, *range(len(lengths))[whole][3:]]
    cache.positions, cache.table = cache.positions[rows], cache.table[rows]
    queries, kv = queries[rows], kv[rows]
    together = decoded(cache, queries, kv, PLAIN)[:3]
    cache.positions, cache.table = cache.positions[:3], cache.table[:3]
    apart = decoded(cache, queries[:3], kv[:3], PLAIN)
    assert torch.equal(together, apart)


def test_rows_of_the_null_block_store_nothing(device: torch.device) -> None:
    cache = Cache([7, 0], 2, 16, device)
    cache.table[1] = 0
    queries, kv = torch.randn(2, 4, 16, device=device), torch.randn(2, 4, 16, device=device)
    output = decoded(cache, queries, kv, PLAIN)
    assert not cache.pages.pool[0].any()
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_in_the_types_of_models(dtype: torch.dtype, device: torch.device) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        dtype = torch.float32  # the interpreter has no half precision
    cache = Cache([17, 300], 2, 128, device, dtype)
    queries = torch.randn(2, 8, 128, device=device, dtype=dtype)
    kv = torch.randn(2, 4, 128, device=device, dtype=dtype)
    expected = decode_attention_reference(
        queries, kv, cache.positions, cache.table, cache.pages, LAYER, PLAIN
    )
    assert close(decoded(cache, queries, kv, PLAIN), expected, dtype)


@pytest.mark.parametrize("seed", range(12))
def test_attention_of_random_shapes(seed: int, device: torch.device) -> None:
    """Decode and prefill over the same sequences."""
    dice = Random(seed)
    kv_heads, dim = dice.choice([1, 2, 3, 8]), dice.choice([16, 24, 40, 64, 80, 128])
    heads = kv_heads * dice.choice([1, 2, 3, 4, 7])
    lengths = [dice.randrange(dice.choice([4, 70, 600])) for _ in range(dice.randint(1, 7))]
    given = rule(dice.choice(["plain", "window", "softcap", "sinks", "all"]), heads, device)
    cache = Cache(lengths, kv_heads, dim, device)
    queries = torch.randn(len(lengths), heads, dim, device=device)
    kv = torch.randn(len(lengths), 2 * kv_heads, dim, device=device)
    expected = decode_attention_reference(
        queries, kv, cache.positions, cache.table, cache.pages, LAYER, given
    )
    assert close(decoded(cache, queries, kv, given), expected)
    counts = [dice.randint(1, length + 1) for length in lengths]
    starts = [length + 1 - count for length, count in zip(lengths, counts, strict=True)]
    queries = torch.randn(sum(counts), heads, dim, device=device)
    tiles = torch.tensor(tiles_of(starts, counts, first_row=0, first=0), device=device)
    expected = prefill_attention_reference(queries, tiles, cache.table, cache.pages, LAYER, given)
    output = torch.full_like(queries, torch.nan)
    prefill_attention(queries, tiles, cache.table, cache.pages, LAYER, given, output)
    assert close(output, expected)


@pytest.mark.parametrize("name", ["plain", "window", "softcap", "sinks", "all"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
def test_prefill_equals_the_reference(
    name: str, heads: int, kv_heads: int, dim: int, device: torch.device
) -> None:
    starts, counts = [0, 50, 0, 130], [70, 3, 1, 65]
    cache = Cache([70, 53, 1, 195], kv_heads, dim, device)
    # Two rows of other sequences come first.
    queries = torch.randn(2 + sum(counts), heads, dim, device=device)
    table = torch.cat((cache.table.new_zeros(2, cache.table.shape[1]), cache.table))
    tiles = torch.tensor(tiles_of(starts, counts, first_row=2, first=2), device=device)
    given = rule(name, heads, device)
    expected = prefill_attention_reference(queries, tiles, table, cache.pages, LAYER, given)
    output = torch.zeros_like(queries)
    prefill_attention(queries, tiles, table, cache.pages, LAYER, given, output)
    assert close(output, expected)
    assert not output[:2].any()
