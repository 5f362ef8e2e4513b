"""Agents of NIXL. NIXL reads through UCX: shared memory, TCP or RDMA, between host or device memory.

NIXL makes no promise about an abandoned transfer: the transfer may still write. Only the end of an agent, with all
connections and registrations, is certain. So each sender is read by an agent of its own, destroyed to end the reads.

All calls to an agent come from a single thread, because agents have no thread of their own: such a thread would spin. A
receiver's thread polls while it reads. A sender's agent is polled all the time, since it answers connecting receivers,
and reads through TCP. No notification announces a read: UCX ends the process if the peer dies before a notification has
left.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from trtmesh.engine.handoff.block_plan import Run
from trtmesh.engine.handoff.transports.transport import (
    PoolSize,
    ReadFailed,
    ShardCopy,
    TransportUnusable,
    check_bounds,
)
from trtmesh.engine.kv_memory import Bytes, HostMemory, KvMemory

_log = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu12", "nixl_cu13")
_VERSION = 1
_HEAD: Final = "<BBH"
"""Version, whether the pools are on devices, number of pools. The metadata of the agent follows the pools."""
_POOL: Final = "<QQQQ"
_MAX_POOLS = 253
_REQUEST_BYTES = 64 << 20
_READ_POLL_SECONDS = 5e-5
_SERVE_POLL_SECONDS = 2e-3
_IDLE_POLL_SECONDS = 1.0
"""Beyond SERVE_SECONDS no lease is left; a poll costs 0.1 ms."""
SERVE_SECONDS = 600.0
"""How long receivers are served without delay after an offer, longer than leases: a poll each 2 ms costs 4 % of a
core."""
_SETTLE_POLLS = 20

Descriptors = NDArray[np.uint64]
"""[regions, (address, bytes, device)]"""


@dataclass(frozen=True, slots=True)
class Pool:
    address: int
    blocks: int
    block_bytes: int
    device: int = 0

    @classmethod
    def of(cls, rows: Bytes) -> Pool:
        """Of host memory [blocks, bytes]."""
        return cls(rows.ctypes.data, len(rows), rows.shape[1])


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of a worker as NIXL addresses them."""

    on_device: bool
    pools: tuple[Pool, ...]

    @property
    def segment(self) -> str:
        return "VRAM" if self.on_device else "DRAM"

    @property
    def sizes(self) -> list[PoolSize]:
        return [PoolSize(pool.blocks, pool.block_bytes) for pool in self.pools]

    @classmethod
    def of(cls, memory: KvMemory) -> Pools:
        """Raises TransportUnusable if some pools are on devices and others are not."""
        found: list[Pool] = []
        on_device = set[bool]()
        for number, shard in enumerate(memory.shards):
            pool = memory.memory(number)
            on_device.add(not isinstance(pool, HostMemory))
            if isinstance(pool, HostMemory):
                found.append(Pool.of(pool.rows))
            else:
                blocks = pool.size // shard.block_bytes
                found.append(Pool(pool.address, blocks, shard.block_bytes, pool.device))
        if len(on_device) != 1:
            raise TransportUnusable("some KV pools are in host memory and others on devices")
        return cls(on_device.pop(), tuple(found))


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """A sender's pools, and the metadata of the sender's agent."""

    pools: Pools
    metadata: bytes

    def encode(self) -> bytes:
        pools = self.pools.pools
        head = struct.pack(_HEAD, _VERSION, self.pools.on_device, len(pools))
        fields = [(each.address, each.blocks, each.block_bytes, each.device) for each in pools]
        return b"".join([head, *(struct.pack(_POOL, *each) for each in fields), self.metadata])

    @classmethod
    def decode(cls, data: bytes) -> NixlOffer:
        head, pool = struct.calcsize(_HEAD), struct.calcsize(_POOL)
        try:
            version, on_device, count = struct.unpack_from(_HEAD, data)
            end = head + count * pool
            pools = tuple(Pool(*each) for each in struct.iter_unpack(_POOL, data[head:end]))
        except struct.error as error:
            raise TransportUnusable("the offer is cut off") from error
        if version != _VERSION:
            raise TransportUnusable(f"the offer has version {version}, but this worker {_VERSION}")
        if not 0 < count <= _MAX_POOLS or len(pools) != count or end >= len(data):
            raise TransportUnusable(f"the offer of {count} pools is cut off")
        return cls(Pools(bool(on_device), pools), data[end:])


