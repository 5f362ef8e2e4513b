"""Linear layers of few rows, with the norm before and the activation or sum after.

With few rows, a product takes as long as reading the weights. These kernels begin to read while the previous kernel
still runs, and need no kernels for norm, activation and sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.layers import Scale
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap
from trtmesh.engine.backends.torch.cuda.kernels.updates import (
    RANKS,
    UNIT_WORDS,
    Inner,
    Updates,
    of_part,
    shrink_arguments,
)

MOST_ROWS = 64
MOST_WIDE_ROWS = 128
"""The same of a product that shrinks and has more than PROGRAMS programs: beside it, shrink would begin late."""
VALUES = 64
"""Weights of a thread, for a product of one row."""
WIDEST = 16384
"""Weights of a line read at once."""
LINES = 64
"""Outputs of a program of a product of several rows: also a divisor of the outputs."""
DEPTH = 128
"""Inputs of a program multiplied at once: also a divisor of the inputs."""
PROGRAMS = 132
"""Programs to fill a large GPU, one per multiprocessor."""
LEAST_SHARE = 512
"""Inputs of a program, where several share the inputs."""
MOST_SHARES = 8
SHARED_MEMORY = 220_000
"""Most bytes for a program of a product of several rows."""


@triton.jit
def _one_row(
    given,
    weight,
    output,
    scale,
    added,
    inner,
    first_a,
    second_a,
    third_a,
    first_ranks,
    second_ranks,
    third_ranks,
    slots,
    most_rank,
    extra,
    epsilon,
    outputs,
    size,
    lines: tl.constexpr,
    columns: tl.constexpr,
    steps: tl.constexpr,
    has_norm: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    shrinks: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: `lines` outputs. With `shrinks`, the first `extra` programs multiply by A instead."""
    if overlaps:
        gdc_launch_dependents()
    line = (tl.program_id(0) - extra) * lines + tl.arange(0, lines)
    in_lines = line < outputs
    matrix = weight
    if shrinks:
        is_extra = tl.program_id(0) < extra
        programs = tl.cdiv(most_rank, lines)
        part = tl.program_id(0) // programs
        r = tl.program_id(0) % programs * lines + tl.arange(0, lines)
        slot = tl.load(slots)
        rank = tl.load(of_part(part, first_ranks, second_ranks, third_ranks) + tl.maximum(slot, 0))
        in_lines = tl.where(is_extra, (slot >= 0) & (r < rank), in_lines)
        line = tl.where(is_extra, tl.maximum(slot, 0).to(tl.int32) * most_rank + r, line)
        matrix = tl.where(is_extra, of_part(part, first_a, second_a, third_a), weight)
    at = tl.arange(0, columns)
    place = matrix + line[:, None].to(tl.int64) * size + at[None, :]
    there = in_lines[:, None] & (at < size)[None, :]
    second = outputs.to(tl.int64) * size
    a = tl.load(place, mask=there, other=0.0)
    if gated:
        b = tl.load(place + second, mask=there, other=0.0)
    if has_norm:
        s = tl.load(scale + at, mask=at < size, other=0.0)
    if overlaps:
        gdc_wait()
    x = tl.load(given + at, mask=at < size, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, 0)
    if has_norm:
        x = x * s
    y = tl.sum(a.to(tl.float32) * x[None, :], 1)
    if gated:
        z = tl.sum(b.to(tl.float32) * x[None, :], 1)
    for step in tl.static_range(1, steps):
        here = step * columns + at
        more = in_lines[:, None] & (here < size)[None, :]
        x = tl.load(given + here, mask=here < size, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 0)
        if has_norm:
            x = x * tl.load(scale + here, mask=here < size, other=0.0)
        a = tl.load(place + step * columns, mask=more, other=0.0)
        y += tl.sum(a.to(tl.float32) * x[None, :], 1)
        if gated:
            b = tl.load(place + second + step * columns, mask=more, other=0.0)
            z += tl.sum(b.to(tl.float32) * x[None, :], 1)
    if has_norm:
        length = tl.rsqrt(squares / size + epsilon)
        y = y * length
        if gated:
            z = z * length
    if gated:
        y = y / (1.0 + tl.exp(-y)) * z
    # Known when compiled, the first condition spares the second.
    if shrinks:  # noqa: SIM102
        if is_extra:
            # Of ranks beyond the slot's too, where B is 0.
            tl.store(inner + part * most_rank + r, y, mask=r < most_rank)
            return
    if adds:
        y += tl.load(added + line, mask=in_lines, other=0.0).to(tl.float32)
    tl.store(output + line, y.to(output.dtype.element_ty), mask=in_lines)


