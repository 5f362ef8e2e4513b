"""Tokenizers of model directories, against transformers' AutoTokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizer.tokenizers_zoo import byte_level_bpe, llama2_bpe, unigram_metaspace
from tokenizers import Tokenizer, pre_tokenizers
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.fingerprint import tokenizer_fingerprint
from trtmesh.chassis.tokenizer_loading import load_tokenizer

FAMILIES = {"byte_level": byte_level_bpe, "llama2": llama2_bpe, "unigram": unigram_metaspace}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXT = "The fox<|new|> <|im_end|>fox <tool2> <s> he"
NEW = {"content": "<|new|>", "special": True}
TOOL = {"content": "<tool2>", "special": False, "normalized": False}

Files = Mapping[str, Mapping[str, Any]]


def declared(next_id: int) -> dict[str, Files]:
    """Files beside tokenizer.json, by what they declare."""
    ids = {"<|new|>": next_id, "<tool2>": next_id + 1}

    def config(**more: Any) -> dict[str, Any]:
        return {"tokenizer_config.json": PLAIN | more}

    return {
        "nothing": config(),
        "additional": config(additional_special_tokens=["<|new|>", "<s>"]),
        "extra": config(extra_special_tokens=["<|new|>"], additional_special_tokens=["<tool2>"]),
        "extra by name": config(extra_special_tokens={"image_token": "<|new|>"}),
        "own name": config(image_token="<|new|>"),
        "by id": config(added_tokens_decoder={str(next_id): NEW, str(next_id + 1): TOOL}),
        "by a wrong id": config(added_tokens_decoder={str(next_id + 5): NEW}),
        "known, but special": config(
            added_tokens_decoder={str(next_id - 2): {"content": "<tool>", "special": True}}
        ),
        "by id, named": config(added_tokens_decoder={str(next_id): TOOL}, eos_token="<tool2>"),
        "added": config() | {"added_tokens.json": ids},
        "added and special": config(additional_special_tokens=["<|new|>"])
        | {"added_tokens.json": ids},
        "added, not read": config(added_tokens_decoder={str(next_id): NEW})
        | {"added_tokens.json": {"<tool2>": next_id}},
        "in the map": config()
        | {
            "special_tokens_map.json": {
                "additional_special_tokens": ["<|new|>"],
                "eos_token": "<e>",
            }
        },
        "an end that is new": config(eos_token="<|new|>"),
        "an end in the vocabulary": config(eos_token="he"),
        "split": config(split_special_tokens=True),
        "prefix, not followed": config(add_prefix_space=True),
    }


def write(directory: Path, tokenizer: Tokenizer, files: Files) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def check_like_transformers(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(directory))
    ours = load_tokenizer(directory)
    ids = ours.encode(TEXT).ids
    assert ids == theirs(TEXT)["input_ids"]
    assert ours.get_vocab(with_added_tokens=True) == theirs.get_vocab()
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip
        )
    return ours


@pytest.mark.parametrize("what", declared(0))
@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_is_that_of_transformers(tmp_path: Path, family: str, what: str) -> None:
    tokenizer = FAMILIES[family]()
    files = declared(tokenizer.get_vocab_size())[what]
    check_like_transformers(write(tmp_path, tokenizer, files))


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("tokenizer_class", ["GPT2TokenizerFast", "GPT2Tokenizer"])
def test_prefix_space(tmp_path: Path, tokenizer_class: str, wanted: bool) -> None:
    config = {"tokenizer_class": tokenizer_class, "add_prefix_space": wanted}
    config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    files = {"tokenizer_config.json": config}
    ours = check_like_transformers(write(tmp_path, byte_level_bpe(), files))
    assert ours.encode("fox").tokens[0].startswith("Ġ") == wanted


@pytest.mark.parametrize("wanted", [True, False])
def test_prefix_space_of_one_step_of_several(tmp_path: Path, wanted: bool) -> None:
    tokenizer = byte_level_bpe()
    steps = [
        pre_tokenizers.Split("|", "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=not wanted, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    config = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": wanted}
    ours = load_tokenizer(write(tmp_path, tokenizer, {"tokenizer_config.json": config}))
    spaced = ["Ġ" * wanted + token for token in ("f", "|", "f")]
    assert "".join(ours.encode("f|f").tokens) == "".join(spaced)


@pytest.mark.parametrize(
    ("build", "config", "words"),
    [
        (
            unigram_metaspace,
            {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
            "tokenizer_config.json: add_prefix_space is not followed",
        ),
        (
            unigram_metaspace,
            {"clean_up_tokenization_spaces": True},
            "tokenizer_config.json: clean_up_tokenization_spaces is not followed",
        ),
        (
            byte_level_bpe,
            {"added_tokens_decoder": {"900": NEW}},
            "'<|new|>' has id 502, as with transformers, not 900",
        ),
        (byte_level_bpe, {"clean_up_tokenization_spaces": True, "add_prefix_space": False}, ""),
    ],
)
def test_what_is_not_followed_is_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    build: Callable[[], Tokenizer],
    config: dict[str, Any],
    words: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        load_tokenizer(write(tmp_path, build(), {"tokenizer_config.json": config}))
    assert words in caplog.text
    assert bool(caplog.records) == bool(words)


def test_token_that_is_none_is_refused(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {"added_tokens_decoder": {"600": {"special": True}}}}
    directory = write(tmp_path, byte_level_bpe(), files)
    with pytest.raises(ModelUnusable, match=r"tokenizer_config.json declares no token for id 600"):
        load_tokenizer(directory)


@pytest.mark.parametrize("what", [name for name in declared(0) if name != "nothing"])
def test_what_changes_a_tokenizer_changes_its_fingerprint(tmp_path: Path, what: str) -> None:
    tokenizer, kinds = byte_level_bpe(), declared(502)
    plain = tokenizer_fingerprint(write(tmp_path / "plain", tokenizer, kinds["nothing"]))
    other = tokenizer_fingerprint(write(tmp_path / "other", tokenizer, kinds[what]))
    assert plain != other
