"""The metrics of a tokenizer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from trtmesh.chassis.metrics import LATENCY_BUCKETS

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class TokenizerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.encoded_tokens = Counter(
            "trtmesh_tokenizer_encoded_tokens",
            "Tokens of encoded texts.",
            registry=registry,
        )
        self.decoded_tokens = Counter(
            "trtmesh_tokenizer_decoded_tokens",
            "Tokens received for decoding, without replayed tokens.",
            registry=registry,
        )
        self.replayed_tokens = Counter(
            "trtmesh_tokenizer_replayed_tokens",
            "Tokens of sequences taken over from a lost tokenizer.",
            registry=registry,
        )
        self.encode_queue_seconds = Histogram(
            "trtmesh_tokenizer_encode_queue_seconds",
            "Time from queueing an encode to its thread.",
            ["lane"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.encode_batch_size = Histogram(
            "trtmesh_tokenizer_encode_batch_size",
            "Encodes per batch.",
            ["lane"],
            buckets=_BATCH_BUCKETS,
            registry=registry,
        )
        self.open_decode_states = Gauge(
            "trtmesh_tokenizer_open_decode_states", "Sequences being decoded.", registry=registry
        )
        self.failures = Counter(
            "trtmesh_tokenizer_failures",
            "Encodes and decode states that failed, by reason.",
            ["reason"],
            registry=registry,
        )
