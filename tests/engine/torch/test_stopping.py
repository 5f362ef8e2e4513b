"""Where sequences end."""

from __future__ import annotations

from pathlib import Path

from engine.torch.harness import configure, running
from oracle import tiny_models
from trtmesh.chassis.vocabulary import Stopping
from trtmesh.engine.backends.torch.stopping import EndRule
from trtmesh.v1 import generation_pb2 as pb

PROMPT = [9, 9]


def rule(stopping: Stopping, *, limit: int = 100) -> EndRule:
    return EndRule(stopping, (0, 1), len(PROMPT), limit)


def test_the_models_end_ids_end_unless_another_is_given_or_all_are_ignored() -> None:
    tokens = [*PROMPT, 5, 1]
    assert rule(Stopping()).end_after(tokens) == (pb.FINISH_REASON_END_ID, (1,))
    assert rule(Stopping(end_id=7)).end_after(tokens) is None
    assert rule(Stopping(end_id=7)).end_after([*PROMPT, 7]) == (pb.FINISH_REASON_END_ID, (7,))
    assert rule(Stopping(ignore_end_id=True)).end_after(tokens) is None


def test_a_stop_word_ends_with_its_last_token_also_one_that_overlaps_itself() -> None:
    words = rule(Stopping(stop_token_ids=((4, 4, 5), (6,))))
    assert words.end_after([*PROMPT, 4, 4]) is None
    assert words.end_after([*PROMPT, 4, 4, 4, 5]) == (pb.FINISH_REASON_STOP_WORD, (4, 4, 5))
    assert words.end_after([*PROMPT, 6]) == (pb.FINISH_REASON_STOP_WORD, (6,))


def test_a_stop_word_does_not_reach_into_the_prompt() -> None:
    assert rule(Stopping(stop_token_ids=((9, 5),))).end_after([*PROMPT, 5]) is None


def test_min_tokens_delays_end_ids_and_stop_words_but_not_the_limit() -> None:
    early = rule(Stopping(min_tokens=2, stop_token_ids=((5,),)), limit=len(PROMPT) + 4)
    assert early.bans_end_ids(len(PROMPT) + 1)
    assert not early.bans_end_ids(len(PROMPT) + 2)
    assert early.end_after([*PROMPT, 5, 5]) is None
    assert early.end_after([*PROMPT, 5, 5, 5]) == (pb.FINISH_REASON_STOP_WORD, (5,))
    hurried = rule(Stopping(min_tokens=9), limit=len(PROMPT) + 2)
    assert hurried.end_after([*PROMPT, 3, 3]) == (pb.FINISH_REASON_LENGTH, ())


def test_the_content_beats_the_length_at_the_same_token() -> None:
    full = rule(Stopping(), limit=len(PROMPT) + 1)
    assert full.end_after([*PROMPT, 0]) == (pb.FINISH_REASON_END_ID, (0,))


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
