"""The choice by rules on a device is the choice of the CPU: the same bounds, tokens and log-probabilities."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from engine.torch.choosing import CHOOSER
from engine.torch.harness import configure
from engine.torch.sampling.test_draws import chi_square, most_by_chance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling
from trtmesh.engine.backends.torch.cpu.device import ORDERING
from trtmesh.engine.backends.torch.cuda.choice import GraphChoice
from trtmesh.engine.backends.torch.cuda.kernels import ruled_choice
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import PART
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import (
    BIASES,
    COUNT_SHIFT,
    LOG_PROB_WORDS,
    Field,
    Flag,
)
from trtmesh.engine.backends.torch.cuda.kernels.ruled_choice import (
    Workspace,
    choose_by_rules,
)
from trtmesh.engine.backends.torch.cuda.ruled_rows import RuledRows
from trtmesh.engine.backends.torch.sampling.draws import _blocks, _Race, places
from trtmesh.engine.backends.torch.sampling.filters import (
    Filters,
    depth_of,
    temperature_of,
    temperatures,
)
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Sequence

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

END_IDS = (5, 7)
FEW_EXAMPLES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def tokens_of(configs: list[Sampling], logits: torch.Tensor, draws: torch.Tensor) -> list[int]:
    """Those that the kernels draw, a row each, with the places `draws` [rows]."""
    rows, size = logits.shape
    work = Workspace(rows, rows, size, logits.device)
    words = np.zeros((len(Field), rows), dtype=np.int64)
    numbers = words.view(np.float64)
    words[Field.FLAGS] = Flag.RULED | Flag.DRAWS
    words[Field.PLACE] = draws.numpy()
    for row, config in enumerate(configs):
        top_k = config.top_k or 0
        words[Field.TOP_K, row] = top_k if top_k < size else 0
        numbers[Field.TEMPERATURE, row] = temperature_of(config)
        numbers[Field.TOP_P, row] = 1.0 if config.top_p is None else config.top_p
        numbers[Field.DEPTH, row] = depth_of(config)
    tokens = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.zeros(rows, LOG_PROB_WORDS, dtype=torch.float64, device=logits.device)
    fields = torch.from_numpy(words).to(logits.device)
    choose_by_rules(logits, fields, work, tokens, log_probs)
    found: list[int] = tokens.tolist()
    return found


def assert_draws_of_the_cpu(configs: list[Sampling], logits: torch.Tensor, tried: int) -> None:
    """Of `tried` draws of each row those without filters nearest to the lowest kept logit, and some others."""
    on_cpu = logits.cpu().float()
    top_p = [1.0 if config.top_p is None else config.top_p for config in configs]
    peaks = on_cpu.amax(dim=1, keepdim=True)
    lowest = Filters(ORDERING).lowest(configs, on_cpu, peaks, top_p)
    blocks, heat = _blocks(on_cpu), temperatures(configs, on_cpu)
    generator = torch.Generator().manual_seed(len(configs))
    rows: list[int] = []
    draws: list[torch.Tensor] = []
    for row in range(len(configs)):
        each = torch.randint(-(2**62), 2**62, (tried,), generator=generator)
        same = torch.full((tried,), row)
        free = _Race(blocks[same], heat[same], lowest[same] - torch.inf, each[:, None]).among_all()
        near = (on_cpu[row, free] - lowest[row]).abs().argsort()[: tried // 8]
        draws += [each[near], each[:1]]
        rows += [row] * (len(near) + 1)
    drawn = torch.cat(draws)
    expected = _Race(blocks[rows], heat[rows], lowest[rows], drawn[:, None]).among_all()
    found = tokens_of([configs[row] for row in rows], logits[rows], drawn)
    assert found == expected.tolist()


LOGITS = st.one_of(
    st.sampled_from([-math.inf, -3.0, -0.0, 0.0, 1.0, 1.5, 60.0]),
    st.floats(-40, 40, width=32),
)
CONFIG = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0, 1e6]),
    top_k=st.sampled_from([None, 1, 2, 5, 30]),
    top_p=st.one_of(st.sampled_from([None, 0.0, 0.5, 1.0, 0.999999]), st.floats(0, 1)),
    min_p=st.sampled_from([None, 0.1, 1.0]),
)


@FEW_EXAMPLES
@given(
    rows=st.integers(1, 12).flatmap(
        lambda size: st.lists(
            st.tuples(st.lists(LOGITS, min_size=size, max_size=size), CONFIG),
            min_size=1,
            max_size=4,
        )
    )
)
def test_draws_among_few_tokens(rows: list[tuple[list[float], Sampling]]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A row without a finite logit has no draw.
    logits = torch.tensor([[*row, 0.25] for row, _ in rows], device=device)
    assert_draws_of_the_cpu([config for _, config in rows], logits, 24)


SHAPES = [
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(top_p=0.999),
    Sampling(top_p=1e-9),
    Sampling(top_p=0.3, temperature=8.0),
    Sampling(top_k=1),
    Sampling(top_k=50),
    Sampling(top_k=50, top_p=0.8, temperature=1.4),
    Sampling(top_k=2000, top_p=0.95, min_p=0.001),
    Sampling(min_p=0.05),
]


@pytest.mark.parametrize("listed", [ruled_choice.LISTED, 4])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "bans", "far", "bfloat16"])
def test_draws_among_many_tokens(
    kind: str, listed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more tokens than listed may be the k-th highest, so that whole rows are searched."""
    if listed != ruled_choice.LISTED:
        if device.type == "cuda":
            pytest.skip("kernels are compiled")
        monkeypatch.setattr(ruled_choice, "_LISTED", tl.constexpr(listed))
    size = 128_256 if device.type == "cuda" else PART + 301
    generator = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(len(SHAPES), size, generator=generator) * 2
    if kind == "ties":
        logits = (logits * 2).round() / 2
    elif kind == "equal":
        logits[:] = -1.75
    elif kind == "bans":
        logits[torch.rand(logits.shape, generator=generator) < 0.99] = -math.inf
        logits[:, 3] = 0.5
    elif kind == "far":
        logits[:, 7] = 100.0
    elif kind == "bfloat16":
        logits = logits.bfloat16()
    assert_draws_of_the_cpu(SHAPES, logits.to(device), 16 if device.type == "cuda" else 24)


