"""Deliveries of adapters to a worker: content in parts on the worker's stream, answered by the adapter's state."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import InternalError, TrtmeshError, WorkerLost
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.adapters.registry import VersionKey
from trtmesh.router.adapters.usage import Usages
from trtmesh.router.metrics import RouterMetrics
from trtmesh.v1 import engine_pb2 as pb
from trtmesh.v1 import generation_pb2 as generation_pb

log = logging.getLogger(__name__)

DELIVERY_SECONDS = 60.0
"""Longest time for a worker to take and load an adapter: the largest content over a link of a gigabit and more, and a
read from a disk."""

PART_BYTES = 256 * 2**10
"""Largest part of a content: the longest that other commands wait for a delivery."""

IN_MEMORY = frozenset({pb.ADAPTER_PLACE_HOST, pb.ADAPTER_PLACE_DEVICE})

Load = Callable[[], Awaitable[AdapterContent]]


@dataclass(slots=True, eq=False)
class _Delivery:
    """A delivery that items wait for."""

    done: asyncio.Future[None]
    began: float
    task: asyncio.Task[None] | None = None
    waiters: int = 0

    def end(self, error: TrtmeshError | None = None) -> None:
        """Tells everything that waits, and sends no further part."""
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
                # Retrieved here, because nothing may wait any more.
                self.done.exception()
        self._stop()

    def leave(self) -> None:
        """A waiter left; the last one ends the delivery."""
        self.waiters -= 1
        if not self.waiters:
            self.done.cancel()
            self._stop()

    def _stop(self) -> None:
        if self.task is not None:
            self.task.cancel()

    @property
    def outcome(self) -> str:
        """A word for the metrics."""
        if self.done.cancelled():
            return "unwanted"
        error = self.done.exception()
        return error.reason.lower() if isinstance(error, TrtmeshError) else "loaded"


class Deliveries:
    """One delivery per version, for all waiting items. Contents are sent one after another."""

    def __init__(
        self,
        new_command: Callable[[int], pb.EngineCommand],
        usages: Usages,
        metrics: RouterMetrics,
    ) -> None:
        self._new_command = new_command
        self._usages = usages
        self._metrics = metrics
        self._underway: dict[VersionKey, _Delivery] = {}
        self._sending = asyncio.Lock()
        self.written = asyncio.Event()
        """Set when a message to the worker was written."""

    async def deliver(self, adapter: Adapter, load: Load, *, pinned: bool = False) -> None:
        """Has the worker load a version. Raises the worker's error, the error of `load`, or WorkerLost."""
        delivery = self._underway.get((adapter.id, adapter.version))
        if delivery is None or delivery.done.done():
            delivery = self._begin(adapter, load, pinned=pinned)
        delivery.waiters += 1
        try:
            await asyncio.shield(delivery.done)
        finally:
            delivery.leave()

    def on_states(self, states: Iterable[pb.AdapterState]) -> None:
        """Ends the deliveries that the worker answers."""
        for state in states:
            if (delivery := self._underway.get((state.id, state.version))) is not None:
                if state.HasField("error"):
                    delivery.end(from_proto(state.error))
                elif state.place in IN_MEMORY:
                    delivery.end()

    def lost(self, error: TrtmeshError) -> None:
        """The worker takes nothing now."""
        for delivery in [*self._underway.values()]:
            delivery.end(error)

    def _begin(self, adapter: Adapter, load: Load, *, pinned: bool) -> _Delivery:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        delivery = _Delivery(done, time.monotonic())
        self._underway[adapter.id, adapter.version] = delivery
        delivery.task = asyncio.create_task(self._carry(delivery, adapter, load, pinned=pinned))
        done.add_done_callback(lambda _: self._ended(adapter, delivery))
        return delivery

    def _ended(self, adapter: Adapter, delivery: _Delivery) -> None:
        key = (adapter.id, adapter.version)
        if self._underway.get(key) is delivery:
            del self._underway[key]
        self._metrics.deliveries[delivery.outcome] += 1
        self._metrics.delivery.observe(time.monotonic() - delivery.began)
        usage = self._usages.of(adapter)
        if delivery.done.cancelled():
            return
        error = delivery.done.exception()
        usage.loads += error is None
        if not (isinstance(error, TrtmeshError) and error.row.movable):
            usage.error = error if isinstance(error, TrtmeshError) else None

    async def _carry(
        self, delivery: _Delivery, adapter: Adapter, load: Load, *, pinned: bool
    ) -> None:
        try:
            async with asyncio.timeout(DELIVERY_SECONDS):
                await self._send(adapter, load, pinned=pinned)
                await asyncio.shield(delivery.done)
        except TimeoutError:
            delivery.end(
                WorkerLost(
                    f"the worker did not load adapter {adapter.id} within {DELIVERY_SECONDS:g} s"
                )
            )
        except TrtmeshError as error:
            delivery.end(error)
        except Exception as error:
            # Broad on purpose: items would wait forever for a defect here.
            log.exception("unexpected error in the delivery of adapter %d", adapter.id)
            delivery.end(InternalError(f"{type(error).__name__}: {error}"))

    async def _send(self, adapter: Adapter, load: Load, *, pinned: bool) -> None:
        content = await load()
        async with self._sending:
            for offset, data in parts(content):
                command = self._new_command(len(data)).load_adapter
                command.adapter.id = adapter.id
                command.adapter.name = adapter.name
                command.adapter.version = adapter.version
                command.pinned = pinned
                command.format = generation_pb.AdapterFormat.ValueType(content.format)
                command.config_bytes = len(content.config)
                command.weights_bytes = len(content.weights)
                command.offset = offset
                command.data = data
                self._metrics.delivered_bytes += len(data)
                self.written.clear()
                await self.written.wait()


def parts(content: AdapterContent) -> Iterator[tuple[int, bytes]]:
    """Positions and bytes of the parts of a content."""
    start = 0
    for file in (content.config, content.weights):
        for offset in range(0, len(file), PART_BYTES):
            yield start + offset, file[offset : offset + PART_BYTES]
        start += len(file)
