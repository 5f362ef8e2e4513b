"""The transports of a worker, as chosen by settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from trtmesh.chassis.errors import SettingsError
from trtmesh.engine.handoff.settings import HandoffSettings, TransportName
from trtmesh.engine.handoff.transports.nixl import Nixl
from trtmesh.engine.handoff.transports.shared_memory import SharedMemory
from trtmesh.engine.handoff.transports.transport import Transport, TransportUnusable
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.v1 import kv_transfer_pb2 as pb

log = logging.getLogger(__name__)

Transports = Mapping[pb.KvTransport.ValueType, Transport | None]
"""By kind, the preferred first. gRPC has None: the data comes in the messages of a fetch."""

Open = Callable[[KvMemory], Transport]


def open_transports(
    settings: HandoffSettings, memory: KvMemory, known: Mapping[TransportName, Open]
) -> Transports:
    """The transports of this system. Raises SettingsError for a chosen but missing transport."""
    found: dict[pb.KvTransport.ValueType, Transport | None] = {}
    for name in settings.transports:
        if name == "grpc":
            found[pb.KV_TRANSPORT_GRPC] = None
            continue
        try:
            transport = known[name](memory)
            found[transport.kind] = transport
        except TransportUnusable as error:
            if "transports" in settings.model_fields_set:
                raise SettingsError(
                    f"names {name}, which this system lacks: {error}",
                    setting="engine.handoff.transports",
                ) from error
            log.debug("handoffs do without %s: %s", name, error)
    return found


KNOWN: Mapping[TransportName, Open] = {
    "shared_memory": SharedMemory,
    "nixl": Nixl,
}