def test_weights_are_added_up_exactly_where_rounded_sums_do_not_decide(
    device: torch.device,
) -> None:
    """Tokens with just as much weight above them as `top_p`, and a little more or less."""
    size, steps = 300, 8
    # The second half has weights of 0.
    logits = torch.full((1, size), -50.0, device=device)
    logits[0, : size // 2] = torch.linspace(0, -3, size // 2).to(device)
    weights = (logits[0].double().exp() * 2**40).long().cumsum(0)
    shares = (weights[40 : 40 + steps] / weights[-1]).tolist()
    configs = [
        Sampling(top_p=math.nextafter(share, towards))
        for share in shares
        for towards in (0.0, share, 1.0)
    ]
    assert_draws_of_the_cpu(configs, logits.expand(len(configs), -1), 40)


def test_draws_follow_the_distribution(device: torch.device) -> None:
    count, size = 20_000 if device.type == "cuda" else 600, 40
    one = torch.randn(1, size, generator=torch.Generator().manual_seed(9)) * 1.5
    config = Sampling(temperature=1.4, top_p=0.95, min_p=0.02)
    shares = Filters(ORDERING).probabilities(config, one, 0.95).numpy()
    draws = torch.from_numpy(places([3] * count, [0] * count, [1] * count, range(count)))
    found = tokens_of([config] * count, one.expand(count, -1).to(device), draws)
    kept = shares > 0
    counts = np.bincount(found, minlength=size)
    assert not counts[~kept].any()
    assert chi_square(counts[kept], count * shares[kept]) < most_by_chance(kept.sum() - 1)


def sequence(
    slot: int, tokens: list[int], prompt_tokens: int, config: GenerationConfig
) -> Sequence:
    return Sequence(
        key=slot,
        batch_index=slot,
        sequence_index=slot % 3,
        tokens=tokens,
        rule=EndRule(config.stopping, END_IDS, prompt_tokens, 1000),
        token_rules=TokenRules(config),
        config=config,
        submitted_tokens=prompt_tokens,
        slot=slot,
    )


def any_config(dice: Random, size: int) -> GenerationConfig:
    draws: dict[str, Any] = {
        "temperature": dice.uniform(0.3, 2),
        "top_k": dice.randint(1, 40),
        "top_p": dice.uniform(0.3, 1),
        "min_p": dice.uniform(0, 0.2),
    }
    ids = dice.sample(range(size), min(size, 8))
    rules: dict[str, Any] = {
        "repetition_penalty": dice.uniform(0.7, 1.6),
        "presence_penalty": dice.uniform(-1, 1),
        "frequency_penalty": dice.uniform(-0.5, 1),
        "prompt_ignore_length": dice.randint(0, 20),
        "min_tokens": 3,
        "bad_token_ids": ((ids[0],), (ids[1],)),
        "top_log_probs": dice.randint(1, 5),
        "log_probs": True,
    }
    values = {name: value for name, value in draws.items() if dice.random() < 0.4}
    values |= {name: value for name, value in rules.items() if dice.random() < 0.4}
    if dice.random() < 0.4:
        values["embedding_bias_token_ids"] = ((ids[2],), (ids[3], ids[4]))
        values["embedding_bias_weights"] = (dice.choice([-math.inf, 3.0]), -1.5)
    return configure(max_tokens=50, seed=dice.getrandbits(64), **values)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_of_any_rules_is_that_of_the_cpu(seed: int, device: torch.device) -> None:
    """Several steps, some launched before the tokens of the step before are known; a slot changes hands."""
    dice = Random(seed)
    on_gpu = device.type == "cuda"
    count, size = (64 if on_gpu else 6), dice.choice([40, 128_256 if on_gpu else 700])
    work = Workspace(count, count, size, device)
    rules = RuledRows(count, work.words, work.biases)
    rows: list[Sequence] = []
    for slot in range(count):
        prompt = [dice.randrange(min(size, 60)) for _ in range(dice.randint(1, 30))]
        rows.append(sequence(slot, prompt, len(prompt), any_config(dice, size)))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(count, dtype=torch.int64, device=device)
    log_probs = torch.zeros(count, LOG_PROB_WORDS, dtype=torch.float64, device=device)
    waiting: list[int] | None = None
    for step in range(4):
        logits = (torch.randn(count, size, generator=generator) * 3).bfloat16()
        words = np.zeros((len(Field), count), dtype=np.int64)
        unknown = 0 if waiting is None else 1
        rules.fill(words, rules.find(rows), unknown)
        if waiting:
            for each, token in zip(rows, waiting, strict=True):
                each.tokens.append(token)
        expected = CHOOSER.choose(rows, logits.float())
        assert expected.read() == {}
        fields = torch.from_numpy(words).to(device)
        choose_by_rules(logits.to(device), fields, work, tokens, log_probs)
        choice = GraphChoice(rows, range(len(rows)), tokens, log_probs)
        assert choice.read() == {}
        ruled = words[Field.FLAGS] != 0
        assert ruled.sum() > count / 2
        for row in np.flatnonzero(ruled).tolist():
            assert choice.token_ids[row] == expected.token_ids[row], rows[row].config
            if rows[row].token_rules.wants_log_probs:
                mine, theirs = choice.details(row), expected.details(row)
                assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
                for some, others in zip(mine.top_log_probs, theirs.top_log_probs, strict=True):
                    assert some[0] == others[0]
                    assert some[1] == pytest.approx(others[1], abs=1e-5)
        waiting = list(expected.token_ids)
        if step % 2:
            for each, token in zip(rows, waiting, strict=True):
                each.tokens.append(token)
            waiting = None
            # Another sequence takes the slot.
            rows[3] = sequence(3, [1, 2], 1, any_config(dice, size))


def test_counts_are_loaded_again_after_tokens_that_the_device_did_not_choose() -> None:
    """Such as accepted drafts, or those of another sequence in the slot."""
    size = 9
    words = torch.zeros(1, size, dtype=torch.int32)
    rules = RuledRows(1, words, torch.zeros(1, BIASES))
    fields = np.zeros((len(Field), 1), dtype=np.int64)
    penalised = configure(max_tokens=50, frequency_penalty=0.5, prompt_ignore_length=0)
    one = sequence(0, [4, 4, 5], 2, penalised)
    for each, more in ((one, []), (one, [5, 6]), (sequence(0, [7], 1, penalised), []), (one, [8])):
        each.tokens += more
        rules.fill(fields, rules.find([each]))
        assert (words[0] >> COUNT_SHIFT).tolist() == np.bincount(
            each.tokens, minlength=size
        ).tolist()


def test_rows_without_a_token_say_why(device: torch.device) -> None:
    size = 60
    banned = configure(bad_token_ids=tuple((token,) for token in range(size)))
    rows = [
        sequence(slot, [1], 1, banned if slot else configure(log_probs=True)) for slot in (0, 1)
    ]
    logits = torch.zeros(2, size, device=device)
    logits[0, 3] = math.nan
    work = Workspace(2, 2, size, device)
    words = np.zeros((len(Field), 2), dtype=np.int64)
    rules = RuledRows(2, work.words, work.biases)
    rules.fill(words, rules.find(rows))
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    log_probs = torch.zeros(2, LOG_PROB_WORDS, dtype=torch.float64, device=device)
    choose_by_rules(logits, torch.from_numpy(words).to(device), work, tokens, log_probs)
    failures = GraphChoice(rows, range(len(rows)), tokens, log_probs).read()
    expected = CHOOSER.choose(rows, logits.cpu()).read()
    assert {row: str(error) for row, error in failures.items()} == {
        row: str(error) for row, error in expected.items()
    }
    assert len(failures) == 2
