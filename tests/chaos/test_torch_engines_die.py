"""Engines with a real model are lost: beam searches, samples and log-probabilities continue unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import (
    NAMES,
    SAMPLED,
    Fragile,
    contents,
    fragile_mesh,
    log_probs,
    lose,
    undisturbed,
)
from e2e.mesh import SMALL, StreamReader
from trtmesh.client import FinishReason, GuidedDecodingConfig, GuideType

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ["def fibonacci(n):", "class Stack:"]
TOKENS = 24
BEAMS: dict[str, Any] = {"beam_width": 3}
SCHEMA = """{"type": "object", "required": ["a", "b"], "additionalProperties": false, "properties":
 {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}}}"""
GUIDED = SAMPLED | {
    "guided_decoding": GuidedDecodingConfig(
        guide_type=GuideType.GUIDE_TYPE_JSON_SCHEMA, guide=SCHEMA
    )
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def torch() -> AsyncIterator[Fragile]:
    async with fragile_mesh((*SMALL, "--torch-threads", "1")) as fragile:
        yield fragile


@pytest.mark.parametrize(
    ("options", "stream"),
    [
        pytest.param(BEAMS, True, id="beams-streamed"),
        pytest.param(BEAMS, False, id="beams-held", marks=pytest.mark.soak),
        pytest.param(SAMPLED, True, id="sampled-streamed", marks=pytest.mark.soak),
        pytest.param(SAMPLED, False, id="sampled-held"),
        pytest.param(GUIDED, True, id="guided-streamed"),
        pytest.param(GUIDED, False, id="guided-held", marks=pytest.mark.soak),
    ],
)
async def test_cut_off_engine_moves_beams_and_samples(
    torch: Fragile, options: dict[str, Any], stream: bool
) -> None:
    options = {**options, "max_tokens": TOKENS, "log_probs": True, "stream": stream}
    whole = await torch.mesh.client.complete(PROMPTS, **options)
    for index, position in enumerate((0, TOKENS // 2)):
        reader = StreamReader(torch.mesh.client, PROMPTS, **options)

        def far_enough(r: StreamReader, index: int = index, position: int = position) -> bool:
            return r.tokens(index) > position if stream else r.items[index].started is not None

        await reader.until(far_enough)
        torch.proxy_of(reader, index).cut()
        items = await reader.result()
        assert contents(items) == contents(whole), position
        # Kernels round differently in another batch.
        assert log_probs(items) == pytest.approx(log_probs(whole), abs=1e-2)
        await torch.mend()
    await torch.check_nothing_is_left()


async def test_cut_off_engine_moves_a_beam_with_its_stop_text(torch: Fragile) -> None:
    """A search may still drop such a beam, so the search restarts elsewhere."""
    options: dict[str, Any] = {"beam_width": 4, "max_tokens": 60, "ignore_end_id": True}
    (item,) = await torch.mesh.client.complete(PROMPTS[:1], **options)
    options["stop_texts"] = [item.sequences[0].text[6:8]]
    whole = await torch.mesh.client.complete(PROMPTS[:1], **options)
    assert FinishReason.STOP_WORD in [sequence.reason for sequence in whole[0].sequences]
    reader = StreamReader(torch.mesh.client, PROMPTS[:1], **options)
    await reader.tokens_here(8)
    torch.proxy_of(reader, 0).cut()
    assert contents(await reader.result()) == contents(whole)
    await torch.mend()
    await torch.check_nothing_is_left()


async def test_cut_off_engine_moves_items_under_either_policy(torch: Fragile) -> None:
    options = {**SAMPLED, "log_probs": True}
    whole = await undisturbed(torch, **options)
    for policy, position, name in (("auto", 3, NAMES[0]), ("round_robin", 9, NAMES[1])):
        await torch.mesh.admin.set_policy(policy)
        worst = await lose(torch, "cut", name, position, whole, **options, max_tokens=1000)
        print(f"torch, {policy}: worst stall after a cut: {worst * 1000:.0f} ms")
    await torch.check_nothing_is_left()
