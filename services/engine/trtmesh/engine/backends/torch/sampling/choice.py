"""The next token of each row, the log-probabilities for ranking beams, and the optional data of a chosen token.

Everything is computed on the device of the logits. A choice is read later, when the step is collected.

Log-probabilities come from the model's own logits. Normalised log-probabilities count only choosable tokens, after
bias, penalties, bans, temperature and filters; a greedy token has 0. As with TensorRT-LLM's `normalize_log_probs`, the
sum stays the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from trtmesh.chassis.errors import BackendFailed, InvalidField, InvalidRequest, TrtmeshError
from trtmesh.engine.backend import TokenDetails, TopLogProbs
from trtmesh.engine.backends.torch.memory.tensors import to_message
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.draws import draw, places_of
from trtmesh.engine.backends.torch.sampling.filters import Filters, column, given, indexes
from trtmesh.engine.backends.torch.sampling.ordering import Ordering
from trtmesh.engine.backends.torch.sampling.rejection import verified
from trtmesh.engine.backends.torch.sampling.token_rules import BANS, GUIDES, Ids


def details_of(
    sequence: Continuation,
    token: int,
    log_probs: Tensor | None,
    normalized: Tensor | None,
    logits: Tensor,
) -> TokenDetails:
    """The details for the item's output fields, from log-probabilities [vocabulary] and `logits` [1, vocabulary]."""
    details, output = TokenDetails(sequence.key), sequence.token_rules.output
    if log_probs is not None:
        if normalized is not None:
            details.model_log_probs.append(float(log_probs[token]))
            log_probs = normalized
        details.log_probs.append(float(log_probs[token]))
        if output.top_log_probs:
            details.top_log_probs.append(most_likely(log_probs, output.top_log_probs))
    if output.generation_logits:
        details.generation_logits = to_message(logits, output.logits_data_type)
    return details


def most_likely(log_probs: Tensor, count: int) -> TopLogProbs:
    """The `count` most likely ids of a row, without impossible ids; of equal ones, the lowest ids first."""
    if not count:
        return [], []
    last = log_probs.topk(min(count, len(log_probs))).values[-1]
    ids = ((log_probs >= last) & (log_probs > -torch.inf)).nonzero()[:, 0]
    # The order of `topk` among equals is not defined.
    values, places = log_probs[ids].sort(descending=True, stable=True)
    return ids[places[:count]].tolist(), values[:count].tolist()


def log_probs_of(sequences: SequenceOf[Continuation], logits: Tensor) -> dict[int, Tensor]:
    """The model's own, [vocabulary] float64, by row, where needed."""
    asking = [row for row, each in enumerate(sequences) if each.token_rules.wants_log_probs]
    if not asking:
        return {}
    rows = logits if len(asking) == len(sequences) else logits[asking]
    return dict(zip(asking, log_softmax(rows), strict=True))


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities [rows, vocabulary] float64."""
    size = logits.shape[1]
    wide = logits.double()
    if size % 2:
        # Every row begins at an even number: elsewhere a GPU adds it up in another order.
        wide = pad(wide, (0, 1), value=-torch.inf)
    return wide.log_softmax(dim=1)[:, :size]


def normalized_of(
    rows: Iterable[int], sequences: SequenceOf[Continuation], changed: Tensor, filters: Filters
) -> dict[int, Tensor]:
    """[vocabulary] float64 by row, where requested, from the adjusted logits [rows, vocabulary]."""
    return {
        row: _among_choosable(sequences[row], changed[row : row + 1], filters)
        for row in rows
        if sequences[row].token_rules.normalizes
    }


def _among_choosable(sequence: Continuation, row: Tensor, filters: Filters) -> Tensor:
    """Log-probabilities [vocabulary] of the draw from `row` [1, vocabulary]; -inf for impossible ids."""
    rules = sequence.token_rules
    if rules.greedy:
        only = torch.full_like(row[0], -torch.inf, dtype=torch.float64)
        only[row[0].argmax()] = 0.0
        return only
    return filters.probabilities(rules.sampling, row, sequence.top_p).log()


class Chooser:
    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._filters = Filters(ordering)

    @torch.inference_mode()
    def choose(self, sequences: SequenceOf[Continuation], logits: Tensor) -> LogitsChoice:
        """`logits` are [sequences, vocabulary] float32 and stay as they are."""
        changed = _changed(sequences, logits)
        peaks, ids = self._ordering.highest(changed)
        drawing = [row for row, sequence in enumerate(sequences) if not sequence.token_rules.greedy]
        if len(drawing) == len(sequences):
            ids = self._drawn(sequences, changed, peaks)
        elif drawing:
            rows = indexes(drawing, changed)
            drawn = self._drawn([sequences[row] for row in drawing], changed[rows], peaks[rows])
            ids.index_copy_(0, rows, drawn)
        for row in drawing:
            if (index := sequences[row].deciding_draft) is not None:
                ids[row] = self._verified(sequences[row], index, changed[row : row + 1])
        log_probs = log_probs_of(sequences, logits)
        normalized = normalized_of(log_probs, sequences, changed, self._filters)
        return LogitsChoice(sequences, logits, peaks, ids, log_probs, normalized)

    def _drawn(self, sequences: SequenceOf[Continuation], logits: Tensor, peaks: Tensor) -> Tensor:
        looks_ahead = self._ordering.looks_ahead
        return draw(sequences, logits, peaks, self._filters, looks_ahead=looks_ahead)

    def _verified(self, sequence: Continuation, index: int, row: Tensor) -> int:
        """The token where the client's drafts decide, by the adjusted logits [1, vocabulary]."""
        given = sequence.given_drafts
        assert given
        source = _changed([sequence], given.logits[index - given.first][None].float())
        model, drafter = (
            self._filters.probabilities(sequence.token_rules.sampling, logits, sequence.top_p)
            for logits in (row, source)
        )
        draft, place = given.token_ids[index], places_of([sequence])
        return verified(draft, model, drafter, given.threshold, place)

    @torch.inference_mode()
    def rank(self, lanes: SequenceOf[Continuation], logits: Tensor) -> Ranking:
        """Log-probabilities after bias, penalties, bans and temperature."""
        changed = _changed(lanes, logits).double()
        temperatures = [lane.token_rules.sampling.temperature or 1.0 for lane in lanes]
        changed = changed / column(temperatures, changed)
        peaks = changed.amax(dim=1)
        forbidden = peaks == -math.inf
        log_probs = log_softmax(changed).masked_fill_(forbidden[:, None], -math.inf)
        return Ranking(log_probs, logits, peaks)


