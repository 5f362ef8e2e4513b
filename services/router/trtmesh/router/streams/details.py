"""Buffers optional per-token data by token, to be cut where the text is cut."""

from __future__ import annotations

from typing import TypeVar

from trtmesh.chassis.log_prob_sums import sums
from trtmesh.v1 import generation_pb2 as pb

T = TypeVar("T")


class TokenDetailBuffer:
    """Details of tokens at the decoder, in token order."""

    def __init__(self) -> None:
        self._log_probs: list[float] = []
        self._model_log_probs: list[float] = []
        """Terms of the sums, where log-probabilities are normalised."""
        self._sums: list[float] = []
        """Sums of the sequence's log-probabilities up to each token."""
        self._top: list[pb.TopLogProbs] = []
        self._rows: list[bytes] = []
        self._row_shape: tuple[int, list[int]] = (0, [])
        self._sum = 0.0
        """Sum at the last token added, unknown to a resuming worker."""
        self.told_sum: float | None = None
        """Sum at the last token taken; None without log-probabilities."""

    def resume_from(self, told_sum: float) -> None:
        """Continues after tokens with this sum."""
        self._sum = self.told_sum = told_sum

    def add(self, details: pb.TokenDetails, known: int = 0) -> None:
        """Appends the data of the next tokens, skipping the first `known` of them."""
        log_probs = details.log_probs[known:]
        self._log_probs.extend(log_probs)
        self._top.extend(details.top_log_probs[known:])
        if log_probs:
            terms = details.model_log_probs[known:]
            self._model_log_probs.extend(terms)
            self._sums.extend(sums(terms or log_probs, self._sum))
            if details.HasField("cumulative_log_prob"):
                self._sums[-1] = details.cumulative_log_prob
            self._sum = self._sums[-1]
        if details.HasField("generation_logits"):
            logits = details.generation_logits
            rows = logits.shape[0]
            size = len(logits.data) // rows if rows else 0
            self._rows.extend(
                logits.data[row * size : (row + 1) * size] for row in range(known, rows)
            )
            self._row_shape = (logits.data_type, list(logits.shape[1:]))

    def fitting(self, count: int, most_bytes: int) -> int:
        """Number of the next `count` tokens with logits of at most `most_bytes` in total, at least 1."""
        if not self._rows:
            return count
        return min(count, max(1, most_bytes // max(1, len(self._rows[0]))))

    def pop(self, count: int) -> pb.TokenDetails | None:
        """Takes the data of the next `count` tokens."""
        if not count:
            return None
        details = pb.TokenDetails(
            log_probs=_pop(self._log_probs, count),
            top_log_probs=_pop(self._top, count),
            model_log_probs=_pop(self._model_log_probs, count),
        )
        if taken := _pop(self._sums, count):
            details.cumulative_log_prob = self.told_sum = taken[-1]
        rows = _pop(self._rows, count)
        if rows:
            data_type, shape = self._row_shape
            details.generation_logits.data_type = pb.DataType.ValueType(data_type)
            details.generation_logits.shape.extend([len(rows), *shape])
            details.generation_logits.data = b"".join(rows)
        return details


def unheard(details: pb.PromptDetails, told: int) -> tuple[pb.PromptDetails | None, int]:
    """The part of `details` from position `told` on, or None, and the end of the known positions."""
    logits = details.context_logits if details.HasField("context_logits") else None
    rows = logits.shape[0] if logits is not None else len(details.log_probs)
    end = details.token_offset + rows
    known = told - details.token_offset
    if known <= 0:
        # Empty details mean a prompt of a single token.
        return details, max(told, end)
    if end <= told:
        return None, told
    fresh = pb.PromptDetails(
        token_offset=told,
        log_probs=details.log_probs[known:],
        top_log_probs=details.top_log_probs[known:],
    )
    if logits is not None:
        size = len(logits.data) // rows
        fresh.context_logits.data_type = logits.data_type
        fresh.context_logits.shape.extend([rows - known, *logits.shape[1:]])
        fresh.context_logits.data = logits.data[known * size :]
    return fresh, end


def _pop(values: list[T], count: int) -> list[T]:
    head = values[:count]
    del values[:count]
    return head
