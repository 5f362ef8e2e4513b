"""Hostile guides, a hundred at once, of which some clients leave: healthy streams of the worker go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import cycle, islice

import pytest
from attack.conftest import PATIENCE_SECONDS, Site
from attack.test_floods import EXTRA_GAP_MS, QUIET_GAP_MS, TRIES
from engine.torch.guided.guides import ATTACKS
from trtmesh.chassis.errors import InvalidRequest, QueueFull
from trtmesh.client import Client, ItemResult
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = 100
REHEARSED = 20
"""Where nobody measures."""
LEAVES_AFTER_SECONDS = 0.05


async def ask(client: Client, number: int, kind: str, guide: str) -> ItemResult | None:
    """Follows a guide for some tokens. Every third client leaves soon."""
    asked = pb.GuidedDecodingConfig(
        guide_type=pb.GuideType.Value(f"GUIDE_TYPE_{kind}"),
        # Another text for each, where it has room for one: those kept would cost nothing.
        guide=guide + " " * number if kind == "JSON_SCHEMA" else guide,
    )
    answer = client.complete(["a"], guided_decoding=asked, max_tokens=6, temperature=1.5)
    try:
        (item,) = await asyncio.wait_for(answer, None if number % 3 else LEAVES_AFTER_SECONDS)
    except TimeoutError:
        return None
    return item


async def ask_at_once(site: Site, guides: Sequence[tuple[str, str]], count: int) -> None:
    async with Client(site.router.address) as client, asyncio.timeout(PATIENCE_SECONDS):
        many = islice(cycle(guides), count)
        asked = (ask(client, number, *guide) for number, guide in enumerate(many))
        items = await asyncio.gather(*asked)
    assert None in items
    for item in items:
        assert (
            item is None or item.error is None or isinstance(item.error, InvalidRequest | QueueFull)
        )


async def attack(site: Site, guides: Sequence[tuple[str, str]]) -> float:
    """By how many milliseconds the longest gap of a healthy stream exceeds its bound."""
    quiet = await site.quiet_service()
    await ask_at_once(site, guides, AT_ONCE)
    service = await site.service() | await site.quiet_service()
    print(f"\nworst gap {service.gap_ms:.0f} ms, {quiet.gap_ms:.0f} ms before")
    slowness = max(1.0, quiet.gap_ms / QUIET_GAP_MS)
    return service.gap_ms - quiet.gap_ms - EXTRA_GAP_MS * slowness


async def test_healthy_streams_outlast_guides(unmeasured_guided_site: Site) -> None:
    site, few = unmeasured_guided_site, [guide for every in ATTACKS.values() for guide in every[:5]]
    await ask_at_once(site, few, REHEARSED)
    assert "Traceback" not in site.router.stderr
    # They go on.
    await site.service()


@pytest.mark.measured
@pytest.mark.parametrize("name", ATTACKS)
async def test_guides_hardly_delay_healthy_streams(guided_site: Site, name: str) -> None:
    for _ in range(TRIES):
        excess = await attack(guided_site, ATTACKS[name])
        if excess <= 0:
            return
    pytest.fail(f"a healthy stream waited {excess:.0f} ms longer than it may")
