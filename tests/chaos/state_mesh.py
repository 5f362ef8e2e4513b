"""A mesh for faults of handoffs by state: two routers, a prefill and two decode workers that move KV themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chaos.handoff_mesh import ROLES, SIMULATED_WORKER, HandoffMesh, handoff_mesh
from process_constants import constants

PREFILLING, TRANSFERRING, CONTINUED = "prefilling", "transferring", "continued"
STAGES = (PREFILLING, TRANSFERRING, CONTINUED)

SLOW = (
    # A prefill takes a second or more, and so does a transfer: long enough to be seen.
    *("--simulated-timing-prefill-tokens-per-second", "500"),
    *("--simulated-handoff-by", "state", "--simulated-handoff-transfer-ms", "1000"),
)
PATIENT_ROUTER = constants(handoff_prefill_seconds=60, handoff_transfer_seconds=60)


@asynccontextmanager
async def state_mesh() -> AsyncIterator[HandoffMesh]:
    """Starts a mesh and waits until ready; kills the processes on exit."""
    flags = {name: (*SIMULATED_WORKER, *SLOW, "--role", role) for name, role in ROLES.items()}
    async with handoff_mesh(flags, PATIENT_ROUTER, transport="backend") as mesh:
        yield mesh
