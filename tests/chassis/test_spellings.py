"""Words as they are spelled within texts, for tokenizers of every family."""

from __future__ import annotations

import pytest
from tokenizer.tokenizers_zoo import ZOO, byte_level_bpe, ids_of, unigram_metaspace, word_piece
from tokenizers import Tokenizer
from trtmesh.chassis.spellings import Speller

CONTEXT = "The"
"""Decodes alike alone and before other words."""


def texts_of(tokenizer: Tokenizer, spellings: list[list[int]]) -> list[str]:
    """The texts of spellings behind another word."""
    head = tokenizer.encode(CONTEXT, add_special_tokens=False).ids
    before = tokenizer.decode(head)
    return [tokenizer.decode(head + ids).removeprefix(before) for ids in spellings]


@pytest.mark.parametrize("name", ["byte_level_bpe", "unigram_byte_fallback", "unigram_metaspace"])
@pytest.mark.parametrize("word", ["quick", "fox", "can", "The", "dog"])
def test_word_is_spelled_as_it_is_and_after_a_space(name: str, word: str) -> None:
    tokenizer = ZOO[name][0]()
    speller = Speller(tokenizer)
    assert sorted(texts_of(tokenizer, speller.spellings(word))) == [f" {word}", word]
    assert texts_of(tokenizer, speller.spellings(f" {word}")) == [f" {word}"]


@pytest.mark.parametrize("name", [name for name in ZOO if name != "llama2_bpe"])
@pytest.mark.parametrize("word", ["quick", " quick", "<|im_end|>", "Größe", "a b"])
def test_what_a_model_writes_is_among_the_spellings(name: str, word: str) -> None:
    """In every family: the ids of the word in a text, after a space. The small Llama 2 merges across words."""
    tokenizer = ZOO[name][0]()
    spellings = Speller(tokenizer).spellings(word)
    assert spellings
    written = tokenizer.encode(f"The {word.strip()}", add_special_tokens=False).ids
    assert any(written[-len(ids) :] == ids for ids in spellings)


def test_spelling_that_ends_with_another_is_left_out() -> None:
    """The shorter one forbids it too, and engines that forbid single ids only can serve it."""
    tokenizer = byte_level_bpe()
    assert Speller(tokenizer).spellings("<|im_end|>") == [ids_of(tokenizer, "<|im_end|>")]
    assert Speller(tokenizer).spellings("12") == [ids_of(tokenizer, "1", "2")]


def test_word_inside_a_word_of_word_piece() -> None:
    tokenizer = word_piece()
    spelled = Speller(tokenizer).spellings("Fox")
    assert spelled == [ids_of(tokenizer, "fox"), ids_of(tokenizer, "##f", "##ox")]


def test_word_without_ids_has_no_spelling() -> None:
    assert Speller(word_piece()).spellings(" ") == []
    assert Speller(unigram_metaspace()).spellings(" ") == [ids_of(unigram_metaspace(), "▁")]
