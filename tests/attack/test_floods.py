"""Floods of one kind of frame or call: healthy streams go on, and the router's memory stays bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from attack.attacker import Toll, flood, grpc_door, http_door
from attack.conftest import PATIENCE_SECONDS, Site
from attack.frames import CALMED, FLOODS, USUAL
from attack.http_floods import HTTP_FLOODS

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXTRA_GAP_MS = 100.0
QUIET_GAP_MS = 25.0
"""The longest gap before or after the attack on an idle machine; a slower one makes all bounds proportionally
longer."""

EXTRA_BYTES = 200 * 2**20
ATTACK_SECONDS = 1.0
TRIES = 4
"""A busy machine may delay everything once."""


async def _peak_bytes(site: Site) -> int:
    """The router's largest memory until cancelled."""
    peak = 0
    try:
        while True:
            peak = max(peak, site.process.memory_info().rss)
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        return peak


@dataclass
class Run:
    """What one attack did."""

    excess_ms: float
    """By how much the healthy streams' longest gap exceeds its bound; at most 0 if it holds."""
    extra_bytes: int
    toll: Toll


async def attack(site: Site, name: str, connections: int, seconds: float, patience: float) -> Run:
    """Floods the router from so many connections, for `seconds`, and for `patience` until it tells them to calm
    down."""
    control = await site.control_gap_ms()
    before = site.process.memory_info().rss
    measuring = asyncio.create_task(_peak_bytes(site))
    is_http = name in HTTP_FLOODS
    door = http_door(site.router.http_address) if is_http else grpc_door(site.router.address)
    sent = HTTP_FLOODS[name] if is_http else FLOODS[name]
    toll = await flood(door, sent, connections, seconds, patience)
    gap = await site.worst_gap_ms()
    measuring.cancel()
    extra = await measuring - before
    # The aftermath counts: ends of calls must not delay streams either.
    gap = max(gap, await site.control_gap_ms())
    # A row of the table in docs/security.md.
    print(
        f"\n| {name} | {connections} | {gap:.0f} ms | {before / 2**20:.0f} MiB | +{extra / 2**20:.0f} MiB |"
        f"\nquiet: {control:.0f} ms; {toll.sent / 2**20:.1f} MiB were sent, {toll.goaways} connections told to go, and"
        f" {toll.ends} ended"
    )
    slowness = max(1.0, control / QUIET_GAP_MS)
    return Run(gap - control - EXTRA_GAP_MS * slowness, extra, toll)


@pytest.mark.parametrize(
    ("name", "connections"),
    [
        *((name, 1 if name in CALMED else 20) for name in USUAL),
        ("HTTP chunks of a byte", 20),
        ("HTTP 60 MiB of binary ids", 20),
    ],
)
async def test_healthy_streams_outlast_a_flood(site: Site, name: str, connections: int) -> None:
    """The attacker costs little memory; the router's workers stay, and it idles soon."""
    run = await attack(site, name, connections, ATTACK_SECONDS, patience=0.0)
    assert run.extra_bytes < EXTRA_BYTES
    await check_rest(site)


@pytest.mark.measured
@pytest.mark.parametrize("connections", [1, 20])
@pytest.mark.parametrize("name", [*FLOODS, *HTTP_FLOODS])
async def test_flood_hardly_delays_healthy_streams(
    site: Site, name: str, connections: int, pytestconfig: pytest.Config
) -> None:
    """Attacks that are good for nothing else end with ENHANCE_YOUR_CALM, too."""
    seconds = pytestconfig.getoption("--attack-seconds", default=None) or ATTACK_SECONDS
    # Many connections share the turns, so that each may stay below its rates.
    is_calmed = name in CALMED and connections == 1
    patience = PATIENCE_SECONDS if is_calmed else 0.0
    for _ in range(TRIES):
        run = await attack(site, name, connections, seconds, patience)
        assert run.extra_bytes < EXTRA_BYTES
        assert run.toll.told.is_set() or not is_calmed
        if run.excess_ms <= 0:
            break
    else:
        pytest.fail(f"healthy streams waited {run.excess_ms:.0f} ms longer than they may")
    await check_rest(site)


async def check_rest(site: Site) -> None:
    """After an attack the router idles and has lost none of its own."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await site.cpu_share() > 0.5:
            pass
    for word in ("Traceback", "was silent", "stalled"):
        assert word not in site.router.stderr
