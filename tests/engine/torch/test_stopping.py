"""Ends of generated sequences on the torch engine."""

from __future__ import annotations

from pathlib import Path

from engine.torch.harness import configure, running
from oracle import tiny_models
from trtmesh.v1 import generation_pb2 as pb


async def test_stop_words_that_span_steps_end_a_sequence(llama: Path) -> None:
    prompt = tiny_models.prompts(2)[1]
    model = tiny_models.reference_model(llama)
    free = tiny_models.greedy(model, prompt, 12)
    word = tuple(free[4:7])
    first = next(end for end in range(3, 13) if tuple(free[end - 3 : end]) == word)
    config = configure(max_tokens=12, ignore_end_id=True, stop_token_ids=((300, 301), word))
    async with running(llama) as engine:
        (stream,) = await engine.ended(engine.submit(prompt, config))
    assert stream.token_ids == free[:first]
    assert stream.end is not None
    assert stream.end.reason == pb.FINISH_REASON_STOP_WORD
    assert stream.end.stop_token_ids == word
    assert stream.end.generated_tokens == first


async def test_min_tokens_bans_the_end_id_as_generate_does(llama: Path) -> None:
    prompts = tiny_models.prompts(4)
    model = tiny_models.reference_model(llama)
    end_id = tiny_models.greedy(model, prompts[1], 12)[2]
    expected = [
        tiny_models.greedy(model, prompt, 12, eos_token_id=end_id, min_new_tokens=6)
        for prompt in prompts
    ]
    async with running(llama) as engine:
        early = await engine.run(prompts, configure(max_tokens=12, end_id=end_id))
        assert early != expected
        config = configure(max_tokens=12, end_id=end_id, min_tokens=6)
        assert await engine.run(prompts, config) == expected


async def test_without_max_tokens_a_sequence_ends_at_the_longest_length(llama: Path) -> None:
    prompt = tiny_models.prompts(2)[1]
    async with running(llama, max_sequence_tokens=len(prompt) + 7) as engine:
        for config in (
            configure(ignore_end_id=True),
            configure(ignore_end_id=True, max_tokens=1000),
        ):
            (stream,) = await engine.ended(engine.submit(prompt, config))
            assert len(stream.token_ids) == 7
            assert stream.end is not None
            assert stream.end.reason == pb.FINISH_REASON_LENGTH


async def test_without_max_tokens_a_sequence_ends_where_the_pool_does(llama: Path) -> None:
    settings = {"kv_cache_tokens": 48, "tokens_per_block": 16, "max_sequence_tokens": 400}
    async with running(llama, **settings) as engine:
        (stream,) = await engine.ended(engine.submit([5] * 40, configure(ignore_end_id=True)))
        # The KV of the last token is not needed.
        assert len(stream.token_ids) == 48 + 1 - 40
        assert stream.end is not None
        assert stream.end.reason == pb.FINISH_REASON_LENGTH
