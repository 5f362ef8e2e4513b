"""`python -m trtmesh.router`: runs a router."""

import trtmesh.chassis.environment  # noqa: F401, I001 - gRPC reads the environment when it is first imported

import sys

from trtmesh.chassis.service import run
from trtmesh.router.router import Router
from trtmesh.router.settings import RouterSettings

if __name__ == "__main__":
    sys.exit(run(RouterSettings, Router, sys.argv[1:]))
