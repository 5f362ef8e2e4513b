"""A fault of an item ends this item alone: when a step fails as a whole, each sequence is tried on its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

from trtmesh.chassis.errors import BackendFailed
from trtmesh.chassis.logs import request_id_bound
from trtmesh.engine.backends.torch.scheduling.sequence import Chunk, Sequence

log = logging.getLogger(__name__)

R = TypeVar("R")
Failure = tuple[Sequence, BackendFailed]


def isolated(
    chunks: SequenceOf[Chunk],
    compute: Callable[[SequenceOf[Chunk]], R],
    what: str,
    release_memory: Callable[[], None],
) -> tuple[list[tuple[SequenceOf[Chunk], R]], list[Failure]]:
    """Results by chunks, and the sequences that fail even alone; `what` describes the fault."""
    if not chunks:
        return [], []
    try:
        return [(chunks, compute(chunks))], []
    except Exception:
        log.exception("a step of %d sequences failed; trying each alone", len(chunks))
    # Not in the handler, where the exception still holds every tensor of the failed step.
    release_memory()
    results: list[tuple[SequenceOf[Chunk], R]] = []
    failures = []
    for chunk in chunks:
        try:
            results.append(([chunk], compute([chunk])))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this item alone
            failures.append((chunk.sequence, fault(chunk.sequence, what, error)))
    return results, failures


def fault(sequence: Sequence, what: str, error: Exception) -> BackendFailed:
    """Logs a fault; returns the error for the end of the item."""
    with request_id_bound(sequence.request_id):
        log.error("item %d: %s", sequence.batch_index, what, exc_info=error)
    return BackendFailed(f"{what}: {error}")
