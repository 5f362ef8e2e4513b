"""Encodes a lone short text on the spot, and other texts in threads: waiting texts together, long and huge texts in
separate threads.

Even a single text goes through `encode_batch_fast`: unlike `encode`, the batch method releases the GIL.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from tokenizers import Encoding, Tokenizer
from trtmesh.chassis.errors import Draining, InternalError, InvalidField, QueueFull, TrtmeshError
from trtmesh.chassis.frozen import frozen
from trtmesh.chassis.panics import is_failure
from trtmesh.chassis.spellings import Speller
from trtmesh.tokenizer.detokenizers.stop_vocabulary import StopVocabularies
from trtmesh.tokenizer.metrics import TokenizerMetrics
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb

ON_THE_SPOT_BYTES = 4096
"""Largest text encoded on the spot, in about a millisecond; a single text in a pass of the event loop. A thread costs a
lone text more than the encoding. Under load threads gather texts meanwhile, so batches grow."""

BEGINNINGS = 3
"""The beginning of a text is encoded first only if the text is so many times as long, as in routers."""

HUGE_TO_LONG = 16
"""A text is huge from this multiple of `long_text_bytes`."""


@frozen
class EncodeRequest:
    """The text and the words to encode, and stop texts to describe."""

    text: str | None
    add_special_tokens: bool
    words: tuple[str, ...] = ()
    spelled_words: tuple[str, ...] = ()
    stop_texts: tuple[str, ...] = ()
    skip_special_tokens: bool = False
    max_token_ids: int = 0
    """Most wanted ids of the text; 0 for all."""
    described_ids: tuple[int, ...] = ()
    """Ids whose bytes are wanted."""
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        texts = (self.text or "", *self.words, *self.spelled_words, *self.stop_texts)
        size_bytes = sum(map(_size_bytes, texts))
        object.__setattr__(self, "size_bytes", size_bytes)

    @property
    def is_plain(self) -> bool:
        """Whether it is a text alone, of which all ids are wanted."""
        return self.text is not None and not (
            self.words
            or self.spelled_words
            or self.stop_texts
            or self.max_token_ids
            or self.described_ids
        )

    def texts(self, *, special: bool) -> Iterator[str]:
        if self.text is not None and self.add_special_tokens == special:
            yield self.text


@dataclass(frozen=True, slots=True)
class UnreadRequest:
    """A large request, to be read in a thread: decoding the text takes longer than a step of the event loop."""

    size_bytes: int
    """About."""
    read: Callable[[], EncodeRequest]


def _size_bytes(text: str) -> int:
    # Does not copy ASCII, the common case of a long text.
    return len(text) if text.isascii() else len(text.encode())


@frozen
class EncodedTexts:
    """Token ids of the text, of each word and of the words' spellings, and the stop texts in terms of tokens."""

    token_ids: list[int]
    words: list[list[int]]
    spelled_words: list[list[list[int]]] = field(default_factory=list)
    stop_vocabulary: pb.StopVocabulary | None = None
    token_bytes: Sequence[bytes] = ()
    omitted: int = 0
    """Number of the text's ids, or of the beginning's ids, if beyond the wanted number. Then all else is empty."""
    text_end: str = ""
    """The last characters of a conversation's text."""
    read_answer: tokenizer_pb.ReadAnswer | None = None
    """The parts of an answer's text, in place of ids."""

    @property
    def token_count(self) -> int:
        words = chain(self.words, *self.spelled_words)
        return len(self.token_ids) + sum(map(len, words))


