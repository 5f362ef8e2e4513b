"""Lanes, batches and limits, with a tokenizer blocked by gates."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
from tokenizer.serving import until
from tokenizer.tokenizers_zoo import byte_level_bpe
from tokenizers import Tokenizer
from trtmesh.chassis.errors import Draining, InternalError, InvalidField, QueueFull
from trtmesh.chassis.spellings import Speller
from trtmesh.chassis.stop_texts import NO_SPECIAL_TOKENS
from trtmesh.tokenizer.detokenizers.stop_vocabulary import StopVocabularies
from trtmesh.tokenizer.detokenizers.windowed import WholeDetokenizer
from trtmesh.tokenizer.encoding import (
    HUGE_TO_LONG,
    ON_THE_SPOT_BYTES,
    BatchEncoder,
    EncodedTexts,
    Encoder,
    EncodeRequest,
    LaneLimits,
    Outcome,
    UnreadRequest,
)
from trtmesh.tokenizer.metrics import TokenizerMetrics

LIMIT = 100


class LibraryPanic(BaseException):
    """Like the library's panic, derived from BaseException."""

    __module__ = "pyo3_runtime"


@dataclass
class Ids:
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class GatedTokenizer:
    """Encodes a text to its length after the gate of the first letter opens."""

    gates: dict[str, threading.Event] = field(default_factory=dict)
    batches: list[list[str]] = field(default_factory=list)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Ids]:
        self.batches.append(texts)
        for text in texts:
            if text.startswith("panic"):
                raise LibraryPanic("bad luck")
            if gate := self.gates.get(text[:1]):
                assert gate.wait(60)
        return [Ids([len(text)] + [-1] * add_special_tokens) for text in texts]

    def gate(self, letter: str) -> threading.Event:
        return self.gates.setdefault(letter, threading.Event())


@asynccontextmanager
async def encoder_over(
    tokenizer: Any, threads: int = 1, max_text_bytes: int = 4 * 2**20, **limits: int
) -> AsyncIterator[Encoder]:
    sizes = {"threads": threads, "long_text_bytes": LIMIT, "max_batch_bytes": LIMIT} | limits
    batches = BatchEncoder(
        cast("Tokenizer", tokenizer),
        Speller(tokenizer),
        StopVocabularies(WholeDetokenizer(cast("Tokenizer", tokenizer)), NO_SPECIAL_TOKENS),
        max_text_bytes,
    )
    encoder = Encoder(batches, TokenizerMetrics(), LaneLimits(**sizes))
    try:
        yield encoder
    finally:
        encoder.close()
        for gate in getattr(tokenizer, "gates", {}).values():
            gate.set()


def plain(text: str) -> EncodeRequest:
    return EncodeRequest(text, add_special_tokens=False)


async def test_texts_and_words_share_a_batch() -> None:
    tokenizer = GatedTokenizer()
    async with encoder_over(tokenizer) as encoder:
        outcomes = await asyncio.gather(
            encoder.submit(EncodeRequest("abc", add_special_tokens=True, words=("d", "ef"))),
            encoder.submit(EncodeRequest(None, add_special_tokens=True, words=("ghi",))),
            encoder.submit(EncodeRequest("", add_special_tokens=False)),
            encoder.submit(EncodeRequest("jk", add_special_tokens=False, words=("l",))),
        )
    assert list(outcomes) == [
        EncodedTexts([3, -1], [[1], [2]]),
        EncodedTexts([], [[3]]),
        EncodedTexts([0], []),
        EncodedTexts([2], [[1]]),
    ]
    assert tokenizer.batches == [["abc"], ["", "jk"], ["d", "ef", "ghi", "l"]]


async def test_long_text_does_not_delay_short_texts() -> None:
    tokenizer = GatedTokenizer()
    gate = tokenizer.gate("L")
    async with encoder_over(tokenizer) as encoder:
        long_ones = [encoder.submit(plain("L" * LIMIT)) for _ in range(3)]
        await asyncio.gather(*(encoder.submit(plain(f"s{i}")) for i in range(50)))
        assert not any(encode.done() for encode in long_ones)
        gate.set()
        outcomes = await asyncio.gather(*long_ones)
    assert list(outcomes) == [EncodedTexts([LIMIT], [])] * 3


async def test_huge_text_does_not_delay_long_texts() -> None:
    tokenizer = GatedTokenizer()
    gate = tokenizer.gate("H")
    async with encoder_over(tokenizer) as encoder:
        huge_ones = [encoder.submit(plain("H" * LIMIT * HUGE_TO_LONG)) for _ in range(3)]
        await asyncio.gather(*(encoder.submit(plain("L" * LIMIT)) for _ in range(5)))
        assert not any(encode.done() for encode in huge_ones)
        gate.set()
        await asyncio.gather(*huge_ones)


