"""Deadlines for replicas, and bounded retries after a loss."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import Settings

Seconds = Annotated[float, Field(gt=0, le=3600)]
LongSeconds = Annotated[float, Field(gt=0, le=86400)]
Wait = Annotated[float, Field(ge=0, le=3600)]


class Deadlines(Settings):
    """Longest delays of a worker or tokenizer before work moves elsewhere."""

    silence_seconds: Seconds = 10.0
    """Silence of a worker or tokenizer with a message due; afterwards the peer counts as lost."""
    decode_seconds: Seconds = 1.5
    """Time for a tokenizer to answer a decode; afterwards the work moves, if another tokenizer answers."""
    encode_seconds: Seconds = 10.0
    """Time for a tokenizer with texts below 64 KiB to answer any text; afterwards the work moves, if another tokenizer
    answers. A text that is not answered in six times as long moves in any case."""
    stall_seconds: Seconds = 1.0
    """Silence of a worker, at least five load intervals; afterwards items move."""
    accepted_seconds: Seconds = 1.0
    """Time for a worker with load reports to read an item; afterwards items move."""
    started_seconds: LongSeconds = 30.0
    """Wait of an item in a worker's queue; afterwards the item moves."""
    first_token_seconds: LongSeconds = 30.0
    """Wait of a started sequence for the first or next token while the worker makes steps."""
    next_token_seconds: LongSeconds = 1.5
    """Time without a step on a busy worker, longer after long steps; afterwards sequences move."""


class Retries(Settings):
    """Attempts after the loss of a worker or tokenizer."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 4
    """Workers or tokenizers lost with an item in a row without a new token; the last loss ends the item with
    WORKER_LOST or TOKENIZER_LOST."""
    worker_wait_seconds: Wait = 10.0
    """Wait of an item for a worker, before the first token or in the middle of the stream: from the first refusal until
    a new token, however many workers refuse it meanwhile."""
    tokenizer_wait_seconds: Wait = 10.0
    """Wait of sequences for another tokenizer after a loss."""
