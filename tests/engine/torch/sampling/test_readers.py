"""A prompt with log-probabilities, paused before the last chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.torch.harness import configure, running
from oracle import tiny_models


async def test_paused_reader_reads_each_position_once(llama: Path) -> None:
    first, second = (prompt * 8 for prompt in tiny_models.prompts(2))
    long = configure(max_tokens=36, ignore_end_id=True)
    read = configure(max_tokens=4, ignore_end_id=True, prompt_log_probs=True)
    async with running(llama, prefix_reuse=False) as engine:
        (alone,) = await engine.ended(engine.submit(second[:40], read))
    # The first sequence grows into the blocks of the second while the second computes a few prompt tokens per step.
    pool = {"kv_cache_tokens": 52, "tokens_per_block": 4, "max_step_tokens": 5}
    async with running(llama, prefix_reuse=False, **pool) as engine:
        with engine.gate.held():
            keys = engine.submit(first[:8], long) + engine.submit(second[:40], read)
        _, paused = await engine.ended(keys)
        assert engine.backend.stats().preemptions
    assert paused.end
    assert paused.end.error is None
    assert paused.token_ids == alone.token_ids
    told = [
        [value for each in stream.prompts for value in each.log_probs] for stream in (paused, alone)
    ]
    assert told[0] == pytest.approx(told[1], abs=1e-4)
    assert len(told[0]) == 39
