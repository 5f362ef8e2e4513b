"""Guides of attackers: each is refused, ends or goes on, and a plain stream has a token in each step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from e2e.mesh import DEMO_DRAFT
from engine.torch.guided.guides import ATTACKS, guided
from engine.torch.harness import Harness, configure, running
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 40, 41, 42]
MOST_MASK_SECONDS = 0.25
"""CPU time for masks between two tokens of a plain stream, on a machine several times as slow as a quiet one."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Harness]:
    async with running(DEMO_DRAFT, max_batch_size=48) as engine:
        yield engine


@pytest.mark.parametrize("name", ATTACKS)
async def test_plain_stream_goes_on_beside_hostile_guides(name: str, engine: Harness) -> None:
    took, first = list[float](), len(engine.outputs)
    plain = engine.submit(PROMPT, configure(max_tokens=10**6, ignore_end_id=True))
    await engine.until(lambda: len(engine.outputs) > first)
    engine.on_output = lambda _: took.append(engine.backend.stats().guide_mask_seconds)
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5, "seed": 3}
    keys = [
        engine.submit(PROMPT, guided(kind, guide, **fields))[0] for kind, guide in ATTACKS[name]
    ]
    engine.backend.stop(keys[1::3], pb.FINISH_REASON_CANCELLED)
    for stream in await engine.ended(keys):
        assert stream.end
        error = stream.end.error
        assert error is None or isinstance(error, InvalidRequest), error
    engine.backend.stop(plain, pb.FINISH_REASON_CANCELLED)
    await engine.ended(plain)
    pauses = [later - before for before, later in pairwise(took)]
    assert max(pauses) < MOST_MASK_SECONDS
    # A token in each output with any, up to the last.
    others = [bool(out.keys) and plain[0] not in out.keys for out in engine.outputs[first:]]
    tokens = [place for place, out in enumerate(engine.outputs[first:]) if plain[0] in out.keys]
    assert not any(others[tokens[0] : tokens[-1]])
