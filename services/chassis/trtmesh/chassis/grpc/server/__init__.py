"""A gRPC server for asyncio that writes what one pass of the event loop made for a client in one go.

It takes the handlers and gives the context of grpc.aio, so whatever serves there serves here. Streams that get a small
message every few milliseconds are what trtmesh is about, and grpc.aio spends most of a router's time on those
(`bench/README.md`).
"""

from trtmesh.chassis.grpc.server.server import GrpcServer

__all__ = ["GrpcServer"]
