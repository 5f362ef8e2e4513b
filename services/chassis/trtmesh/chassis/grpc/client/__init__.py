"""A gRPC client for asyncio: a connection to a server, and calls.

Built for the links between services, a few long streams of small messages: for every message, grpc.aio wakes a thread,
and the thread the event loop (`bench/README.md`). Large messages can be received into given memory. For load balancing
or reconnects use grpc.aio.
"""

from trtmesh.chassis.grpc.client.call import Call, ClientCall, Connection, Method
from trtmesh.chassis.grpc.client.connection import ClientConnection, connected

__all__ = ["Call", "ClientCall", "ClientConnection", "Connection", "Method", "connected"]
