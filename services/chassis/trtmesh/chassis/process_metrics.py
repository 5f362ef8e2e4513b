"""The metrics of every process of the mesh, whatever it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from time import monotonic
from typing import NoReturn

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import GAUGE, HISTOGRAM, Histogram, Label, Row, families
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.chassis.tls.certificates import Certificates

PREFIX = "trtmesh_"

LAG_SECONDS = 0.5
"""Interval between two looks at the lag of the event loop."""


class ProcessMetrics(Collector):
    """The metrics of a process; made on its event loop."""

    def __init__(self, service: str, certificates: Certificates) -> None:
        self.loop_lag = Histogram()
        self.build = {(service, version("trtmesh"), str(SCHEMA_REVISION)): 1}
        self._certificates = certificates
        self._loop = asyncio.get_running_loop()

    @property
    def tasks(self) -> int:
        """To make leaks visible."""
        return len(asyncio.all_tasks(self._loop))

    @property
    def certificate_expiry(self) -> Mapping[str, float]:
        return self._certificates.expiry

    async def follow(self) -> NoReturn:
        """Measures the lag of the event loop until cancelled."""
        while True:
            # The loop's own clock stands still within a pass.
            due = monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.loop_lag.observe(max(0.0, monotonic() - due))

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus on another thread."""
        yield from families(PREFIX, TABLE, self)


# fmt: off
TABLE: tuple[Row[ProcessMetrics], ...] = (
    Row(GAUGE, "build_info", "1, with the version of the process and its revision of trtmesh.v1.", "build",
        (Label("service", "`router`, `tokenizer`, `engine`"), Label("version", "version of trtmesh"),
         Label("schema_revision", "revision of trtmesh.v1"))),
    Row(GAUGE, "tasks", "Unfinished tasks of the event loop."),
    Row(HISTOGRAM, "loop_lag_seconds", "Seconds by which the event loop ends a sleep too late.", "loop_lag"),
    Row(GAUGE, "certificate_expiry_timestamp_seconds",
        "Unix time in seconds at which the first certificate of the process's own file ends.", "certificate_expiry",
        (Label("file", "path of the setting `tls.certificate`"),)),
)
# fmt: on
