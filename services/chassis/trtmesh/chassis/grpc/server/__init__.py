"""A gRPC server for asyncio that merges the output of one pass of the event loop into one write per connection.

It runs the handlers of grpc.aio and gives them grpc.aio's context. Streams of small messages every few milliseconds are
the main load of trtmesh; under grpc.aio they took most of a router's time (`bench/README.md`).
"""

from trtmesh.chassis.grpc.server.server import GrpcServer

__all__ = ["GrpcServer"]
