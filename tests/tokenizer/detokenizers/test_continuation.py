"""The text of a prompt, then that of what follows it, is the text of all ids."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from searches import examples
from tokenizer.tokenizers_zoo import CORPUS, ZOO, ids_of, llama2_bpe
from tokenizers import Tokenizer
from trtmesh.tokenizer.detokenizers.base import REPLACEMENT, TextDecoder
from trtmesh.tokenizer.detokenizers.choice import choose_detokenizer
from trtmesh.tokenizer.detokenizers.continuation import Continuations

Family = tuple[Tokenizer, Continuations]
END = 8
"""Tokens of a long prompt that a router sends."""


@pytest.fixture(scope="module", params=[name for name in ZOO if name != "unstreamable"])
def family(request: pytest.FixtureRequest) -> Family:
    tokenizer = ZOO[request.param][0]()
    return tokenizer, Continuations(tokenizer, choose_detokenizer(tokenizer))


def behind(family: Family, prompt: list[int], *, skip: bool) -> TextDecoder:
    is_cut = len(prompt) > END
    return family[1].open(prompt[-END:], is_cut=is_cut, skip_special_tokens=skip)


def text_of(decoder: TextDecoder, ids: list[int]) -> str:
    texts = [decoder.push(token_id) for token_id in ids]
    assert decoder.flush() == decoder.flush()
    return "".join([*texts, decoder.flush()])


@settings(
    max_examples=examples(40, soak=300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    first=st.sampled_from(CORPUS),
    second=st.sampled_from(CORPUS),
    cut=st.integers(0, 60),
    special=st.booleans(),
    skip=st.booleans(),
)
def test_prompt_and_pieces_are_the_whole_text(
    family: Family, first: str, second: str, cut: int, special: bool, skip: bool
) -> None:
    tokenizer = family[0]
    ids = tokenizer.encode(first, add_special_tokens=special).ids
    prompt, ids = ids[:cut], ids[cut:] + tokenizer.encode(second, add_special_tokens=False).ids
    before, whole = (
        tokenizer.decode(each, skip_special_tokens=skip) for each in (prompt, prompt + ids)
    )
    # The first piece completes what the prompt leaves incomplete.
    assume(whole.startswith(before))
    assert before + text_of(behind(family, prompt, skip=skip), ids) == whole


@pytest.mark.parametrize("prompt_tokens", [1, 5, END, END + 1, 40])
def test_first_piece_keeps_its_space(prompt_tokens: int) -> None:
    tokenizer = llama2_bpe()
    known = (tokenizer, Continuations(tokenizer, choose_detokenizer(tokenizer)))
    begin, word, end = ids_of(tokenizer, "<s>", "▁a", "</s>")
    for prompt in (prompt_tokens * [word], [word, *(prompt_tokens * [end])]):
        assert text_of(behind(known, [begin, *prompt], skip=True), [word, end]) == " a"
    # Behind nothing, the text begins.
    assert text_of(behind(known, [begin], skip=True), [word, end]) == "a"
    assert text_of(behind(known, [], skip=True), [word, end]) == "a"


def test_prompt_that_ends_with_bytes() -> None:
    """A newline, part of a character, and a run that began long before."""
    tokenizer = llama2_bpe()
    known = (tokenizer, Continuations(tokenizer, choose_detokenizer(tokenizer)))
    word, newline, *euro = ids_of(tokenizer, "▁a", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>")
    for prompt, ids, text in (
        ([word, newline], [word], " a"),
        ([word, newline], [*euro, word], "€ a"),
        ([word, newline], [newline], "\n"),
        ([word, newline], [], ""),
        ([word, *euro[:2]], [euro[2], word], "€ a"),
        ([word, *(5 * euro)], [*euro, word], "€ a"),
    ):
        assert text_of(behind(known, prompt, skip=True), ids) == text


def test_unknown_ids_of_a_prompt_have_no_text(family: Family) -> None:
    tokenizer = family[0]
    unknown = tokenizer.get_vocab_size() + 7
    ids = tokenizer.encode(CORPUS[0], add_special_tokens=False).ids
    prompt, ids = ids[:3], ids[3:]
    expected = text_of(behind(family, prompt, skip=True), ids)
    assert REPLACEMENT not in expected
    padded = [unknown, prompt[0], unknown, *prompt[1:]]
    assert text_of(behind(family, padded, skip=True), ids) == expected
