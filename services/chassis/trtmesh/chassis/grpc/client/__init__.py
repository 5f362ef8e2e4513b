"""A gRPC client for asyncio: one connection to one server, and its calls.

Built for the links between services, a few long streams of small messages: grpc.aio wakes a thread, and through it the
event loop, for every message (`bench/README.md`). For load balancing, TLS or reconnects use grpc.aio.
"""

from trtmesh.chassis.grpc.client.call import ClientCall, Method
from trtmesh.chassis.grpc.client.connection import ClientConnection, connected

__all__ = ["ClientCall", "ClientConnection", "Method", "connected"]
