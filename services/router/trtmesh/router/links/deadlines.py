"""Deadlines for workers, and the wait after a loss."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import Settings

Seconds = Annotated[float, Field(gt=0, le=3600)]
LongSeconds = Annotated[float, Field(gt=0, le=86400)]
Wait = Annotated[float, Field(ge=0, le=3600)]


class Deadlines(Settings):
    """Longest waits for a worker before its work moves elsewhere."""

    silence_seconds: Seconds = 1.0
    """Silence of a worker, or time without reading an item, at least five load intervals; afterwards its items move. A
    worker or tokenizer silent for ten times as long, with a message due, is disconnected."""
    step_gap_seconds: LongSeconds = 1.5
    """Time without a step on a busy worker, at least four times the longest recent step; afterwards its items move."""
    queue_seconds: LongSeconds = 30.0
    """Wait of an item in a worker's queue, or for the next token while the worker makes steps; afterwards the item
    moves."""


class Retries(Settings):
    """Attempts after the loss of a worker."""

    worker_wait_seconds: Wait = 10.0
    """Wait of an item for a worker, before the first token or in the middle of the stream: from the first refusal until
    a new token, however many workers refuse it meanwhile."""
