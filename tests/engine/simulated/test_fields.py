"""Every supported field of the simulated backend changes the result of an item; every other one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from engine.adapter_contents import content
from engine.backend_lab import lab
from engine.field_effects import (
    BLOCK,
    DRAWN,
    ONE,
    ONE_AT_A_TIME,
    Case,
    adapted,
    adapter_cases,
    cache,
    check,
    everything,
    order,
    refuses,
    reused,
)
from engine.short_names import by_short_names
from trtmesh.engine.backend import Backend
from trtmesh.engine.backends.simulated.backend import (
    ADAPTER_FIELDS,
    SUPPORTED_FIELDS,
    SimulatedBackend,
)
from trtmesh.engine.backends.simulated.settings import SimulatedSettings


def simulated_cases() -> dict[str, Case]:
    """By field. The end id is frequent; tokens change with every field that would change a model's."""
    new = {"max_tokens": 300, "ignore_end_id": True}
    drawn = {**new, "temperature": 1.0, "seed": 5}
    some = {
        "temperature": 2.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "top_p_min": 0.5, "top_p_decay": 0.5,
        "top_p_reset_id": 4, "seed": 6, "repetition_penalty": 2.0, "presence_penalty": 1.0,
        "frequency_penalty": 1.0, "prompt_ignore_length": 2, "no_repeat_ngram_size": 2,
        "num_return_sequences": 2,
    }  # fmt: skip
    sampling = {f"sampling.{name}": Case(drawn, {name: value}) for name, value in some.items()}
    adapters = adapter_cases(new, adapted([*map(content, range(3))]), {"adapters_slots": 3})
    return (
        sampling
        | adapters
        | {
            "stopping.max_tokens": Case(new, {"max_tokens": 3}),
            "stopping.min_tokens": Case({"max_tokens": 300}, {"min_tokens": 250}),
            "stopping.end_id": Case({"max_tokens": 300}, {"end_id": 60}),
            "stopping.ignore_end_id": Case({"max_tokens": 300}, {"ignore_end_id": True}),
            "stopping.stop_token_ids": Case(new, {"stop_token_ids": [[60]]}),
            "output.perf_metrics": Case(new, {"perf_metrics": True}),
            "kv_cache.reuse": Case(ONE, cache(reuse=False), reused),
            "kv_cache.salt": Case(ONE, cache(salt="pepper"), reused),
            "priority": Case({"max_tokens": 2}, {"priority": 9}, order, ONE_AT_A_TIME),
        }
    )


def simulated_backend(**settings: Any) -> Backend:
    given = {"step_ms": 0, "tokens_per_block": BLOCK, "end_id": 50, "end_probability": 0.05}
    return SimulatedBackend(by_short_names(SimulatedSettings, **{**given, **settings}))


@pytest.mark.parametrize("path", sorted(SUPPORTED_FIELDS | ADAPTER_FIELDS))
async def test_field_acts(path: str) -> None:
    cases = simulated_cases()
    assert path in cases, f"say in simulated_cases what {path} changes"
    await check(path, cases[path], simulated_backend)


async def test_observations_are_repeatable() -> None:
    """Else a difference would not be the field's."""
    for see, options in ((everything, DRAWN), (reused, ONE)):
        seen = []
        for _ in range(2):
            async with lab(simulated_backend()) as on:
                seen.append(await see(on, options))
        assert seen[0] == seen[1]


def test_table_lists_supported_fields_only() -> None:
    assert set(simulated_cases()) == SUPPORTED_FIELDS | ADAPTER_FIELDS


async def test_other_fields_are_refused() -> None:
    await refuses(SimulatedBackend(SimulatedSettings()), SUPPORTED_FIELDS)
    with_adapters = simulated_backend(adapters_slots=1)
    await refuses(with_adapters, SUPPORTED_FIELDS | ADAPTER_FIELDS)
