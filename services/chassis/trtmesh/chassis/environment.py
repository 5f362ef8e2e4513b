"""Environment variables for gRPC, read at its first import: entry points import this module before all others.

The event engine of the pinned grpcio costs asyncio programs 10 to 30 % of their throughput (`bench/README.md`).
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
