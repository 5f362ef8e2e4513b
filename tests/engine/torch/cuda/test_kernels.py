"""Kernels of layers and of the choice give what their references give."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from engine.torch.cuda.references import (
    gated_silu_reference,
    highest_reference,
    known_reference,
    turn_reference,
)
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import (
    PART,
    choose_tokens,
    known_tokens,
)
from trtmesh.engine.backends.torch.cuda.kernels.layers import (
    Scale,
    gated_silu,
    norm,
    norm_heads,
    norm_reference,
    turn,
)
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import NO_TOKEN
from trtmesh.engine.backends.torch.sampling.draws import _blocks, _Race, places

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def test_norm(device: torch.device) -> None:
    given, weight = torch.randn(3, 5, 48, device=device), torch.randn(48, device=device)
    given[0] *= 1e-3
    torch.testing.assert_close(norm(given, weight, 1e-5), norm_reference(given, weight, 1e-5))
    part, added = given[:, 1:3], given[:, 2:4]
    expected = norm_reference(part, weight, 1e-5)
    torch.testing.assert_close(norm(part, weight, 1e-5), expected)
    torch.testing.assert_close(norm(part, weight, 1e-5, added), added + expected)


@pytest.mark.parametrize(("count", "queries"), [(3, 2), (8, 7), (20, 16)])
def test_norm_of_heads(count: int, queries: int, device: torch.device) -> None:
    scales = [Scale(torch.randn(24, device=device), 1e-5) for _ in range(2)]
    # The values follow the keys.
    whole = torch.randn(5, count + 2, 24, device=device)
    whole[0] *= 1e-3
    expected = whole.clone()
    for part, scale in zip((slice(queries), slice(queries, count)), scales, strict=True):
        expected[:, part] = norm_reference(whole[:, part], scale.weight, scale.epsilon)
    norm_heads(whole[:, :count], queries, *scales)
    torch.testing.assert_close(whole, expected)


def test_gated_silu(device: torch.device) -> None:
    both = torch.randn(3, 2 * 1500, device=device) * 5
    torch.testing.assert_close(gated_silu(both), gated_silu_reference(both))


@pytest.mark.parametrize("seed", range(12))
def test_layers_of_random_shapes(seed: int, device: torch.device) -> None:
    dice = Random(seed)
    tokens, heads, half = dice.randint(1, 70), dice.randint(1, 9), dice.randint(1, 70)
    size = dice.choice([dice.randint(1, 300), dice.randint(300, 5000)])
    given, weight = torch.randn(tokens, size, device=device), torch.randn(size, device=device)
    torch.testing.assert_close(norm(given, weight, 1e-6), norm_reference(given, weight, 1e-6))
    both = torch.randn(tokens, 2 * size, device=device) * 5
    torch.testing.assert_close(gated_silu(both), gated_silu_reference(both))
    whole = torch.randn(tokens, heads, 2 * half + dice.randint(0, 9), device=device)
    angles = torch.randn(tokens, half, device=device)
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()
    expected = turn_reference(whole, cos, sin)
    turn(whole, cos, sin)
    torch.testing.assert_close(whole, expected)


def test_turn(device: torch.device) -> None:
    whole = torch.randn(3, 7, 24, device=device)
    before = whole.clone()
    angles = torch.randn(3, 8, device=device)
    # Two halves with angles of their own, for 16 of 24 dimensions.
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()
    expected = turn_reference(whole[:, :5], cos, sin)
    turn(whole[:, :5], cos, sin)
    torch.testing.assert_close(whole[:, :5], expected)
    assert torch.equal(whole[:, 5:], before[:, 5:])


def chosen(logits: torch.Tensor, temperatures: list[float], draws: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    wide = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)
    choose_tokens(logits, draws, wide, tokens)
    return tokens


def test_known_tokens(device: torch.device) -> None:
    chosen = torch.tensor([70, NO_TOKEN, 128_255], device=device)
    given = torch.tensor([5, -1, -2, -3, 0, *[-1] * 300], device=device)
    got = known_tokens(given, chosen)
    assert got[:5].tolist() == [5, 70, 0, 128_255, 0]
    assert torch.equal(got, known_reference(given, chosen))


@pytest.mark.parametrize("size", [3, 320, 2 * PART + 17])
def test_draws_equal_those_of_the_host(size: int, device: torch.device) -> None:
    """Greedy rows between the drawing ones, equal logits, few tokens with a chance."""
    rows = 64 if device.type == "cuda" else 20
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size, generator=generator).mul(3).to(device)
    logits[::7] = logits[::7].round()
    logits[3::7] = -math.inf
    logits[3::7, :: size // 3] = 1.5
    logits[5::7, size // 2] = 60.0
    draws = some_draws(rows).to(device)
    temperatures = [(0.0, 0.7, 1.0, 1.9, 1e-3, 1e4)[row % 6] for row in range(rows)]
    got = chosen(logits, temperatures, draws)
    expected = drawn_by_host(logits, temperatures, draws)
    greedy = np.array(temperatures) == 0
    expected[greedy] = highest_reference(logits.cpu())[greedy]
    assert got.tolist() == expected.tolist()


def some_draws(rows: int) -> torch.Tensor:
    return torch.from_numpy(
        places(
            [2**64 - 1 - row * 977 for row in range(rows)],
            list(range(rows)),
            [row % 3 for row in range(rows)],
            [row * 11 for row in range(rows)],
        )
    )


def drawn_by_host(
    logits: torch.Tensor, temperatures: list[float], draws: torch.Tensor
) -> torch.Tensor:
    wide = torch.tensor(temperatures, dtype=torch.float64)[:, None]
    bounds = torch.full_like(wide, -math.inf)
    return _Race(_blocks(logits.cpu()), wide, bounds, draws.cpu()[:, None]).among_all()


# The interpreter warns of infinite quotients and their products with 0, which are not used.
@pytest.mark.filterwarnings("ignore:(overflow|invalid)")
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_draws_whose_noise_is_rounded_away_equal_those_of_the_host(
    scale: float, device: torch.device
) -> None:
    """Where equal logits are high or the temperature is low."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(24, 600, generator=generator).mul(3).round() + 20).mul(scale).to(device)
    draws = some_draws(24).to(device)
    for temperature in (1.0, 1e-13, 1e-15, 1e-20, 1e-40):
        temperatures = [temperature] * len(logits)
        got = chosen(logits, temperatures, draws).tolist()
        assert got == drawn_by_host(logits, temperatures, draws).tolist(), temperature


def test_logits_that_are_not_finite_choose_no_token(device: torch.device) -> None:
    logits = torch.randn(5, PART + 5, device=device)
    logits[0, 3] = math.nan
    logits[1, PART + 1] = math.inf
    logits[2] = -math.inf
    logits[3, 0] = -math.inf
    draws = torch.zeros(5, dtype=torch.int64, device=device)
    for temperature in (0.0, 1.0):
        got = chosen(logits, [temperature] * 5, draws).tolist()
        assert got[:3] == [NO_TOKEN] * 3
        assert min(got[3:]) >= 0
