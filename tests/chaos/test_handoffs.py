"""Handoffs under faults at every step of their protocol: no token is lost or repeated, and no lease or block is left.

The suite runs some cases of each step, fault and transport; `make chaos` runs all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from chaos.handoff_cases import TRANSPORTS, Case, suffer
from chaos.handoff_faults import FAULTS
from chaos.handoff_mesh import ROLES, HandoffMesh, flags_of, handoff_mesh
from chaos.handoff_scenes import SCENES

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHARES = {"prefill": 1, "drain": 6, "role": 17, "pause": 6}
"""The suite has one of so many faults of a scene, each at one of the steps."""


def cases_of(scene: str) -> list[list[Case]]:
    """Steps and faults of a scene, each with every transport that can have it."""
    found = [
        [Case(transport, scene, step, fault) for transport in TRANSPORTS]
        for step in SCENES[scene].steps
        for fault in FAULTS
    ]
    able = [[case for case in cases if case.can_happen] for cases in found]
    return [cases for cases in able if cases]


def every_case() -> Iterator[Case]:
    """A prefill with every transport; the other scenes, which share what is below them, with one. A role changes as a
    worker is drained, so a third of its cases do."""
    for scene in SCENES:
        for number, cases in enumerate(cases_of(scene)[:: 3 if scene == "role" else 1]):
            yield from cases if scene == "prefill" else [cases[number % len(cases)]]


def some_cases() -> Iterator[Case]:
    """A share of each scene, with every step, every fault and every transport."""
    for scene, share in SHARES.items():
        for number, fault in enumerate(FAULTS[::share]):
            able = [cases for cases in cases_of(scene) if cases[0].fault == fault]
            cases = able[number % len(able)]
            yield cases[number % len(cases)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        runs_all = metafunc.config.getoption("--every-transport", default=False)
        chosen = sorted(every_case() if runs_all else some_cases(), key=lambda case: case.transport)
        metafunc.parametrize(
            ("mesh", "case"),
            [(case.transport, case) for case in chosen],
            ids=map(str, chosen),
            indirect=["mesh"],
            scope="module",
        )


async def test_share_has_every_scene_step_fault_and_transport() -> None:
    cases = list(some_cases())
    assert {case.scene for case in cases} == set(SCENES)
    assert {case.step for case in cases} == {
        step for each in SCENES.values() for step in each.steps
    }
    assert {case.fault for case in cases} == set(FAULTS)
    assert {case.transport for case in cases} == set(TRANSPORTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[HandoffMesh]:
    transport: str = request.param
    flags = {name: flags_of(name, role, transport) for name, role in ROLES.items()}
    async with handoff_mesh(flags, transport=transport) as mesh:
        yield mesh


async def test_fault_at_a_step_loses_nothing(mesh: HandoffMesh, case: Case) -> None:
    await suffer(mesh, case, SCENES[case.scene])
