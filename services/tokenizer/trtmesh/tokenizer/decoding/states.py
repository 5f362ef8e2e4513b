"""The decode states of one router's stream, by handle: token ids in, text out, each ended by stop texts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol
from weakref import WeakValueDictionary

from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    Draining,
    InternalError,
    InvalidField,
    InvalidRequest,
    QueueFull,
    TrtmeshError,
)
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.panics import is_failure
from trtmesh.chassis.stop_texts import NO_SPECIAL_TOKENS, StopTexts
from trtmesh.tokenizer.decoding.stop_matcher import StopMatcher, matcher_of
from trtmesh.tokenizer.detokenizers.base import TextDecoder
from trtmesh.tokenizer.metrics import TokenizerMetrics
from trtmesh.tokenizer.vocabulary import Vocabulary
from trtmesh.v1 import tokenizer_pb2 as pb

log = logging.getLogger(__name__)

NO_MARKS: Mapping[int, str] = MappingProxyType({})


class Workload:
    """Counts the encodes and decode states of all streams. Every `begin` is matched by an `end`."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._draining = False
        self._idle = asyncio.Event()
        """Set at the end of a drain."""

    def begin(self) -> None:
        """Admits one encode or sequence. Raises Draining."""
        if self._draining:
            raise Draining("the tokenizer is draining and admits no new encodes or sequences")
        self._in_flight += 1

    def end(self, count: int = 1) -> None:
        self._in_flight -= count
        if self._draining and not self._in_flight:
            self._idle.set()

    async def drain(self) -> None:
        """Admits nothing more and returns when nothing is in flight."""
        self._draining = True
        if self._in_flight:
            await self._idle.wait()


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop text was found."""

    stop_index: int
    token_count: int
    """Tokens of the call up to and including the completing token; 0 if an earlier call completed the stop text."""


class TextOptions(Protocol):
    """How ids become text: an OpenDecodeCommand, or the same values of a router in this process."""

    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def stop_texts(self) -> Sequence[str]: ...
    @property
    def include_stop_text(self) -> bool: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_is_cut(self) -> bool: ...


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """Decodes one sequence. The text does not depend on how the ids are split into calls."""

    _decoder: TextDecoder
    _matcher: StopMatcher | None
    _vocabulary_size: int
    request_id: str = ""
    min_tokens: int = 0
    """Fewest tokens before the last token of a stop text."""
    _pushed: int = 0
    """Tokens of earlier calls, where stop texts are looked for."""
    _absorbed_stop: Stop | None = None
    _over: bool = False
    _finished: bool = False

    def absorb(self, token_ids: Sequence[int]) -> None:
        """Takes tokens with delivered text; the next `push` returns a stop text completed here."""
        _, stop = self.push(token_ids)
        if stop is not None:
            self._absorbed_stop = Stop(stop.stop_index, 0)

    def push(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        """Returns the newly certain text, and once the stop text at the end of the sequence.

        Ignores tokens after a stop text. Raises InvalidRequest for tokens after `finish`.
        """
        if self._over:
            return self._push_after_the_end(token_ids)
        text, count, matcher = "", 0, self._matcher
        marks = matcher.marks if matcher else NO_MARKS
        for token_id in token_ids:
            # This loop runs for every token served; enumerate doubles the cost.
            count += 1
            if token_id >= self._vocabulary_size:
                # A row of the model's padded embedding: the tokenizer has no text for it.
                continue
            delta = self._decoder.push(token_id)
            if matcher is not None:
                may_end = self._pushed + count > self.min_tokens
                if token_id in marks:
                    rest = self._decoder.flush()
                    delta = matcher.push_mark(marks[token_id], rest, may_end=may_end)
                else:
                    delta = matcher.push(delta, may_end=may_end)
                if matcher.stop_index is not None:
                    self._over = True
                    return text + delta, Stop(matcher.stop_index, count)
            text += delta
        self._pushed += count
        return text, None

    def finish(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        """Pushes the last tokens and returns all text still held back."""
        text, stop = self.push(token_ids)
        if self._over:
            return text, stop
        self._over = self._finished = True
        rest = self._decoder.flush()
        if self._matcher is None:
            return text + rest, None
        text += self._matcher.push(rest, may_end=self._pushed > self.min_tokens)
        if self._matcher.stop_index is not None:
            return text, Stop(self._matcher.stop_index, len(token_ids))
        return text + self._matcher.flush(), None

    def _push_after_the_end(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        if self._finished and token_ids:
            raise InvalidRequest(
                f"has {len(token_ids)} ids after the sequence was finished; close the handle instead",
                field="token_ids",
            )
        stop, self._absorbed_stop = self._absorbed_stop, None
        return "", stop


_ABSORBED_AT_ONCE = 4096
"""Delivered tokens absorbed before other streams get a turn: about a millisecond."""


@dataclass(slots=True)
class DecodeStates:
    """Executes the decode commands of a stream, in order. A failure concerns only its handle.

    A failure is kept until the handle is closed, and every DecodeCommand for the handle returns the failure: OpenDecode
    has no answer.
    """

    _vocabulary: Vocabulary
    _workload: Workload
    _metrics: TokenizerMetrics
    _max_decode_states: int
    _sequences: dict[int, DecodeSequence] = field(default_factory=dict)
    _failures: dict[int, TrtmeshError] = field(default_factory=dict)
    _stop_texts: WeakValueDictionary[tuple[bool, tuple[str, ...]], StopTexts] = field(
        default_factory=WeakValueDictionary
    )
    """Shared by the sequences of an item: building the automaton takes longer than a step."""

    def open(
        self, handle: int, request_id: str, options: TextOptions, delivered: Sequence[int]
    ) -> Iterator[None]:
        """Opens a sequence and absorbs the delivered tokens. Yields between steps of a millisecond."""
        try:
            sequence = self._begin(handle, request_id, options)
            self._metrics.replayed_tokens += len(delivered)
            for start in range(0, len(delivered), _ABSORBED_AT_ONCE):
                sequence.absorb(delivered[start : start + _ABSORBED_AT_ONCE])
                yield
        except BaseException as error:  # noqa: BLE001 - see _known
            with request_id_bound(request_id):
                self._fail(handle, _known(error))

    def decode(self, command: pb.DecodeCommand, answer: pb.Decoded) -> None:
        """Fills `answer` with the texts of new tokens, in the order of the handles."""
        # An empty command has an answer too.
        answer.SetInParent()
        handles = list(command.handles)
        counts, token_ids = list(command.token_counts), list(command.token_ids)
        finished = frozenset(command.finished_handles)
        if mistake := _find_mistake(handles, counts, len(token_ids), finished):
            self._refuse(handles, finished, mistake, answer)
            return
        start = 0
        texts = []
        for handle, count in zip(handles, counts, strict=True):
            end, text = start + count, ""
            try:
                text, stop = self.decode_one(
                    handle, token_ids[start:end], finished=handle in finished
                )
            except TrtmeshError as error:
                answer.failures.add(handle=handle, error=to_proto(error))
            else:
                if stop is not None:
                    answer.stops.add(
                        handle=handle, stop_index=stop.stop_index, token_count=stop.token_count
                    )
            texts.append(text)
            start = end
        answer.handles.extend(handles)
        answer.texts.extend(texts)

    def close(self, handles: Iterable[int]) -> None:
        """Drops sequences and failures; ignores unknown handles."""
        for handle in handles:
            self._failures.pop(handle, None)
            self._drop(handle)

    def close_all(self) -> None:
        self.close([*self._sequences, *self._failures])

    def _begin(self, handle: int, request_id: str, options: TextOptions) -> DecodeSequence:
        if handle in self._sequences or handle in self._failures:
            raise _wrong_handle(handle, "is open already; close it before reuse")
        if len(self._sequences) >= self._max_decode_states:
            raise QueueFull(
                f"the stream has {len(self._sequences)} open decode handles, the most allowed",
                value=str(len(self._sequences)),
                limit=f"at most {self._max_decode_states}",
            )
        if "" in options.stop_texts:
            raise InvalidField.of("stop_texts", "", "texts of at least one character")
        self._workload.begin()
        matcher = None
        if options.stop_texts:
            matcher = matcher_of(
                self._shared_stop_texts(options), include_stop_text=options.include_stop_text
            )
        sequence = self._sequences[handle] = DecodeSequence(
            self._vocabulary.continuations.open(
                options.prompt_token_ids,
                is_cut=options.prompt_is_cut,
                skip_special_tokens=options.skip_special_tokens,
            ),
            matcher,
            self._vocabulary.size,
            request_id,
            options.min_tokens,
        )
        self._metrics.open_decode_states += 1
        return sequence

    def _shared_stop_texts(self, options: TextOptions) -> StopTexts:
        """Built once for all open sequences with these stop texts."""
        skip, texts = options.skip_special_tokens, tuple(options.stop_texts)
        stop_texts = self._stop_texts.get((skip, texts))
        if stop_texts is None:
            omitted = self._vocabulary.special_tokens if skip else NO_SPECIAL_TOKENS
            stop_texts = self._stop_texts[skip, texts] = StopTexts(texts, omitted)
        return stop_texts

    def decode_one(
        self, handle: int, token_ids: list[int], *, finished: bool
    ) -> tuple[str, Stop | None]:
        """Decodes new tokens of a sequence. Raises the failure of the handle."""
        self._metrics.decoded_tokens += len(token_ids)
        sequence = self._sequences.get(handle)
        if sequence is None:
            raise self._failure(handle)
        try:
            return sequence.finish(token_ids) if finished else sequence.push(token_ids)
        except BaseException as error:  # noqa: BLE001 - see _known
            with request_id_bound(sequence.request_id):
                known = _known(error)
                self._fail(handle, known)
            raise known from None

    def _refuse(
        self, handles: list[int], finished: frozenset[int], error: TrtmeshError, answer: pb.Decoded
    ) -> None:
        """Fails all handles of a malformed command."""
        answer.handles.extend(handles)
        answer.texts.extend([""] * len(handles))
        for handle in dict.fromkeys([*handles, *finished]):
            if handle in self._sequences:
                self._fail(handle, error)
            answer.failures.add(handle=handle, error=to_proto(self._failure(handle)))

    def _fail(self, handle: int, error: TrtmeshError) -> None:
        sequence = self._drop(handle)
        self._metrics.failures[error.reason] += 1
        if sequence is not None:
            with request_id_bound(sequence.request_id):
                log.info("decode handle %d failed: %s: %s", handle, error.reason, error.message)
        if len(self._failures) < self._max_decode_states:
            self._failures[handle] = error

    def _failure(self, handle: int) -> TrtmeshError:
        error = self._failures.get(handle)
        if error is None:
            error = _wrong_handle(handle, "is not open on this stream")
            self._metrics.failures[error.reason] += 1
        return error

    def _drop(self, handle: int) -> DecodeSequence | None:
        sequence = self._sequences.pop(handle, None)
        if sequence is not None:
            self._metrics.open_decode_states -= 1
            self._workload.end()
        return sequence


def _wrong_handle(handle: int, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{handle} {problem}", field="handle", value=str(handle))


def _find_mistake(
    handles: list[int], counts: list[int], token_count: int, finished: frozenset[int]
) -> InvalidRequest | None:
    """Checks the arrays of a DecodeCommand."""
    if len(handles) != len(counts):
        return InvalidRequest(
            f"have {len(handles)} and {len(counts)} entries but must have equally many",
            fields=("handles", "token_counts"),
        )
    if sum(counts) != token_count:
        return InvalidRequest(
            f"add up to {sum(counts)} but there are {token_count} token_ids", field="token_counts"
        )
    known = frozenset(handles)
    if len(known) != len(handles):
        return InvalidRequest("must be different", field="handles")
    if not finished <= known:
        return InvalidRequest(
            f"has {sorted(finished - known)}, which are not in handles", field="finished_handles"
        )
    return None


def _known(error: BaseException) -> TrtmeshError:
    """The error of one handle. Unexpected exceptions and panics of the library become errors too, and must not end
    other sequences."""
    if isinstance(error, TrtmeshError):
        return error
    if not is_failure(error):
        raise error
    log.error("unexpected error in decoding", exc_info=error)
    return InternalError(f"decoding failed: {type(error).__name__}: {error}")
