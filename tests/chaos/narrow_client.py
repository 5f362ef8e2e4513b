"""A client to which a router may send hardly more than it has read, so that a pause of its reading is noticed soon."""

from __future__ import annotations

from typing import Any, Self

import grpc
from trtmesh.chassis.channels import channel_options
from trtmesh.client import Client
from trtmesh.client.channel import ServerChannel

NARROW: list[tuple[str, Any]] = [
    ("grpc.http2.lookahead_bytes", 5),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class NarrowChannel(ServerChannel):
    """A channel with a small window."""

    async def __aenter__(self) -> Self:
        options = [*channel_options(self._max_message_bytes), *NARROW]
        self._channel = grpc.aio.insecure_channel(self.address, options=options)
        return self


class NarrowClient(Client):
    """A client with such channels."""

    async def __aenter__(self) -> Self:
        self._routers: list[ServerChannel] = [NarrowChannel(each) for each in self.addresses]
        return await super().__aenter__()
