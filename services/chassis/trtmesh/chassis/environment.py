"""Environment variables for gRPC, read at its first import: entry points import this module before all others.

Its core writes lines of its own on standard error, although every failed call has an error; the event engine of the
pinned grpcio costs asyncio programs 10 to 30 % of their throughput (`bench/README.md`).
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
