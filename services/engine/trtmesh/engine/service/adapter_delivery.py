"""Assembles the content of adapters from the parts sent by a router."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import AdaptersFull, InvalidField, InvalidRequest
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

DELIVERIES = 4
"""Contents of the largest size held at once before loading, of all routers together."""

Key = tuple[int, str]

_REPEATED = ("adapter", "pinned", "format", "config_bytes", "weights_bytes")
"""Fields equal in all parts."""


class DeliveryMemory:
    """Memory for contents on their way into the backend, shared by the routers of a worker."""

    def __init__(self, most_adapter_bytes: int) -> None:
        self.most_adapter_bytes = most_adapter_bytes
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Raises InvalidField for too large a content, AdaptersFull while others take the memory."""
        most = self.most_adapter_bytes
        if size > most:
            raise InvalidField.of("load_adapter content", f"{size} bytes", f"at most {most}")
        if self.used_bytes + size > DELIVERIES * most:
            raise AdaptersFull(
                f"deliveries of adapters take {self.used_bytes} of {DELIVERIES * most} bytes; try again later or"
                " elsewhere",
                value=str(size),
                limit=f"at most {DELIVERIES * most} bytes",
            )
        self.used_bytes += size

    def give_back(self, size: int) -> None:
        self.used_bytes -= size


@dataclass(slots=True)
class Delivery:
    """A partly received content."""

    first: epb.LoadAdapterCommand
    """The first command, without data."""
    received: int = 0
    config: list[bytes] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.first.config_bytes + self.first.weights_bytes

    def put(self, data: bytes) -> None:
        rest = max(0, self.first.config_bytes - self.received)
        if rest:
            self.config.append(data[:rest])
        if len(data) > rest:
            self.weights.append(data[rest:])
        self.received += len(data)

    def content(self) -> AdapterContent:
        """The complete content, copied and hashed without the GIL. Raises InvalidField for another version."""
        first = self.first
        content = AdapterContent(first.format, b"".join(self.config), b"".join(self.weights))
        if content.version != first.adapter.version:
            raise InvalidField.of(
                "load_adapter.adapter.version",
                first.adapter.version,
                f"{content.version}, the digest of the content",
            )
        return content


class Deliveries:
    """The deliveries of one router. Parts of at most one content arrive at a time; a new delivery drops an unfinished
    delivery."""

    def __init__(self, memory: DeliveryMemory) -> None:
        self._memory = memory
        self._partial: Delivery | None = None
        self._refused: Key | None = None
        """The last delivery refused; later parts may already be under way."""
        self._unanswered: dict[Key, int] = {}
        """Loads without an answer, with the memory of their content."""

    def put(self, command: epb.LoadAdapterCommand) -> Delivery | None:
        """Takes a part; returns the delivery if complete. Raises InvalidRequest or AdaptersFull, once per delivery."""
        key = key_of(command.adapter)
        if command.offset and key == self._refused:
            return None
        try:
            return self._put(command)
        except (InvalidRequest, AdaptersFull):
            self.drop_partial()
            self._refused = key
            raise

    def answered(self, key: Key) -> bool:
        """Whether the router waited for this answer."""
        if key not in self._unanswered:
            return False
        self._memory.give_back(self._unanswered.pop(key))
        return True

    def await_answer(self, key: Key, size: int = 0) -> None:
        """Expects an answer; `size` bytes are in use until then."""
        self._unanswered[key] = self._unanswered.get(key, 0) + size

    def drop_partial(self) -> None:
        if self._partial:
            self._memory.give_back(self._partial.size)
            self._partial = None

    def close(self) -> None:
        """Drops everything, because the stream is over."""
        self.drop_partial()
        for key in list(self._unanswered):
            self.answered(key)

    def _put(self, command: epb.LoadAdapterCommand) -> Delivery | None:
        if not command.offset:
            self._begin(command)
        delivery = self._partial
        if delivery is None:
            raise InvalidField.of("load_adapter.offset", command.offset, "0 in the first part")
        _check_part(delivery, command)
        delivery.put(command.data)
        if delivery.received < delivery.size:
            return None
        self._partial = None
        self.await_answer(key_of(command.adapter), delivery.size)
        return delivery

    def _begin(self, command: epb.LoadAdapterCommand) -> None:
        self.drop_partial()
        self._refused = None
        if command.format not in (pb.ADAPTER_FORMAT_PEFT, pb.ADAPTER_FORMAT_ARRAYS):
            raise InvalidField.of("load_adapter.format", command.format, "PEFT or ARRAYS")
        if not (command.config_bytes and command.weights_bytes):
            raise InvalidRequest("has only one of both files", field="load_adapter")
        self._memory.take(command.config_bytes + command.weights_bytes)
        first = epb.LoadAdapterCommand()
        first.CopyFrom(command)
        first.ClearField("data")
        self._partial = Delivery(first)


def key_of(adapter: pb.LoraConfig) -> Key:
    return adapter.id, adapter.version


def identity_of(adapter: pb.LoraConfig) -> Adapter:
    """The identity of an adapter to load. Raises InvalidField where number or version is missing."""
    fields = {field.name for field, _ in adapter.ListFields()}
    for name in sorted(fields & {"weights", "config"}):
        raise InvalidField(
            "is set, but an adapter is loaded from its content",
            field=f"load_adapter.adapter.{name}",
        )
    for name in sorted({"id", "version"} - fields):
        raise InvalidField("is not set", field=f"load_adapter.adapter.{name}")
    return Adapter(adapter.id, adapter.name, adapter.version)


def _check_part(delivery: Delivery, command: epb.LoadAdapterCommand) -> None:
    first = delivery.first
    if any(getattr(command, name) != getattr(first, name) for name in _REPEATED):
        raise InvalidRequest(
            f"of adapter {command.adapter.id} differs from the first part, of {first.adapter.id}, in more than offset"
            " and data",
            field="load_adapter",
        )
    if command.offset != delivery.received:
        raise InvalidField.of("load_adapter.offset", command.offset, str(delivery.received))
    left = delivery.size - delivery.received
    if not 0 < len(command.data) <= left:
        given = f"{len(command.data)} bytes"
        raise InvalidField.of("load_adapter.data", given, f"1 to {left} bytes")
