"""Floods of one kind of frame or call: healthy streams go on, others soon get their first tokens, and the router's
memory stays bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from attack.attacker import Toll, flood, grpc_door, http_door
from attack.conftest import PATIENCE_SECONDS, Site
from attack.frames import CALMED, CROWDS, FLOODS, USUAL
from attack.http_floods import HTTP_FLOODS

pytestmark = pytest.mark.asyncio(loop_scope="module")

ATTACKS = {**FLOODS, **CROWDS, **HTTP_FLOODS}

EXTRA_GAP_MS = 100.0
FIRST_FACTOR, EXTRA_FIRST_MS = 5.0, 100.0
"""The longest time to a first token under attack: so many times the median of an idle router, and so much more."""
CROWD = 900
"""Connections of one address, a little fewer than it may have."""
QUIET_GAP_MS = 25.0
"""The longest gap before or after the attack on an idle machine; a slower one makes all bounds proportionally
longer."""

EXTRA_BYTES = 200 * 2**20
ATTACK_SECONDS = 1.0
REHEARSAL_SECONDS = 0.3
"""Of the attacks whose delays nobody measures."""
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
    """By how much the healthy streams' longest gap, or the longest time to a first token, exceeds its bound; at most 0
    if both hold."""
    extra_bytes: int
    toll: Toll


@dataclass
class Flooded:
    """What the router and its attacker met."""

    extra_bytes: int
    toll: Toll


async def flooded(
    site: Site, name: str, connections: int, seconds: float, patience: float = 0.0
) -> Flooded:
    """Floods the router from so many connections, for `seconds`, and for `patience` until it tells them to calm
    down."""
    before = site.process.memory_info().rss
    measuring = asyncio.create_task(_peak_bytes(site))
    is_http = name in HTTP_FLOODS
    door = http_door(site.router.http_address) if is_http else grpc_door(site.router.address)
    toll = await flood(door, ATTACKS[name], connections, seconds, patience)
    measuring.cancel()
    return Flooded(await measuring - before, toll)


async def attack(site: Site, name: str, connections: int, seconds: float, patience: float) -> Run:
    """Floods the router, and measures how long healthy clients wait."""
    quiet = await site.quiet_service()
    before = site.process.memory_info().rss
    met = await flooded(site, name, connections, seconds, patience)
    service = await site.service()
    toll, extra = met.toll, met.extra_bytes
    # The aftermath counts: ends of calls must not delay streams either.
    service |= await site.quiet_service()
    first = max(service.firsts_ms)
    row = site.rows[name, connections] = (
        f"| {name} | {connections} | {service.gap_ms:.0f} ms | {quiet.median_first_ms:.0f} ms | {first:.0f} ms"
        f" | {before / 2**20:.0f} MiB | +{extra / 2**20:.0f} MiB |"
    )
    print(
        f"\n{row}\nquiet: {quiet.gap_ms:.0f} ms; {toll.sent / 2**20:.1f} MiB were sent, {toll.goaways} connections told"
        f" to go, and {toll.ends} ended; median time to a first token {service.median_first_ms:.0f} ms"
    )
    slowness = max(1.0, quiet.gap_ms / QUIET_GAP_MS)
    excess = service.gap_ms - quiet.gap_ms - EXTRA_GAP_MS * slowness
    late = first - FIRST_FACTOR * quiet.median_first_ms - EXTRA_FIRST_MS * slowness
    return Run(max(excess, late), extra, toll)


@pytest.mark.parametrize(
    ("name", "connections"),
    [
        *((name, 1 if name in CALMED else 20) for name in USUAL),
        ("HTTP chunks of a byte", 20),
        ("HTTP 60 MiB of binary ids", 20),
    ],
)
async def test_healthy_streams_outlast_a_flood(
    unmeasured_site: Site, name: str, connections: int
) -> None:
    """The attacker costs little memory; the router's workers stay, and it idles soon."""
    site = unmeasured_site
    met = await flooded(site, name, connections, REHEARSAL_SECONDS)
    assert met.extra_bytes < EXTRA_BYTES
    await check_rest(site)
    # They go on.
    await site.service()


@pytest.mark.measured
@pytest.mark.parametrize(
    ("name", "connections"),
    [
        *((name, connections) for name in (*FLOODS, *HTTP_FLOODS) for connections in (1, 20)),
        *((name, CROWD) for name in CROWDS),
        ("HTTP chunks of a byte", CROWD),
    ],
)
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
        pytest.fail(f"healthy clients waited {run.excess_ms:.0f} ms longer than they may")
    await check_rest(site)


async def check_rest(site: Site) -> None:
    """After an attack the router idles and has lost none of its own."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await site.cpu_share() > 0.5:
            pass
    for word in ("Traceback", "was silent", "stalled"):
        assert word not in site.router.stderr
