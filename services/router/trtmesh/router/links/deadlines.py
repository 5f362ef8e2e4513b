"""Deadlines for replicas, and bounded retries after a loss."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import Settings

Seconds = Annotated[float, Field(gt=0, le=3600)]
LongSeconds = Annotated[float, Field(gt=0, le=86400)]
Wait = Annotated[float, Field(ge=0, le=3600)]


class Deadlines(Settings):
    """Longest delays of a worker or tokenizer before its work moves elsewhere."""

    silence_seconds: Seconds = 10.0
    """Silence of a worker or tokenizer that owes a message; then it counts as lost."""
    decode_seconds: Seconds = 1.5
    """Time for a tokenizer to answer a decode; then its work moves to another one that answers, if there is one."""
    stall_seconds: Seconds = 1.0
    """Silence of a worker, at least five of its load intervals; then its items move."""
    accepted_seconds: Seconds = 1.0
    """Time for a worker that reports its load to read an item; then its items move."""
    started_seconds: LongSeconds = 30.0
    """Wait of an item in a worker's queue; then it is tried elsewhere."""
    first_token_seconds: LongSeconds = 30.0
    """Wait of a started sequence for its first or next token while its worker makes steps."""
    next_token_seconds: LongSeconds = 1.5
    """Time without a step on a worker that has sequences, longer if its recent steps took longer; then they move."""


class Retries(Settings):
    """Attempts after the loss of a worker or tokenizer."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 4
    """Workers, or tokenizers, that may be lost with an item in a row, without a token gained in between; then the item
    ends with WORKER_LOST or TOKENIZER_LOST."""
    worker_wait_seconds: Wait = 10.0
    """Wait of an item, before its first token or in the middle of its stream, for a worker that takes it."""
    tokenizer_wait_seconds: Wait = 10.0
    """Wait of sequences for another tokenizer when the last one was lost."""
