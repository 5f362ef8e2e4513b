"""JSON within limits: the standard library's values, counted."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.fair.messages import LARGE_BYTES, LargeMessageThread
from trtmesh.router.doors.http.json_bodies import (
    MAX_DEPTH,
    MAX_KEY_CHARACTERS,
    MAX_KEYS,
    MAX_NUMBERS,
    MAX_VALUES,
    PIECE,
    parse_json,
)

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FINITE | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=20), inner),
    max_leaves=30,
)


def parsed(text: str | bytes) -> Any:
    """The value of a text, as a member of an object."""
    body = text if isinstance(text, bytes) else text.encode()
    return parse_json(b'{"":%s}' % body, len(body) + 5, lambda key: f"key '{key}' is repeated")[""]


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key is repeated")
    return members


@UNHURRIED
@given(VALUES, st.booleans(), st.sampled_from([None, 0, 3]))
def test_values_are_those_of_the_standard_library(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert parsed(text) == json.loads(text)


@UNHURRIED
@given(st.text(alphabet='{}[]",:0123456789.eE+- \\u\nabftn\ud800d8c', max_size=40))
def test_texts_are_accepted_and_refused_like_by_the_standard_library(text: str) -> None:
    body = text.encode("utf-8", "replace")
    try:
        expected: Any = json.loads(body, object_pairs_hook=without_repeats)
        json.dumps(expected, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        expected = InvalidRequest
    if expected is InvalidRequest:
        with pytest.raises(InvalidRequest):
            parsed(body)
    else:
        # Longer integers become floating-point numbers.
        assert repr(parsed(body)) == repr(expected) or re.search("[0-9]{19}", text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n"a": tru}', ".*: line 2 column 6"),
        ('{"a": [1,]}', ".*: line 1 column 9"),
        ('{"a": NaN}', ".*: line 1 column 7"),
        ('{"a": "b', ".*: line 1 column 9"),
        ('{"a": "b\\', ".*: line 1 column 10"),
        ('"\\"', ".*: line 1 column 4"),
        ("[1]", "it is not a JSON object"),
    ],
)
def test_malformed_json_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"failed to parse the request JSON buffer: {said}"):
        parse_json(text.encode(), 100)


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    assert parse_json("\ufeff{}".encode(), 100) == {}


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff", "\\ud83dx", "\\ude00\\ud83d", "\\ud83d\\n"])
def test_half_of_a_surrogate_pair_is_refused(half: str) -> None:
    for text in (f'"{half}"', f'{{"{half}": 1}}', f'{{"id": ["{half}"]}}'):
        with pytest.raises(InvalidRequest, match="surrogate"):
            parsed(text)
    assert parsed('"\\ud83d\\ude00"') == "\N{GRINNING FACE}"


def test_pieces_split_nothing() -> None:
    """Quotes and brackets at every offset around the end of a piece: what is counted is what is there."""
    for before in range(PIECE - 14, PIECE + 2):
        text = '["' + "x" * before + '\\"{[:,\\\\", {"a": 1, "b": "]"}]'
        assert parsed(text) == json.loads(text)
        with pytest.raises(InvalidRequest, match="'a' is repeated"):
            parsed(text.replace("b", "a"))


def of_numbers(count: int) -> str:
    return "[" + ",".join(["1"] * count) + "]"


def of_depth(depth: int) -> str:
    return "[" * depth + "]" * depth


def of_texts(count: int) -> str:
    return "[" + ",".join(['""'] * count) + "]"


def of_keys(count: int, length: int = 0) -> str:
    return "{" + ",".join(f'"{number:0{length}}":1' for number in range(count)) + "}"


@pytest.mark.parametrize(
    ("most", "above", "said"),
    [
        (of_depth(MAX_DEPTH - 1), of_depth(MAX_DEPTH), "deeper than 64"),
        (of_keys(MAX_KEYS), of_keys(MAX_KEYS + 1), "more than 1024 keys"),
        (
            of_keys(1, MAX_KEY_CHARACTERS),
            of_keys(1, MAX_KEY_CHARACTERS + 1),
            "a key more than 1024 char",
        ),
        (of_numbers(MAX_NUMBERS + 1), of_numbers(MAX_NUMBERS + 2), "more than 1048576 numbers"),
        # The object around, its key, and the list are values, too.
        (of_texts(MAX_VALUES - 3), of_texts(MAX_VALUES - 2), "more than 65536 values"),
    ],
)
def test_limits(most: str, above: str, said: str) -> None:
    assert parsed(most) == json.loads(most)
    with pytest.raises(InvalidRequest, match=said) as caught:
        parsed(above)
    assert len(str(caught.value)) < 1000


def test_counting_stops_at_the_limit() -> None:
    """Nothing behind is parsed."""
    with pytest.raises(InvalidRequest, match="more than 65536 values"):
        parsed(of_texts(MAX_VALUES)[:-1] + ", this is no JSON at all" * 10)


def test_repeated_keys_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="key 'a' is repeated"):
        parsed('[{"a": 1, "b": 2, "a": 3}]')
    with pytest.raises(InvalidRequest, match="key 'a' is repeated"):
        parsed('{"a": [{}], "a": []}')
    with pytest.raises(InvalidRequest, match="key 'a' is repeated"):
        parsed('{"b": {"a": 1}, "a": "b", "c": {"x": "a:{"}, "\\u0061": 2}')
    # Parsed again, what only stands behind the first value would end the recursion of json.
    with pytest.raises(InvalidRequest, match="key 'a' is repeated"):
        parsed(f'{{"a": {of_depth(1000)}, "a": 1}}')


async def test_loop_runs_while_a_large_body_is_parsed() -> None:
    """Parsed on the loop, it would let the ticker run once. A thread gives way every 5 ms of its own time."""
    body = ('{"a": [' + ",".join(['[1, "x"]'] * 15_000) + "]}").encode()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    try:
        await LargeMessageThread().run(max(len(body), LARGE_BYTES), lambda: parsed(body))
    finally:
        ticking.cancel()
    assert ticks > 3
