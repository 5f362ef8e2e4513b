"""What the kernels compute, with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.layers import Scale
from trtmesh.engine.backends.torch.cuda.kernels.pages import Pages, TableRows
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import NO_TOKEN
from trtmesh.engine.backends.torch.cuda.kernels.updates import Factors
from trtmesh.engine.backends.torch.model.attention import Rule


def decode_attention_reference(
    queries: Tensor,
    kv: Tensor,
    positions: Tensor,
    table: Tensor,
    pages: Pages,
    layer: int,
    rule: Rule,
) -> Tensor:
    """The same with PyTorch, in float64 and row by row; `table` is [rows, width], and nothing is stored."""
    output = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    for row in range(len(queries)):
        position = int(positions[row])
        keys, values = stored(pages, table[row], position, layer)
        keys = torch.cat((keys, kv[row, None, : pages.kv_heads]))
        values = torch.cat((values, kv[row, None, pages.kv_heads :]))
        output[row] = attended(queries[row, None], keys, values, position, rule)[0]
    return output.to(queries.dtype)


def stored(pages: Pages, blocks: Tensor, tokens: int, layer: int) -> tuple[Tensor, Tensor]:
    """The first keys and values [tokens, kv_heads, dim] of a sequence with these blocks."""
    # [blocks, 2, kv_heads, tokens of a block, dim]
    found = pages.pool[blocks, layer]
    rows = found.permute(1, 0, 3, 2, 4).flatten(1, 2)
    return rows[0, :tokens], rows[1, :tokens]


def attended(queries: Tensor, keys: Tensor, values: Tensor, start: int, rule: Rule) -> Tensor:
    """Attention in float64 of `queries` [tokens, heads, dim] from position `start` on to `keys` and `values` [keys,
    kv_heads, dim] from position 0 on."""
    shared = queries.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(shared, 1) for each in (keys, values))
    scores = torch.einsum("thd,khd->htk", queries.double(), keys) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    own = torch.arange(start, start + len(queries), device=queries.device)[:, None]
    other = torch.arange(len(keys), device=queries.device)
    hidden = other > own
    if rule.window is not None:
        hidden |= other <= own - rule.window
    scores = scores.masked_fill(hidden, -math.inf)
    if rule.sinks is not None:
        column = rule.sinks.double()[:, None, None].expand(-1, len(queries), 1)
        scores = torch.cat((scores, column), 2)
    weights = scores.softmax(2)[:, :, : len(keys)]
    return torch.einsum("htk,khd->thd", weights, values)


def prefill_attention_reference(
    queries: Tensor, tiles: Tensor, table: Tensor, pages: Pages, layer: int, rule: Rule
) -> Tensor:
    """The same with PyTorch, in float64 and tile by tile; rows of no tile are zero."""
    output = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    for row, token, start, length in tiles.tolist():
        keys, values = stored(pages, table[row], start + length, layer)
        own = slice(token, token + length)
        output[own] = attended(queries[own], keys, values, start, rule)
    return output.to(queries.dtype)


def invariant_product_reference(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    found = rows.double() @ matrix.double().t()
    return (found if bias is None else found + bias.double()).to(rows.dtype)


def product_reference(
    given: Tensor,
    weight: Tensor,
    *,
    scale: Scale | None = None,
    added: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    wide = given.double()
    if scale:
        length = torch.rsqrt(wide.square().mean(-1, keepdim=True) + scale.epsilon)
        wide = wide * length * scale.weight.double()
    found = wide @ weight.double().t()
    if gated:
        gate, up = found.chunk(2, -1)
        found = torch.nn.functional.silu(gate) * up
    if added is not None:
        found = found + added.double()
    return found.to(given.dtype)


def store_reference(kv: Tensor, tokens: TableRows, pages: Pages, layer: int) -> None:
    """The same with PyTorch, token by token."""
    table = tokens.table.view(-1, int(tokens.width))
    places = zip(tokens.owners.tolist(), tokens.positions.tolist(), strict=True)
    for row, (owner, position) in enumerate(places):
        block = int(table[owner, position // pages.block_tokens])
        if block:
            place = pages.pool[block, layer, :, :, position % pages.block_tokens]
            place.copy_(kv[row].view(place.shape))


def gated_silu_reference(both: Tensor) -> Tensor:
    gate, up = both.double().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(both.dtype)


def turn_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[1]
    turned, rest = heads.double().tensor_split((size,), 2)
    a, b = turned.chunk(2, 2)
    swapped = torch.cat((-b, a), 2)
    turned = turned * cos.double()[:, None] + swapped * sin.double()[:, None]
    return torch.cat((turned, rest), 2).to(heads.dtype)


def known_reference(given: Tensor, chosen: Tensor) -> Tensor:
    found = chosen[(-1 - given).clamp(min=0)].clamp(min=0)
    return torch.where(given < 0, found, given)


def highest_reference(logits: Tensor) -> Tensor:
    """The tokens of rows of temperature 0."""
    peaks, ids = logits.float().max(1)
    return torch.where(peaks.abs() < math.inf, ids, NO_TOKEN)


def updates_reference(
    slots: Sequence[int], parts: Sequence[Factors], given: Tensor, output: Tensor
) -> Tensor:
    """`output` with the update of each row's slot, -1 for none."""
    wide = output.double()
    for row, slot in enumerate(slots):
        first = 0
        for part in parts:
            after = first + part.b.shape[2]
            if slot >= 0:
                rank = int(part.ranks[slot])
                inner = part.a[slot, :rank].double() @ given[row].double()
                wide[row, first:after] += inner @ part.b[slot, :rank].double()
            first = after
    return wide
