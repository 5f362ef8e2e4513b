"""Sets environment variables for libraries, unless the operator has set them. Libraries read them on import, so entry
points import this module first.

gRPC's core writes lines of its own to standard error, although every failed call has an error. The event engine of the
pinned grpcio costs asyncio programs 10 to 30 % of their throughput (`bench/README.md`). Waiting threads of OpenMP would
spin on cores needed by the others.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
