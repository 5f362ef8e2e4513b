"""The metrics of all services, from the tables by which they are served: for pages, dashboards and alerts."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import ProcessCollector
from trtmesh.chassis import process_metrics
from trtmesh.chassis.metrics import Described, described
from trtmesh.chassis.tracing import counts as spans
from trtmesh.engine.handoff.metrics import HANDOFF_TABLE
from trtmesh.engine.service import metrics as engine
from trtmesh.router import gauges
from trtmesh.router import metrics as router
from trtmesh.router.doors.triton import metrics as triton
from trtmesh.router.line_file import LINE_FILE_TABLE, prefix_of
from trtmesh.router.receipts import RECEIPTS
from trtmesh.router.recorder import RECORDS
from trtmesh.tokenizer import metrics as tokenizer

OF_LIBRARY = tuple(
    Described(
        family.name + "_total" * (family.type == "counter"), family.type, family.documentation
    )
    for family in ProcessCollector(registry=None).collect()
)
"""Of prometheus_client, under the names that every program has."""
EVERY_PROCESS = (
    *described(process_metrics.PREFIX, process_metrics.TABLE),
    *described(spans.PREFIX, spans.TABLE),
    *OF_LIBRARY,
)
ROUTER = (
    *described(router.GENAI_PREFIX, router.GENAI_TABLE),
    *described(router.PREFIX, router.TABLE),
    *described(router.PREFIX, gauges.GAUGES),
    *(
        row
        for content in (RECORDS, RECEIPTS)
        for row in described(prefix_of(content), LINE_FILE_TABLE)
    ),
    *described(gauges.VLLM_PREFIX, gauges.VLLM_GAUGES),
    *triton.described(),
)
ENGINE = (
    *described(engine.PREFIX, engine.TABLE),
    *described(engine.PREFIX, HANDOFF_TABLE),
)
TOKENIZER = tuple(described(tokenizer.PREFIX, tokenizer.TABLE))

SERVED: Mapping[str, tuple[Described, ...]] = {
    "every process": EVERY_PROCESS,
    "router": ROUTER,
    "engine": ENGINE,
    "tokenizer": TOKENIZER,
}
"""The metrics of a process, by service."""
