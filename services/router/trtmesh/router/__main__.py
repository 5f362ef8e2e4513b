"""`python -m trtmesh.router`: runs a router."""

import trtmesh.chassis.environment  # noqa: F401, I001 - gRPC reads the environment when it is first imported

import sys

from trtmesh.chassis.service import run
from trtmesh.router.router import Router
from trtmesh.router.settings import RouterSettings

SWITCH_SECONDS = 0.0001
"""Longest wait of the event loop for the thread that parses a large message, once in each of its passes."""

if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.exit(run(RouterSettings, Router, sys.argv[1:]))
