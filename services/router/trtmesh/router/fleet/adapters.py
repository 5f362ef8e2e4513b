"""The adapters that requests brought, kept for workers that lack them.

A client sends an adapter's weights once and names it by number later, as with Triton. Any worker may get such a later
item, also after evictions and restarts, so the router sends the weights along to a worker without this version.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.settings import Settings
from trtmesh.chassis.vocabulary import Adapter, Lora
from trtmesh.router.placement import WorkerAdapters
from trtmesh.v1 import generation_pb2 as pb


class AdapterSettings(Settings):
    """The adapters that requests bring."""

    bytes: Annotated[int, Field(ge=0, le=2**40)] = 2**30
    """Most memory in bytes for their weights; the longest unused are forgotten. Without its weights, an adapter is
    known only to the workers that hold it."""


@dataclass(frozen=True, slots=True)
class KeptAdapter:
    """A version of an adapter with its weights. Items keep the version that they began with."""

    identity: Adapter
    message: pb.LoraConfig

    def put(self, config: pb.GenerationConfig, held: WorkerAdapters) -> None:
        """Names the version in an item's config, with the weights where the worker, which holds `held`, lacks it."""
        config.lora.CopyFrom(self.message)
        if held.holds(self.identity):
            config.lora.ClearField("weights")
            config.lora.ClearField("config")


class KeptAdapters:
    """The newest version of each adapter by model and number, in bounded memory."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._most_bytes = settings.bytes
        self._kept: OrderedDict[tuple[str, int], KeptAdapter] = OrderedDict()
        self.size_bytes = 0

    def find(self, model: str, asked: Lora, message: pb.LoraConfig) -> KeptAdapter | None:
        """The adapter of an item: as the item brings it, or as the last one did; None for an unknown number.

        `message` is `asked` as it arrived.
        """
        if asked.id is None:
            return None
        key = (model, asked.id)
        if asked.weights is None or asked.config is None:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
            return kept
        version = AdapterContent.of_arrays(asked.weights, asked.config).version
        brought = KeptAdapter(Adapter(asked.id, asked.name or "", version), pb.LoraConfig())
        # A copy: a part of the request would keep the whole request in memory.
        brought.message.CopyFrom(message)
        brought.message.version = version
        self._forget(key)
        self._kept[key] = brought
        self.size_bytes += brought.message.ByteSize()
        while self.size_bytes > self._most_bytes:
            self._forget(next(iter(self._kept)))
        return brought

    def _forget(self, key: tuple[str, int]) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self.size_bytes -= kept.message.ByteSize()
