"""A gRPC client for asyncio: one connection to one server, and the calls on it.

What it is for are links between services, which carry a few long streams of small messages; grpc.aio wakes a thread,
and that the event loop, for each message that comes or goes (`bench/README.md`). Whoever needs balancing, TLS or
connections that come back by themselves uses grpc.aio.
"""

from trtmesh.chassis.grpc.client.call import ClientCall, Method
from trtmesh.chassis.grpc.client.connection import ClientConnection, connected

__all__ = ["ClientCall", "ClientConnection", "Method", "connected"]
