"""The fingerprint depends only on parts with an effect on ids and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.fingerprint import tokenizer_fingerprint

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 0, "content": "<s>", "special": True}],
    "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
}
CONFIG: dict[str, Any] = {"bos_token": "<s>", "model_max_length": 10, "chat_template": "{{ x }}"}


def fingerprint(folder: Path, tokenizer: dict[str, Any], config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer_fingerprint(folder)


def test_directory_without_a_tokenizer_has_no_fingerprint(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tmp_path) == ""
    assert tokenizer_fingerprint(tmp_path / "missing") == ""


def test_format_and_irrelevant_parts_are_ignored(tmp_path: Path) -> None:
    expected = fingerprint(tmp_path, TOKENIZER, CONFIG)
    assert len(expected) == 64
    reordered = dict(reversed(TOKENIZER.items())) | {"truncation": {"max_length": 5}}
    assert fingerprint(tmp_path, reordered, CONFIG) == expected
    pairs = TOKENIZER | {"model": TOKENIZER["model"] | {"merges": [["a", "b"]]}}
    assert fingerprint(tmp_path, pairs, CONFIG) == expected
    assert fingerprint(tmp_path, TOKENIZER, CONFIG | {"model_max_length": 99}) == expected


@pytest.mark.parametrize(
    ("tokenizer", "config"),
    [
        ({"model": TOKENIZER["model"] | {"merges": []}}, {}),
        ({"normalizer": {"type": "Lowercase"}}, {}),
        ({"added_tokens": []}, {}),
        ({}, {"bos_token": "</s>"}),
        ({}, {"add_bos_token": True}),
    ],
)
def test_parts_affecting_ids_or_text_change_the_fingerprint(
    tmp_path: Path, tokenizer: dict[str, Any], config: dict[str, Any]
) -> None:
    expected = fingerprint(tmp_path, TOKENIZER, CONFIG)
    assert fingerprint(tmp_path, TOKENIZER | tokenizer, CONFIG | config) != expected


def test_sentencepiece_model_is_hashed_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"one")
    one = tokenizer_fingerprint(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"two")
    assert one
    assert tokenizer_fingerprint(tmp_path) != one


def test_invalid_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json is refused"):
        tokenizer_fingerprint(tmp_path)
