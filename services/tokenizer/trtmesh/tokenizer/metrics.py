"""The metrics of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from trtmesh.chassis.metrics import LATENCY_BUCKETS

PREFIX = "trtmesh_tokenizer_"
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class TokenizerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def by_lane(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, ["lane"], buckets=buckets, registry=registry)

        self.encoded_tokens = counter("encoded_tokens", "Tokens of encoded texts.")
        self.decoded_tokens = counter(
            "decoded_tokens", "Tokens received for decoding, without replayed tokens."
        )
        self.replayed_tokens = counter(
            "replayed_tokens", "Tokens of sequences taken over from a lost tokenizer."
        )
        self.encode_queue_seconds = by_lane(
            "encode_queue_seconds", "Time from queueing an encode to its thread.", LATENCY_BUCKETS
        )
        self.encode_batch_size = by_lane("encode_batch_size", "Encodes per batch.", _BATCH_BUCKETS)
        self.open_decode_states = Gauge(
            PREFIX + "open_decode_states", "Sequences being decoded.", registry=registry
        )
        self.failures = counter(
            "failures", "Encodes and decode states that failed, by reason.", "reason"
        )
