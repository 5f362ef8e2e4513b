"""Executes a router's commands about adapters and answers with their states."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import BackendFailed, SlowClient, TrtmeshError, UnsupportedCall
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import AdapterLoad, HeldAdapter, HoldsAdapters
from trtmesh.engine.service.adapter_delivery import Deliveries, Delivery, identity_of
from trtmesh.engine.service.event_outbox import EventOutbox
from trtmesh.engine.service.streams import LoadedEngine
from trtmesh.engine.service.wire import adapter_states
from trtmesh.v1 import engine_pb2 as epb

log = logging.getLogger(__name__)


class AdapterCommands:
    """The loads and unloads of one router.

    Every router gets every change; a failed load is reported only to the router that asked.
    """

    def __init__(self, engine: LoadedEngine, outbox: EventOutbox, router: str) -> None:
        self._engine = engine
        self._outbox = outbox
        self._router = router
        self._deliveries = Deliveries(engine.delivery_memory)
        self._open = True
        self._tell(engine.held_adapters)

    def load(self, command: epb.LoadAdapterCommand) -> None:
        """Takes a part of a content, or loads an adapter without one."""
        try:
            self._holder("load_adapter")
            identity = identity_of(command.adapter)
            if command.config_bytes or command.weights_bytes or command.data:
                if delivery := self._deliveries.put(command):
                    self._complete(identity, delivery)
            else:
                self._load(AdapterLoad(identity, None, command.pinned))
        except TrtmeshError as error:
            self._refuse(command.adapter.id, command.adapter.name, command.adapter.version, error)

    def unload(self, command: epb.UnloadAdapterCommand) -> None:
        try:
            holder = self._holder("unload_adapter")
        except UnsupportedCall as error:
            self._refuse(command.id, "", command.version, error)
            return
        holder.unload_adapter(command.id, command.version, unpin=command.unpin)

    def take_states(self, held: Sequence[HeldAdapter]) -> None:
        """Tells changes. Raises SlowClient when too many answers wait."""
        told = []
        for each in held:
            awaited = self._deliveries.answered((each.adapter.id, each.adapter.version))
            if awaited or not each.error:
                told.append(each)
        self._tell(told)

    def close(self) -> None:
        """Drops partial deliveries, because the stream is over."""
        self._open = False
        self._deliveries.close()

    def _complete(self, identity: Adapter, delivery: Delivery) -> None:
        """Joins the parts off the event loop: large contents would hold up the tokens."""
        content = asyncio.get_running_loop().run_in_executor(None, delivery.content)
        content.add_done_callback(partial(self._completed, identity, delivery))

    def _completed(
        self, identity: Adapter, delivery: Delivery, content: asyncio.Future[AdapterContent]
    ) -> None:
        if content.cancelled() or not self._open:
            return
        try:
            self._load(AdapterLoad(identity, content.result(), delivery.first.pinned))
        except TrtmeshError as error:
            self._refuse_later(identity, error)
        except Exception as error:
            # Broad on purpose: the router would wait forever for a defect here.
            log.exception("adapter %d could not be loaded", identity.id)
            reason = f"the adapter could not be loaded: {type(error).__name__}: {error}"
            self._refuse_later(identity, BackendFailed(reason))

    def _refuse_later(self, identity: Adapter, error: TrtmeshError) -> None:
        """Refuses outside of a command. A router that does not read its answers must not break other calls."""
        try:
            self._refuse(identity.id, identity.name, identity.version, error)
        except SlowClient as slow:
            self._outbox.finish(slow)

    def _load(self, load: AdapterLoad) -> None:
        holder = self._holder("load_adapter")
        log.info("router %s loads adapter %d", self._router, load.identity.id)
        self._deliveries.await_answer((load.identity.id, load.identity.version))
        holder.load_adapter(load)

    def _refuse(self, number: int, name: str, version: str, error: TrtmeshError) -> None:
        error.worker = error.worker or self._engine.name
        self._engine.metrics.errors[error.reason] += 1
        log.info("adapter %d refused: %s", number, error.message)
        self._deliveries.answered((number, version))
        state = self._held(number, version)
        absent = HeldAdapter(Adapter(number, name, version), epb.ADAPTER_PLACE_ABSENT)
        self._tell([replace(state or absent, error=error)])

    def _held(self, number: int, version: str) -> HeldAdapter | None:
        """The adapter's state, if it is in memory: a refused delivery leaves it there."""
        for each in self._engine.held_adapters:
            if (each.adapter.id, each.adapter.version) == (number, version) and not each.error:
                return each
        return None

    def _holder(self, command: str) -> HoldsAdapters:
        if (holder := self._engine.adapters) and self._engine.info.max_adapter_bytes:
            return holder
        raise UnsupportedCall(
            f"the {self._engine.info.backend} backend of worker {self._engine.name} does not support {command}"
        )

    def _tell(self, held: Sequence[HeldAdapter]) -> None:
        if held:
            self._outbox.put_answer(epb.EngineEvent(adapter_states=adapter_states(held)))
