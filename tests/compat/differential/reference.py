"""The model as transformers runs it: one forward over prompt and output says whether each token was the right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compat.differential.cases import Case
from compat.differential.results import Generated, Row, require
from oracle import tiny_models

NEAR = 2e-3
"""Difference of logits by which roundings of two programs may differ."""


class Reference:
    """Judges the outputs of the core model for a case with prompts of ids."""

    def __init__(self, folder: Path) -> None:
        self._model = tiny_models.reference_model(folder)

    def check(self, case: Case, rows: Sequence[Row]) -> None:
        for prompt, options, row in zip(case.prompts, case.rows, rows, strict=True):
            assert not isinstance(prompt, str)
            for sequence in row.sequences:
                shown = sequence.ids
                if not options.get("exclude_input_in_output"):
                    require(shown[: len(prompt)] == list(prompt), "the output lacks the prompt")
                    shown = shown[len(prompt) :]
                self._check(case, prompt, options, row, sequence, shown)

    def _check(
        self,
        case: Case,
        prompt: tuple[int, ...],
        options: Mapping[str, Any],
        row: Row,
        sequence: Generated,
        new: Sequence[int],
    ) -> None:
        logits = self._logits([*prompt, *new])
        check_end(options, new)
        before = logits[len(prompt) - 1 : -1]
        if row.context_logits is not None:
            near(row.context_logits, logits[: len(prompt)], "context_logits")
        if sequence.logits is not None:
            near(sequence.logits, before, "generation_logits")
        rules = [Rules(options, prompt).apply(before[at], list(new[:at])) for at in range(len(new))]
        if sequence.cum_log_prob is not None:
            scored = rules if case.has_beams else before
            if case.has_beams:
                scored = [row / options.get("temperature", 1.0) for row in rules]
            each = [log_softmax(scored[at])[token] for at, token in enumerate(new)]
            near(np.array(sequence.log_probs), np.array(each), "output_log_probs")
            near(np.array(sequence.cum_log_prob), np.array(sum(each)), "cum_log_probs")
        if case.has_beams:
            return
        for at, token in enumerate(new):
            best = np.sort(rules[at])[::-1]
            rank = 1 if case.is_greedy else options.get("top_k") or len(best)
            require(
                rules[at][token] >= best[rank - 1] - NEAR,
                f"token {at} is {token} with {rules[at][token]} below {best[rank - 1]} of",
                int(rules[at].argmax()),
            )
            if not case.is_greedy and options.get("top_p", 0.0) > 0:
                self._check_nucleus(options, rules[at], token)

    def _check_nucleus(self, options: Mapping[str, Any], logits: Any, token: int) -> None:
        """The tokens above a drawn one have less than top_p together."""
        if options.get("top_k"):
            logits = np.where(logits >= np.sort(logits)[-options["top_k"]], logits, -np.inf)
        shares = np.exp(log_softmax(logits / options.get("temperature", 1.0)))
        above = shares[shares > shares[token]].sum()
        most = max(options["top_p"], options.get("runtime_top_p_min", 0.0))
        require(above <= most + NEAR, f"{token} lies outside of top_p:", above)

    def _logits(self, ids: Sequence[int]) -> Any:
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].numpy()


def near(given: Any, expected: Any, what: str) -> None:
    require(
        given.shape == expected.shape, what, "has the shape", given.shape, "not", expected.shape
    )
    worst = float(np.abs(given - expected).max(initial=0.0))
    require(worst < NEAR * max(1, len(np.atleast_1d(expected))), what, "differ by", worst)


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
        ignored = asked.get("prompt_ignore_length", 0)
        for token in {*self._prompt[ignored:], *new}:
            factor = asked.get("repetition_penalty", 1.0)
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        for token in set(new):
            out[token] -= asked.get("presence_penalty", 0.0)
            out[token] -= asked.get("frequency_penalty", 0.0) * new.count(token)
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