class TokenChoice(Protocol):
    @property
    def token_ids(self) -> list[int]:
        """Set by `read`."""

    def read(self) -> dict[int, TrtmeshError]:
        """Waits for the device. Returns the rows without a token, and why."""

    def details(self, row: int) -> TokenDetails:
        """The details for the item's output fields, without the cumulative log-probability."""


@dataclass(slots=True)
class LogitsChoice:
    """Implements TokenChoice; keeps the logits for details."""

    sequences: SequenceOf[Continuation]
    logits: Tensor
    """The model's own, [rows, vocabulary]."""
    peaks: Tensor
    ids: Tensor
    log_probs: Mapping[int, Tensor]
    """The model's own, [vocabulary] by row, where needed."""
    normalized: Mapping[int, Tensor]
    """[vocabulary] by row, where requested."""
    token_ids: list[int] = field(init=False)

    def read(self) -> dict[int, TrtmeshError]:
        self.token_ids = self.ids.tolist()
        return {
            row: _failure(self.logits[row], self.sequences[row])
            for row, peak in enumerate(self.peaks.tolist())
            if not math.isfinite(peak)
        }

    def details(self, row: int) -> TokenDetails:
        return details_of(
            self.sequences[row],
            self.token_ids[row],
            self.log_probs.get(row),
            self.normalized.get(row),
            self.logits[row : row + 1],
        )


@dataclass(frozen=True, slots=True)
class Ranking:
    """Log-probabilities to rank beams by."""

    log_probs: Tensor
    """[lanes, vocabulary] float64; -inf for banned tokens."""
    logits: Tensor
    """The model's own, [lanes, vocabulary]."""
    peaks: Tensor

    def read(self) -> dict[int, TrtmeshError]:
        """Waits for the device. Returns the rows without a finite logit, with the reason. A row without an allowed
        token is no failure: other beams may continue."""
        return {
            row: not_finite()
            for row, peak in enumerate(self.peaks.tolist())
            if not math.isfinite(peak) and peak != -math.inf
        }


def _changed(sequences: SequenceOf[Continuation], logits: Tensor) -> Tensor:
    for sequence in sequences:
        if sequence.token_rules.remembers:
            sequence.remember()
    return adjusted(sequences, logits)


def _failure(row: Tensor, sequence: Continuation) -> TrtmeshError:
    """Why no token of a row can be chosen; `row` holds the model's own logits."""
    return forbidden(sequence) if bool(torch.isfinite(row.amax())) else not_finite()


def forbidden(sequence: Continuation) -> TrtmeshError:
    """For a sequence without a token left to choose."""
    guide = sequence.history and sequence.history.guide
    if guide and guide.problem:
        problem = f"cannot be followed any further: {guide.problem}"
        return InvalidField(problem, field="guided_decoding.guide")
    return nothing_left(*GUIDES, *BANS) if guide else nothing_left()


