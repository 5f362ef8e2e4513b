"""What changes the odds of a token, against the arguments of transformers' `generate` or the formula written out.

Then the same for any company and interruption: what a choice remembers is a function of the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.choosing import chosen, continuation, filtered_weights
from engine.torch.harness import configure, running
from oracle import tiny_models
from transformers import TopPLogitsWarper
from trtmesh.chassis.errors import InvalidField, InvalidRequest
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling, Stopping

NEW_TOKENS = 32
VOCABULARY = tiny_models.VOCABULARY_SIZE
PROMPTS = tiny_models.prompts(4)


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[list[int]]:
    """The model's output without controls."""
    model = tiny_models.reference_model(llama)
    return [tiny_models.greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


def bad_words(plain: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Likely words: single ids, pairs and triples, two overlapping, two with a common beginning."""
    first, second = plain[1], plain[3]
    return (
        (first[0],),
        tuple(first[3:5]),
        tuple(second[2:5]),
        tuple(second[3:6]),
        tuple(second[2:4]),
        (*second[8:10], 7),
    )


BIAS = {11: 4.0, 40: -3.0, 200: 6.5, 201: float("-inf")}


def oracle_cases(plain: Sequence[Sequence[int]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Our options and the equivalent arguments of `generate`."""
    words = bad_words(plain)
    dense = [BIAS.get(token, 0.0) for token in range(VOCABULARY)]
    sequence_bias = {(token,): value for token, value in BIAS.items()}
    all_options = {
        "embedding_bias": tuple(dense),
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_token_ids": words,
    }
    all_arguments = {
        "sequence_bias": sequence_bias,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [list(word) for word in words],
    }
    return [
        *(({"no_repeat_ngram_size": n}, {"no_repeat_ngram_size": n}) for n in (1, 2, 3)),
        ({"bad_token_ids": words}, {"bad_words_ids": [list(word) for word in words]}),
        ({"embedding_bias": tuple(dense)}, {"sequence_bias": sequence_bias}),
        (
            {
                "embedding_bias_token_ids": ((11, 40, 11), (40, 200), (201,)),
                "embedding_bias_weights": (2.0, -5.0, float("-inf")),
            },
            {
                "sequence_bias": {
                    (11,): 4.0,
                    (40,): -3.0,
                    (200,): -5.0,
                    (201,): float("-inf"),
                }
            },
        ),
        (all_options, all_arguments),
    ]


async def test_controls_are_those_of_generate(llama: Path, plain: list[list[int]]) -> None:
    model = tiny_models.reference_model(llama)
    async with running(llama) as engine:
        assert (
            await engine.run(PROMPTS, configure(max_tokens=NEW_TOKENS, ignore_end_id=True)) == plain
        )
        for options, arguments in oracle_cases(plain):
            expected = [
                tiny_models.greedy(model, prompt, NEW_TOKENS, **arguments) for prompt in PROMPTS
            ]
            assert expected != plain, f"the oracle has nothing to say about {options}"
            config = configure(max_tokens=NEW_TOKENS, ignore_end_id=True, **options)
            assert await engine.run(PROMPTS, config) == expected, options


async def test_dense_bias_and_words_add_up(llama: Path) -> None:
    dense = tuple(1.5 if token == 9 else 0.0 for token in range(VOCABULARY))
    both = configure(
        max_tokens=8,
        ignore_end_id=True,
        embedding_bias=dense,
        embedding_bias_token_ids=((9, 10),),
        embedding_bias_weights=(30.0,),
    )
    model = tiny_models.reference_model(llama)
    expected = tiny_models.greedy(model, PROMPTS[1], 8, sequence_bias={(9,): 31.5, (10,): 30.0})
    async with running(llama) as engine:
        assert await engine.run(PROMPTS[1:2], both) == [expected]


def decayed(top_p: float, decay: float, least: float, reset: int, tokens: Sequence[int]) -> float:
    """top_p of the next token: the rule of TensorRT-LLM's computeToppDecay, applied after each token."""
    value = top_p
    for token in tokens:
        value = top_p if token == reset else max(value * decay, least)
    return value


async def test_top_p_decays_to_its_minimum_and_is_reset(llama: Path) -> None:
    """Sampled tokens equal the same draws over transformers' distribution of each step."""
    prompt, reset = PROMPTS[1], 5
    shape = {"top_p": 0.95, "top_p_decay": 0.7, "top_p_min": 0.3, "top_p_reset_id": reset}
    # The bias makes the reset id come now and then.
    config = configure(
        max_tokens=NEW_TOKENS,
        ignore_end_id=True,
        temperature=3.0,
        seed=5,
        embedding_bias_token_ids=((reset,),),
        embedding_bias_weights=(9.0,),
        **shape,
    )
    async with running(llama) as engine:
        (tokens,) = await engine.run([prompt], config)
    assert reset in tokens[2:-4], "the seed shows no reset"
    model = tiny_models.reference_model(llama)
    sampling = config.sampling
    for position in range(NEW_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:position]])).logits[:, -1]
        biased = logits.clone()
        biased[0, reset] += 9.0
        top_p = decayed(0.95, 0.7, 0.3, reset, tokens[:position])
        warper: Any = TopPLogitsWarper(top_p)
        expected = warper(None, biased.double() / 3.0).softmax(dim=1)
        weights = filtered_weights([sampling], biased, [top_p])
        torch.testing.assert_close(weights / weights.sum(), expected)
        assert expected[0, tokens[position]] > 0
        row = continuation([*prompt, *tokens[:position]], config, len(prompt))
        assert chosen([row], logits) == [tokens[position]]


