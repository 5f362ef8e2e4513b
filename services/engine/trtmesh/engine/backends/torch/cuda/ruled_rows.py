"""The rules of sequences as words for kernels, by the slots of the sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import (
    BIAS_SHIFT,
    BIASES,
    COUNT_SHIFT,
    MOST_COUNT,
    MOST_TOPS,
    Field,
    Flag,
    Word,
)
from trtmesh.engine.backends.torch.sampling.draws import places_in, stream_of
from trtmesh.engine.backends.torch.sampling.filters import depth_of, given, temperature_of
from trtmesh.engine.backends.torch.sequence import Sequence

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RuledPart:
    """Rows chosen by kernels after rules."""

    rows: Numbers
    sequences: list[Sequence]
    slots: Numbers
    fields: Numbers
    """[fields, rows]; places of draws and bans of end ids also depend on the step."""
    flags: Flag
    """Of any row."""
    counting: NDArray[np.bool_]
    closes: bool
    """Whether end ids are banned at first in any row."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The sequences of rows, with the facts that hold as long as the sequences keep their slots."""

    sequences: list[Sequence]
    slots: Numbers
    by_host: list[int]
    """Rows whose tokens kernels do not choose."""
    guided: list[int]
    """Rows chosen by kernels once the tokens before are known."""
    depends: NDArray[np.bool_]
    """Whether the choice depends on the tokens before, by row."""
    temperatures: NDArray[np.float64]
    """Of draws without rules; 0 for all other rows."""
    draws: bool
    """Whether any row has one."""
    ruled: RuledPart
    """The other rows."""


