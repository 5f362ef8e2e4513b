"""Checks the health of a process: `python -m trtmesh.chassis.probe 127.0.0.1:8001` exits with 0 if serving.

A second word names a service of grpc.health.v1; `live` is SERVING as long as the process answers, busy or loading. The
container images have no other gRPC client for their health checks. TRTMESH_TLS_CA and similar variables
(`tls/client.py`) turn TLS on.
"""

from __future__ import annotations

import trtmesh.chassis.environment  # noqa: F401 - before anything imports gRPC

# isort: split
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trtmesh.chassis.connecting import check_address, connection_error
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.tls.client import ClientTls

PATIENCE_SECONDS = 3.0


def main(address: str, service: str = "") -> int:
    """Prints the status of `service`, '' for the whole process, at `address`; returns 0 for SERVING, else 1."""
    try:
        check_address(address)
        tls = ClientTls.of_environment(os.environ)
        with _channel(address, tls) as channel:
            return _check(address, channel, service)
    except SettingsError as error:
        print(error)
        return 1


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, tls.credentials(), tls.channel_options())


def _check(address: str, channel: grpc.Channel, service: str) -> int:
    health = health_pb2_grpc.HealthStub(channel)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health.Check(request, timeout=PATIENCE_SECONDS)
    except grpc.RpcError as error:
        found = connection_error(address, error.details() or "")
        print(found or f"{address} does not respond: {error.code().name}: {error.details()}")
        return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


USAGE = "usage: python -m trtmesh.chassis.probe HOST:PORT [SERVICE]"


def run(*words: str) -> int:
    """Returns the exit status of the command line `words`."""
    if {"-h", "--help"} & {*words}:
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    if len(words) not in (1, 2) or words[0].startswith("-"):
        print(f"{USAGE}; --help tells more", file=sys.stderr)
        return 2
    return main(*words)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
