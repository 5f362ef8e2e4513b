"""Encodes texts in threads of their own: what waits together is encoded together, and longer texts wait apart.

Even a single text goes through `encode_batch_fast`, because it releases the interpreter lock, which `encode` holds.
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

from tokenizers import Tokenizer
from trtmesh.chassis.errors import Draining, InternalError, InvalidField, QueueFull, TrtmeshError
from trtmesh.tokenizer.metrics import TokenizerMetrics
from trtmesh.tokenizer.settings import TokenizerSettings

HUGE_TO_LONG = 16
"""From how many times the size of a long text on a text is huge."""


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Texts of one encode."""

    text: str | None
    add_special_tokens: bool
    words: tuple[str, ...] = ()
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size_bytes = sum(map(_size_bytes, (self.text or "", *self.words)))
        object.__setattr__(self, "size_bytes", size_bytes)

    def texts(self, *, special: bool) -> Iterator[str]:
        """The texts that are encoded with special tokens, or those without, in order."""
        if self.text is not None and self.add_special_tokens == special:
            yield self.text
        if not special:
            yield from self.words


def _size_bytes(text: str) -> int:
    # Measuring must not copy the common long text, which is ASCII.
    return len(text) if text.isascii() else len(text.encode())


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Ids of the text, and of each word."""

    token_ids: list[int]
    words: list[list[int]]

    @property
    def token_count(self) -> int:
        return len(self.token_ids) + sum(map(len, self.words))


Outcome = EncodedTexts | TrtmeshError


class Encoder:
    """Lanes by size, so that a text is delayed by none that is much longer."""

    def __init__(
        self, tokenizer: Tokenizer, settings: TokenizerSettings, metrics: TokenizerMetrics
    ) -> None:
        self._settings = settings
        few = settings.max_queued_long_encodes
        lanes = (
            (0, "short", settings.encode_threads, settings.max_queued_encodes),
            (settings.long_text_bytes, "long", 1, few),
            (settings.long_text_bytes * HUGE_TO_LONG, "huge", 1, few),
        )
        self._lanes = [
            _Lane(
                _LaneLimits(smallest, name, threads, most_waiting, settings.max_batch_bytes),
                lambda requests: encode_batch(tokenizer, requests),
                metrics,
            )
            for smallest, name, threads, most_waiting in lanes
        ]

    def submit(self, request: EncodeRequest) -> asyncio.Future[Outcome]:
        """Queues an encode. The future gives a failure as a value; cancelling it takes the encode from the queue.

        Raises InvalidField for a text that is too long, QueueFull, and Draining after `close`.
        """
        most = self._settings.max_text_bytes
        if request.size_bytes > most:
            raise InvalidField(
                f"text and words have {request.size_bytes} bytes but at most {most} are encoded (max_text_bytes)"
            )
        lane = next(lane for lane in reversed(self._lanes) if request.size_bytes >= lane.smallest)
        return lane.submit(request)

    def close(self) -> None:
        """Cancels what waits. What a thread is encoding ends on its own."""
        for lane in self._lanes:
            lane.close()


@dataclass(slots=True)
class _Waiting:
    request: EncodeRequest
    outcome: asyncio.Future[Outcome]
    queued_at: float


@dataclass(frozen=True, slots=True)
class _LaneLimits:
    smallest: int
    """Bytes of the shortest text that it takes."""
    name: str
    threads: int
    most_waiting: int
    most_batch_bytes: int


class _Lane:
    """A queue and its threads. A thread that is free takes what waits; nothing waits for a batch to fill."""

    def __init__(
        self,
        limits: _LaneLimits,
        encode: Callable[[Sequence[EncodeRequest]], list[Outcome]],
        metrics: TokenizerMetrics,
    ) -> None:
        self._limits = limits
        self._encode = encode
        self._queue: deque[_Waiting] = deque()
        self._free_threads = limits.threads
        self._closed = False
        self._executor = ThreadPoolExecutor(limits.threads, f"encode-{limits.name}")
        self._queue_seconds = metrics.encode_queue_seconds.labels(limits.name)
        self._batch_size = metrics.encode_batch_size.labels(limits.name)

    @property
    def smallest(self) -> int:
        return self._limits.smallest

    def submit(self, request: EncodeRequest) -> asyncio.Future[Outcome]:
        limits = self._limits
        if self._closed:
            raise Draining("the tokenizer is stopping")
        if len(self._queue) >= limits.most_waiting:
            self._queue = deque(one for one in self._queue if not one.outcome.cancelled())
        if len(self._queue) >= limits.most_waiting:
            raise QueueFull(f"{limits.most_waiting} encodes of {limits.name} texts wait already")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Outcome] = loop.create_future()
        self._queue.append(_Waiting(request, outcome, time.monotonic()))
        if len(self._queue) == 1:
            # Not at once: the commands that came in the same message shall share a batch.
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
                self._executor, self._encode, requests
            )
            running.add_done_callback(partial(self._finish_batch, batch))

    def _take_batch(self) -> list[_Waiting]:
        """As many as fit into a batch, and one in any case, without those that nobody waits for any more."""
        now, size_bytes = time.monotonic(), 0
        batch: list[_Waiting] = []
        while self._queue:
            waiting = self._queue[0]
            size_bytes += waiting.request.size_bytes
            if batch and size_bytes > self._limits.most_batch_bytes:
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
    """Keeps the library from spreading batches over its own pool of threads, one a core.

    There a long text would occupy a thread that short ones need: all of them, where there is one core.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def encode_batch(tokenizer: Tokenizer, requests: Sequence[EncodeRequest]) -> list[Outcome]:
    """Encodes together; a failure is the outcome of the request that causes it, and of no other."""
    try:
        return list(_encode(tokenizer, requests))
    except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
        if len(requests) > 1:
            return [
                outcome for request in requests for outcome in encode_batch(tokenizer, [request])
            ]
        return [InternalError(f"the text cannot be encoded: {type(error).__name__}: {error}")]


def _encode(tokenizer: Tokenizer, requests: Sequence[EncodeRequest]) -> Iterator[EncodedTexts]:
    marked = [text for request in requests for text in request.texts(special=True)]
    plain = [text for request in requests for text in request.texts(special=False)]
    marked_ids = iter(_ids(tokenizer, marked, special=True))
    plain_ids = iter(_ids(tokenizer, plain, special=False))
    for request in requests:
        ids_of_text = marked_ids if request.add_special_tokens else plain_ids
        token_ids = [] if request.text is None else next(ids_of_text)
        yield EncodedTexts(token_ids, [next(plain_ids) for _ in request.words])


def _ids(tokenizer: Tokenizer, texts: list[str], *, special: bool) -> list[list[int]]:
    if not texts:
        return []
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=special)
    return [encoding.ids for encoding in encodings]