async def test_waiting_texts_are_batched_up_to_a_size() -> None:
    tokenizer = GatedTokenizer()
    gate = tokenizer.gate("g")
    async with encoder_over(tokenizer) as encoder:
        first = encoder.submit(plain("g"))
        await until(lambda: tokenizer.batches)
        waiting = [encoder.submit(plain("s" * 40)) for _ in range(5)]
        gate.set()
        await asyncio.gather(first, *waiting)
    assert [len(batch) for batch in tokenizer.batches] == [1, 2, 2, 1]


async def test_words_count_for_lane_and_limit() -> None:
    tokenizer = GatedTokenizer()
    gate = tokenizer.gate("w")
    async with encoder_over(tokenizer, max_text_bytes=2 * LIMIT) as encoder:
        words = ("w" * 60, "w" * 60)
        heavy = encoder.submit(EncodeRequest(None, add_special_tokens=False, words=words))
        await encoder.submit(plain("s"))
        assert not heavy.done()
        gate.set()
        await heavy
        with pytest.raises(InvalidField) as caught:
            _ = encoder.submit(EncodeRequest(None, add_special_tokens=False, words=words * 2))
        assert (caught.value.fields, caught.value.value) == (("text",), "240 bytes")
        assert caught.value.limit == "at most 200"


async def test_full_queue_refuses() -> None:
    tokenizer = GatedTokenizer()
    gate = tokenizer.gate("g")
    limits = {"max_queued": 2, "max_queued_long": 1}
    async with encoder_over(tokenizer, **limits) as encoder:
        accepted = [encoder.submit(plain("g"))]
        await until(lambda: tokenizer.batches)
        accepted += [encoder.submit(plain("a")), encoder.submit(plain("b"))]
        with pytest.raises(QueueFull):
            _ = encoder.submit(plain("c"))
        accepted.append(encoder.submit(plain("x" * LIMIT)))
        gate.set()
        assert all(isinstance(o, EncodedTexts) for o in await asyncio.gather(*accepted))


async def test_failure_is_the_outcome_of_its_own_text() -> None:
    tokenizer = GatedTokenizer()
    async with encoder_over(tokenizer) as encoder:
        outcomes: list[Outcome] = await asyncio.gather(
            *(encoder.submit(plain(text)) for text in ("a", "panic", "bc"))
        )
        assert outcomes[::2] == [EncodedTexts([1], []), EncodedTexts([2], [])]
        failure = outcomes[1]
        assert isinstance(failure, InternalError)
        assert "LibraryPanic: bad luck" in failure.message
        assert await encoder.submit(plain("next")) == EncodedTexts([4], [])


async def test_cancelled_encode_is_not_encoded() -> None:
    tokenizer = GatedTokenizer()
    gate = tokenizer.gate("g")
    async with encoder_over(tokenizer) as encoder:
        first = encoder.submit(plain("g"))
        await until(lambda: tokenizer.batches)
        cancelled, last = encoder.submit(plain("cancelled")), encoder.submit(plain("last"))
        cancelled.cancel()
        gate.set()
        await asyncio.gather(first, last)
    assert tokenizer.batches == [["g"], ["last"]]


async def test_cancelled_encode_makes_room_in_a_full_queue() -> None:
    tokenizer = GatedTokenizer()
    gate = tokenizer.gate("g")
    async with encoder_over(tokenizer, max_queued=2) as encoder:
        first = encoder.submit(plain("g"))
        await until(lambda: tokenizer.batches)
        cancelled, last = encoder.submit(plain("cancelled")), encoder.submit(plain("last"))
        cancelled.cancel()
        newcomer = encoder.submit(plain("new"))
        with pytest.raises(QueueFull) as full:
            _ = encoder.submit(plain("one more"))
        assert (full.value.value, full.value.limit) == ("2", "at most 2")
        gate.set()
        await asyncio.gather(first, last, newcomer)
    assert tokenizer.batches == [["g"], ["last", "new"]]


async def test_close_cancels_waiting_encodes() -> None:
    tokenizer = GatedTokenizer()
    tokenizer.gate("g")
    async with encoder_over(tokenizer) as encoder:
        running = encoder.submit(plain("g"))
        await until(lambda: tokenizer.batches)
        waiting = encoder.submit(plain("a"))
    assert waiting.cancelled()
    assert await running == EncodedTexts([1], [])
    with pytest.raises(Draining):
        _ = encoder.submit(plain("a"))


async def test_the_first_short_text_of_a_pass_is_encoded_on_the_spot() -> None:
    async with encoder_over(GatedTokenizer(), long_text_bytes=2 * ON_THE_SPOT_BYTES) as encoder:
        assert encoder.at_once(plain("s")) == EncodedTexts([1], [])
        assert encoder.at_once(plain("s")) is None
        await asyncio.sleep(0)
        assert encoder.at_once(plain("s" * (ON_THE_SPOT_BYTES + 1))) is None
        whole = plain("s" * ON_THE_SPOT_BYTES)
        assert encoder.at_once(whole) == EncodedTexts([ON_THE_SPOT_BYTES], [])