@triton.jit
def _few_rows(
    given,
    weight,
    output,
    added,
    partial,
    done,
    inner,
    first_a,
    second_a,
    third_a,
    first_ranks,
    second_ranks,
    third_ranks,
    slots,
    most_rank,
    units,
    extra,
    rows,
    outputs,
    size: tl.constexpr,
    padded_rows: tl.constexpr,
    lines: tl.constexpr,
    depth: tl.constexpr,
    shares: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    shrinks: tl.constexpr,
    parts: tl.constexpr,
    ranks: tl.constexpr,
    unit_words: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (`lines` outputs, number below `shares`). The shares divide the inputs. With `shrinks`, the first
    `extra` programs of a share multiply by A instead: `lines` ranks of units, each some ranks of a slot."""
    if overlaps:
        gdc_launch_dependents()
    tile = tl.program_id(0) - extra
    share = tl.program_id(1)
    begin = share * (size // shares)
    line = tile * lines + tl.arange(0, lines)
    row = tl.arange(0, padded_rows)
    matrix = weight
    if shrinks:
        is_extra = tile < 0
        programs = extra // parts
        part = tl.program_id(0) // programs
        at = tl.program_id(0) % programs * lines + tl.arange(0, lines)
        known = is_extra & (at // ranks < tl.load(units))
        place = units + (1 + at // ranks) * unit_words
        slot = tl.load(place, mask=known, other=-1)
        first_rank = tl.load(place + 1, mask=known, other=0)
        place_of_rank = of_part(part, first_ranks, second_ranks, third_ranks) + slot
        rank = tl.load(place_of_rank, mask=slot >= 0, other=0)
        used = first_rank < rank
        if is_extra & (tl.max(used.to(tl.int32), 0) == 0):
            return
        r = first_rank + at % ranks
        own = tl.where(used, slot.to(tl.int32) * most_rank + r, 0)
        line = tl.where(is_extra, own, line)
        matrix = tl.where(is_extra, of_part(part, first_a, second_a, third_a), weight)
    k = begin + tl.arange(0, depth)
    place = matrix + line[:, None].to(tl.int64) * size + k[None, :]
    second = outputs.to(tl.int64) * size
    source = given + row[None, :] * size + k[:, None]
    in_rows = (row < rows)[None, :]
    y = tl.zeros((lines, padded_rows), tl.float32)
    z = tl.zeros((lines, padded_rows), tl.float32)
    if overlaps:
        gdc_wait()
    # The weights are the first operand, of at least 64 lines; the second has at least 8.
    for step in range(0, size // shares, depth):
        a = tl.load(place + step)
        x = tl.load(source + step, mask=in_rows, other=0.0)
        y = tl.dot(a, x, y, input_precision="ieee")
        if gated:
            b = tl.load(place + second + step)
            z = tl.dot(b, x, z, input_precision="ieee")
    if shrinks:  # noqa: SIM102 - see above
        if is_extra:
            slot_of_row = tl.load(slots + row, mask=row < rows, other=-2)
            to = inner + ((share * parts + part) * rows + row[None, :]) * most_rank + r[:, None]
            tl.store(to, y, mask=(slot_of_row[None, :] == slot[:, None]) & used[:, None])
            return
    last = True
    if shares > 1:
        own = tl.arange(0, lines)[:, None] * padded_rows + row[None, :]
        wide: tl.constexpr = lines * padded_rows * (2 if gated else 1)
        mine = partial + (tile * shares + share) * wide
        tl.store(mine + own, y)
        if gated:
            tl.store(mine + lines * padded_rows + own, z)
        tl.debug_barrier()
        last = tl.atomic_add(done + tile, 1) == shares - 1
        if last:
            y = tl.zeros((lines, padded_rows), tl.float32)
            z = tl.zeros((lines, padded_rows), tl.float32)
            # In order, by any program as the last. Not from the first-level cache, perhaps older.
            for other in tl.static_range(shares):
                theirs = partial + (tile * shares + other) * wide + own
                y += tl.load(theirs, cache_modifier=".cg")
                if gated:
                    z += tl.load(theirs + lines * padded_rows, cache_modifier=".cg")
            tl.store(done + tile, 0)
    if last:
        if gated:
            y = y / (1.0 + tl.exp(-y)) * z
        spot = row[None, :].to(tl.int64) * outputs + line[:, None]
        if adds:
            y += tl.load(added + spot, mask=in_rows, other=0.0).to(tl.float32)
        tl.store(output + spot, y.to(output.dtype.element_ty), mask=in_rows)


class FewRows:
    """Products of up to MOST_ROWS rows, or MOST_WIDE_ROWS, with half-precision weights."""

    def __init__(self, device: torch.device) -> None:
        most = PROGRAMS * 2 * LINES * MOST_ROWS
        self._partial = torch.empty(most, device=device)
        # Zero between launches.
        self._done = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self._options = overlap(device)
        self._has_room = shared_memory(device) >= SHARED_MEMORY

    def takes(self, given: Tensor, weight: Tensor, *, shrinks: bool = False) -> bool:
        """Whether a kernel computes the product of `given` [rows, inputs] and `weight` [outputs, inputs], with `shrink`
        if it `shrinks`, faster than others."""
        rows, (outputs, size) = len(given), weight.shape
        most = MOST_WIDE_ROWS if shrinks and outputs // LINES > PROGRAMS else MOST_ROWS
        if weight.dtype.itemsize != 2 or not weight.is_contiguous() or not 0 < rows <= most:
            return False
        return rows == 1 or (self._has_room and not (outputs % (2 * LINES) or size % DEPTH))

    def product(
        self,
        given: Tensor,
        weight: Tensor,
        *,
        scale: Scale | None = None,
        added: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """given [rows, inputs] @ weight.T, plus `added`; silu(first half of the outputs) * second half where `gated`.

        A `scale` applies to `given`, and needs one row.
        """
        outputs = len(weight) // 2 if gated else len(weight)
        return self._launched(given, weight, outputs, scale, added, None)[0]

    def product_and_shrink(
        self,
        given: Tensor,
        weight: Tensor,
        updates: Updates,
        *,
        scale: Scale | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Inner]:
        """The same, and the result of `shrink` for the same rows, in a single launch."""
        output, inner = self._launched(given, weight, len(weight), scale, added, updates)
        assert inner
        return output, inner

    def _launched(
        self,
        given: Tensor,
        weight: Tensor,
        outputs: int,
        scale: Scale | None,
        added: Tensor | None,
        updates: Updates | None,
    ) -> tuple[Tensor, Inner | None]:
        given = given.contiguous()
        rows = len(given)
        output, inner = given.new_empty(rows, outputs), None
        if updates:
            shared = 1 if rows == 1 else shares(outputs // LINES, given.shape[1])
            values = shared * len(updates.parts) * rows * updates.most_rank
            inner = Inner(torch.empty(values, device=given.device), shared)
        if rows == 1:
            self._launch_one(given, weight, output, scale, added, updates, inner)
        else:
            assert scale is None
            self._launch_few(given, weight, output, added, updates, inner)
        return output, inner

    def _launch_one(
        self,
        given: Tensor,
        weight: Tensor,
        output: Tensor,
        scale: Scale | None,
        added: Tensor | None,
        updates: Updates | None,
        inner: Inner | None,
    ) -> None:
        size, outputs = given.shape[1], output.shape[1]
        gated = outputs < len(weight)
        columns = min(WIDEST, triton.next_power_of_2(size))
        warps = 4 if columns <= 4096 else 8
        lines = max(1, VALUES * 32 * warps // columns // (2 if gated else 1))
        extra = 0
        if updates:
            extra = len(updates.parts) * triton.cdiv(updates.most_rank, lines)
        _one_row[(extra + triton.cdiv(outputs, lines),)](
            given,
            weight,
            output,
            scale.weight if scale else given,
            given if added is None else added,
            *shrink_arguments(updates, inner)[:-1],
            extra,
            scale.epsilon if scale else 0.0,
            outputs,
            size,
            lines=lines,
            columns=columns,
            steps=triton.cdiv(size, columns),
            has_norm=scale is not None,
            adds=added is not None,
            gated=gated,
            shrinks=updates is not None,
            num_warps=warps,
            **self._options,
        )

    def _launch_few(
        self,
        given: Tensor,
        weight: Tensor,
        output: Tensor,
        added: Tensor | None,
        updates: Updates | None,
        inner: Inner | None,
    ) -> None:
        size, (rows, outputs) = given.shape[1], output.shape
        extra = 0
        if updates:
            extra = len(updates.parts) * triton.cdiv((len(updates.tiles.units) - 1) * RANKS, LINES)
        gated = outputs < len(weight)
        shared = shares(outputs // LINES, size)
        # Within the shared memory, and the fastest on an H200.
        deeper = rows <= MOST_ROWS // 2 and shared > 1 and size % (2 * DEPTH * shared) == 0
        # More programs would not run at once with further launches.
        depth = 2 * DEPTH if deeper and not gated and not updates else DEPTH
        _few_rows[(extra + outputs // LINES, shared)](
            given,
            weight,
            output,
            given if added is None else added,
            self._partial,
            self._done,
            *shrink_arguments(updates, inner),
            extra,
            rows,
            outputs,
            size=size,
            padded_rows=max(16, triton.next_power_of_2(rows)),
            lines=LINES,
            depth=depth,
            shares=shared,
            adds=added is not None,
            gated=gated,
            shrinks=updates is not None,
            parts=len(updates.parts) if updates else 0,
            ranks=RANKS,
            unit_words=UNIT_WORDS,
            num_warps=4,
            num_stages=3 if depth > DEPTH else 4,
            **self._options,
        )


def shared_memory(device: torch.device) -> float:
    """Bytes of a program."""
    if device.type != "cuda":
        return math.inf
    untyped: Any = torch.cuda.get_device_properties(device)
    return float(untyped.shared_memory_per_block_optin)


def shares(tiles: int, size: int) -> int:
    """Number of programs for the `size` inputs of each of `tiles`: enough to fill a GPU, if all have enough to do."""
    found = 1
    while (
        2 * found * tiles <= PROGRAMS
        and 2 * found <= MOST_SHARES
        and size // (2 * found) >= LEAST_SHARE
        and size % (2 * found * DEPTH) == 0
    ):
        found *= 2
    return found
