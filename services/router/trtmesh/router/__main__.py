"""`python -m trtmesh.router`: runs a router."""

import trtmesh.chassis.environment  # noqa: F401, I001 - gRPC reads the environment when it is first imported

import sys

from trtmesh.chassis.allocator import give_back_large_blocks
from trtmesh.chassis.service import run
from trtmesh.router.router import Router
from trtmesh.router.settings import RouterSettings

SWITCH_SECONDS = 0.0001
"""Longest wait of the event loop for the thread that parses a large message: once for each callback of a socket, and a
pass under attack has a hundred."""

if __name__ == "__main__":
    give_back_large_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.exit(run(RouterSettings, Router, sys.argv[1:]))
