"""Joined texts of tokens equal the text of the whole, for random ids of every family."""

from __future__ import annotations

import logging
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from searches import examples
from tokenizer.tokenizers_zoo import (
    CORPUS,
    ZOO,
    byte_level_bpe,
    ids_of,
    llama2_bpe,
    numbered,
    unigram_metaspace,
)
from tokenizers import Tokenizer, decoders, models
from trtmesh.tokenizer.detokenizers import choice as decoder_module
from trtmesh.tokenizer.detokenizers.base import REPLACEMENT, Detokenizer
from trtmesh.tokenizer.detokenizers.byte_level import ByteLevelDetokenizer, _byte_by_character
from trtmesh.tokenizer.detokenizers.choice import agrees, choose_detokenizer
from trtmesh.tokenizer.detokenizers.pieces import PieceDetokenizer

Family = tuple[Tokenizer, Detokenizer]

SAME_FAMILY_EACH_TIME = settings(
    max_examples=examples(40, soak=250),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", params=list(ZOO))
def family(request: pytest.FixtureRequest) -> Family:
    build, decoding_name = ZOO[request.param]
    tokenizer = build()
    detokenizer = choose_detokenizer(tokenizer)
    assert detokenizer.name == decoding_name
    return tokenizer, detokenizer


def draw_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Random ids; low ones, which are specials and bytes, more often."""
    size = tokenizer.get_vocab_size()
    ids = st.one_of(st.integers(0, size - 1), st.integers(0, min(size, 262) - 1))
    return data.draw(st.lists(ids, max_size=60))


def texts_of(detokenizer: Detokenizer, ids: list[int], *, skip: bool) -> list[str]:
    state = detokenizer.open(skip_special_tokens=skip)
    return [*map(state.push, ids), state.flush()]


@SAME_FAMILY_EACH_TIME
@given(data=st.data(), skip=st.booleans())
def test_random_ids_decode_like_the_library(
    family: Family, data: st.DataObject, skip: bool
) -> None:
    tokenizer, detokenizer = family
    ids = draw_ids(data, tokenizer)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(texts_of(detokenizer, ids, skip=skip)) == whole


@SAME_FAMILY_EACH_TIME
@given(text=st.text(max_size=60), skip=st.booleans())
def test_random_texts_decode_like_the_library(family: Family, text: str, skip: bool) -> None:
    tokenizer, detokenizer = family
    ids = tokenizer.encode(text).ids
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(texts_of(detokenizer, ids, skip=skip)) == whole


@pytest.mark.parametrize("text", CORPUS)
def test_incomplete_character_is_held_back(family: Family, text: str) -> None:
    tokenizer, detokenizer = family
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert not any(REPLACEMENT in delta for delta in texts_of(detokenizer, ids, skip=True))


def test_byte_level_streams_character_by_character() -> None:
    tokenizer = byte_level_bpe()
    ids = ids_of(tokenizer, "ð", "Ł", "ĺ", "Ģ", "a")
    assert texts_of(choose_detokenizer(tokenizer), ids, skip=True) == ["", "", "", "😀", "a", ""]


def test_flush_of_an_incomplete_character_equals_the_library() -> None:
    tokenizer = byte_level_bpe()
    ids = ids_of(tokenizer, "a", "ð", "Ł")
    assert texts_of(choose_detokenizer(tokenizer), ids, skip=True) == ["a", "", "", REPLACEMENT]
    tokenizer = llama2_bpe()
    ids = ids_of(tokenizer, "a", "<0xF0>", "<0x9F>")
    assert texts_of(choose_detokenizer(tokenizer), ids, skip=True) == ["a", "", "", 2 * REPLACEMENT]


def test_byte_run_is_valid_as_a_whole_or_not_at_all() -> None:
    tokenizer = llama2_bpe()
    tokens = ["<0xC3>", "<0xA9>", "<0xC3>", "<0xC3>", "<0x41>", "▁b"]
    ids = ids_of(tokenizer, *tokens)
    deltas = texts_of(choose_detokenizer(tokenizer), ids, skip=True)
    assert deltas == ["", "", "", 4 * REPLACEMENT, REPLACEMENT, " b", ""]


def test_skipped_token_does_not_split_a_character() -> None:
    tokenizer = llama2_bpe()
    ids = ids_of(tokenizer, "<0xC3>", "</s>", "<0xA9>", "b")
    assert "".join(texts_of(choose_detokenizer(tokenizer), ids, skip=True)) == "éb"
    kept = "".join(texts_of(choose_detokenizer(tokenizer), ids, skip=False))
    assert kept == f"{REPLACEMENT}</s>{REPLACEMENT}b"


def test_id_in_a_gap_has_no_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 3}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    ids = [1, 0, 2, 3]
    deltas = texts_of(choose_detokenizer(tokenizer), ids, skip=False)
    assert deltas == ["", "a", "", " b", ""]
    assert tokenizer.decode(ids) == "a b"


def test_state_does_not_grow() -> None:
    tokenizer = byte_level_bpe()
    state = ByteLevelDetokenizer(tokenizer).open(skip_special_tokens=True)
    ids = tokenizer.encode("🙂é" * 200).ids
    assert all(len(state._rest) <= 3 for token_id in ids if state.push(token_id) is not None)


def test_family_that_disagrees_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(PieceDetokenizer):
        def _later_piece(self, token: str | None) -> str:
            return f"{token}!"

    monkeypatch.setattr(decoder_module, "_FAMILIES", (Wrong, ByteLevelDetokenizer))
    with caplog.at_level(logging.WARNING):
        assert choose_detokenizer(unigram_metaspace()).name == "whole"
    assert "pieces decoding does not reproduce" in caplog.text


def test_unknown_decoder_falls_back_to_slower_families() -> None:
    tokenizer = unigram_metaspace()
    tokenizer.decoder = decoders.CTC()
    assert ByteLevelDetokenizer.of(tokenizer) is None
    assert PieceDetokenizer.of(tokenizer) is None
    detokenizer = choose_detokenizer(tokenizer)
    assert agrees(detokenizer, tokenizer)


def test_windows_follow_tokens_that_each_end_inside_a_character() -> None:
    """The certain text is delivered at once, however many tokens in a row end so."""
    links = [
        b"\xa9\xc3",
        b"\xa9\xf0\x9f\x98",
        b"\x80\xe2",
        b"\x80\xc3",
        b"\x82\xac\xc3",
        b"\xa9 \xc3",
    ]
    character_of = {byte: character for character, byte in _byte_by_character().items()}
    tokens = ["".join(character_of[byte] for byte in link) for link in [b" \xc3", *links]]
    tokenizer = Tokenizer(models.WordLevel(numbered(tokens), unk_token=tokens[0]))
    for strip in ((1, 0), (1, 1)):
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", *strip)])
        detokenizer = choose_detokenizer(tokenizer)
        assert detokenizer.name == "windowed"
        random = Random(1)
        for _ in range(50):
            ids = [0, *(random.randrange(len(tokens)) for _ in range(150))]
            assert "".join(texts_of(detokenizer, ids, skip=True)) == tokenizer.decode(ids)
        chain = [0] + 70 * [1]
        assert texts_of(detokenizer, chain, skip=True)[1:] == 70 * ["é"] + [REPLACEMENT]


def test_decoder_that_panics_is_chosen_by_what_it_decodes(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(models.WordLevel({"Ġ": 0, "a": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    detokenizer = choose_detokenizer(tokenizer)
    assert detokenizer.name == "whole"
    assert texts_of(detokenizer, [0, 1], skip=True) == ["", "", "a"]
