"""Random cases, each drawn from a seed and a number alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from compat.differential.cases import TABLE_ROWS, VOCABULARY, Case

SEED, REQUESTS = 490, 21
"""Requests of the suite, of the few seeds with which so few have every input."""

Makers = dict[str, Callable[[], Any]]
"""How to draw each option of a row."""

FIRST_WORD_ID = 8
"""Ids below are special."""

PROMPTS = (
    "def f(a, b):\n    return a +",
    "def fibonacci(n):",
    "import os\n\n\ndef main():\n    ",
    "class Node:\n    def __init__(self, value):\n        self.",
    "for i in range(",
    "x = [1, 2,",
    "naïve café 😀 ",
    "The quick brown fox jumps over",
    '"""Reads a file."""\nwith open(',
    " ",
    "if x is None:\n    raise ",
    "def add(self, item):\n    self.items.append(item)\n\n    def remove(self, item):\n",
    "日本語 = '",
)
WORDS = (
    "\n",
    "return",
    "self",
    ":",
    " =",
    ")",
    "e",
    "    ",
    "self.",
    "\n\n",
    "not there",
    "(self",
    "é",
)
COMMON_IDS: tuple[int, ...] = (*range(FIRST_WORD_ID, 300), 818, 938)
CHANCES = {"top_k": (2, 5, 50), "top_p": (0.3, 0.8, 0.95, 1.0), "temperature": (0.2, 0.7, 1.0, 1.7)}
PENALTIES = {
    "repetition_penalty": (0.7, 1.0, 1.2, 2.0),
    "presence_penalty": (-0.5, 0.5, 1.5),
    "frequency_penalty": (-0.3, 0.4, 1.2),
}
FLAGS = {
    "return_log_probs": 0.5,
    "return_context_logits": 0.12,
    "return_generation_logits": 0.15,
    "return_perf_metrics": 0.15,
    "return_num_input_tokens": 0.3,
    "return_num_output_tokens": 0.5,
}


def draw(seed: int, number: int) -> Case:
    return _Dice(seed, number).case()


class _Dice:
    def __init__(self, seed: int, number: int) -> None:
        self._seed, self._number = seed, number
        self._random = random.Random(f"{seed} {number}")

    def case(self) -> Case:
        dice = self._random
        is_text = dice.random() < 0.6
        size = dice.choice([1, 1, 1, 2, 3])
        kind = dice.choice(["greedy", "greedy", "sampled", "sampled", "beams"])
        tables = () if is_text or dice.random() > 0.1 else tuple(dice.sample(range(100), size))
        prompts = [self._text() if is_text else self._ids(bool(tables)) for _ in range(size)]
        width = dice.randint(2, 4) if kind == "beams" else 1
        sequences = None
        if dice.random() < 0.3:
            sequences = dice.randint(1, width if kind == "beams" else 3)
        options = self._common(is_text=is_text)
        options |= getattr(self, f"_{kind}")(is_text=is_text)
        rows = tuple({name: make() for name, make in options.items()} for _ in range(size))
        flags = tuple(flag for flag, chance in FLAGS.items() if dice.random() < chance)
        return Case(
            self._seed,
            self._number,
            tuple(prompts),
            rows,
            flags,
            width,
            sequences,
            kind != "sampled",
            tables,
        )

    def _some(self, chance: float, **makers: Callable[[], Any]) -> Makers:
        return {name: make for name, make in makers.items() if self._random.random() < chance}

    def _one(self, *values: Any) -> Callable[[], Any]:
        return lambda: self._random.choice(values)

    def _text(self) -> str:
        return self._random.choice(PROMPTS)

    def _id(self) -> int:
        return self._random.randrange(FIRST_WORD_ID, VOCABULARY)

    def _ids(self, has_table: bool) -> tuple[int, ...]:
        ids = [self._id() for _ in range(self._random.randint(1, 24))]
        if has_table:
            ids[self._random.randrange(len(ids))] = VOCABULARY + self._random.randrange(TABLE_ROWS)
        return tuple(ids)

    def _word(self) -> tuple[int, ...]:
        return tuple(self._common_id() for _ in range(self._random.choice([1, 1, 2])))

    def _common_id(self) -> int:
        """An id that the model often generates."""
        return self._random.choice(COMMON_IDS)

    def _words(self) -> list[str]:
        return self._random.sample(WORDS, self._random.randint(1, 3))

    def _id_words(self) -> list[tuple[int, ...]]:
        return [self._word() for _ in range(self._random.randint(1, 3))]

    def _common(self, *, is_text: bool) -> Makers:
        dice = self._random
        most = dice.choice([1, 8, 8, 8, 8, 8, 8, 32])
        words = self._words if is_text else self._id_words
        return {
            "max_tokens": lambda: dice.randint(1, most),
            **self._some(0.5, exclude_input_in_output=self._one(True, False)),
            **self._some(0.15, min_tokens=lambda: dice.randint(0, 20)),
            **self._some(0.25, end_id=self._one(-1, 199, 202, 262, 7, 15)),
            **self._some(0.2, **{name: self._one(*values) for name, values in PENALTIES.items()}),
            **self._some(0.25, stop_words=words, bad_words=words),
            **(self._of_texts() if is_text else self._of_ids()),
        }

    def _of_texts(self) -> Makers:
        dice = self._random
        options = self._some(0.06, prompt_table_extra_id=lambda: dice.randint(1, 2**63))
        if dice.random() < 0.15:
            count = dice.randint(1, 3)
            weight = self._one(-20.0, 2.0, 6.0)
            options["embedding_bias_words"] = lambda: dice.sample(WORDS, count)
            options["embedding_bias_weights"] = lambda: [weight() for _ in range(count)]
        return options

    def _of_ids(self) -> Makers:
        dice, weight = self._random, self._one(0.0, 0.0, -3.0, 3.0)
        options = self._some(
            0.12,
            no_repeat_ngram_size=lambda: dice.randint(1, 4),
            prompt_ignore_length=lambda: dice.randint(0, 8),
            embedding_bias=lambda: [weight() for _ in range(VOCABULARY)],
        )
        return options | (self._retention() if dice.random() < 0.05 else {})

    def _retention(self) -> Makers:
        return {
            "retention_token_range_starts": self._one([0]),
            "retention_token_range_ends": self._one([-1], [4]),
            "retention_token_range_priorities": self._one([0], [90]),
            "retention_token_range_durations_ms": self._one([-1], [5]),
            "retention_decode_priority": self._one([10], [80]),
        }

    def _greedy(self, *, is_text: bool) -> Makers:
        return self._some(
            0.2, top_k=self._one(1), temperature=self._one(0.5, 1.0), seed=self._any_seed
        )

    def _sampled(self, *, is_text: bool) -> Makers:
        options = self._some(0.6, **{n: self._one(*v) for n, v in CHANCES.items()})
        if not {"top_k", "top_p"} & options.keys():
            options["top_k"] = self._one(50)
        # Without a seed, requests draw by the door's.
        options |= self._some(0.8, seed=self._any_seed)
        if not is_text and "top_p" in options:
            options |= self._some(
                0.3,
                runtime_top_p_min=self._one(0.1, 0.4),
                runtime_top_p_decay=self._one(0.5, 0.9),
                runtime_top_p_reset_ids=self._common_id,
            )
        return options

    def _beams(self, *, is_text: bool) -> Makers:
        options = self._some(
            0.4,
            length_penalty=self._one(-1.0, 0.0, 0.5, 1.0, 2.0),
            early_stopping=self._one(0, 1, 2),
        )
        if not is_text:
            options |= self._some(0.2, beam_search_diversity_rate=self._one(0.0, 0.5))
        return options | self._some(0.15, seed=self._any_seed, temperature=self._one(0.5, 1.5))

    def _any_seed(self) -> int:
        return self._random.getrandbits(self._random.choice([3, 64]))
