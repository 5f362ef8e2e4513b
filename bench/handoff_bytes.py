"""Measures the transports of handoffs between two processes, against copies of memory and the bare transports.

Each round moves the same blocks in every way: a plain copy, a copy of shuffled blocks by a Python loop, one read by the
transports that read memory, a whole handoff by each transport from the fetch to the adoption, one NIXL READ by plain
agents, and a grpc.aio stream of 1 MiB messages. Prints GB/s: the median of the rounds, and the lowest and highest.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import asyncio
import importlib.util
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from _kv_worker import (
    LEASE_SECONDS,
    SEED,
    Owner,
    StoredKv,
    bytes_of,
    content_of,
    handoffs_of,
    memory_of,
    shuffled,
)
from _options import run_bench, tell
from _turns import Figures, Values, in_turn
from trtmesh.engine.backend import Awaiting
from trtmesh.engine.handoff.block_plan import Run
from trtmesh.engine.handoff.handoffs import HandoffsByBlocks
from trtmesh.engine.handoff.settings import HandoffSettings
from trtmesh.engine.handoff.transports.nixl_agents import Descriptors, Pools, new_agent, register
from trtmesh.engine.handoff.transports.transport import ShardCopy
from trtmesh.engine.kv_memory import HostKvMemory
from trtmesh.v1 import kv_transfer_pb2 as transfer

BLOCK_BYTES = (32 * 2**10, 256 * 2**10, 2**20)
KINDS = {
    "shared_memory": transfer.KV_TRANSPORT_SHARED_MEMORY,
    "nixl": transfer.KV_TRANSPORT_NIXL,
    "grpc": transfer.KV_TRANSPORT_GRPC,
}
FLOORS = {
    "shared_memory_read": "scattered_copy",
    "shared_memory_handoff": "scattered_copy",
    "nixl_read": "bare_nixl",
    "nixl_handoff": "bare_nixl",
    "grpc_handoff": "bare_grpc",
}
"""What each way is compared with. Reads aim at 0.6 of a scattered copy and 0.9 of plain NIXL, gRPC at 0.8."""


@dataclass
class Sender:
    """The sending process."""

    process: asyncio.subprocess.Process
    hello: dict[str, Any]

    async def descriptor(self) -> transfer.HandoffDescriptor:
        """A lease of all blocks."""
        assert self.process.stdin
        self.process.stdin.write(b"x")
        descriptor = transfer.HandoffDescriptor.FromString(
            bytes.fromhex(await line(self.process, "descriptor"))
        )
        descriptor.address = self.hello["address"]
        return descriptor


async def line(process: asyncio.subprocess.Process, name: str) -> str:
    """The rest of the next line that begins with `name`."""
    assert process.stdout
    while text := (await process.stdout.readline()).decode():
        if text.startswith(name + " "):
            return text.removeprefix(name + " ")
    raise RuntimeError("the sender has ended")


@asynccontextmanager
async def sender_of(blocks: int, block_bytes: int, nixl: str) -> AsyncIterator[Sender]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).parent / "_kv_worker.py")),
        *(str(blocks), str(block_bytes), nixl),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    try:
        yield Sender(process, json.loads(await line(process, "hello")))
        assert process.stdin
        process.stdin.close()
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Receiver:
    """The receiving process: this one."""

    def __init__(
        self, handoffs: HandoffsByBlocks, backend: StoredKv, memory: HostKvMemory, sender: Sender
    ) -> None:
        self.rows = memory.memory(0).rows
        self._handoffs, self._backend, self._sender = handoffs, backend, sender
        self._source = bytes_of(backend.blocks, self.rows.shape[1])
        self._sources = shuffled(backend.blocks, SEED)
        self._targets = shuffled(backend.blocks, SEED + 1)

    @property
    def size(self) -> int:
        return self._backend.blocks * int(self.rows.shape[1])

    def check(self) -> None:
        """Compares the blocks with the sender's, and overwrites them."""
        same = self.rows[list(self._targets)] == self._source[list(self._sources)]
        if not same.all():
            raise RuntimeError("the receiver has other bytes than the sender")
        self.rows[:] = 0

    def plain_copy(self) -> float:
        began = time.perf_counter()
        np.copyto(self.rows, self._source)
        return time.perf_counter() - began

    def scattered_copy(self) -> float:
        copy, rows, source = np.copyto, self.rows, self._source
        began = time.perf_counter()
        for one, other in zip(self._sources, self._targets, strict=True):
            copy(rows[other], source[one])
        took = time.perf_counter() - began
        self.check()
        return took

    async def handoff(self, transport: str) -> float:
        """A whole handoff, from the descriptor to the adoption of the blocks."""
        descriptor = await self._sender.descriptor()
        chosen = [each for each in descriptor.transports if each.transport == KINDS[transport]]
        del descriptor.transports[:]
        descriptor.transports.extend(chosen)
        handoffs, owner, lease_id = self._handoffs, Owner(), secrets.token_hex(16)
        content = content_of(self._backend.blocks)
        self._backend.adopted.clear()
        began = time.perf_counter()
        handoffs.reserve(owner, lease_id, content.tokens, (), LEASE_SECONDS)
        received = handoffs.received.get(lease_id)
        assert received
        received.submitted([1])
        handoffs.take(Awaiting(lease_id, 1, content))
        handoffs.attach(lease_id, descriptor, None)
        async with asyncio.timeout(60):
            await self._backend.adopted.wait()
        took = time.perf_counter() - began
        self.check()
        return took

    async def read(self, transport: str) -> float:
        """One read of all blocks, from an open source."""
        descriptor = await self._sender.descriptor()
        offers = {each.transport: each.state for each in descriptor.transports}
        opened = self._handoffs.own.transports[KINDS[transport]]
        assert opened
        source = await opened.open(offers[KINDS[transport]])
        whole = (Run(0, 0, int(self.rows.shape[1])),)
        began = time.perf_counter()
        await source.read([ShardCopy(0, 0, self._sources, self._targets, whole)])
        took = time.perf_counter() - began
        await source.close()
        self.check()
        return took

    async def bare_grpc(self) -> float:
        async with grpc.aio.insecure_channel(self._sender.hello["floor"]) as channel:
            await channel.channel_ready()
            began, size = time.perf_counter(), 0
            stream: Any = channel.unary_stream("/bench.Floor/Stream")
            async for message in stream(b""):
                size += len(message)
            assert size == self.size
            return time.perf_counter() - began


