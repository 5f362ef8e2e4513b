"""Copies of KV equal the blocks while sequences join, leave and continue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine.torch.harness import configure, running
from oracle import tiny_models
from trtmesh.engine.backends.torch.compute.grouping import ROOM_TOKENS, DecodeCopies
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache, KvShape

SHAPE = KvShape(layers=2, kv_heads=2, head_dim=4)
SIZE = 4
BLOCKS = 64
PLENTY = 2**30


class Lab:
    """Two sequences of random KV, in scattered blocks."""

    def __init__(self, dtype: torch.dtype = torch.float32, most_bytes: int = PLENTY) -> None:
        self.cache = KvCache(
            SHAPE, blocks=BLOCKS, tokens_per_block=SIZE, dtype=dtype, device=torch.device("cpu")
        )
        torch.manual_seed(1)
        self.cache.pool[1:] = torch.randn(self.cache.pool[1:].shape)
        self.tables = BlockTables(4, BLOCKS // 2)
        self.slots = np.array([self.tables.take(), self.tables.take()])
        for number, slot in enumerate(self.slots):
            self.tables.put(int(slot), 0, range(1 + number, BLOCKS, 2))
        self.copies = DecodeCopies(self.cache, self.tables, torch.float32, most_bytes)

    def step(self, starts: list[int]) -> bool:
        """Decodes at `starts`; returns whether copies were used, after comparing their content."""
        positions = np.array(starts)
        copies = self.copies.follow(self.slots, positions, lambda blocks: [(0, len(blocks))])
        blocks = self.tables.rows[self.slots, positions // SIZE]
        rows = torch.from_numpy(self.cache.rows_of_tokens(blocks, positions).reshape(-1))
        for layer in range(SHAPE.layers):
            kv = torch.randn(2, 2 * SHAPE.kv_heads, SHAPE.head_dim)
            self.cache.write(layer, rows, kv)
            for copy in copies:
                self.compare(layer, starts, *copy.take(layer, kv))
        return bool(copies)

    def compare(
        self, layer: int, starts: list[int], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        assert keys.isfinite().all()
        assert values.isfinite().all()
        for row, start in enumerate(starts):
            blocks = self.tables.rows[self.slots[row]]
            # [blocks, 2, kv_heads, tokens, head_dim]
            held = self.cache.pool[blocks, layer].float()
            held = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : start + 1]
            close = 0 if self.cache.pool.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(keys[row, :, : start + 1], held[0], atol=close, rtol=close)
            torch.testing.assert_close(values[row, :, : start + 1], held[1], atol=close, rtol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_batch_gets_copies_from_its_second_step(dtype: torch.dtype) -> None:
    lab = Lab(dtype)
    assert [lab.step([3 + count, 5 + count]) for count in range(9)] == [False] + [True] * 8


def test_copies_grow_beyond_their_room() -> None:
    lab = Lab()
    served = [lab.step([count, 20 + count]) for count in range(ROOM_TOKENS + 2 * SIZE)]
    assert served == [False] + [True] * (len(served) - 1)


def test_changed_batches_get_no_copies() -> None:
    lab = Lab()
    assert [lab.step([3, 5]), lab.step([4, 6])] == [False, True]
    # One sequence did not advance and is computed again.
    assert not lab.step([4, 7])
    assert lab.step([5, 8])
    # A search gave the row the KV of another sequence.
    slot = int(lab.slots[0])
    lab.tables.replace(slot, lab.tables.rows[slot][::-1].copy().tolist())
    assert not lab.step([6, 9])
    assert lab.step([7, 10])
    # The row was given back and has a new owner.
    lab.tables.give_back(slot)
    assert lab.tables.take() == slot
    lab.tables.put(slot, 0, range(1, BLOCKS, 2))
    assert not lab.step([8, 11])


def test_copies_beyond_the_limit_are_not_made() -> None:
    lab = Lab(most_bytes=1000)
    assert not any(lab.step([3 + count, 5 + count]) for count in range(4))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_copies_change_no_token(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences join and end continually, and a search exchanges the KV of the beams."""
    model = tiny_models.build(tmp_path, family)
    results = []
    for copies in (0, PLENTY):
        monkeypatch.setattr("trtmesh.engine.backends.torch.cpu.device.DECODE_COPY_BYTES", copies)
        async with running(model, max_batch_size=5) as engine:
            keys: list[int] = []
            for number, prompt in enumerate(tiny_models.prompts(7)):
                width = 3 if number == 2 else 1
                config = configure(max_tokens=4 + 3 * number, ignore_end_id=True, beam_width=width)
                keys += engine.submit(prompt, config)
            results.append([stream.token_ids for stream in await engine.ended(keys)])
    assert results[0] == results[1]
