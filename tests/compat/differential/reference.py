"""The model as transformers runs it: one forward over prompt and output says whether each token was the right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compat.differential.cases import Case
from compat.differential.results import Generated, Row, require
from oracle import beams, tiny_models

NEAR = 2e-3
"""Difference of logits by which roundings of two programs may differ."""


UNRANKED = {"max_tokens", "end_id", "length_penalty", "early_stopping", "exclude_input_in_output"}
"""Options of a beam search that leave the logits as they are, and `seed`."""


class Reference:
    """Judges the outputs of the core model for a case with prompts of ids."""

    def __init__(self, folder: Path) -> None:
        self._model = tiny_models.reference_model(folder)

    def check(self, case: Case, rows: Sequence[Row]) -> None:
        for prompt, options, row in zip(case.prompts, case.rows, rows, strict=True):
            assert not isinstance(prompt, str)
            outputs = []
            for sequence in row.sequences:
                outputs.append(new_ids(prompt, options, sequence))
                self._check(case, prompt, options, row, sequence, outputs[-1])
            if case.has_beams and options.keys() <= UNRANKED | {"seed"}:
                self._check_search(case, prompt, options, outputs)

    def _check(
        self,
        case: Case,
        prompt: tuple[int, ...],
        options: Mapping[str, Any],
        row: Row,
        sequence: Generated,
        new: Sequence[int],
    ) -> None:
        check_end(options, new)
        logits = self._logits([*prompt, *new])
        before = logits[len(prompt) - 1 : -1]
        if row.context_logits is not None:
            near(row.context_logits, logits[: len(prompt)], "context_logits")
        if sequence.logits is not None:
            near(sequence.logits, before, "generation_logits")
        rules = [Rules(options, prompt).apply(before[at], list(new[:at])) for at in range(len(new))]
        if sequence.cum_log_prob is not None:
            scored = before
            if case.has_beams:
                scored = [row / options.get("temperature", 1.0) for row in rules]
            each = np.array([log_softmax(scored[at])[token] for at, token in enumerate(new)])
            near(np.array(sequence.log_probs), each, "output_log_probs")
            near(np.array(sequence.cum_log_prob), each.sum(), "cum_log_probs")
        if not case.has_beams:
            for logits_after_rules, token in zip(rules, new, strict=True):
                check_choice(case, options, logits_after_rules, token)

    def _check_search(
        self,
        case: Case,
        prompt: tuple[int, ...],
        options: Mapping[str, Any],
        outputs: Sequence[Sequence[int]],
    ) -> None:
        """The best sequences are those of transformers' search."""
        found = beams.expected(
            self._model,
            prompt,
            case.beam_width,
            early_stopping=options.get("early_stopping", 0) + 1,
            length_penalty=options.get("length_penalty", 0.0),
            end_id=None if options.get("end_id", -1) < 0 else options["end_id"],
            tokens=options["max_tokens"],
        )
        best = [ids for ids, _ in found[: case.returned]]
        require(best == list(map(list, outputs)), "transformers finds", found, "not", outputs)

    def _logits(self, ids: Sequence[int]) -> Any:
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].numpy()


def new_ids(prompt: Sequence[int], options: Mapping[str, Any], sequence: Generated) -> list[int]:
    """The ids after the prompt."""
    if options.get("exclude_input_in_output"):
        return sequence.ids
    require(sequence.ids[: len(prompt)] == list(prompt), "the output lacks the prompt")
    return sequence.ids[len(prompt) :]


def near(given: Any, expected: Any, what: str) -> None:
    require(
        given.shape == expected.shape, what, "has the shape", given.shape, "not", expected.shape
    )
    worst = float(np.abs(given - expected).max(initial=0.0))
    require(worst < NEAR, what, "differ by", worst)


def check_choice(case: Case, options: Mapping[str, Any], logits: Any, token: int) -> None:
    """The token is the best, or among those that top_k and top_p leave."""
    top_k = 1 if case.is_greedy else options.get("top_k") or len(logits)
    least = np.sort(logits)[-top_k]
    require(logits[token] >= least - NEAR, token, "has", logits[token], "and the last", least)
    if case.is_greedy or "top_p" not in options:
        return
    shares = np.exp(
        log_softmax(np.where(logits >= least, logits, -np.inf) / options.get("temperature", 1.0))
    )
    above = shares[shares > shares[token]].sum()
    most = max(options["top_p"], options.get("runtime_top_p_min", 0.0))
    require(above <= most + NEAR, f"{token} lies outside of top_p:", above)


def log_softmax(row: Any) -> Any:
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def check_end(options: Mapping[str, Any], new: Sequence[int]) -> None:
    """The first possible end is the end."""
    most, least = options["max_tokens"], options.get("min_tokens", 0)
    end_id = options.get("end_id", -1)
    words = options.get("stop_words", ())
    for length in range(1, len(new) + 1):
        ended = length == most
        if length > least:
            ended |= new[length - 1] == end_id
            ended |= any(tuple(new[:length][-len(word) :]) == word for word in words)
        require(ended == (length == len(new)), f"ended after {len(new)} tokens, not {length}:", new)


class Rules:
    """Bias, penalties and bans, in this order."""

    def __init__(self, options: Mapping[str, Any], prompt: Sequence[int]) -> None:
        self._options, self._prompt = options, list(prompt)

    def apply(self, logits: Any, new: list[int]) -> Any:
        asked = self._options
        out = logits.astype(np.float64)
        if asked.get("embedding_bias"):
            out = out + np.array(asked["embedding_bias"])
        for token in {*self._prompt, *new}:
            factor = asked.get("repetition_penalty", 1.0)
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        counted = self._prompt[asked.get("prompt_ignore_length", 0) :] + new
        for token in set(counted):
            out[token] -= asked.get("presence_penalty", 0.0)
            out[token] -= asked.get("frequency_penalty", 0.0) * counted.count(token)
        out[list(self._banned(new))] = -np.inf
        return out

    def _banned(self, new: list[int]) -> set[int]:
        asked, tokens = self._options, self._prompt + new
        banned = {
            word[-1]
            for word in asked.get("bad_words", ())
            if tuple(tokens[len(tokens) - len(word) + 1 :]) == tuple(word[:-1])
        }
        size = asked.get("no_repeat_ngram_size", 0)
        if size:
            last = tokens[len(tokens) - size + 1 :]
            for at in range(len(tokens) - size + 1):
                if tokens[at : at + size - 1] == last:
                    banned.add(tokens[at + size - 1])
        if len(new) < asked.get("min_tokens", 0) and asked.get("end_id", -1) >= 0:
            banned.add(asked["end_id"])
        return banned
