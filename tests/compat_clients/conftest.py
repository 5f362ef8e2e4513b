"""A mesh for clients of other libraries: three routers over a simulated engine and a small real model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from certificates import Authority
from e2e.mesh import DEMO, SIMULATED, WIDE_TOKENS, Mesh, running_mesh
from processes import ServiceProcess

TORCH = ("--model-dir", str(DEMO), "--torch-threads", "1", "--torch-kv-cache-tokens", "8192")


@dataclass
class Site:
    """Routers by what they are for."""

    mesh: Mesh
    """Its router serves decoupled models of a simulated engine, in plain text."""
    secure: ServiceProcess
    """The same, over TLS."""
    ca: Path
    real: Mesh
    """Its router serves models that are not decoupled, of an engine with logits."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    own = authority.issue("router")
    limits = ("--simulated-limits-max-sequence-tokens", "32768")
    async with (
        running_mesh(engine_flags=(*SIMULATED, *WIDE_TOKENS, *limits)) as mesh,
        running_mesh(engine_flags=TORCH, router_flags=("--triton-decoupled", "")) as real,
    ):
        secure = await mesh.start(
            *("router", "--port", "0", "--engines", mesh.engines[0].address),
            *("--tokenizers", mesh.tokenizers[0].address),
            *("--tls-certificate", str(own.certificate), "--tls-key", str(own.key)),
        )
        yield Site(mesh, secure, authority.ca, real)
