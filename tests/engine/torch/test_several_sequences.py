"""The sequences of an item share its prompt and nothing else."""

from __future__ import annotations

from pathlib import Path

from engine.torch.harness import configure, running
from oracle import tiny_models


async def test_the_sequences_of_an_item_compute_the_prompt_once(llama: Path) -> None:
    prompt = list(range(10, 32))
    async with running(llama, tokens_per_block=4) as engine:
        for reuse in (False, True):
            before = engine.backend.stats()
            config = configure(
                max_tokens=6, ignore_end_id=True, num_return_sequences=5, reuse=reuse
            )
            streams = await engine.ended(engine.submit(prompt, config))
            after = engine.backend.stats()
            # The last token's logits are wanted by each.
            assert after.computed_prompt_tokens - before.computed_prompt_tokens == 22 + 4
            assert [s.end.cached_prompt_tokens for s in streams if s.end] == [0, 21, 21, 21, 21]


async def test_the_sequences_of_an_item_get_the_tokens_they_would_get_alone(llama: Path) -> None:
    prompt = tiny_models.prompts(2)[1]
    config = configure(
        max_tokens=8, ignore_end_id=True, temperature=1.2, seed=7, num_return_sequences=4
    )
    alone = configure(max_tokens=8, ignore_end_id=True, temperature=1.2, seed=7)
    async with running(llama, tokens_per_block=4, max_step_tokens=8, max_batch_size=3) as engine:
        together = await engine.ended(engine.submit(prompt, config))
        for index, stream in enumerate(together):
            keys = engine.submit(prompt, alone, sequence_index=index)
            (expected,) = await engine.ended(keys)
            assert stream.token_ids == expected.token_ids
