"""Refuses gRPC calls without a valid API key before their handlers run."""

from __future__ import annotations

import grpc
from trtmesh.chassis.errors import Unauthenticated
from trtmesh.chassis.rpc import Refusal
from trtmesh.router.callers.callers import Callers

TRITON = "/inference.GRPCInferenceService/"
OPEN_METHODS = frozenset(
    {
        *("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"),
        *(f"{TRITON}ServerLive", f"{TRITON}ServerReady", f"{TRITON}ModelReady"),
    }
)
"""Health, for probes that have no key."""


class CallerGuard:
    """The guard of the port for clients: of every method but health, known or not."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def __call__(self, call: grpc.HandlerCallDetails) -> Refusal | None:
        if call.method in OPEN_METHODS:
            return None
        try:
            self._callers.identify(call.invocation_metadata or ())
        except Unauthenticated as error:
            return Refusal.of(error)
        return None
