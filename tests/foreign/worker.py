"""A stand-in engine as a process: `python -m foreign.worker CONTRACT PORT STEP_SECONDS KV_ROLE`.

Prints its address once it serves. SIGUSR1 freezes the engine: its contract goes on answering.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from foreign.serving import stand_in


async def serve(contract: str, port: int, step_seconds: float, kv_role: str) -> None:
    async with stand_in(contract, port=port, step_seconds=step_seconds, kv_role=kv_role) as served:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, setattr, served.engine, "frozen", True)
        print(served.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
