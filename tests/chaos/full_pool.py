"""A worker whose KV pool another router has filled."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine_streams import RouterStream, router_stream
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import kv_transfer_pb2 as transfer

LIFE_MS = 60_000
MOST_BLOCKS = 2**15


@asynccontextmanager
async def full_pool(address: str) -> AsyncIterator[None]:
    """Reserves every free block of a worker for the block."""
    async with router_stream(address, router="filler") as stream:
        assert stream.welcome
        engine = stream.welcome.engine
        blocks = min(MOST_BLOCKS, engine.max_sequence_tokens // engine.tokens_per_block)
        while blocks:
            if not await _is_reserved(stream, blocks * engine.tokens_per_block):
                blocks //= 2
        yield


async def _is_reserved(stream: RouterStream, tokens: int) -> bool:
    command = transfer.ReserveBlocksCommand(
        lease_id=secrets.token_hex(16), tokens=tokens, expires_in_ms=LIFE_MS
    )
    stream.blocks_reserved.clear()
    await stream.send(epb.EngineCommand(reserve_blocks=command))
    await stream.until(lambda: stream.blocks_reserved)
    return not stream.blocks_reserved[0].HasField("error")
