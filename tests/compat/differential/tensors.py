"""The inputs of a case, as arrays and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from compat.differential.cases import TABLE_ROWS, Case

CORE_NAMES = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stop_words": "stop_words_list",
    "bad_words": "bad_words_list",
    "stream": "streaming",
}
"""Names of the core model where they differ."""
OLD_NAMES = {"seed": "random_seed", "min_tokens": "min_length"}
"""Names of releases before 2025-05."""
TABLE_WIDTH = 192
UNSIGNED = {"seed", "prompt_table_extra_id", "prompt_table_extra_ids"}


def tensors(case: Case, *, stream: bool = False, old_names: bool = False) -> dict[str, Any]:
    """Inputs of the text models, or of the core model for prompts of ids."""
    named = {name: _array(name, [row[name] for row in case.rows]) for name in case.rows[0]}
    size = len(case.rows)
    named |= {flag: np.ones((size, 1), np.bool_) for flag in case.flags}
    if case.has_beams:
        named["beam_width"] = np.full((size, 1), case.beam_width, np.int32)
    if case.sequences is not None:
        named["num_return_sequences"] = np.full((size, 1), case.sequences, np.int32)
    if case.tables:
        named["prompt_embedding_table"] = np.stack([_table(seed) for seed in case.tables])
    if old_names:
        named = {OLD_NAMES.get(name, name): value for name, value in named.items()}
    if stream:
        named["stream"] = np.ones((size, 1), np.bool_)
    texts = [[prompt.encode()] for prompt in case.prompts if isinstance(prompt, str)]
    if texts:
        return named | {"text_input": np.array(texts, np.object_)}
    prompts = [prompt for prompt in case.prompts if isinstance(prompt, tuple)]
    ids, lengths = _padded(prompts), [[len(prompt)] for prompt in prompts]
    core = {CORE_NAMES.get(name, name): value for name, value in named.items()}
    return core | {"input_ids": ids, "input_lengths": np.array(lengths, np.int32)}


def json_body(case: Case, *, stream: bool = False) -> dict[str, Any]:
    """The body of `generate` for a single row."""
    body: dict[str, Any] = {}
    for name, value in tensors(case, stream=stream).items():
        (element,) = value.tolist()
        plain = [e.decode() if isinstance(e, bytes) else e for e in element]
        body[name] = plain[0] if np.size(value) == 1 else plain
    return body


def _table(seed: int) -> Any:
    """Rows like those of the model's own embedding."""
    return np.random.default_rng(seed).normal(0, 0.05, (TABLE_ROWS, TABLE_WIDTH)).astype(np.float16)


def _padded(rows: Sequence[Sequence[int]], pad: int = 1) -> Any:
    longest = max(map(len, rows))
    return np.array([[*row, *[pad] * (longest - len(row))] for row in rows], np.int32)


def _array(name: str, values: Sequence[Any]) -> Any:
    """The tensor of an option, a row for each value."""
    if not isinstance(values[0], list):
        whole = np.uint64 if name in UNSIGNED else np.int32
        kind = {bool: np.bool_, int: whole, float: np.float32}[type(values[0])]
        return np.array([[value] for value in values], kind)
    longest = max(map(len, values))
    flat = [element for value in values for element in value]
    if flat and isinstance(flat[0], str):
        texts = [[w.encode() for w in value] + [b""] * (longest - len(value)) for value in values]
        return np.array(texts, np.object_)
    if flat and isinstance(flat[0], tuple):
        return _word_list(values)
    if flat and isinstance(flat[0], int):
        return np.array(values, np.uint64 if name in UNSIGNED else np.int32)
    return np.array([[*v, *[0.0] * (longest - len(v))] for v in values], np.float32)


def _word_list(values: Sequence[Sequence[Sequence[int]]]) -> Any:
    """Ids over the ends of the words, as preprocessing writes both."""
    ids = [[i for word in value for i in word] for value in values]
    ends = [np.cumsum([len(word) for word in value]).tolist() for value in values]
    longest = max(1, *map(len, ids))
    rows = [
        [a + [0] * (longest - len(a)), b + [-1] * (longest - len(b))]
        for a, b in zip(ids, ends, strict=True)
    ]
    return np.array(rows, np.int32)
