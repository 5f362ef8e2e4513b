"""A gRPC server for asyncio: merges the output of an event loop pass into one write per connection.

Runs the handlers of grpc.aio with grpc.aio's context. Streams of small messages every few milliseconds are
the main load of trtmesh; under grpc.aio they took most of a router's time (`bench/README.md`).
"""

from trtmesh.chassis.grpc.server.server import GrpcServer

__all__ = ["GrpcServer"]
