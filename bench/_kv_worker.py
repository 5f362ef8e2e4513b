"""A worker that only hands KV over: the engine's handoffs over stored bytes, without an engine.

As a program: a sender. It prints its addresses, and a descriptor of all blocks for each line of its input. Beside its
handoffs it offers the floors: memory of a plain agent of NIXL, and a grpc.aio stream of 1 MiB messages.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import asyncio
import json
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import numpy as np
import uvloop
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.engine.backend import (
    Content,
    HandedOver,
    HandsOverBlocks,
    Offered,
    PartFinal,
    Reserved,
)
from trtmesh.engine.handoff.copying import copying_of
from trtmesh.engine.handoff.fetch_server import FetchServer
from trtmesh.engine.handoff.handoffs import HandoffsByBlocks
from trtmesh.engine.handoff.metrics import HandoffMetrics
from trtmesh.engine.handoff.own_kv import OwnKv
from trtmesh.engine.handoff.send_run import SenderRequest
from trtmesh.engine.handoff.settings import HandoffSettings
from trtmesh.engine.handoff.transports.choice import KNOWN, open_transports
from trtmesh.engine.handoff.transports.nixl_agents import Pools, new_agent, register
from trtmesh.engine.kv_memory import Bytes, HostKvMemory, Shard, host_memory
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer
from trtmesh.v1 import kv_transfer_pb2_grpc as transfer_grpc

MESSAGE_BYTES = 2**20
PART_BYTES = 16 * 2**20
TOKENS_PER_BLOCK = 16
LEASE_SECONDS = 600.0
SEED = 7
"""Of the sender's bytes."""


class StoredKv:
    """Backend of a worker without a model. Its only lease has all blocks."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.adopted = asyncio.Event()
        self.take: Any = None

    def reserve(self, lease_id: str, tokens: int, block_hashes: Sequence[int]) -> None:
        del tokens, block_hashes
        self.take(Reserved(lease_id, shuffled(self.blocks, SEED + 1)))

    def adopt(self, lease_id: str) -> None:
        del lease_id
        self.adopted.set()

    def drop(self, lease_id: str) -> None:
        """The blocks are never freed."""

    def hand_over(self, key: int, lease_id: str) -> None:
        """There are no sequences."""

    def stop(self, keys: Sequence[int], reason: int) -> None:
        """There are no sequences."""


class Owner:
    """The router's stream; it keeps what it is told."""

    def __init__(self) -> None:
        self.descriptor = transfer.HandoffDescriptor()

    def tell_reserved(self, lease_id: str, present_tokens: int, error: Exception | None) -> None:
        del lease_id, present_tokens
        if error:
            raise error

    def tell_offered(self, key: int, descriptor: transfer.HandoffDescriptor) -> None:
        del key
        self.descriptor = descriptor

    def tell_failed(self, lease_id: str, error: Exception) -> None:
        raise RuntimeError(lease_id) from error

    def tell_over(self, lease_id: str, error: Exception) -> None:
        self.tell_failed(lease_id, error)

    def owes_less(self) -> None:
        """The stream never ends."""


def shuffled(blocks: int, seed: int) -> tuple[int, ...]:
    """The numbers of all blocks but the null block, in random order."""
    return tuple((np.random.default_rng(seed).permutation(blocks) + 1).tolist())


def memory_of(blocks: int, block_bytes: int) -> HostKvMemory:
    """A pool of 4 layers in float32."""
    head_dim = block_bytes // (4 * 2 * TOKENS_PER_BLOCK * 4)
    shard = Shard(range(4), range(1), TOKENS_PER_BLOCK, head_dim, pb.DATA_TYPE_FP32, 4)
    return HostKvMemory([shard], [host_memory(blocks + 1, shard.block_bytes)])


def bytes_of(blocks: int, block_bytes: int) -> Bytes:
    """The sender's bytes."""
    rng = np.random.default_rng(SEED)
    return rng.integers(0, 256, (blocks + 1, block_bytes), dtype=np.uint8)