Outcome = EncodedTexts | TrtmeshError


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Sizes and queues of the three lanes: short, long, huge."""

    threads: int = 2
    """Threads for short texts; long and huge texts have one thread each. The event loop encodes most short texts, and
    tokenizers scale by processes."""
    long_text_bytes: int = 16 * 2**10
    """Least size of a long text; from HUGE_TO_LONG times this size a text is huge."""
    max_batch_bytes: int = 64 * 2**10
    """Most text for a thread to take from the queue at once; a larger text goes alone."""
    max_queued: int = 8192
    """Most queued encodes of short texts; further encodes are refused with QUEUE_FULL."""
    max_queued_long: int = 1024
    """Most queued encodes of long texts, and of huge texts; further encodes are refused with QUEUE_FULL."""


class Encoder:
    """A lane for each size class: a short text never waits for a long one."""

    def __init__(
        self, batches: BatchEncoder, metrics: TokenizerMetrics, limits: LaneLimits = LaneLimits()
    ) -> None:
        self._batches = batches
        self.long_text_bytes = limits.long_text_bytes
        """Size of requests to leave unread."""
        self._most_on_the_spot = min(
            ON_THE_SPOT_BYTES, batches.most_bytes, limits.long_text_bytes - 1
        )
        self._comes_first = True
        """Whether the next text is the first in this pass."""
        few = limits.max_queued_long
        lanes = (
            (0, "short", limits.threads, limits.max_queued),
            (limits.long_text_bytes, "long", 1, few),
            (limits.long_text_bytes * HUGE_TO_LONG, "huge", 1, few),
        )
        self._lanes = [_Lane(*lane, limits.max_batch_bytes, batches, metrics) for lane in lanes]

    def at_once(self, request: EncodeRequest) -> Outcome | None:
        """Encodes the first text of a pass on the spot, if it is short and none waits; None for `submit`."""
        if (
            not self._comes_first
            or request.size_bytes > self._most_on_the_spot
            or request.stop_texts
            or request.spelled_words
            or request.described_ids
            or not self._lanes[0].idle
        ):
            return None
        self._comes_first = False
        asyncio.get_running_loop().call_soon(self._next_pass)
        return self._batches.encode([request])[0]

    def _next_pass(self) -> None:
        self._comes_first = True

    def submit(self, request: EncodeRequest | UnreadRequest) -> asyncio.Future[Outcome]:
        """Queues an encode. The future returns failures as values; cancel removes the encode from the queue.

        Raises InvalidField for an oversized text that was read, QueueFull, and Draining after `close`.
        """
        if isinstance(request, EncodeRequest):
            self._batches.check_size(request)
        lane = next(lane for lane in reversed(self._lanes) if request.size_bytes >= lane.smallest)
        return lane.submit(request)

    def close(self) -> None:
        """Cancels the waiting encodes. Threads finish their batches."""
        for lane in self._lanes:
            lane.close()


@dataclass(slots=True)
class _Waiting:
    request: EncodeRequest | UnreadRequest
    outcome: asyncio.Future[Outcome]
    queued_at: float


class _Lane:
    """A queue with threads. A free thread takes the waiting texts at once, without waiting for more."""

    def __init__(
        self,
        smallest: int,
        name: str,
        threads: int,
        most_waiting: int,
        most_batch_bytes: int,
        batches: BatchEncoder,
        metrics: TokenizerMetrics,
    ) -> None:
        """`smallest` is the size of the smallest texts, in bytes."""
        self.smallest, self._name = smallest, name
        self._free_threads, self._most_waiting = threads, most_waiting
        self._most_batch_bytes, self._batches = most_batch_bytes, batches
        self._queue: deque[_Waiting] = deque()
        self._closed = False
        self._executor = ThreadPoolExecutor(threads, f"encode-{name}")
        self._queue_seconds, self._batch_size = metrics.add_lane(name)

    @property
    def idle(self) -> bool:
        """Whether the lane takes texts and none waits."""
        return not (self._queue or self._closed)

    def submit(self, request: EncodeRequest | UnreadRequest) -> asyncio.Future[Outcome]:
        if self._closed:
            raise Draining("the tokenizer is stopping")
        if len(self._queue) >= self._most_waiting:
            self._queue = deque(one for one in self._queue if not one.outcome.cancelled())
        if len(self._queue) >= self._most_waiting:
            raise QueueFull(
                f"{len(self._queue)} encodes of {self._name} texts are queued, the most allowed",
                value=str(len(self._queue)),
                limit=f"at most {self._most_waiting}",
            )
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Outcome] = loop.create_future()
        self._queue.append(_Waiting(request, outcome, time.monotonic()))
        if len(self._queue) == 1:
            # In the next pass of the event loop: the commands of a message share a batch.
            loop.call_soon(self._start_batches)
        return outcome

    def close(self) -> None:
        self._closed = True
        for waiting in self._queue:
            waiting.outcome.cancel()
        self._queue.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start_batches(self) -> None:
        while self._free_threads and (batch := self._take_batch()):
            self._free_threads -= 1
            requests = [waiting.request for waiting in batch]
            running = asyncio.get_running_loop().run_in_executor(
                self._executor, self._batches.read_and_encode, requests
            )
            running.add_done_callback(partial(self._finish_batch, batch))

    def _take_batch(self) -> list[_Waiting]:
        """Takes the next batch, with at least one encode; skips cancelled encodes."""
        now, size_bytes = time.monotonic(), 0
        batch: list[_Waiting] = []
        while self._queue:
            waiting = self._queue[0]
            size_bytes += waiting.request.size_bytes
            if batch and size_bytes > self._most_batch_bytes:
                break
            self._queue.popleft()
            if not waiting.outcome.cancelled():
                batch.append(waiting)
                self._queue_seconds.observe(now - waiting.queued_at)
        if batch:
            self._batch_size.observe(len(batch))
        return batch

    def _finish_batch(self, batch: list[_Waiting], done: asyncio.Future[list[Outcome]]) -> None:
        self._free_threads += 1
        if done.cancelled():
            for waiting in batch:
                waiting.outcome.cancel()
            return
        for waiting, outcome in zip(batch, done.result(), strict=True):
            if not waiting.outcome.done():
                waiting.outcome.set_result(outcome)
        self._start_batches()


def encode_in_this_thread_alone() -> None:
    """Turns off the library's own thread pool.

    There long texts would occupy the threads of short texts.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class BatchEncoder:
    """Encodes batches of requests, in any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        speller: Speller,
        stop_vocabularies: StopVocabularies,
        max_text_bytes: int,
    ) -> None:
        self._tokenizer, self._speller = tokenizer, speller
        self._stop_vocabularies, self.most_bytes = stop_vocabularies, max_text_bytes

    def check_size(self, request: EncodeRequest) -> None:
        """Raises InvalidField for too large a text."""
        if request.size_bytes > self.most_bytes:
            raise InvalidField(
                f"has {request.size_bytes} bytes with its words but must have at most {self.most_bytes}"
                " (a sixteenth of max_message_bytes)",
                field="text",
                value=f"{request.size_bytes} bytes",
                limit=f"at most {self.most_bytes}",
            )

    def read_and_encode(self, requests: Sequence[EncodeRequest | UnreadRequest]) -> list[Outcome]:
        """Encodes a batch with unread requests."""
        read = [self._read(request) for request in requests]
        encoded = iter(self.encode([each for each in read if isinstance(each, EncodeRequest)]))
        return [next(encoded) if isinstance(each, EncodeRequest) else each for each in read]

    def _read(self, request: EncodeRequest | UnreadRequest) -> EncodeRequest | InvalidField:
        if isinstance(request, EncodeRequest):
            return request
        read = request.read()
        try:
            self.check_size(read)
        except InvalidField as error:
            return error.with_traceback(None)
        return read

    def encode(self, requests: Sequence[EncodeRequest]) -> list[Outcome]:
        """Encodes a batch; a failure becomes the outcome of the failing request alone."""
        try:
            if len(requests) == 1 and requests[0].is_plain:
                special = requests[0].add_special_tokens
                (encoding,) = self._encodings([requests[0].text or ""], special=special)
                return [EncodedTexts(encoding.ids, [])]
            return list(self._encode(requests))
        except BaseException as error:
            if not is_failure(error):
                raise
            if len(requests) > 1:
                return [outcome for each in requests for outcome in self.encode([each])]
            return [InternalError(f"the text cannot be encoded: {type(error).__name__}: {error}")]

    def _encode(self, requests: Sequence[EncodeRequest]) -> Iterator[EncodedTexts]:
        omitted = [self._surplus(request) for request in requests]
        wanted = [each for each, count in zip(requests, omitted, strict=True) if not count]
        marked = [text for request in wanted for text in request.texts(special=True)]
        plain = [text for request in wanted for text in request.texts(special=False)]
        marked_ids = iter(self._encodings(marked, special=True))
        plain_ids = iter(self._encodings(plain, special=False))
        words_of_all = [word for request in wanted for word in request.words]
        word_ids = iter(self._speller.encode(words_of_all) if words_of_all else ())
        # The items of a request mostly have the same words.
        spelled_words = {word for request in wanted for word in request.spelled_words}
        spellings = {word: self._speller.spellings(word) for word in spelled_words}
        for request, count in zip(requests, omitted, strict=True):
            if count:
                yield EncodedTexts([], [], omitted=count)
                continue
            words = [next(word_ids) for _ in request.words]
            token_ids: list[int] = []
            if request.text is not None:
                encoding = next(marked_ids if request.add_special_tokens else plain_ids)
                # A list of ids that nobody wants would hold the interpreter.
                if 0 < request.max_token_ids < len(encoding):
                    yield EncodedTexts([], [], omitted=len(encoding))
                    continue
                token_ids = encoding.ids
            spelled = [spellings[word] for word in request.spelled_words]
            stops = None
            if request.stop_texts:
                skip = request.skip_special_tokens
                stops = self._stop_vocabularies.of(request.stop_texts, skip_special_tokens=skip)
            described = self._stop_vocabularies.bytes_of(request.described_ids)
            yield EncodedTexts(token_ids, words, spelled, stops, described)

    def _surplus(self, request: EncodeRequest) -> int:
        """Returns the number of ids of the beginning, if the whole text surely has more ids than wanted, or 0 if the
        whole must be encoded.

        Encoding four million bytes takes seconds, and freeing as many tokens holds the interpreter. The whole may have
        a few ids fewer than the beginning, but not half as many.
        """
        text, most = request.text, request.max_token_ids
        if text is None or not most:
            return 0
        size = most * 5 // 8 + 1
        # A text of an ordinary length for its tokens is encoded once.
        while size < len(text) // BEGINNINGS:
            count = len(self._encodings([text[:size]], special=False)[0])
            if count > 2 * most:
                return count
            size *= 4
        return 0

    def _encodings(self, texts: list[str], *, special: bool) -> Sequence[Encoding]:
        encode = self._tokenizer.encode_batch_fast
        return encode(texts, add_special_tokens=special) if texts else ()