class RuledRows:
    """Keeps what never changes of a sequence from its first step on. The device counts the tokens that it chooses; the
    table of counts is loaded again where other tokens were chosen, or the slot has another sequence."""

    def __init__(
        self,
        slots: int,
        words: Tensor | None = None,
        biases: Tensor | None = None,
        *,
        adds_logs: bool = True,
    ) -> None:
        """`words` [slots, vocabulary] int32 and `biases` [slots, BIASES] float32 are on the device; None where kernels
        apply no rules. Without `adds_logs`, the host chooses for rows with log-probabilities."""
        self._adds_logs = adds_logs
        self._words = words
        self._biases = biases
        self._owners: list[Sequence | None] = [None] * slots
        self._fields = np.zeros((len(Field), slots), dtype=np.int64)
        self._fields[Field.SLOT] = np.arange(slots)
        self._streams = np.zeros(slots, dtype=np.int64)
        self._drawn = np.zeros(slots)
        """Temperatures of sequences without rules; 0 for all others."""
        self._open_until = np.zeros(slots, dtype=np.int64)
        """Lengths below which end ids are banned."""
        self._by_host = np.zeros(slots, dtype=np.bool_)
        self._counted = np.zeros(slots, dtype=np.int64)
        """Tokens in the counts of the device."""
        self._last: tuple[list[int], SlotRows] | None = None
        """Slots and rows of the last `find`."""

    def find(self, sequences: list[Sequence]) -> SlotRows:
        """Finds the rules of a step's rows. Steps mostly have the rows of the step before."""
        slots, last = [sequence.slot for sequence in sequences], self._last
        if last is None or last[0] != slots or last[1].sequences != sequences:
            last = self._last = slots, self._find(sequences, np.array(slots, dtype=np.int64))
        return last[1]

    def _find(self, sequences: list[Sequence], slots: Numbers) -> SlotRows:
        for sequence in sequences:
            if self._owners[sequence.slot] is not sequence:
                self._take(sequence)
        flags, by_host = self._fields[Field.FLAGS, slots], self._by_host[slots]
        guided = (flags & Flag.GUIDED) != 0
        drawn = self._drawn[slots]
        return SlotRows(
            list(sequences),
            slots,
            np.flatnonzero(by_host).tolist(),
            np.flatnonzero(guided).tolist(),
            by_host | ((flags & (Flag.GUIDED | Flag.COUNTS)) != 0),
            drawn,
            bool(drawn.any()),
            self._part(np.flatnonzero((flags != 0) & ~guided), sequences, slots),
        )

    def _part(self, rows: Numbers, sequences: SequenceOf[Sequence], slots: Numbers) -> RuledPart:
        """`rows` of the sequences in `slots`."""
        own = [sequences[row] for row in rows.tolist()]
        fields = self._fields[:, slots[rows]]
        flags = fields[Field.FLAGS]
        return RuledPart(
            rows,
            own,
            slots[rows],
            fields,
            Flag(int(np.bitwise_or.reduce(flags, initial=0))),
            (flags & Flag.COUNTS) != 0,
            bool(self._open_until[slots[rows]].any()),
        )

    def draws(
        self, found: SlotRows, unknown: int | Numbers = 0
    ) -> tuple[Numbers, NDArray[np.float64]]:
        """The places and temperatures of the draws without rules, [rows], after `unknown` tokens known to the device
        alone; 0 for a row with its highest logit as the choice, or with rules."""
        if not found.draws:
            return np.zeros(len(found.slots), dtype=np.int64), found.temperatures
        lengths = _lengths(found.sequences, unknown)
        return places_in(self._streams[found.slots], lengths), found.temperatures

    def fill(self, words: Numbers, found: SlotRows, unknown: int | Numbers = 0) -> Flag:
        """Writes the words [fields, rows or more] of the rows, without those of guided rows; returns the flags of any
        row. The caller has kernels choose the tokens. Rows are after `unknown` tokens known to the device alone, or
        after drafts, by row: then those that count tokens are left out too."""
        part = found.ruled
        if not isinstance(unknown, int):
            kept = part.rows[~part.counting | (unknown[part.rows] == 0)]
            part, unknown = self._part(kept, found.sequences, found.slots), unknown[kept]
        return self._fill(words, part, unknown) if len(part.rows) else Flag(0)

    def fill_guided(
        self, words: Numbers, masks: Bytes, rows: SequenceOf[int], sequences: list[Sequence]
    ) -> Flag:
        """`fill` for guided `rows` alone; writes a line of `masks` for each."""
        for place, sequence in enumerate(sequences):
            guide = sequence.guide
            assert guide
            guide.catch_up(sequence.tokens)
            mask = guide.mask(sequence.rule.end_ids)
            masks[place, : len(mask)] = mask
        slots = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
        part = replace(self._part(np.arange(len(rows)), sequences, slots), rows=np.array(rows))
        flags = self._fill(words, part, 0)
        words[Field.MASK, rows] = np.arange(len(rows))
        return flags

    def _fill(self, words: Numbers, part: RuledPart, unknown: int | Numbers) -> Flag:
        flags = part.flags
        words[Field.FLAGS] = 0
        words[:, part.rows] = part.fields
        if not (part.closes or flags & (Flag.DRAWS | Flag.COUNTS)):
            return flags
        lengths = _lengths(part.sequences, unknown)
        closed = lengths < self._open_until[part.slots]
        if part.closes and closed.any():
            flags |= Flag.CHANGES | Flag.BANS_ENDS
            bans = np.where(closed, int(Flag.CHANGES | Flag.BANS_ENDS), 0)
            words[Field.FLAGS, part.rows] |= bans
        words[Field.PLACE, part.rows] = places_in(self._streams[part.slots], lengths)
        if flags & Flag.COUNTS:
            self._count(part, lengths, unknown)
        return flags

    def _count(self, part: RuledPart, lengths: Numbers, unknown: int | Numbers) -> None:
        """Brings the device's counts up to date, and counts the tokens of this step."""
        stale = part.counting & (self._counted[part.slots] != lengths)
        for row in np.flatnonzero(stale).tolist():
            if np.any(unknown):
                raise RuntimeError("tokens of the step before were not counted on the device")
            self._load(part.sequences[row])
        self._counted[part.slots[part.counting]] = lengths[part.counting] + 1

    def _take(self, sequence: Sequence) -> None:
        slot, rules, rule = sequence.slot, sequence.token_rules, sequence.rule
        sampling = rules.sampling
        self._owners[slot] = sequence
        self._drawn[slot] = self._open_until[slot] = self._fields[Field.FLAGS, slot] = 0
        self._streams[slot] = stream_of(
            sampling.seed or 0, sequence.batch_index, sequence.sequence_index
        )
        bans_ends = bool(rule.min_tokens and rule.end_ids)
        changes = rules.penalises or rules.biases or rules.bars_words or rules.guided
        is_ruled = rules.filters or rules.adjusts or bans_ends or rules.wants_details
        can_choose = self._words is not None and (self._adds_logs or not rules.wants_log_probs)
        self._by_host[slot] = is_ruled and (not can_choose or _needs_host(sequence))
        if sequence.config.beam_search.beam_width > 1:
            self._by_host[slot] = True
        if self._by_host[slot]:
            return
        temperature = 0.0 if rules.greedy else temperature_of(sampling)
        if not is_ruled:
            self._drawn[slot] = temperature
            return
        assert self._words is not None
        flags = Flag.RULED
        flags |= Flag.DRAWS if temperature else Flag(0)
        flags |= Flag.CHANGES if changes else Flag(0)
        flags |= Flag.COUNTS if rules.penalises else Flag(0)
        flags |= Flag.LOG_PROBS if rules.wants_log_probs else Flag(0)
        flags |= Flag.GUIDED if rules.guided else Flag(0)
        self._fields[Field.FLAGS, slot] = flags
        size = self._words.shape[1]
        top_k = sampling.top_k or 0
        self._fields[Field.TOP_K, slot] = top_k if rules.filters and top_k < size else 0
        self._fields[Field.TOPS, slot] = rules.output.top_log_probs
        numbers = self._fields.view(np.float64)
        numbers[Field.TEMPERATURE, slot] = temperature
        numbers[Field.TOP_P, slot] = sequence.top_p if rules.filters else 1.0
        numbers[Field.DEPTH, slot] = depth_of(sampling) if rules.filters else -np.inf
        numbers[Field.REPETITION, slot] = sampling.repetition_penalty
        numbers[Field.PRESENCE, slot] = sampling.presence_penalty
        numbers[Field.FREQUENCY, slot] = sampling.frequency_penalty
        if bans_ends:
            self._open_until[slot] = rule.prompt_tokens + rule.min_tokens
        if changes or bans_ends:
            self._load(sequence)

    def _load(self, sequence: Sequence) -> None:
        """Copies what is known of each token to the device."""
        assert self._words is not None
        assert self._biases is not None
        rules, size = sequence.token_rules, self._words.shape[1]
        words = np.zeros(size, dtype=np.int32)
        if rules.penalises:
            tokens = np.array(sequence.tokens, dtype=np.int64)
            own = tokens < size
            words[tokens[own]] = Word.SEEN
            own[: rules.sampling.ignored_prompt(sequence.prompt_tokens)] = False
            ids, counts = np.unique(tokens[own], return_counts=True)
            words[ids] += counts.astype(np.int32) << COUNT_SHIFT
            self._counted[sequence.slot] = len(sequence.tokens)
        if rules.biases:
            ids, weights = rules.bias
            words[ids] |= np.arange(1, len(ids) + 1, dtype=np.int32) << BIAS_SHIFT
            self._biases[sequence.slot, 1 : len(ids) + 1].copy_(torch.from_numpy(weights))
        if rules.bars_words:
            words[rules.bad_ids[rules.bad_ids < size]] |= Word.BANNED
        words[[token for token in sequence.rule.end_ids if token < size]] |= Word.ENDS
        row, known = self._words[sequence.slot], np.flatnonzero(words)
        # Not as a whole: a large copy from memory that is not pinned waits for the device.
        row.zero_()
        values = torch.from_numpy(words[known]).to(row.device, non_blocking=True)
        row.index_copy_(0, given(known, row), values)


def _lengths(sequences: SequenceOf[Sequence], unknown: int | Numbers) -> Numbers:
    return np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int64) + unknown


def _needs_host(sequence: Sequence) -> bool:
    """Whether rules need the tokens before, or more than the kernels' tables hold."""
    rules, output = sequence.token_rules, sequence.token_rules.output
    return (
        rules.bars_ngrams
        or rules.bars_longer_words
        or rules.decays_top_p
        or sequence.given_drafts is not None
        or output.generation_logits
        or (rules.wants_log_probs and (rules.normalizes or output.top_log_probs > MOST_TOPS))
        or (rules.biases and len(rules.bias[0]) >= BIASES)
        or (rules.penalises and sequence.rule.limit > MOST_COUNT)
    )
