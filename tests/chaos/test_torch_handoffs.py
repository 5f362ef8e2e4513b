"""Handoffs between workers with a real model under faults: tokens continue unchanged.

Three workers that load a model are much for the suite: `make soak` runs one case and `make chaos` all. Every run has
the faults with simulated workers (`test_handoffs`) and the KV of a real model (`e2e/test_halves`,
`engine/torch/test_handoffs`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from chaos.handoff_cases import TRANSPORTS, Case, suffer
from chaos.handoff_mesh import ROLES, HandoffMesh, handoff_mesh
from chaos.handoff_scenes import Drain, Prefill
from e2e.mesh import DEMO
from process_constants import constants

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKER = (
    *("--backend", "torch", "--model-dir", str(DEMO), "--torch-threads", "1"),
    *("--torch-batch-invariant", "true", "--torch-kv-cache-tokens", "4096"),
    # A prefill takes eight chunks.
    *("--torch-batching-max-step-tokens", "64", *constants(layers_per_part=2)),
    *("--handoff-checksums", "all"),
)

BLOCKS = {"sender": "16", "one": "16", "two": "32"}

FAULTS = [
    ("prefill", "prefilling", "kill sender"),
    ("prefill", "transferring", "damage"),
    ("prefill", "transferring", "kill receiver"),
    ("prefill", "first token", "kill router"),
    ("drain", "transferring", "freeze receiver"),
]


class LongDrain(Drain):
    """A real model takes longer for a token."""

    max_tokens = 120


SCENES = {"prefill": Prefill, "drain": LongDrain}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        runs_all = metafunc.config.getoption("--every-transport", default=False)
        every = [Case(transport, *fault) for transport in TRANSPORTS for fault in FAULTS]
        chosen = every if runs_all else every[:1]
        marks = () if runs_all else (pytest.mark.soak,)
        metafunc.parametrize(
            ("mesh", "case"),
            [pytest.param(case.transport, case, marks=marks) for case in chosen],
            ids=map(str, chosen),
            indirect=["mesh"],
            scope="module",
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[HandoffMesh]:
    transport: str = request.param
    flags = {
        name: (
            *WORKER,
            *("--role", role, "--handoff-transports", transport),
            *("--torch-kv-cache-tokens-per-block", BLOCKS[name]),
        )
        for name, role in ROLES.items()
    }
    # Steps of a real model take longer.
    slower = constants(handoff_prefill_seconds=10, handoff_transfer_seconds=3)
    async with handoff_mesh(flags, slower, transport=transport) as mesh:
        yield mesh


async def test_fault_at_a_step_loses_nothing(mesh: HandoffMesh, case: Case) -> None:
    await suffer(mesh, case, SCENES[case.scene])
