"""Deliveries of adapters to a worker: content in parts on the worker's stream, answered by the adapter's state."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import InternalError, TrtmeshError, WorkerLost, forget_frames
from trtmesh.chassis.tasks import until_first_ends
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
    """A delivery that items wait for. Whatever ends it sets the answer."""

    answer: asyncio.Future[None]
    task: asyncio.Task[None]
    waiters: int = 0

    def end(self, error: TrtmeshError | None = None) -> None:
        """The worker loaded the version, or will not because of an error."""
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(error)


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
        if delivery is None or delivery.answer.done():
            delivery = self._begin(adapter, load, pinned=pinned)
        delivery.waiters += 1
        try:
            await asyncio.shield(delivery.task)
        finally:
            delivery.waiters -= 1
            if not delivery.waiters:
                delivery.answer.cancel()
            # The error's frames have this one.
            del delivery

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
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._carry(answer, adapter, load, pinned=pinned))
        delivery = self._underway[adapter.id, adapter.version] = _Delivery(answer, task)
        task.add_done_callback(partial(self._ended, adapter, delivery, time.monotonic()))
        return delivery

    def _ended(
        self, adapter: Adapter, delivery: _Delivery, began: float, task: asyncio.Task[None]
    ) -> None:
        key = (adapter.id, adapter.version)
        if self._underway.get(key) is delivery:
            del self._underway[key]
        self._metrics.delivery.observe(time.monotonic() - began)
        usage = self._usages.of(adapter)
        if task.cancelled():
            self._metrics.deliveries["unwanted"] += 1
            return
        # Retrieved here, because nothing may wait any more.
        error = task.exception()
        assert error is None or isinstance(error, TrtmeshError)
        if error is not None:
            forget_frames(error)
        self._metrics.deliveries[error.reason.lower() if error else "loaded"] += 1
        usage.loads += error is None
        if error is None or not error.row.movable:
            usage.error = error

    async def _carry(
        self, answer: asyncio.Future[None], adapter: Adapter, load: Load, *, pinned: bool
    ) -> None:
        """Sends a version until the worker answers. Raises TrtmeshError."""
        try:
            async with asyncio.timeout(DELIVERY_SECONDS):
                await until_first_ends(answer, self._send(answer, adapter, load, pinned=pinned))
        except TimeoutError as error:
            raise WorkerLost(
                f"the worker did not load adapter {adapter.id} within {DELIVERY_SECONDS:g} s"
            ) from error
        except TrtmeshError:
            raise
        except Exception as error:
            # Broad on purpose: items would fail without a word of a defect here.
            log.exception("unexpected error in the delivery of adapter %d", adapter.id)
            raise InternalError(f"{type(error).__name__}: {error}") from error

    async def _send(
        self, answer: asyncio.Future[None], adapter: Adapter, load: Load, *, pinned: bool
    ) -> None:
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
        await asyncio.shield(answer)


def parts(content: AdapterContent) -> Iterator[tuple[int, bytes]]:
    """Positions and bytes of the parts of a content."""
    start = 0
    for file in (content.config, content.weights):
        for offset in range(0, len(file), PART_BYTES):
            yield start + offset, file[offset : offset + PART_BYTES]
        start += len(file)
