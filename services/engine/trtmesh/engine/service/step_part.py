"""Parts of steps for one stream: splitting and merging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TypeVar

from trtmesh.chassis.vocabulary import Tensor
from trtmesh.engine.backend import PromptDetails, SequenceStart, TokenDetails

T = TypeVar("T")


@dataclass(slots=True)
class StepPart:
    """One stream's part of a step or of several merged steps, in parallel lists as in engine.proto's Step.

    `details`, `prompts` and `starts` name their sequences by handle, in the field `key`.
    """

    step_count: int
    handles: list[int] = field(default_factory=list)
    token_offsets: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)
    prompts: list[PromptDetails] = field(default_factory=list)
    starts: list[SequenceStart] = field(default_factory=list)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of logits."""
        if not (self.details or self.prompts):
            return 0
        generated = sum(_bytes(each.generation_logits) for each in self.details)
        return generated + sum(_bytes(each.context_logits) for each in self.prompts)


def split(part: StepPart, most_bytes: int) -> list[StepPart]:
    """Splits `part` into parts of at most `most_bytes` of logits; a single token or prompt run may exceed the limit."""
    if part.tensor_bytes <= most_bytes:
        return [part]
    parts = [
        StepPart(part.step_count, prompts=run)
        for run in _runs(part.prompts, lambda each: _bytes(each.context_logits), most_bytes)
    ]
    rows = [piece for row in _rows_of(part) for piece in row.pieces(most_bytes)]
    runs = _runs(rows, lambda row: row.tensor_bytes, most_bytes)
    parts += [_part_of(part.step_count, run) for run in runs]
    # No later than the tokens.
    parts[0].starts = part.starts
    return parts


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence's tokens in a part, with their data."""

    handle: int
    offset: int
    token_ids: list[int]
    details: TokenDetails | None

    @property
    def tensor_bytes(self) -> int:
        return _bytes(self.details.generation_logits) if self.details else 0

    def pieces(self, most_bytes: int) -> list[_Row]:
        """Splits the row into pieces of at most `most_bytes` of logits, or of one token."""
        count, size = len(self.token_ids), self.tensor_bytes
        if size <= most_bytes or count == 1:
            return [self]
        step = max(1, most_bytes * count // size)
        return [self._piece(at, min(at + step, count)) for at in range(0, count, step)]

    def _piece(self, first: int, end: int) -> _Row:
        assert self.details
        details = _cut(self.details, first, end)
        if end == len(self.token_ids):
            details.cumulative_log_prob = self.details.cumulative_log_prob
        return _Row(self.handle, self.offset + first, self.token_ids[first:end], details)


def _rows_of(part: StepPart) -> Iterator[_Row]:
    details = {each.key: each for each in part.details}
    ends = accumulate(part.token_counts)
    for handle, offset, count, end in zip(
        part.handles, part.token_offsets, part.token_counts, ends, strict=True
    ):
        yield _Row(handle, offset, part.token_ids[end - count : end], details.get(handle))


def _part_of(step_count: int, rows: Sequence[_Row]) -> StepPart:
    return StepPart(
        step_count,
        [row.handle for row in rows],
        [row.offset for row in rows],
        [len(row.token_ids) for row in rows],
        [token for row in rows for token in row.token_ids],
        [row.details for row in rows if row.details],
    )


def _runs(values: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Groups `values` into runs of at most `most` in total size, or of one larger value."""
    run: list[T] = []
    total = 0
    for value in values:
        size = size_of(value)
        if run and total + size > most:
            yield run
            run, total = [], 0
        run.append(value)
        total += size
    if run:
        yield run


def _bytes(tensor: Tensor | None) -> int:
    return len(tensor.data) if tensor else 0


def merge(parts: Sequence[StepPart]) -> StepPart:
    """Merges parts in step order into one; every handle occurs once, in order of appearance.

    A rewritten sequence (beam search) keeps its latest tokens only.
    """
    if len(parts) == 1:
        return parts[0]
    if _aligned(parts):
        merged = _merge_aligned(parts)
        details: dict[int, TokenDetails] = {}
        for part in parts:
            _add_details(details, part.details)
        merged.details = list(details.values())
    else:
        merged = _merge_by_handle(parts)
    merged.prompts = [prompt for part in parts for prompt in part.prompts]
    merged.starts = [start for part in parts for start in part.starts]
    return merged


def _aligned(parts: Sequence[StepPart]) -> bool:
    """Whether every part has one next token for each of the same handles, as in a stable batch."""
    handles, offsets = parts[0].handles, parts[0].token_offsets
    size = len(handles)
    return all(
        len(part.token_ids) == size
        and len(part.handles) == size
        and part.handles == handles
        and part.token_offsets == [offset + place for offset in offsets]
        for place, part in enumerate(parts)
    )


def _merge_aligned(parts: Sequence[StepPart]) -> StepPart:
    columns = zip(*(part.token_ids for part in parts), strict=True)
    return StepPart(
        parts[-1].step_count,
        parts[0].handles,
        parts[0].token_offsets,
        [len(parts)] * len(parts[0].handles),
        list(chain.from_iterable(columns)),
    )


def _merge_by_handle(parts: Sequence[StepPart]) -> StepPart:
    tokens: dict[int, list[int]] = {}
    offsets: dict[int, int] = {}
    details: dict[int, TokenDetails] = {}
    for part in parts:
        start = 0
        for handle, offset, count in zip(
            part.handles, part.token_offsets, part.token_counts, strict=True
        ):
            end = start + count
            fresh = part.token_ids[start:end]
            start = end
            if handle not in tokens:
                tokens[handle], offsets[handle] = fresh, offset
                continue
            kept = offset - offsets[handle]
            if kept < len(tokens[handle]):
                kept = max(0, kept)
                del tokens[handle][kept:]
                offsets[handle] = min(offset, offsets[handle])
                if handle in details:
                    details[handle] = _cut(details[handle], 0, kept)
            tokens[handle] += fresh
        _add_details(details, part.details)
    return StepPart(
        parts[-1].step_count,
        list(tokens),
        list(offsets.values()),
        list(map(len, tokens.values())),
        list(chain.from_iterable(tokens.values())),
        list(details.values()),
    )


def _add_details(merged: dict[int, TokenDetails], details: Iterable[TokenDetails]) -> None:
    for later in details:
        earlier = merged.get(later.key)
        merged[later.key] = _joined(earlier, later) if earlier else later


def _cut(details: TokenDetails, first: int, end: int) -> TokenDetails:
    """The data of the tokens [first, end), without the sum, which belongs to the last token."""
    return replace(
        details,
        log_probs=details.log_probs[first:end],
        cumulative_log_prob=None,
        top_log_probs=details.top_log_probs[first:end],
        model_log_probs=details.model_log_probs[first:end],
        generation_logits=_sliced(details.generation_logits, first, end),
    )


def _sliced(tensor: Tensor | None, first: int, end: int) -> Tensor | None:
    if tensor is None or first == end:
        return None
    size = len(tensor.data) // tensor.shape[0]
    data = tensor.data[first * size : end * size]
    return replace(tensor, shape=(end - first, *tensor.shape[1:]), data=data)


def _joined(earlier: TokenDetails, later: TokenDetails) -> TokenDetails:
    return replace(
        later,
        log_probs=earlier.log_probs + later.log_probs,
        top_log_probs=earlier.top_log_probs + later.top_log_probs,
        model_log_probs=earlier.model_log_probs + later.model_log_probs,
        generation_logits=_stacked(earlier.generation_logits, later.generation_logits),
    )


def _stacked(above: Tensor | None, below: Tensor | None) -> Tensor | None:
    if above is None or below is None:
        return above or below
    rows = above.shape[0] + below.shape[0]
    return replace(above, shape=(rows, *above.shape[1:]), data=above.data + below.data)