async def test_a_greedy_top_p_decay_changes_nothing(llama: Path) -> None:
    config = configure(max_tokens=8, ignore_end_id=True, top_p_decay=0.5)
    async with running(llama) as engine:
        expected = await engine.run(PROMPTS[:1], configure(max_tokens=8, ignore_end_id=True))
        assert await engine.run(PROMPTS[:1], config) == expected


def interrupted_cases(plain: Sequence[Sequence[int]]) -> list[GenerationConfig]:
    """Every feature with a memory, and combinations."""
    sampled = {"temperature": 2.0, "seed": 3}
    decay = {"top_p": 0.97, "top_p_decay": 0.9, "top_p_min": 0.4, "top_p_reset_id": 7}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    words = {"bad_token_ids": bad_words(plain)}
    bias = {"embedding_bias_token_ids": ((11, 12), (13,)), "embedding_bias_weights": (3.0, 5.0)}
    several: list[dict[str, Any]] = [
        {**sampled, **decay},
        {**sampled, **decay, **bias, "no_repeat_ngram_size": 3},
        {**penalties, "prompt_ignore_length": 3},
        {**penalties, **sampled, "top_k": 20},
        {"no_repeat_ngram_size": 2, **words},
        {**words, **bias, **penalties, **sampled, **decay, "min_p": 0.01, "min_tokens": 20},
        {**sampled, "log_probs": True, "normalize_log_probs": True, "top_k": 5},
    ]
    return [configure(max_tokens=NEW_TOKENS, ignore_end_id=True, **case) for case in several]


async def test_company_chunks_pauses_and_migration_change_no_token(
    llama: Path, plain: list[list[int]]
) -> None:
    cases = interrupted_cases(plain)
    prompts = [PROMPTS[1 + number % 3] for number in range(len(cases))]
    async with running(llama, max_batch_size=1) as engine:
        keys = [engine.submit(p, c)[0] for p, c in zip(prompts, cases, strict=True)]
        alone = [stream.token_ids for stream in await engine.ended(keys)]
        for cut in (1, 13, NEW_TOKENS - 1):
            keys = [
                engine.submit(prompt, config, emitted=tokens[:cut])[0]
                for prompt, config, tokens in zip(prompts, cases, alone, strict=True)
            ]
            rest = [stream.token_ids for stream in await engine.ended(keys)]
            assert rest == [tokens[cut:] for tokens in alone]
    tiny = {"kv_cache_tokens": 160, "tokens_per_block": 4, "max_step_tokens": 9}
    async with running(llama, **tiny, prefix_reuse=False) as engine:
        with engine.gate.held():
            keys = [engine.submit(p, c)[0] for p, c in zip(prompts, cases, strict=True)]
        assert [stream.token_ids for stream in await engine.ended(keys)] == alone
        assert engine.backend._loaded.engine.scheduler.preemptions > 0


async def test_ids_beyond_the_vocabulary_are_refused_by_name(llama: Path) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("stopping.end_id", {"end_id": VOCABULARY}),
        ("stopping.stop_token_ids", {"stop_token_ids": ((1, VOCABULARY), (2,))}),
        ("stopping.bad_token_ids", {"bad_token_ids": ((2,), (VOCABULARY, 1))}),
        ("sampling.top_p_reset_id", {"top_p_reset_id": VOCABULARY}),
        (
            "sampling.embedding_bias_token_ids",
            {"embedding_bias_token_ids": ((VOCABULARY,),), "embedding_bias_weights": (1.0,)},
        ),
        ("sampling.embedding_bias", {"embedding_bias": (0.0,) * (VOCABULARY - 1)}),
    ]
    async with running(llama) as engine:
        for name, options in refused:
            with pytest.raises(InvalidField, match=name):
                engine.submit([5], configure(**options))


async def test_where_every_token_is_forbidden_the_item_fails_and_says_why(llama: Path) -> None:
    nothing = configure(max_tokens=3, bad_token_ids=tuple((token,) for token in range(VOCABULARY)))
    async with running(llama) as engine:
        fine = engine.submit([5], configure(max_tokens=3, ignore_end_id=True))
        (failed,) = await engine.ended(engine.submit([6], nothing))
        assert failed.end is not None
        assert isinstance(failed.end.error, InvalidRequest)
        assert "stopping.bad_token_ids" in failed.end.error.fields
        (stream,) = await engine.ended(fine)
        assert len(stream.token_ids) == 3


def test_a_ban_of_the_end_id_holds_while_min_tokens_are_not_there() -> None:
    config = GenerationConfig(stopping=Stopping(min_tokens=2), sampling=Sampling())
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    for generated, token in ((0, 1), (1, 1), (2, 0)):
        row = continuation([2] * (1 + generated), config, 1, end_ids=(0,))
        assert chosen([row], logits) == [token]
    assert logits.tolist() == [[9.0, 1.0, 0.0]], "the logits of the caller changed"
