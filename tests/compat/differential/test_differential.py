"""Random requests to `ensemble`, `tensorrt_llm_bls` and `tensorrt_llm`: answers agree in every way to ask, and with
transformers.

`DIFFERENTIAL=SEED:FIRST:COUNT` draws other requests, to hunt longer or to repeat one.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
from compat.differential.cases import Case
from compat.differential.clients import Clients
from compat.differential.drawing import REQUESTS, SEED, draw
from compat.differential.reference import Reference
from compat.differential.relations import Relations
from compat.differential.results import Disagreement
from compat.plain_http import PlainHttp
from compat.triton import Triton
from e2e.mesh import DEMO_DRAFT, PATIENT, SMALL, running_mesh

DRAWN, FIRST, COUNT = map(int, os.environ.get("DIFFERENTIAL", f"{SEED}:0:{REQUESTS}").split(":"))
AT_ONCE = 48
ENGINE = (
    *(*SMALL, "--torch-dtype", "float32", "--torch-threads", "1"),
    # Other requests of a step would decide between candidates that nearly tie.
    *("--torch-kv-cache-tokens", "32768", "--torch-batch-invariant", "true"),
)


@pytest.mark.timeout(900)
async def test_answers_agree_in_every_way_to_ask() -> None:
    async with (
        running_mesh(engines=2, engine_flags=ENGINE, router_flags=PATIENT) as mesh,
        Triton(mesh.router.address) as triton,
        PlainHttp(mesh.router.http_address) as http,
    ):
        relations = Relations(Clients(triton, http), Reference(DEMO_DRAFT))
        at_once = asyncio.Semaphore(AT_ONCE)

        async def fault(case: Case) -> str | None:
            async with at_once:
                try:
                    await relations.check(case)
                except Disagreement as wrong:
                    return f"{wrong}\n{shown(case)}"
                return None

        found = await asyncio.gather(*(fault(draw(DRAWN, FIRST + n)) for n in range(COUNT)))
        faults = [each for each in found if each]
        assert not faults, f"{len(faults)} of {COUNT} requests:\n\n" + "\n\n".join(faults)
        await mesh.idle()


def shown(case: Case) -> str:
    """The request, without the numbers of a dense bias, and how to repeat it."""
    rows = [{k: v for k, v in row.items() if k != "embedding_bias"} for row in case.rows]
    again = f"DIFFERENTIAL={case.seed}:{case.number}:1 pytest tests/compat/differential"
    return f"{replace(case, rows=tuple(rows))}\n{again}"