class BareNixl:
    """One READ of all blocks by plain agents, polled without a pause."""

    def __init__(self, receiver: Receiver, memory: HostKvMemory, sender: Sender) -> None:
        self._receiver, self._pools = receiver, Pools.of(memory)
        self._agent = new_agent()
        self._registered = register(self._agent, self._pools)
        self._peer = self._agent.add_remote_agent(bytes.fromhex(sender.hello["nixl"]))
        self._sources = self._regions(sender.hello["memory"], receiver._sources)
        self._targets = self._regions(self._pools.pools[0].address, receiver._targets)

    def _regions(self, address: int, blocks: tuple[int, ...]) -> Descriptors:
        size = self._pools.pools[0].block_bytes
        regions = np.zeros((len(blocks), 3), dtype=np.uint64)
        regions[:, 0] = np.array(blocks, dtype=np.uint64) * np.uint64(size) + np.uint64(address)
        regions[:, 1] = size
        return regions

    def read(self) -> float:
        agent, began = self._agent, time.perf_counter()
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(self._targets, "DRAM"),
            agent.get_xfer_descs(self._sources, "DRAM"),
            self._peer,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - began
        handle.release()
        if state != "DONE":
            raise RuntimeError(state)
        self._receiver.check()
        return took


async def measure(block_bytes: int, total_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s of each way, by name."""
    blocks = total_bytes // block_bytes
    memory = memory_of(blocks, block_bytes)
    nixl = "nixl" if importlib.util.find_spec("nixl_cu12") else ""
    async with (
        sender_of(blocks, block_bytes, nixl) as sender,
        handoffs_of(memory, blocks, HandoffSettings()) as (handoffs, backend),
    ):
        receiver = Receiver(handoffs, backend, memory, sender)
        found = await in_turn(ways_of(receiver, memory, sender, nixl), rounds)
    rates = {name: each.values["gb_per_second"] for name, each in found.items()}
    return {
        name: {
            "median": found[name].medians()["gb_per_second"],
            "lowest": round(min(each), 2),
            "highest": round(max(each), 2),
        }
        for name, each in rates.items()
    }


def ways_of(
    receiver: Receiver, memory: HostKvMemory, sender: Sender, nixl: str
) -> dict[str, Callable[[], Awaitable[Values]]]:
    ways: dict[str, Callable[[], float | Awaitable[float]]] = {
        "plain_copy": receiver.plain_copy,
        "scattered_copy": receiver.scattered_copy,
        "shared_memory_read": partial(receiver.read, "shared_memory"),
        "shared_memory_handoff": partial(receiver.handoff, "shared_memory"),
        "bare_grpc": receiver.bare_grpc,
        "grpc_handoff": partial(receiver.handoff, "grpc"),
    }
    if nixl:
        ways["bare_nixl"] = BareNixl(receiver, memory, sender).read
        ways["nixl_read"] = partial(receiver.read, "nixl")
        ways["nixl_handoff"] = partial(receiver.handoff, "nixl")

    async def timed(way: Callable[[], float | Awaitable[float]]) -> Values:
        took = way()
        seconds = took if isinstance(took, float) else await took
        return {"gb_per_second": receiver.size / seconds / 1e9}

    return {name: partial(timed, way) for name, way in ways.items()}


async def bench(total_bytes: int, rounds: int) -> Figures:
    """GB/s by block size, and what the aims compare."""
    result: Figures = {}
    for block_bytes in BLOCK_BYTES:
        rates = await measure(block_bytes, total_bytes, rounds)
        shares = {
            name: round(rates[name]["median"] / rates[floor]["median"], 2)
            for name, floor in FLOORS.items()
            if name in rates
        }
        size = f"{block_bytes // 1024} KiB"
        result[size] = {"gb_per_second": rates, "share_of_floor": shares}
        tell(size, result[size])
    return result


async def main(*, mib: int = 256, rounds: int = 7) -> Figures:
    """`mib` are the bytes of a handoff."""
    return await bench(mib * 2**20, rounds)


if __name__ == "__main__":
    run_bench(main)
