"""The rules of sequences as words for kernels, by the slots of the sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

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

    def apart(self, sequences: SequenceOf[Sequence]) -> tuple[list[int], list[int]]:
        """The rows whose tokens kernels do not choose, and those that they choose after all others, for which the
        tokens before must be known: of guided sequences."""
        slots = self._slots(sequences)
        guided = self._fields[Field.FLAGS, slots] & Flag.GUIDED
        by_host: list[int] = np.flatnonzero(self._by_host[slots]).tolist()
        late: list[int] = np.flatnonzero(guided).tolist()
        return by_host, late

    def draws(
        self, sequences: SequenceOf[Sequence], unknown: int | Numbers = 0
    ) -> tuple[Numbers, NDArray[np.float64]]:
        """The places and temperatures of the draws without rules, [rows], after `unknown` tokens known to the device
        alone; 0 for a row with its highest logit as the choice, or with rules."""
        slots = self._slots(sequences)
        temperatures = self._drawn[slots]
        if not temperatures.any():
            return np.zeros(len(slots), dtype=np.int64), temperatures
        return places_in(self._streams[slots], _lengths(sequences, unknown)), temperatures

    def are_independent(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether kernels choose without counts of the tokens before, or masks."""
        slots = self._slots(sequences)
        depends = (self._fields[Field.FLAGS, slots] & (Flag.GUIDED | Flag.COUNTS)) != 0
        return not (depends | self._by_host[slots]).any()

    def fill(
        self, words: Numbers, sequences: SequenceOf[Sequence], unknown: int | Numbers = 0
    ) -> Flag:
        """Writes the words [fields, rows or more] of the rows, without those of guided rows; returns the flags of any
        row. The caller has kernels choose the tokens. Rows are after `unknown` tokens known to the device alone, or
        after drafts, by row: then those that count tokens are left out too."""
        slots = self._slots(sequences)
        flags = self._fields[Field.FLAGS, slots]
        taken = (flags != 0) & ((flags & Flag.GUIDED) == 0)
        if not isinstance(unknown, int):
            taken &= ((flags & Flag.COUNTS) == 0) | (unknown == 0)
        rows = np.flatnonzero(taken)
        if not len(rows):
            return Flag(0)
        own = [sequences[row] for row in rows.tolist()]
        unknown = unknown if isinstance(unknown, int) else unknown[rows]
        return self._fill(words, rows, own, slots[rows], unknown)

    def fill_guided(
        self, words: Numbers, masks: Bytes, rows: SequenceOf[int], sequences: SequenceOf[Sequence]
    ) -> Flag:
        """`fill` for guided `rows` alone; writes a line of `masks` for each."""
        for place, sequence in enumerate(sequences):
            guide = sequence.guide
            assert guide
            guide.catch_up(sequence.tokens)
            mask = guide.mask(sequence.rule.end_ids)
            masks[place, : len(mask)] = mask
        flags = self._fill(words, np.array(rows), sequences, self._slots(sequences), 0)
        words[Field.MASK, rows] = np.arange(len(rows))
        return flags

    def _fill(
        self,
        words: Numbers,
        rows: Numbers,
        sequences: SequenceOf[Sequence],
        slots: Numbers,
        unknown: int | Numbers,
    ) -> Flag:
        lengths = _lengths(sequences, unknown)
        fields = self._fields[:, slots]
        counting = (fields[Field.FLAGS] & Flag.COUNTS) != 0
        closed = lengths < self._open_until[slots]
        fields[Field.FLAGS] |= np.where(closed, int(Flag.CHANGES | Flag.BANS_ENDS), 0)
        fields[Field.PLACE] = places_in(self._streams[slots], lengths)
        words[Field.FLAGS] = 0
        words[:, rows] = fields
        for row in np.flatnonzero(counting & (self._counted[slots] != lengths)).tolist():
            if np.any(unknown):
                raise RuntimeError("tokens of the step before were not counted on the device")
            self._load(sequences[row])
        self._counted[slots[counting]] = lengths[counting] + 1
        return Flag(int(np.bitwise_or.reduce(fields[Field.FLAGS])))

    def _slots(self, sequences: SequenceOf[Sequence]) -> Numbers:
        owners = self._owners
        for sequence in sequences:
            if owners[sequence.slot] is not sequence:
                self._take(sequence)
        return np.array([sequence.slot for sequence in sequences], dtype=np.int64)

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