def nothing_left(*fields: str) -> InvalidRequest:
    """For a row with every token forbidden, by `fields` or else by those that ban tokens."""
    return InvalidRequest("together leave no token to choose; forbid less", fields=fields or BANS)


def not_finite() -> BackendFailed:
    """For a row with no finite highest logit and nothing banned."""
    return BackendFailed("the model's logits are not finite numbers")


Row = tuple[int, Continuation]


def adjusted(sequences: SequenceOf[Continuation], logits: Tensor) -> Tensor:
    """`logits` [sequences, vocabulary] after bias, penalties, bans and grammars; a copy unless unchanged.

    Each kind is one operation over the entries of all rows, numbered in the flat view of the logits.
    """
    rows = [
        (row, sequence)
        for row, sequence in enumerate(sequences)
        if sequence.token_rules.adjusts or sequence.rule.bans_end_ids(len(sequence.tokens))
    ]
    if not rows:
        return logits
    logits = logits.clone()
    flat = logits.view(-1)
    size = logits.shape[1]
    _add_bias([row for row in rows if row[1].token_rules.biases], flat, size)
    _penalise([row for row in rows if row[1].token_rules.penalises], flat, size)
    _ban(rows, flat, size)
    _allow([row for row in rows if row[1].token_rules.guided], logits)
    return logits


def _add_bias(rows: SequenceOf[Row], flat: Tensor, size: int) -> None:
    if not rows:
        return
    biases = [(row, sequence.token_rules.bias) for row, sequence in rows]
    places = np.concatenate([ids + row * size for row, (ids, _) in biases])
    weights = np.concatenate([weights for _, (_, weights) in biases])
    # No place occurs twice, so the order of the sum does not matter.
    flat.index_add_(0, given(places, flat), given(weights, flat))


def _penalise(rows: SequenceOf[Row], flat: Tensor, size: int) -> None:
    """Divides positive logits of all earlier tokens by the repetition penalty and multiplies negative logits; subtracts
    presence + frequency * count for counted tokens."""
    places, factors, minus = [], [], []
    for row, sequence in rows:
        sampling = sequence.token_rules.sampling
        occurrences = sequence.history and sequence.history.occurrences
        assert occurrences
        ids, counts = occurrences.ids, occurrences.counts
        # Ids of a prompt table have no logits.
        own = ids < size
        ids, counts = ids[own], counts[own]
        places.append(ids + row * size)
        factors.append(np.full(len(ids), sampling.repetition_penalty, dtype=np.float32))
        penalty = (counts > 0) * sampling.presence_penalty + counts * sampling.frequency_penalty
        minus.append(penalty.astype(np.float32))
    if not rows:
        return
    where = given(np.concatenate(places), flat)
    factor = given(np.concatenate(factors), flat)
    values = flat[where]
    values = torch.where(values > 0, values / factor, values * factor)
    flat[where] = values - given(np.concatenate(minus), flat)


def _ban(rows: SequenceOf[Row], flat: Tensor, size: int) -> None:
    places = [
        ids[ids < size] + row * size
        for row, sequence in rows
        for ids in _banned(sequence)
        if len(ids)
    ]
    if places:
        flat.index_fill_(0, given(np.concatenate(places), flat), -math.inf)


def _allow(rows: SequenceOf[Row], logits: Tensor) -> None:
    """Forbids the tokens that the grammars of the rows do not allow."""
    if not rows:
        return
    size = logits.shape[1]
    masks = []
    for _, sequence in rows:
        guide = sequence.guide
        assert guide
        masks.append(guide.mask(sequence.rule.end_ids))
    allowed = np.stack(masks)
    forbidden = np.unpackbits(~allowed, axis=1, count=size, bitorder="little").view(np.bool_)
    where = indexes([row for row, _ in rows], logits)
    logits[where] = logits[where].masked_fill_(given(forbidden, logits), -math.inf)


def _banned(sequence: Continuation) -> Iterator[Ids]:
    """Ids banned as the next token."""
    rules, tokens = sequence.token_rules, sequence.tokens
    if rules.bars_ngrams and sequence.history and sequence.history.ngrams:
        yield np.array(sequence.history.ngrams.repeating(tokens), dtype=np.int64)
    if rules.bars_words:
        yield rules.bad_ids
        yield np.array(rules.completing_ids(tokens), dtype=np.int64)
    if sequence.rule.bans_end_ids(len(tokens)):
        yield np.array(list(sequence.rule.end_ids), dtype=np.int64)