class OfferingAgent:
    """Lets receivers read the pools of this worker, until closed."""

    def __init__(self, pools: Pools) -> None:
        self._agent = new_agent()
        self._registered = register(self._agent, pools)
        self.offer = NixlOffer(pools, self._agent.get_agent_metadata())
        self._closing = False
        self._serves_until = 0.0
        self._news = threading.Event()
        """Wakes the thread from a long wait."""
        self._thread = threading.Thread(target=self._poll, name="trtmesh-kv-nixl", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """Receivers may come soon."""
        self._serves_until = time.monotonic() + SERVE_SECONDS
        self._news.set()

    @property
    def serves(self) -> bool:
        """Whether receivers are served without delay."""
        return time.monotonic() < self._serves_until

    def close(self) -> None:
        """Returns once nobody can read the pools."""
        self._closing = True
        self._news.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._closing:
            if self._news.wait(_SERVE_POLL_SECONDS if self.serves else _IDLE_POLL_SECONDS):
                self._news.clear()
            self._agent.get_new_notifs()
        self._agent.deregister_memory(self._registered)
        del self._agent, self._registered


class ReadingAgent:
    """Reads from a sender. All methods but `cut` are called in the same thread."""

    def __init__(self, offer: NixlOffer, memory: KvMemory) -> None:
        """Raises TransportUnusable."""
        self._sources, self._targets = offer.pools, Pools.of(memory)
        self._cut = threading.Event()
        self._agent: Any = new_agent()
        try:
            self._registered = register(self._agent, self._targets)
            self._peer = self._agent.add_remote_agent(offer.metadata)
        except Exception as error:
            raise TransportUnusable(f"the sender's agent cannot be loaded: {error}") from error

    @property
    def is_usable(self) -> bool:
        return self._agent is not None

    def cut(self) -> None:
        """Ends the read in progress, and this agent too."""
        self._cut.set()

    def read(self, copies: Sequence[ShardCopy]) -> Iterator[None]:
        """Reads with a request per step. Raises ReadFailed."""
        check_bounds(copies, self._sources.sizes, self._targets.sizes)
        for sources, targets in _requests(copies, self._sources, self._targets):
            self._fetch(sources, targets)
            yield

    def destroy(self) -> None:
        """Returns once nothing of a read can write any more."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        try:
            for _ in range(_SETTLE_POLLS if self._cut.is_set() else 0):
                agent.get_new_notifs()
                time.sleep(_SERVE_POLL_SECONDS)
            agent.deregister_memory(self._registered)
            agent.remove_remote_agent(self._peer)
        except Exception as error:  # noqa: BLE001 - the errors of NIXL have no common base
            _log.info("an agent of NIXL did not end well: %s", error)

    def _fetch(self, sources: Descriptors, targets: Descriptors) -> None:
        """Reads; any failure destroys the agent, because other regions of the request may still be written."""
        problem = "the connection to the sender has ended"
        try:
            if self._agent and self._has_fetched(sources, targets):
                return
        except Exception as error:  # noqa: BLE001 - the errors of NIXL have no common base
            problem = f"{type(error).__name__}: {error}"
        self.destroy()
        raise ReadFailed(problem)

    def _has_fetched(self, sources: Descriptors, targets: Descriptors) -> bool:
        """Whether a read was completed, and not cut."""
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(targets, self._targets.segment),
            agent.get_xfer_descs(sources, self._sources.segment),
            self._peer,
        )
        try:
            state = agent.transfer(handle)
            while state == "PROC" and not self._cut.is_set():
                time.sleep(_READ_POLL_SECONDS)
                state = agent.check_xfer_state(handle)
        finally:
            handle.release()
        return bool(state == "DONE")


def _requests(
    copies: Sequence[ShardCopy], sources: Pools, targets: Pools
) -> Iterator[tuple[Descriptors, Descriptors]]:
    """The regions of copies, in pairs of requests of about _REQUEST_BYTES."""
    pairs = [
        _joined(
            _regions(sources.pools[copy.source_shard], copy.source_blocks, copy.runs, "source"),
            _regions(targets.pools[copy.target_shard], copy.target_blocks, copy.runs, "target"),
        )
        for copy in copies
        if len(copy.source_blocks)
    ]
    if pairs:
        source, target = (np.concatenate(side) for side in zip(*pairs, strict=True))
        number = (np.cumsum(source[:, 1]) - 1) // _REQUEST_BYTES
        bounds = np.flatnonzero(np.diff(number)) + 1
        yield from zip(np.split(source, bounds), np.split(target, bounds), strict=True)


def _regions(
    pool: Pool, blocks: Sequence[int], runs: Sequence[Run], side: Literal["source", "target"]
) -> Descriptors:
    starts = np.asarray(blocks, dtype=np.uint64)[:, None] * np.uint64(pool.block_bytes)
    offsets = np.array([getattr(run, side) for run in runs], dtype=np.uint64)
    regions = np.empty((len(blocks), len(runs), 3), dtype=np.uint64)
    regions[:, :, 0] = starts + offsets + np.uint64(pool.address)
    regions[:, :, 1] = [run.size for run in runs]
    regions[:, :, 2] = pool.device
    return regions.reshape(-1, 3)


def _joined(source: Descriptors, target: Descriptors) -> tuple[Descriptors, Descriptors]:
    """Joins regions adjacent on both sides."""
    follows = [each[:-1, 0] + each[:-1, 1] == each[1:, 0] for each in (source, target)]
    starts = np.flatnonzero(np.concatenate(([True], ~(follows[0] & follows[1]))))
    sizes = np.add.reduceat(source[:, 1], starts)
    source, target = source[starts], target[starts]
    source[:, 1] = target[:, 1] = sizes
    return source, target


def register(agent: Any, pools: Pools) -> Any:
    regions = [
        (pool.address, pool.blocks * pool.block_bytes, pool.device, "") for pool in pools.pools
    ]
    return agent.register_memory(regions, pools.segment)


def new_agent() -> Any:
    """A new agent, without a thread. Raises TransportUnusable."""
    api = _api()
    config = api.nixl_agent_config(enable_prog_thread=False)
    try:
        agent = api.nixl_agent(f"trtmesh-{secrets.token_hex(16)}", config)
    except Exception as error:
        # Broad on purpose: the errors of NIXL have no common base.
        raise TransportUnusable(f"NIXL cannot create an agent: {error}") from error
    if "UCX" not in agent.backends:
        raise TransportUnusable("NIXL has no UCX backend")
    return agent


@cache
def _api() -> Any:
    """The API of NIXL. The library's log goes to this process's log instead of the standard output."""
    raises = logging.raiseExceptions
    problem = "is not installed"
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:
                problem = f"cannot be imported: {error}"
            continue
        except ImportError as error:
            problem = f"cannot be imported: {error}"
            continue
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        logging.raiseExceptions = raises
        return api
    raise TransportUnusable(f"the package nixl-cu12 (extra nixl) {problem}")
