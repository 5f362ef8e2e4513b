"""Stop texts in generated tokens, against the text of all tokens at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from trtllm_client import DEMO
from trtmesh.engine.gateways.trtllm.texts import MOST_TEXTLESS, Texts

LOADED = Texts.load(DEMO)
assert LOADED is not None
TEXTS: Texts = LOADED
TOKENIZER = TEXTS._tokenizer
SOURCE = TOKENIZER.encode("def naïve(n):\n    return n — 日本語 # 🙂🙂\n" * 3).ids
TOKENS = st.one_of(
    st.lists(st.sampled_from(SOURCE), min_size=1, max_size=40),
    st.integers(1, len(SOURCE)).map(lambda length: SOURCE[:length]),
)
PROMPTS = st.lists(st.sampled_from(SOURCE), min_size=1, max_size=10)


def decoded(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=True))


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@given(TOKENS, PROMPTS, st.data())
def test_every_stop_text_is_found_where_it_first_ends(
    tokens: list[int], prompt: list[int], data: st.DataObject
) -> None:
    text = decoded(tokens)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    search = TEXTS.follow(TEXTS.stops([stop, "never to be seen"]), prompt)
    sent = 0
    for place, token in enumerate(tokens):
        if search.add(token, may_end=True):
            assert search.found == stop
            assert sent <= search.kept <= place + 1
            kept = decoded(tokens[: search.kept])
            before = text[: text.find(stop)]
            # Exactly what is before it, or everything where no token begins with it.
            assert kept == before or search.kept == place + 1 or "\ufffd" in text
            return
        assert search.certain >= sent
        sent = search.certain
    assert "\ufffd" in text, "a stop text was missed"


@given(TOKENS)
def test_tokens_that_may_belong_to_a_stop_text_are_held(tokens: list[int]) -> None:
    search = TEXTS.follow(TEXTS.stops(["return n — 日本"]), [1])
    for count, token in enumerate(tokens, start=1):
        if search.add(token, may_end=True):
            return
        held = decoded(tokens[search.certain : count])
        assert len(tokens[search.certain : count]) <= 12
        assert "return n — 日本" not in held


def test_bytes_that_are_no_character_do_not_pile_up() -> None:
    half = next(token for token in SOURCE if decoded([token]) == "\ufffd")
    search = TEXTS.follow(TEXTS.stops(["stop"]), [half])
    for _ in range(10 * MOST_TEXTLESS):
        search.add(half, may_end=True)
    word = TOKENIZER.encode(" stop", add_special_tokens=False).ids
    assert any(search.add(token, may_end=True) for token in [*SOURCE[1:4], *word])


def test_a_text_before_the_sequence_may_end_does_not_count() -> None:
    search = TEXTS.follow(TEXTS.stops(["return"]), [1])
    (word,) = ids_of(" return")
    assert not search.add(word, may_end=False)
    assert search.add(word, may_end=True)
    assert search.kept == 2, "the stop text begins inside the second token, after a space"


def test_a_stop_text_that_begins_with_a_token_is_cut_off() -> None:
    search = TEXTS.follow(TEXTS.stops([" return 1"]), [1])
    tokens = ids_of("x = 2\n return 1")
    *_, found = (search.add(token, may_end=True) for token in tokens)
    assert found
    assert decoded(list(tokens[: search.kept])) == "x = 2\n"


def test_without_a_tokenizer_there_are_no_texts() -> None:
    assert Texts.load(None) is None
    assert Texts.load(DEMO / "missing") is None


def test_a_special_token_is_a_stop_text() -> None:
    special, *_ = (t for t in TOKENIZER.get_added_tokens_decoder().values() if t.special)
    end = TOKENIZER.token_to_id(special.content)
    for stop, kept in (
        (special.content, 3),
        (f"return{special.content}", 4),
        (f" return{special.content}", 2),
    ):
        search = TEXTS.follow(TEXTS.stops(["never", stop]), [1])
        tokens = [*ids_of("x = return"), end]
        assert [search.add(token, may_end=True) for token in tokens] == 3 * [False] + [True]
        assert (search.found, search.kept) == (stop, kept)


def test_ids_that_the_tokenizer_does_not_know_have_no_text() -> None:
    search = TEXTS.follow(TEXTS.stops(["return 1"]), [1])
    unknown = TOKENIZER.get_vocab_size() + 7
    tokens = [token for each in ids_of(" return 1") for token in (unknown, each)]
    assert [search.add(token, may_end=True) for token in tokens][-1]


def test_words_are_spelled_with_and_without_a_space() -> None:
    assert TEXTS.spell("return", "bad") == [ids_of("return"), ids_of(" return")]
    assert TEXTS.spell(" return", "bad") == [ids_of(" return")]
