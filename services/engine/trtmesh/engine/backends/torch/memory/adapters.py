"""The adapters in a worker's memory.

An item brings an adapter with its weights, or names one that an earlier item brought. A thread of its own takes weights
apart and checks them; meanwhile the sequences of the item wait in the queue, as for a prompt table. While it works,
lookups take the same way, so that an item finds what was sent before it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from trtmesh.chassis import vocabulary
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import (
    AdapterNotFound,
    AdaptersFull,
    BackendFailed,
    InvalidField,
    TrtmeshError,
)
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.adapters.arrays import read_arrays
from trtmesh.engine.adapters.lora import Lora, Place, Target, Update, fit
from trtmesh.engine.backend import HeldAdapter
from trtmesh.engine.backends.torch.memory.tensors import FLOATS, from_message
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class LoadedAdapter:
    """An adapter as the layers take it. Sequences keep the version that they began with."""

    identity: Adapter
    updates: Mapping[Place, Update]
    size_bytes: int
    give_back: Callable[[LoadedAdapter], None]
    """Called once by each holder."""
    holders: int = 0
    """Sequences; a held adapter stays in memory."""


Done = Callable[[LoadedAdapter | TrtmeshError], None]
"""Takes the adapter, held once per sequence, or an error; on the loading thread."""


class AdapterCache:
    """The adapters of a worker in at most `most_bytes`; the longest unused leave first."""

    def __init__(
        self, targets: Mapping[Place, Target], dtype: torch.dtype, device: torch.device,
        *, most_bytes: int, max_rank: int,
    ) -> None:  # fmt: skip
        self._targets = targets
        self._dtype, self._device = dtype, device
        self._most_bytes, self._max_rank = most_bytes, max_rank
        self._lock = threading.Lock()
        # Guarded by `_lock`; by number and version, the longest unused first.
        self._held: OrderedDict[tuple[int, str], LoadedAdapter] = OrderedDict()
        self._newest: dict[int, str] = {}
        self._news: dict[tuple[int, str], HeldAdapter] = {}
        self._loading = 0
        self.loads = self.evictions = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def held(self) -> list[Adapter]:
        """The adapters in memory, the longest unused first."""
        with self._lock:
            return [each.identity for each in self._held.values()]

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return self._size_bytes()

    def find(
        self, request_id: str, asked: vocabulary.Lora, holders: int, done: Done
    ) -> LoadedAdapter | None:
        """The adapter for `holders` sequences, or None where `done` gets it.

        Raises InvalidField for what needs no look at the weights, AdapterNotFound for an unknown number.
        """
        self._check(asked)
        with self._lock:
            if not self._loading and asked.weights is None:
                return self._found(asked, holders)
            self._loading += 1
        self._thread.submit(self._work, request_id, asked, holders, done)
        return None

    def _release(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            adapter.holders -= 1

    def take_news(self) -> list[HeldAdapter]:
        """The adapters that changed their place since the last call."""
        if not self._news:
            return []
        with self._lock:
            news, self._news = self._news, {}
        return list(news.values())

    def close(self) -> None:
        """Waits for the current load and drops the queue."""
        self._thread.shutdown(cancel_futures=True)

    def _check(self, asked: vocabulary.Lora) -> None:
        if asked.id is None:
            raise InvalidField("is not set; adapters are known by number here", field="lora.id")
        if (asked.weights is None) != (asked.config is None):
            given, other = ("weights", "config") if asked.weights else ("config", "weights")
            raise InvalidField(f"comes without lora.{other}", field=f"lora.{given}")
        if asked.weights is None or asked.config is None:
            return
        for name, tensor, types in (
            ("weights", asked.weights, tuple(FLOATS)),
            ("config", asked.config, (pb.DATA_TYPE_INT32,)),
        ):
            if tensor.data_type not in types:
                given = pb.DataType.Name(pb.DataType.ValueType(tensor.data_type))
                limit = ", ".join(pb.DataType.Name(each) for each in types)
                raise InvalidField.of(f"lora.{name}.data_type", given, f"one of {limit}")

    def _found(self, asked: vocabulary.Lora, holders: int) -> LoadedAdapter:
        number = asked.id or 0
        version = asked.version or self._newest.get(number, "")
        adapter = self._held.get((number, version))
        if adapter is None:
            known = ", ".join(str(held) for held, _ in self._held) or "none"
            raise AdapterNotFound(
                f"is {number}, an adapter that this worker does not hold in this version (it holds {known}); send it"
                " with its weights",
                field="lora.id",
                value=str(number),
            )
        self._held.move_to_end((number, version))
        adapter.holders += holders
        return adapter

    def _work(self, request_id: str, asked: vocabulary.Lora, holders: int, done: Done) -> None:
        outcome: LoadedAdapter | TrtmeshError
        try:
            outcome = self._find_or_load(asked, holders)
        except TrtmeshError as error:
            outcome = error
        except Exception as error:
            with request_id_bound(request_id):
                log.exception("an adapter could not be loaded")
            outcome = BackendFailed(f"the adapter could not be loaded: {error}")
        with self._lock:
            self._loading -= 1
        done(outcome)

    def _find_or_load(self, asked: vocabulary.Lora, holders: int) -> LoadedAdapter:
        if asked.weights is None or asked.config is None:
            with self._lock:
                return self._found(asked, holders)
        version = AdapterContent.of_arrays(asked.weights, asked.config).version
        if asked.version not in (None, version):
            raise InvalidField.of("lora.version", asked.version, f"{version}, that of the weights")
        number = asked.id or 0
        with self._lock:
            if (number, version) in self._held:
                self._newest[number] = version
                return self._found(asked, holders)
        loaded = self._load(asked, from_message(asked.weights), from_message(asked.config), version)
        with self._lock:
            self._make_room(loaded.size_bytes)
            self._held[number, version] = loaded
            self._newest[number] = version
            self._news[number, version] = HeldAdapter(loaded.identity)
            self.loads += 1
            loaded.holders += holders
        return loaded

    def _load(
        self, asked: vocabulary.Lora, weights: Tensor, config: Tensor, version: str
    ) -> LoadedAdapter:
        lora = read_arrays(weights, config, self._targets)
        if lora.rank > self._max_rank:
            limit = f"at most {self._max_rank}"
            raise InvalidField.of("lora.config rank", lora.rank, limit, "adapters.max_rank")
        updates = {
            place: Update(self._converted(update.a), self._converted(update.b))
            for place, update in fit(lora, self._targets).updates.items()
        }
        identity = Adapter(asked.id or 0, asked.name or "", version)
        return LoadedAdapter(identity, updates, Lora(updates).size_bytes, self._release)

    def _converted(self, matrix: Tensor) -> Tensor:
        return matrix.to(self._device, self._dtype).contiguous()

    def _make_room(self, size: int) -> None:
        """Evicts unused adapters. Raises AdaptersFull where too many are in use, InvalidField for one too large."""
        most = self._most_bytes
        if size > most:
            raise InvalidField.of(
                "lora.weights", f"{size} bytes", f"at most {most}", "adapters.bytes"
            )
        for key in [key for key, adapter in self._held.items() if not adapter.holders]:
            if self._size_bytes() + size <= most:
                return
            self._evict(key)
        if self._size_bytes() + size > most:
            raise AdaptersFull(
                f"the adapters of running items take {self._size_bytes()} of {most} bytes (adapters.bytes); try again"
                " later or elsewhere",
                value=str(size),
                limit=f"at most {most} bytes",
                limit_field="adapters.bytes",
            )

    def _evict(self, key: tuple[int, str]) -> None:
        number, version = key
        gone = self._held.pop(key).identity
        if self._newest.get(number) == version:
            del self._newest[number]
        self._news[key] = HeldAdapter(gone, epb.ADAPTER_PLACE_ABSENT)
        self.evictions += 1

    def _size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._held.values())
