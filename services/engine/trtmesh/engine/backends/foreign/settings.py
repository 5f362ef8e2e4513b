"""Settings of the foreign backend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import CommaList, Settings


class ForeignSettings(Settings):
    """An engine that runs elsewhere and speaks a contract of its own; no model is loaded here."""

    address: str = ""
    """The engine, as vllm://host:port, sglang://host:port or trtllm://host:port."""
    model_dirs: CommaList = ()
    """Directories of models. The engine is taken to serve the one that has the name of its model: the fingerprint of
    the worker is that of an engine of ours with these weights. The tokenizers must be equal."""
    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 256
    """Sequences computed at once, where the engine does not tell."""
    max_queue_size: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1024
    """Sequences of all routers together that may wait in the engine."""
    max_sequences_per_item: Annotated[int, Field(ge=1, le=256)] = 16
    """Most sequences of one item; each is a call of its own."""
