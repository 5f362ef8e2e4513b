"""h2spec against every gRPC port of a mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import pytest_asyncio
from conformance.artefacts import OF_H2SPEC, OF_H2SPEC_GRPC, Artefact
from conformance.binaries import H2SPEC, H2SPEC_GRPC, Binary
from e2e.mesh import DEMO, SIMULATED
from processes import service_process

HEALTH = "/grpc.health.v1.Health/Check"
ANSWER_SECONDS = "1"
"""h2spec's wait for an answer. Some cases wait for all of it."""

RUN_SECONDS = 200.0
PORTS = ("router", "admin", "engine", "tokenizer")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ports() -> AsyncIterator[Mapping[str, str]]:
    """Addresses by port."""
    async with (
        service_process("tokenizer", "--model-dir", str(DEMO)) as tokenizer,
        service_process("engine", *SIMULATED) as engine,
        service_process(
            *("router", "--engines", engine.address, "--tokenizers", tokenizer.address)
        ) as router,
    ):
        yield {
            "router": router.address,
            "admin": router.admin_address,
            "engine": engine.address,
            "tokenizer": tokenizer.address,
        }


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(
    ("binary", "artefacts"),
    [
        pytest.param(H2SPEC_GRPC, OF_H2SPEC_GRPC, marks=H2SPEC_GRPC.needed, id="h2spec-grpc"),
        pytest.param(H2SPEC, OF_H2SPEC, marks=H2SPEC.needed, id="h2spec"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_h2spec_fails_in_its_artefacts_alone(
    binary: Binary,
    artefacts: Mapping[str, Artefact],
    ports: Mapping[str, str],
    port: str,
    tmp_path: Path,
) -> None:
    host, _, number = ports[port].rpartition(":")
    report = tmp_path / "report.xml"
    _, output = await binary.run(
        *("-h", host, "-p", number, "-P", HEALTH, "-o", ANSWER_SECONDS, "-j", str(report)),
        seconds=RUN_SECONDS,
    )
    passed, failed = _results(report)
    assert passed, output
    assert not failed - artefacts.keys(), output
    always = {name for name, artefact in artefacts.items() if artefact.always}
    assert not always & passed, "these cases pass: take them off the list of artefacts"
    assert not artefacts.keys() - passed - failed, "h2spec has no such cases"


def _results(report: Path) -> tuple[set[str], set[str]]:
    """Names of the cases that passed and failed."""
    passed, failed = set[str](), set[str]()
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('package')}: {case.get('classname')}"
        if case.find("error") is not None or case.find("failure") is not None:
            failed.add(name)
        elif case.find("skipped") is None:
            passed.add(name)
    return passed, failed