async def test_nothing_is_encoded_on_the_spot_before_waiting_texts() -> None:
    tokenizer = GatedTokenizer()
    gate = tokenizer.gate("g")
    async with encoder_over(tokenizer) as encoder:
        first = encoder.submit(plain("g"))
        await until(lambda: tokenizer.batches)
        waiting = encoder.submit(plain("a"))
        assert encoder.at_once(plain("b")) is None
        gate.set()
        await asyncio.gather(first, waiting)
        assert encoder.at_once(plain("b")) == EncodedTexts([1], [])
    assert encoder.at_once(plain("b")) is None


async def test_texts_beyond_a_limit_are_left_to_the_queue() -> None:
    async with encoder_over(GatedTokenizer(), max_text_bytes=10, long_text_bytes=5) as encoder:
        assert encoder.at_once(plain("l" * 5)) is None
        assert encoder.at_once(plain("s" * 4)) == EncodedTexts([4], [])


@dataclass
class ByteTokenizer:
    """Encodes each byte to an id."""

    sizes: list[int] = field(default_factory=list)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Ids]:
        self.sizes += map(len, texts)
        return [Ids(list(text.encode())) for text in texts]


async def test_a_large_request_is_read_where_it_is_encoded() -> None:
    readers = list[int]()

    def read(text: str) -> EncodeRequest:
        readers.append(threading.get_ident())
        return plain(text)

    async with encoder_over(ByteTokenizer(), max_text_bytes=3 * LIMIT) as encoder:
        asked = [
            encoder.submit(UnreadRequest(size + 9, partial(read, "x" * size)))
            for size in (LIMIT, 3 * LIMIT, 3 * LIMIT + 1, LIMIT)
        ]
        outcomes = await asyncio.gather(*asked)
    assert threading.get_ident() not in readers
    lengths = [each.token_count if isinstance(each, EncodedTexts) else each for each in outcomes]
    assert lengths[:2] + lengths[3:] == [LIMIT, 3 * LIMIT, LIMIT]
    assert isinstance(lengths[2], InvalidField)


async def test_ids_that_nobody_wants_are_counted() -> None:
    async with encoder_over(ByteTokenizer()) as encoder:
        for size, most, ids, omitted in ((9, 0, 9, 0), (9, 9, 9, 0), (9, 8, 0, 9)):
            request = EncodeRequest(
                "x" * size, add_special_tokens=True, words=("w",), max_token_ids=most
            )
            for outcome in (encoder.at_once(request), await encoder.submit(request)):
                assert isinstance(outcome, EncodedTexts)
                assert (len(outcome.token_ids), outcome.omitted) == (ids, omitted)
                assert bool(outcome.words) == (not omitted)
                await asyncio.sleep(0)


@pytest.mark.parametrize("character", ["x", "\U0001f600"])
async def test_no_more_of_a_text_is_encoded_than_shows_that_it_is_too_long(character: str) -> None:
    tokenizer = ByteTokenizer()
    async with encoder_over(tokenizer) as encoder:
        text = character * 1_000_000
        outcome = await encoder.submit(
            EncodeRequest(text, add_special_tokens=True, words=("w",), max_token_ids=1000)
        )
    assert isinstance(outcome, EncodedTexts)
    assert outcome.omitted > 1000
    assert not outcome.token_ids
    assert sum(tokenizer.sizes) <= 10 * 1000


async def test_text_of_an_ordinary_length_is_encoded_once() -> None:
    tokenizer = ByteTokenizer()
    async with encoder_over(tokenizer) as encoder:
        for size, omitted in ((900, 0), (1800, 1800)):
            outcome = await encoder.submit(
                EncodeRequest("x" * size, add_special_tokens=True, max_token_ids=1000)
            )
            assert isinstance(outcome, EncodedTexts)
            assert outcome.omitted == omitted
    assert tokenizer.sizes == [900, 1800]


@dataclass
class CountingTokenizer:
    """A tokenizer of the library that counts texts."""

    library: Tokenizer
    encoded: Counter[str] = field(default_factory=Counter)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.encoded.update(texts)
        return self.library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self.library.decode(ids, skip_special_tokens=skip_special_tokens)


async def test_words_of_many_items_are_spelled_once() -> None:
    """A small request may have a thousand items with hundreds of words."""
    tokenizer = CountingTokenizer(byte_level_bpe())
    words = ("quick", "dog")
    async with encoder_over(tokenizer, max_batch_bytes=2**16) as encoder:
        outcomes = await asyncio.gather(
            *(
                encoder.submit(
                    EncodeRequest(None, add_special_tokens=True, spelled_words=(*words, f"w{i}"))
                )
                for i in range(64)
            )
        )
    assert [cast("EncodedTexts", each).spelled_words[:2] for each in outcomes] == 64 * [
        [Speller(byte_level_bpe()).spellings(word) for word in words]
    ]
    assert all(tokenizer.encoded[word] == 1 for word in words)
    assert tokenizer.encoded.total() <= 4 * (64 + len(words))