@asynccontextmanager
async def handoffs_of(
    memory: HostKvMemory, blocks: int, settings: HandoffSettings
) -> AsyncIterator[tuple[HandoffsByBlocks, StoredKv]]:
    backend, threads = StoredKv(blocks), ThreadPoolExecutor(2)
    own = OwnKv(
        worker="bench",
        settings=settings,
        backend=cast("HandsOverBlocks", backend),
        memory=memory,
        kind=("model", "tokenizer"),
        total_blocks=blocks,
        layers_per_part=4,
        transports=open_transports(settings, memory, KNOWN),
        threads=threads,
        copying=copying_of(memory, threads),
        max_message_bytes=64 * 2**20,
        is_draining=lambda: False,
    )
    handoffs = HandoffsByBlocks(own, HandoffMetrics())
    backend.take = handoffs.take
    try:
        yield handoffs, backend
    finally:
        await handoffs.close()


def offered(
    handoffs: HandoffsByBlocks, blocks: int, block_bytes: int
) -> transfer.HandoffDescriptor:
    """Grants a lease of all blocks, announces all parts, and commits them."""
    owner, lease_id, content = Owner(), secrets.token_hex(16), content_of(blocks)
    numbers = shuffled(blocks, SEED)
    handoffs.hand_over(1, SenderRequest(owner, lease_id, [1], None, LEASE_SECONDS))
    handoffs.take(Offered(lease_id, 1, numbers, content.tokens))
    step = max(1, PART_BYTES // block_bytes)
    for first in range(0, blocks, step):
        handoffs.take(PartFinal(lease_id, first, min(step, blocks - first), 0, 4))
    handoffs.take(HandedOver(lease_id, 1, numbers, content, 1, 1))
    return owner.descriptor


def content_of(blocks: int) -> Content:
    return Content(blocks * TOKENS_PER_BLOCK, bytes(16))


async def serve_messages(total_bytes: int) -> tuple[grpc.aio.Server, str]:
    """The floor of gRPC: a grpc.aio server that streams messages."""
    message = bytes(MESSAGE_BYTES)

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        del request, context
        for _ in range(total_bytes // MESSAGE_BYTES):
            yield message

    server = grpc.aio.server()
    method: Any = grpc.unary_stream_rpc_method_handler(stream)
    handlers = grpc.method_handlers_generic_handler("bench.Floor", {"Stream": method})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


class PlainAgent:
    """The floor of NIXL: an agent that offers memory, polled in a thread."""

    def __init__(self, memory: HostKvMemory) -> None:
        self.pools = Pools.of(memory)
        self._agent = new_agent()
        self._registered = register(self._agent, self.pools)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._end.wait(1e-3):
            self._agent.get_new_notifs()


async def main(blocks: int, block_bytes: int, *, with_nixl: bool) -> None:
    memory = memory_of(blocks, block_bytes)
    memory.memory(0).rows[:] = bytes_of(blocks, block_bytes)
    plain = PlainAgent(memory) if with_nixl else None
    floor, floor_address = await serve_messages(blocks * block_bytes)
    async with handoffs_of(memory, blocks, HandoffSettings()) as (handoffs, _):
        server = GrpcServer(64 * 2**20)
        transfer_grpc.add_KvTransferServiceServicer_to_server(
            FetchServer(lambda: handoffs), cast("grpc.aio.Server", server)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        hello = {
            "address": f"127.0.0.1:{port}",
            "floor": floor_address,
            "nixl": plain.metadata.hex() if plain else "",
            "memory": plain.pools.pools[0].address if plain else 0,
        }
        print("hello", json.dumps(hello), flush=True)
        while await asyncio.to_thread(os.read, 0, 1):
            descriptor = offered(handoffs, blocks, block_bytes)
            print("descriptor", descriptor.SerializeToString().hex(), flush=True)
        await server.stop(0)
    await floor.stop(0)
    if plain:
        plain.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), int(sys.argv[2]), with_nixl=sys.argv[3] == "nixl"))
