"""Free pages of the heap, given back while much is held."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio
import os
from trtmesh.chassis.allocator import GIVING_SECONDS, FreePages, give_back_large_blocks

BLOCKS, BYTES = 2000, 60_000

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def main():
    pages, searches = FreePages(), 0
    trim = pages._trim

    def counted(padding):
        nonlocal searches
        searches += 1
        return trim(padding)

    pages._trim = counted
    blocks = [bytearray(b"x") * BYTES for _ in range(BLOCKS)]
    # The last one keeps those before it in the heap.
    del blocks[:-1]
    kept = resident()
    pages.give_back_soon()
    pages.give_back_soon()
    while kept - resident() < BLOCKS * BYTES / 2:
        await asyncio.sleep(0.01)
    while (known := searches) < 2 or (await asyncio.sleep(2 * GIVING_SECONDS)) or searches > known:
        await asyncio.sleep(0.01)

give_back_large_blocks()
asyncio.run(main())
"""


def test_free_pages_below_a_block_in_use_are_given_back_for_a_while() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
