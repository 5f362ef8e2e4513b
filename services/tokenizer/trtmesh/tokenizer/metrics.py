"""What a tokenizer counts and measures."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from trtmesh.chassis.metrics import LATENCY_BUCKETS

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class TokenizerMetrics:
    """The metrics of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.encoded_tokens = Counter(
            "trtmesh_tokenizer_encoded_tokens",
            "Tokens that texts were encoded to.",
            registry=registry,
        )
        self.decoded_tokens = Counter(
            "trtmesh_tokenizer_decoded_tokens",
            "Tokens received for decoding, delivered ones not counted.",
            registry=registry,
        )
        self.replayed_tokens = Counter(
            "trtmesh_tokenizer_replayed_tokens",
            "Tokens absorbed for sequences that moved here from a lost tokenizer.",
            registry=registry,
        )
        self.encode_queue_seconds = Histogram(
            "trtmesh_tokenizer_encode_queue_seconds",
            "Time that an encode waited for a thread.",
            ["lane"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.encode_batch_size = Histogram(
            "trtmesh_tokenizer_encode_batch_size",
            "Encodes that a thread took at once.",
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
