"""Asks a service whether it serves: `python -m trtmesh.chassis.probe 127.0.0.1:8001` exits with 0 if it does.

For the health checks of containers, whose images have no other gRPC client.
"""

from __future__ import annotations

import trtmesh.chassis.environment  # noqa: F401 - before anything imports gRPC

# isort: split
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PATIENCE_SECONDS = 3.0


def main(address: str) -> int:
    """0 when the service at `address` says SERVING; 1, with a line that says what it is instead, when it does not."""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            print(f"{address} does not answer: {error.code().name}: {error.details()}")
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
