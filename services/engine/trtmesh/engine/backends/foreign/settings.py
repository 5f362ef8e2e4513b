"""Settings of the foreign backend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import CommaList, Settings

Seconds = Annotated[float, Field(gt=0, le=3600)]


class ForeignSettings(Settings):
    """An engine that runs elsewhere and speaks a contract of its own; no model is loaded here."""

    address: str = ""
    """The engine, as vllm://host:port, sglang://host:port or trtllm://host:port."""
    model_dirs: CommaList = ()
    """Directories of models. The engine is taken to serve the one that has the name of its model: the fingerprint of
    the worker is that of an engine of ours with these weights. The tokenizers must be equal."""
    connect_seconds: Seconds = 10.0
    """Time for the engine to answer at the start; afterwards the process exits."""
    poll_seconds: Seconds = 0.25
    """Interval at which the load is read, or the health of an engine without load reports."""
    answer_seconds: Seconds = 5.0
    """Time for such a read; after three reads without an answer the engine counts as dead."""
    abort_seconds: Seconds = 1.0
    """Time for the engine to end a stopped sequence; afterwards the sequence ends without it."""
    state_seconds: Seconds = 25.0
    """Time for which a prefill engine keeps KV for another one; vLLM's own limit is 30 s by default."""
    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 256
    """Sequences computed at once, where the engine does not tell."""
    max_queue_size: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1024
    """Sequences of all routers together that may wait in the engine."""
    max_sequences_per_item: Annotated[int, Field(ge=1, le=256)] = 16
    """Most sequences of one item; each is a call of its own."""
