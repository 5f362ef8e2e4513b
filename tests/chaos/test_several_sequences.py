"""Beam searches and sampled sequences of a real model survive the loss of their engine unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import Fragile, contents, fragile_mesh, log_probs
from e2e.mesh import DEMO, StreamReader

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ["def fibonacci(n):", "class Stack:"]
TOKENS = 24
BEAMS: dict[str, Any] = {"beam_width": 3}
SAMPLED: dict[str, Any] = {"num_return_sequences": 2, "temperature": 0.9, "seed": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def torch() -> AsyncIterator[Fragile]:
    async with fragile_mesh(("--backend", "torch", "--model-dir", str(DEMO))) as fragile:
        yield fragile


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "held"])
@pytest.mark.parametrize("options", [BEAMS, SAMPLED], ids=["beams", "sampled"])
async def test_cut_off_engine_moves_beams_and_samples(
    torch: Fragile, options: dict[str, Any], stream: bool
) -> None:
    options = {**options, "max_tokens": TOKENS, "log_probs": True, "stream": stream}
    undisturbed = await torch.mesh.client.complete(PROMPTS, **options)
    for index, position in enumerate((0, TOKENS // 2)):
        reader = StreamReader(torch.mesh.client, PROMPTS, **options)

        def far_enough(r: StreamReader, index: int = index, position: int = position) -> bool:
            return r.tokens(index) > position if stream else r.items[index].started is not None

        await reader.until(far_enough)
        torch.proxy_of(reader, index).cut()
        items = await reader.result()
        assert contents(items) == contents(undisturbed), position
        # Kernels round differently in another batch.
        assert log_probs(items) == pytest.approx(log_probs(undisturbed), abs=1e-2)
        await torch.mend()
    await torch.check_nothing_is_left()
