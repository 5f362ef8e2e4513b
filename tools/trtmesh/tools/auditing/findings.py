"""What a repeated item says of a receipt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trtmesh.chassis.receipts import digest, first_difference, serialized
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2 as receipt_pb
from trtmesh.v1 import router_pb2 as router_pb

CUT_SHORT = frozenset(
    {pb.FINISH_REASON_CANCELLED, pb.FINISH_REASON_STOPPED, pb.FINISH_REASON_ERROR, 0}
)
"""Reasons by which a sequence ended before its text did: a repeated one goes on."""


class Likeness(Enum):
    """The result of an audit."""

    IDENTICAL = "identical"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result for an item, with a sentence for people."""

    request_id: str
    batch_index: int
    verdict: Likeness
    why: str = ""
    """Of a difference: where it begins. Else why nothing was compared."""
    changed: tuple[str, ...] = ()
    """Fingerprints that are no more those of the receipt."""
    offset: int | None = None
    """Of a difference: the first offset that may have it."""


def found(
    receipt: receipt_pb.Receipt,
    known: Sequence[Sequence[int]] | None,
    again: receipt_pb.Receipt,
    sequences: Sequence[Sequence[int]],
) -> AuditResult:
    """Compares a repeated item with the receipt: its tokens by sequence_index, and the facts of its own receipt;
    `known` are the tokens of then, if they were kept."""
    changed = changes(receipt, again)
    if len(sequences) != len(receipt.sequences):
        why = f"it has {len(sequences)} sequences, not {len(receipt.sequences)}"
        return _finding(receipt, Likeness.DIFFERENT, why, changed)
    for index, (kept, tokens) in enumerate(zip(receipt.sequences, sequences, strict=True)):
        compared = tokens[: kept.tokens] if kept.reason in CUT_SHORT else tokens
        where = first_difference(kept, compared)
        if where is not None and known is not None:
            where = _first_other(known[index], compared)
        if where is not None:
            of = f"sequence {index}: " if len(sequences) > 1 else ""
            last = f" to {where[-1]}" if len(where) > 1 else ""
            why = f"{of}the first other token is at offset {where.start}{last}"
            return _finding(receipt, Likeness.DIFFERENT, why, changed, where.start)
    return _finding(receipt, Likeness.IDENTICAL, "", changed)


def _first_other(known: Sequence[int], tokens: Sequence[int]) -> range:
    pairs = enumerate(zip(known, tokens, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(known), len(tokens)))
    return range(at, at + 1)


def not_compared(receipt: receipt_pb.Receipt, why: str) -> AuditResult:
    return _finding(receipt, Likeness.NOT_COMPARED, why)


def _finding(
    receipt: receipt_pb.Receipt,
    verdict: Likeness,
    why: str,
    changed: tuple[str, ...] = (),
    offset: int | None = None,
) -> AuditResult:
    return AuditResult(receipt.request_id, receipt.batch_index, verdict, why, changed, offset)


def changes(receipt: receipt_pb.Receipt, again: receipt_pb.Receipt) -> tuple[str, ...]:
    """The fingerprints that differ."""
    last, first = receipt.workers[-1], again.workers[0]
    pairs = {
        "release": (receipt.release, again.release),
        "tokenizer": (receipt.tokenizer_digest, again.tokenizer_digest),
        "prompt": (receipt.prompt_digest, again.prompt_digest),
        "adapter": (receipt.adapter_digest, again.adapter_digest),
        "model": (last.model_digest, first.model_digest),
        "settings": (last.settings_digest, first.settings_digest),
    }
    return tuple(name for name, (before, now) in pairs.items() if before != now)


def why_not(receipt: receipt_pb.Receipt, item: router_pb.GenerateItem, *, inexact: bool) -> str:
    """Why an item cannot be compared, or ''. With `inexact`, workers need not promise equal tokens."""
    if digest(serialized(item)) != receipt.item_digest:
        return "the item is not that of the receipt"
    if not receipt.workers or not receipt.sequences:
        return "no worker took it"
    if item.config.beam_search.beam_width > 1 and any(
        each.reason in CUT_SHORT for each in receipt.sequences
    ):
        return "its beams were cut short, and later steps of a search replace tokens"
    for worker in receipt.workers:
        if not (worker.exact or inexact):
            return promise_of(worker.worker)
    return ""


def promise_of(worker: str) -> str:
    return (
        f"worker {worker} does not promise equal tokens; torch does with batch_invariant, and --inexact"
        " compares nevertheless"
    )
