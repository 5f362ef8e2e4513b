"""The pace and the order of handshakes."""

from __future__ import annotations

import asyncio

from trtmesh.chassis.fair.turns import Handshakes


async def test_handshakes_begin_one_after_the_other() -> None:
    loop = asyncio.get_running_loop()
    handshakes = Handshakes(per_second=100)
    begun = loop.time()
    await asyncio.gather(*(handshakes.turn("a") for _ in range(11)))
    assert loop.time() - begun >= 0.099


async def test_addresses_take_turns() -> None:
    handshakes, order = Handshakes(per_second=1000), list[str]()

    async def begin(address: str) -> None:
        await handshakes.turn(address)
        order.append(address)

    flood = [asyncio.create_task(begin("flood")) for _ in range(50)]
    await asyncio.sleep(0)
    await asyncio.gather(begin("b"), begin("c"))
    assert order.count("flood") <= 3
    await asyncio.gather(*flood)
    assert not handshakes._waiting.entries


async def test_clients_that_left_take_no_turn() -> None:
    handshakes = Handshakes(per_second=2)
    await handshakes.turn("a")
    left = [asyncio.create_task(handshakes.turn("a")) for _ in range(100)]
    await asyncio.sleep(0)
    for each in left:
        each.cancel()
    async with asyncio.timeout(60):
        await handshakes.turn("a")
