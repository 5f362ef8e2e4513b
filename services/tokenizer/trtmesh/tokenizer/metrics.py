"""The metrics of a tokenizer: plain numbers, and the table by which a scrape reads them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import COUNTER, GAUGE, HISTOGRAM, Histogram, Label, Row, families

PREFIX = "trtmesh_tokenizer_"
_BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class TokenizerMetrics(Collector):
    def __init__(self) -> None:
        self.encoded_tokens = 0
        self.decoded_tokens = 0
        self.replayed_tokens = 0
        self.open_decode_states = 0
        self.failures: Counter[str] = Counter()
        self.encode_queue_seconds: dict[str, Histogram] = {}
        self.encode_batch_size: dict[str, Histogram] = {}
        self._created = time.time()

    def add_lane(self, name: str) -> tuple[Histogram, Histogram]:
        """Returns the queue times and the batch sizes of a lane."""
        queue_seconds = self.encode_queue_seconds[name] = Histogram()
        batch_size = self.encode_batch_size[name] = Histogram(_BATCH_BUCKETS)
        return queue_seconds, batch_size

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus on another thread."""
        yield from families(PREFIX, TABLE, self, self._created)


LANE = Label("lane", "`short`, `long`, `huge`, by the length of texts")
ERROR = Label("reason", "reason words of the table of errors")

# fmt: off
TABLE: tuple[Row[TokenizerMetrics], ...] = (
    Row(COUNTER, "encoded_tokens", "Tokens of encoded texts."),
    Row(COUNTER, "decoded_tokens", "Tokens received for decoding, without replayed tokens."),
    Row(COUNTER, "replayed_tokens", "Tokens of sequences taken over from a lost tokenizer."),
    Row(HISTOGRAM, "encode_queue_seconds", "Seconds that a text waited for a thread; where they grow, start another"
        " tokenizer.",
        labels=(LANE,)),
    Row(HISTOGRAM, "encode_batch_size", "Encodes of a batch.", labels=(LANE,)),
    Row(GAUGE, "open_decode_states", "Sequences being decoded."),
    Row(COUNTER, "failures", "Encodes and decode states that failed.", labels=(ERROR,)),
)
# fmt: on
