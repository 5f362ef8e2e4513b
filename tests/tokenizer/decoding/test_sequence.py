"""Text and stop do not depend on splits, replays or cuts of the ids."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer.tokenizers_zoo import CORPUS, ZOO, ids_of
from tokenizers import Tokenizer
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tokenizer.decoding.sequence import DecodeSequence, Stop
from trtmesh.tokenizer.decoding.stop_texts import StopMatcher, StopTexts
from trtmesh.tokenizer.detokenizers.base import Detokenizer
from trtmesh.tokenizer.detokenizers.choice import choose_detokenizer

Family = tuple[Tokenizer, Detokenizer]
FAMILIES = ("byte_level_bpe", "llama2_bpe", "unigram_byte_fallback", "word_piece")
PROPERTY = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    matcher = StopMatcher(StopTexts(stop_texts), include_stop_text=include) if stop_texts else None
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
