"""Free pages of the heap, given back while much is held."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio
import os
from trtmesh.chassis.allocator import GIVE_BACK_SECONDS, FreePages, give_back_large_blocks

BLOCKS, BYTES = 2000, 60_000

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def main():
    answers = [True, False, True]
    pages = FreePages(lambda: answers.pop(0))
    blocks = [bytearray(b"x") * BYTES for _ in range(BLOCKS)]
    # The last one keeps those before it in the heap.
    del blocks[:-1]
    kept = resident()
    pages.give_back_soon()
    pages.give_back_soon()
    while len(answers) > 1:
        await asyncio.sleep(GIVE_BACK_SECONDS)
    assert kept - resident() > BLOCKS * BYTES / 2, (kept, resident())
    await asyncio.sleep(5 * GIVE_BACK_SECONDS)
    assert answers == [True]

give_back_large_blocks()
asyncio.run(main())
"""


def test_free_pages_below_a_block_in_use_are_given_back_until_little_is_held() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
