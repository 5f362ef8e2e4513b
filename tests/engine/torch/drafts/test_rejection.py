"""Drafts with logits: the tokens have the model's distribution, and say alone where drafts end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.torch.drafts.drafters import AnyLengths, Knowing, draft
from engine.torch.harness import configure, running
from oracle import tiny_models
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import Draft, GenerationConfig, Tensor
from trtmesh.engine.backends.torch.cpu.device import ORDERING
from trtmesh.engine.backends.torch.memory.tensors import to_message
from trtmesh.engine.backends.torch.sampling.choice import Chooser
from trtmesh.engine.backends.torch.sampling.continuation import Continuation, GivenDrafts
from trtmesh.engine.backends.torch.sampling.filters import Filters
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.v1 import generation_pb2 as pb

SIZE = 24
"""Of the vocabulary."""
DRAWS = 1000
TOKENS = 12
"""Drafts of an item."""


def continuation(config: GenerationConfig, given: GivenDrafts | None = None) -> Continuation:
    rule = EndRule(config.stopping, (), 3, 99)
    return Continuation(0, 0, 0, [1, 2, 3], rule, TokenRules(config), given_drafts=given)


def chosen(sequences: list[Continuation], logits: torch.Tensor) -> list[int]:
    choice = Chooser(ORDERING).choose(sequences, logits.expand(len(sequences), -1))
    assert not choice.read()
    return choice.token_ids


def probabilities(config: GenerationConfig, logits: torch.Tensor) -> Any:
    top_p = config.sampling.top_p or 1.0
    return Filters(ORDERING).probabilities(config.sampling, logits, top_p).numpy()


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({"temperature": 1.0}, "with the noise of the sequence"),
        ({"temperature": 0.7, "top_k": 15, "top_p": 0.9}, "foreign"),
    ],
    ids=str,
)
def test_tokens_have_the_distribution_of_the_model(values: dict[str, Any], source: str) -> None:
    """By chi-square, over seeds; drafts are drawn from other logits."""
    torch.manual_seed(5)
    model, other = torch.randn(2, 1, SIZE) * 1.5
    configs = [configure(**values, seed=seed) for seed in range(DRAWS)]
    wanted, drafted = probabilities(configs[0], model), probabilities(configs[0], other)
    if source == "foreign":
        drafts = np.random.default_rng(1).choice(SIZE, DRAWS, p=drafted).tolist()
    else:
        drafts = chosen([continuation(config) for config in configs], other)
    found = chosen(
        [
            continuation(config, GivenDrafts([token], other, None))
            for config, token in zip(configs, drafts, strict=True)
        ],
        model,
    )
    held = np.mean(np.array(found) == drafts)
    # A replacement never equals its draft.
    assert held == pytest.approx(np.minimum(wanted, drafted).sum(), abs=0.02)
    assert fits(found, wanted)
    assert not fits(drafts, wanted)


def fits(tokens: list[int], wanted: Any) -> bool:
    """Whether tokens may be draws from probabilities: a chi-square within four deviations, as in 9,999 of 10,000."""
    likely = wanted > 0
    counts = np.bincount(tokens, minlength=SIZE)
    expected = wanted[likely] * len(tokens)
    statistic = ((counts[likely] - expected) ** 2 / expected).sum()
    freedom = likely.sum() - 1
    return not counts[~likely].any() and statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_a_threshold_decides_without_a_draw() -> None:
    model, other = torch.log(torch.tensor([[[0.2, 0.8]], [[0.5, 0.5]]]))
    for threshold, token in ((0.0, 0), (0.39, 0), (0.41, 1), (1.0, 1)):
        rows = [
            continuation(configure(temperature=1.0, seed=seed), GivenDrafts([0], other, threshold))
            for seed in range(50)
        ]
        assert set(chosen(rows, model)) == {token}


@pytest.mark.parametrize("values", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_a_source_without_an_allowed_token_leaves_the_choice_to_the_model(
    values: dict[str, Any],
) -> None:
    """Logits that are finite for banned tokens alone."""
    torch.manual_seed(3)
    model, other = torch.randn(1, SIZE), torch.full((1, SIZE), -torch.inf)
    other[0, 4] = 0.0
    values |= {"temperature": 1.0, "bad_token_ids": ((4,), (0,))}
    configs = [configure(**values, seed=seed) for seed in range(DRAWS)]
    found = chosen(
        [continuation(config, GivenDrafts([4], other, None)) for config in configs], model
    )
    model[0, [0, 4]] = -torch.inf
    assert fits(found, probabilities(configs[0], model))


def given(threshold: float | None = None, **changes: Any) -> Draft:
    """Drafts of a source with equal chances for all ids; about half of them hold."""
    logits = to_message(torch.zeros(TOKENS, tiny_models.VOCABULARY_SIZE), pb.DATA_TYPE_FP16)
    ids = tuple(range(40, 40 + TOKENS))
    return replace(Draft(ids, logits, threshold), **changes)


@pytest.mark.parametrize("threshold", [None, 0.4])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))]
)
async def test_the_choice_does_not_depend_on_the_steps(
    seed: int, threshold: float | None, llama: Path
) -> None:
    """One draft a step or all; resumed at every token; with drafts of another source after the first that differs."""
    plain = configure(max_tokens=20, ignore_end_id=True, temperature=1.2, seed=seed, top_p=0.99)
    config = replace(plain, draft=given(threshold))
    prompt = tiny_models.prompts(2)[1]
    async with running(llama, max_step_tokens=1) as engine:
        streams = await engine.ended(
            [*engine.submit(prompt, plain), *engine.submit(prompt, config)]
        )
    without, tokens = (stream.token_ids for stream in streams)
    assert tokens != without
    async with running(llama, drafts="ngram", max_batch_size=32) as engine:
        draft(engine, Knowing({(0, 0): tokens}, 0.7), AnyLengths(3))
        keys = [engine.submit(prompt, config, emitted=tokens[:cut])[0] for cut in range(20)]
        for cut, stream in enumerate(await engine.ended(keys)):
            assert tokens[:cut] + stream.token_ids == tokens
        assert engine.backend._loaded.draft_logits._preparation.held == 0


REFUSED: dict[str, tuple[Draft, dict[str, Any], str]] = {
    "no logits": (given(0.5, logits=None), {}, "draft.acceptance_threshold"),
    "no drafts": (given(token_ids=()), {}, "draft.logits.shape"),
    "fewer drafts": (given(token_ids=(4, 5)), {}, "draft.logits.shape"),
    "beams": (given(), {"beam_width": 2}, "draft.logits"),
    "integers": (
        given(logits=Tensor(pb.DATA_TYPE_INT32, (TOKENS, 1), bytes(4 * TOKENS))),
        {},
        "draft.logits.data_type",
    ),
    "no number": (
        given(logits=to_message(torch.full((TOKENS, tiny_models.VOCABULARY_SIZE), torch.nan), 0)),
        {},
        "draft.logits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_unusable_logits_are_refused_by_name(case: str, llama: Path) -> None:
    drafts, values, field = REFUSED[case]
    config = replace(configure(max_tokens=3, **values), draft=drafts)
    async with running(llama) as engine:
        try:
            (stream,) = await engine.ended(engine.submit([1, 2, 3], config)[:1])
            assert stream.end
            error = stream.end.error
        except InvalidField as refusal:
            error = refusal
    assert isinstance(error, InvalidField)
    assert error.field == field
