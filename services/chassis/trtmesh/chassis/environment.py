"""Environment variables that libraries read when they are first imported: entry points import this module before all
others. What the operator set stays.

gRPC's core writes lines of its own on standard error, although every failed call has an error; the event engine of the
pinned grpcio costs asyncio programs 10 to 30 % of their throughput (`bench/README.md`). A thread of OpenMP that spins
until the others come takes the core that these need.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
