"""Text and stop do not depend on splits, replays or cuts of the ids."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from searches import examples
from tokenizer.tokenizers_zoo import CORPUS, ZOO, ids_of
from tokenizers import Tokenizer
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.stop_texts import NO_SPECIAL_TOKENS, SpecialTokens, StopTexts
from trtmesh.tokenizer.decoding.states import DecodeSequence, Stop
from trtmesh.tokenizer.decoding.stop_matcher import matcher_of
from trtmesh.tokenizer.detokenizers.base import Detokenizer
from trtmesh.tokenizer.detokenizers.choice import choose_detokenizer

Family = tuple[Tokenizer, Detokenizer]
FAMILIES = ("byte_level_bpe", "llama2_bpe", "unigram_byte_fallback", "word_piece")
PROPERTY = settings(
    max_examples=examples(40, soak=150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
STOPS = ["e", " the", "quick b", "�", "界", "\n\n", "ö", "##"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    tokenizer = ZOO[request.param][0]()
    return tokenizer, choose_detokenizer(tokenizer)


def open_sequence(
    family: Family,
    stop_texts: list[str],
    *,
    skip: bool = True,
    include: bool = False,
    min_tokens: int = 0,
) -> DecodeSequence:
    tokenizer, detokenizer = family
    matcher = None
    if stop_texts:
        omitted = SpecialTokens.of(tokenizer) if skip else NO_SPECIAL_TOKENS
        matcher = matcher_of(StopTexts(stop_texts, omitted), include_stop_text=include)
    return DecodeSequence(
        detokenizer.open(skip_special_tokens=skip),
        matcher,
        tokenizer.get_vocab_size(),
        min_tokens=min_tokens,
    )


def run(sequence: DecodeSequence, calls: list[list[int]]) -> tuple[list[str], int | None, int]:
    """The text of each call, the stop text and the total tokens up to the match."""
    texts, stop_index, tokens = [], None, 0
    for position, ids in enumerate(calls):
        act = sequence.finish if position == len(calls) - 1 else sequence.push
        text, stop = act(ids)
        texts.append(text)
        if stop is not None:
            stop_index, tokens = stop.stop_index, tokens + stop.token_count
        elif stop_index is None:
            tokens += len(ids)
    return texts, stop_index, tokens


def brute_force(
    family: Family,
    ids: list[int],
    stop_texts: list[str],
    *,
    skip: bool,
    include: bool,
    min_tokens: int,
) -> str:
    text = family[0].decode(ids, skip_special_tokens=skip)
    plain = open_sequence(family, [], skip=skip)
    certain = list(accumulate(len(plain.push([token_id])[0]) for token_id in ids))
    for end in range(len(text) + 1):
        found = [stop for stop in stop_texts if text[:end].endswith(stop)]
        tokens = min(bisect_left(certain, end) + 1, len(ids))
        if found and tokens > min_tokens:
            return text[: end if include else end - len(max(found, key=len))]
    return text


def split(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    return [ids[start:end] for start, end in pairwise([0, *cuts, len(ids)])]


@PROPERTY
@given(
    data=st.data(),
    skip=st.booleans(),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1, 5, 39]),
)
def test_text_does_not_depend_on_splits_and_replays(
    family: Family, data: st.DataObject, skip: bool, include: bool, min_tokens: int
) -> None:
    size = family[0].get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    stops = data.draw(st.lists(st.sampled_from(STOPS), max_size=3))
    one_by_one = run(
        open_sequence(family, stops, skip=skip, include=include, min_tokens=min_tokens),
        [*([token_id] for token_id in ids), []],
    )
    calls = split(data, ids)
    by_split = run(
        open_sequence(family, stops, skip=skip, include=include, min_tokens=min_tokens), calls
    )
    assert "".join(by_split[0]) == "".join(one_by_one[0])
    assert by_split[1:] == one_by_one[1:]
    assert "".join(by_split[0]) == brute_force(
        family, ids, stops, skip=skip, include=include, min_tokens=min_tokens
    )

    cut = data.draw(st.integers(0, len(calls) - 1))
    delivered = [token_id for ids in calls[:cut] for token_id in ids]
    replayed = open_sequence(family, stops, skip=skip, include=include, min_tokens=min_tokens)
    replayed.absorb(delivered[: len(delivered) // 2])
    replayed.absorb(delivered[len(delivered) // 2 :])
    assert run(replayed, calls[cut:])[0] == by_split[0][cut:]


def test_token_count_ends_at_the_token_completing_the_match(family: Family) -> None:
    tokenizer, _ = family
    ids = tokenizer.encode(CORPUS[1], add_special_tokens=False).ids
    text = tokenizer.decode(ids)
    stop = text[12:16]
    sequence = open_sequence(family, [stop])
    delta, found = sequence.push(ids)
    assert found is not None
    assert stop in tokenizer.decode(ids[: found.token_count])
    assert stop not in tokenizer.decode(ids[: found.token_count - 1])
    assert delta == text[: text.index(stop)]
    assert sequence.push(ids) == ("", None)
    assert sequence.finish(ids) == ("", None)


@pytest.mark.parametrize("at_once", [True, False])
def test_min_tokens_pass_over_a_stop_text(family: Family, at_once: bool) -> None:
    tokenizer, _ = family
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    again = next(token_id for token_id in ids if tokenizer.decode([token_id]).strip())
    word = tokenizer.decode([again]).strip()
    for least in range(4):
        sequence = open_sequence(family, [word], min_tokens=least)
        calls = [[again] * 6] if at_once else [[again]] * 6
        text, stop_index, tokens = run(sequence, [*calls, []])
        assert (stop_index, tokens) == (0, least + 1)
        assert "".join(text).count(word) == least


def test_stop_text_in_delivered_tokens_ends_the_next_push(family: Family) -> None:
    tokenizer, _ = family
    ids = tokenizer.encode("hello world", add_special_tokens=False).ids
    sequence = open_sequence(family, ["hello"])
    sequence.absorb(ids)
    sequence.absorb(ids)
    assert sequence.push(ids) == ("", Stop(0, 0))
    assert sequence.push(ids) == ("", None)


def test_stop_text_ends_in_the_flushed_text() -> None:
    tokenizer = ZOO["byte_level_bpe"][0]()
    ids = ids_of(tokenizer, "a", "ð", "Ł")
    sequence = open_sequence((tokenizer, choose_detokenizer(tokenizer)), ["a�"])
    assert sequence.push(ids[:1]) == ("", None)
    assert sequence.finish(ids[1:]) == ("", Stop(0, 2))


def test_id_of_a_padded_vocabulary_has_no_text(family: Family) -> None:
    """Models have more rows than their tokenizers have ids, and may sample one of them."""
    tokenizer, size = family[0], family[0].get_vocab_size()
    ids = tokenizer.encode(CORPUS[0], add_special_tokens=False).ids
    padded = [size, *(token_id for known in ids for token_id in (known, size + 7)), 2**32 - 1]
    assert "".join(run(open_sequence(family, []), [padded])[0]) == tokenizer.decode(ids)
    assert tokenizer.decode(padded) == tokenizer.decode(ids)
    texts, stop_index, tokens = run(open_sequence(family, ["row"]), [[each] for each in padded])
    assert ("".join(texts) + "row", stop_index) == (
        tokenizer.decode(ids).partition("row")[0] + "row",
        0,
    )
    assert tokens % 2 == 0


def test_tokens_after_finish_are_refused(family: Family) -> None:
    sequence = open_sequence(family, [])
    sequence.finish([5])
    assert sequence.push([]) == ("", None)
    with pytest.raises(InvalidRequest) as caught:
        sequence.push([5])
    assert caught.value.field == "token_ids"


END = "<|im_end|>"


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", [name for name in ZOO if name != "unstreamable"])
def test_special_token_stops(name: str, skip: bool, include: bool) -> None:
    """Whether or not the text shows it, and in words with other text, as a text that shows it spells them."""
    tokenizer = ZOO[name][0]()
    known = (tokenizer, choose_detokenizer(tokenizer))
    before = tokenizer.encode("How are you?", add_special_tokens=False).ids
    after = tokenizer.encode("fine", add_special_tokens=False).ids
    (end,) = ids_of(tokenizer, END)
    ids = [*before, end, *after]
    shown = tokenizer.decode(ids[: len(before) + 2], skip_special_tokens=False)
    begin = shown.index(END)
    left, right = shown[begin - 3 : begin], shown[begin + len(END) :]
    words = [(END, 1), (left + END, 1), (END + right, 2), (left + END + right, 2)]
    # Its decoder drops the space behind the last word of a text.
    for word, tokens in words[:1] if name == "word_end_bpe" else words:
        whole = tokenizer.decode(ids[: len(before) + tokens], skip_special_tokens=skip)
        if not include:
            omitted = len(word) - (len(END) if skip else 0)
            # Some decoders put a space before the token, which the text then omits too.
            omitted -= skip and word.startswith(left) and left.endswith(" ")
            whole = whole[: len(whole) - omitted]
        sequence = open_sequence(known, ["never", word, END + "?"], skip=skip, include=include)
        told, stop_index, count = run(sequence, [[token_id] for token_id in ids])
        assert ("".join(told), stop_index, count) == (whole, 1, len(before) + tokens), word


def test_special_token_stops_a_text_that_comes_at_the_end() -> None:
    tokenizer = ZOO["unstreamable"][0]()
    before = tokenizer.encode("How are you?", add_special_tokens=False).ids
    ids = [*before, *ids_of(tokenizer, END), *before]
    sequence = open_sequence((tokenizer, choose_detokenizer(tokenizer)), [f"you?{END}"])
    told, stop_index, count = run(sequence, [[token_id] for token_id in ids])
    assert "".join(told) == tokenizer.decode(before).removesuffix("you?")
    assert (stop_index, count) == (0, len(before) + 1)


@pytest.mark.parametrize("include", [True, False])
def test_text_before_a_special_token_counts_though_it_is_not_certain(include: bool) -> None:
    """A newline of Llama 2 is a byte: what follows could still make its run invalid."""
    tokenizer = ZOO["llama2_bpe"][0]()
    known = (tokenizer, choose_detokenizer(tokenizer))
    ids = ids_of(tokenizer, "▁b", "<0x0A>", "<0x0A>", END, "▁b")
    for stop, expected in (
        (END, ("b\n\n", "b\n\n")),
        (f"\n{END}", ("b\n\n", "b\n")),
        (f"b\n\n{END}", ("b\n\n", "")),
        (f"{END} b", ("b\n\n b", "b\n\n")),
        (f"\n\n{END} b", ("b\n\n b", "b")),
        (f"b{END}", ("b\n\n b", "b\n\n b")),
    ):
        sequence = open_sequence(known, [stop], include=include)
        text = "".join(run(sequence, [[token_id] for token_id in ids])[0])
        assert text == expected[0 if include else 1], stop


def test_special_token_does_not_end_a_character() -> None:
    tokenizer = ZOO["llama2_bpe"][0]()
    ids = ids_of(tokenizer, "<0xC3>", END, "<0xA9>", END, "▁b")
    sequence = open_sequence((tokenizer, choose_detokenizer(tokenizer)), [f"b{END}"])
    assert "".join(run(sequence, [[token_id] for token_id in ids])[0]) == "é b"
    assert tokenizer.decode(ids) == "é b"


def test_special_token_in_delivered_tokens_ends_the_next_push(family: Family) -> None:
    sequence = open_sequence(family, [END])
    sequence.absorb(ids_of(family[0], END))
    assert sequence.push([5]) == ("", Stop(0, 0))
