"""A beam search in the least room."""

from __future__ import annotations

import pytest
from engine.scheduling.paper_engine import BLOCK, least_blocks
from engine.torch.conftest import ModelDir
from engine.torch.harness import configure, running
from oracle import tiny_models
from oracle.beams import expected


@pytest.mark.parametrize("family", ["llama", "mistral"])
async def test_a_search_runs_in_the_fewest_blocks(family: str, model_dir: ModelDir) -> None:
    """The last prompt token begins a block, or moves the window past a block."""
    folder = model_dir(family)
    model = tiny_models.reference_model(folder)
    for prompt_tokens in (13, 15):
        prompt = tiny_models.prompts(2)[1][:prompt_tokens]
        config = configure(max_tokens=4, ignore_end_id=True, beam_width=3)
        tokens = least_blocks(prompt_tokens, 4, 3) * BLOCK
        async with running(
            folder, tokens_per_block=BLOCK, kv_cache_tokens=tokens, prefix_reuse=False
        ) as engine:
            streams = await engine.ended(engine.submit(prompt, config))
            assert [stream.token_ids for stream in streams] == [
                found for found, _ in expected(model, prompt, 3, tokens=4)
            ]
