"""Prompt and decode on two workers, by the library's own parameters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from engine.backend_lab import Lab, Outcome, config_of, lab
from engine.tensorrt_llm.harness import (
    PROMPT,
    backend,
    info_of,
    last_call,
    last_params,
    submit,
    tokens,
)
from trtmesh.chassis.errors import HandoffFailed
from trtmesh.engine.backend import HandoffState
from trtmesh.v1 import generation_pb2 as pb

LEASE = "0123456789abcdef0123456789abcdef"
NEW: dict[str, Any] = {"max_tokens": 12, "ignore_end_id": True}
UCX = {"cache_transceiver_config": {"backend": "UCX", "kv_transfer_timeout_ms": 9000}}
TRANSFER: dict[str, Any] = {"options": UCX}
PREFILL: dict[str, Any] = {"options": {**UCX, "disable_overlap_scheduler": True}}
FP8: dict[str, Any] = {"options": {**UCX, "kv_cache_config": {"dtype": "fp8"}}}


@dataclass
class Pair:
    prefill: Lab
    decode: Lab


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    async with lab(backend(**PREFILL)) as prefill, lab(backend(**TRANSFER)) as decode:
        yield Pair(prefill, decode)


async def first_half(on: Lab, **options: Any) -> Outcome:
    return await submit(on, PROMPT, config_of({**NEW, **options}), sender_lease_id=LEASE)


async def second_half(on: Lab, first: int, state: bytes, **options: Any) -> Outcome:
    asked = config_of({**NEW, **options})
    return await submit(on, [*PROMPT, first], asked, emitted_tokens=1, handoff_state=state)


def state_of(outcome: Outcome) -> HandoffState:
    assert outcome.end is not None
    assert outcome.end.error is None, outcome.end.error
    assert outcome.end.reason == pb.FINISH_REASON_HANDOFF
    assert outcome.end.handoff_state is not None
    return outcome.end.handoff_state


async def test_two_workers_generate_the_tokens_of_one(release: str) -> None:
    async with pair() as on:
        plain = await tokens(on.decode, **NEW)
        first = await first_half(on.prefill)
        assert first.token_ids == plain[:1]
        state = state_of(first)
        assert state.seconds == 9.0
        second = await second_half(on.decode, plain[0], state.content)
        # The handed-over token is not told again.
        assert second.token_ids == plain[1:]
        assert second.end is not None
        assert second.end.reason == pb.FINISH_REASON_LENGTH
        assert second.end.generated_tokens == 12


async def test_both_halves_name_the_request_alike(newer: str) -> None:
    async with pair() as on:
        plain = await tokens(on.decode, **NEW)
        state = state_of(await first_half(on.prefill)).content
        for _ in range(2):
            await second_half(on.decode, plain[0], state)
            params = last_call()["disaggregated_params"]
            assert params.request_type == "generation_only"
            assert params.first_gen_tokens == plain[:1]


async def test_limits_and_words_count_the_first_token(release: str) -> None:
    async with pair() as on:
        plain = await tokens(on.decode, **NEW)
        state = state_of(await first_half(on.prefill)).content
        second = await second_half(on.decode, plain[0], state, stop_token_ids=[plain[:2]])
        assert second.token_ids == plain[1:2]
        assert second.end is not None
        assert second.end.reason == pb.FINISH_REASON_STOP_WORD
        second = await second_half(on.decode, plain[0], state, max_tokens=2)
        assert second.token_ids == plain[1:2]
        assert last_params().max_tokens == 2


@pytest.mark.parametrize("kind", ["length", "end id", "stop word"])
async def test_a_first_token_that_ends_the_item_hands_nothing_over(release: str, kind: str) -> None:
    async with pair() as on:
        plain = await tokens(on.decode, **NEW)
        options: dict[str, dict[str, Any]] = {
            "length": {"max_tokens": 1},
            "end id": {"ignore_end_id": False, "end_id": plain[0]},
            "stop word": {"stop_token_ids": [plain[:1]]},
        }
        first = await first_half(on.prefill, **options[kind])
        assert first.token_ids == plain[:1]
        assert first.end is not None
        assert first.end.reason != pb.FINISH_REASON_HANDOFF
        assert first.end.handoff_state is None


async def test_log_probs_of_both_halves_follow_their_tokens(release: str) -> None:
    async with pair() as on:
        (whole,) = await on.decode.run(PROMPT, config_of({**NEW, "log_probs": True}))
        first = await first_half(on.prefill, log_probs=True)
        state = state_of(first).content
        second = await second_half(on.decode, whole.token_ids[0], state, log_probs=True)
        halves = [
            each for half in (first, second) for part in half.details for each in part.log_probs
        ]
        assert halves == [each for part in whole.details for each in part.log_probs]


async def test_a_state_of_another_prompt_fails_as_a_handoff(release: str) -> None:
    """The router then computes the prompt elsewhere."""
    async with pair() as on:
        first = await first_half(on.prefill)
        state = state_of(first).content
        asked = config_of(NEW)
        wrong = [*PROMPT[:-1], 7, first.token_ids[0]]
        second = await submit(on.decode, wrong, asked, emitted_tokens=1, handoff_state=state)
        assert second.token_ids == []
        assert second.end is not None
        assert isinstance(second.end.error, HandoffFailed)


@pytest.mark.parametrize("state", [b"{", b"[]", b'{"opaque_state": {"base64": "?"}}', b"\xff"])
async def test_a_broken_state_is_refused_as_a_handoff(release: str, state: bytes) -> None:
    async with pair() as on:
        with pytest.raises(HandoffFailed):
            await second_half(on.decode, 9, state)


async def test_a_worker_with_overlap_refuses_prompts_for_others(release: str) -> None:
    async with lab(backend(**TRANSFER)) as on:
        with pytest.raises(HandoffFailed, match="overlap"):
            await first_half(on)


async def test_only_equal_workers_pair(release: str) -> None:
    kinds = []
    for settings in (TRANSFER, TRANSFER, FP8, {}):
        async with lab(backend(**settings)) as on:
            kinds.append(info_of(on).state_kind)
    assert kinds[0] == kinds[1] != kinds[2]
    assert kinds[3] is None
