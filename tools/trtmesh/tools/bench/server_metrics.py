"""Metrics that a server exposes to Prometheus, read while a run happens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.record import MetricsSample, without_secrets

PERIOD_SECONDS = 1.0
READ_SECONDS = 5.0
MOST_BYTES = 8 << 20
"""Of one reading."""
MOST_HELD_BYTES = 256 << 20
"""Of all readings of a run; later ones are not made."""
MOST_NAMES = 2000

OPTION = "--metrics"


class ServerMetrics:
    """Holds what it reads as it came, and parses it when the run is over: that would take time from the sending."""

    def __init__(self, url: str) -> None:
        self.source = without_secrets([url])
        self.problems: list[str] = []
        """Of each reading that failed."""
        self._url = url
        self._held: list[tuple[float, str]] = []

    async def check(self) -> None:
        """Raises SettingsError for a URL without metrics."""
        (page,) = await read_pages([self._url], OPTION)
        try:
            parsed(self.source, 0.0, page)
        except ValueError as error:
            raise SettingsError(f"{self.source}: {error}", setting=OPTION) from error

    async def run(self, clock: Callable[[], float]) -> None:
        """Reads each second by the clock of the run, and once more when it is cancelled, as the run ends."""
        self._held = []
        async with _session() as session:
            try:
                while True:
                    await self._keep(session, clock)
                    await asyncio.sleep(PERIOD_SECONDS)
            finally:
                await self._keep(session, clock)

    async def _keep(self, session: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
        try:
            if sum(len(text) for _, text in self._held) > MOST_HELD_BYTES:
                raise ValueError(
                    f"a run keeps no more than {MOST_HELD_BYTES >> 20} MiB of readings"
                )
            text = await _read(session, self._url)
            self._held.append((clock(), text))
        except ValueError as error:
            self.problems.append(str(error))

    def samples(self) -> Iterator[MetricsSample]:
        """Of the last run."""
        for at_s, text in self._held:
            try:
                yield parsed(self.source, at_s, text)
            except ValueError as error:
                self.problems.append(str(error))


async def read_pages(urls: Sequence[str], setting: str) -> list[str]:
    """One page of each. Raises SettingsError, which names the option `setting`."""
    async with _session() as session:
        pages = []
        for url in urls:
            try:
                pages.append(await _read(session, url))
            except ValueError as error:
                raise SettingsError(
                    f"{without_secrets([url])}: {error}", setting=setting
                ) from error
        return pages


async def _read(session: aiohttp.ClientSession, url: str) -> str:
    """Raises ValueError."""
    text = bytearray()
    try:
        async with session.get(url, headers={"Accept": "text/plain"}) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}")
            async for part in response.content.iter_any():
                text += part
                if len(text) > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return text.decode()


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READ_SECONDS))


def parsed(source: str, at_s: float, text: str) -> MetricsSample:
    """Without buckets and quantiles, which have no sum. Raises ValueError for what is no metrics."""
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        sums = family.type in ("counter", "histogram", "summary")
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")) or "quantile" in sample.labels:
                continue
            kept = counters if sums or sample.name.endswith("_total") else gauges
            if math.isfinite(sample.value):
                kept[sample.name] = kept.get(sample.name, 0.0) + sample.value
    if not gauges and not counters:
        raise ValueError("no metrics")
    if len(gauges) + len(counters) > MOST_NAMES:
        raise ValueError(f"more than {MOST_NAMES} metrics")
    return MetricsSample(at_s, source, gauges, counters)
