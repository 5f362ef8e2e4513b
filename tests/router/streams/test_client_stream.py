"""A client's queue keeps every event once and in order."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_constants import patch
from trtmesh.router.streams.client_stream import (
    LOOK_BYTES,
    MOST_MESSAGE_BYTES,
    OBJECT_BYTES,
    TOKEN_BYTES,
    ClientStream,
    Pace,
    WriteScheduler,
    as_response,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

OPENING = router_pb.GenerateEvent(accepted=router_pb.RequestAccepted(request_id="r"))

Key = tuple[int, int]


class Put:
    """Puts numbered tokens."""

    def __init__(self, *, details: bool) -> None:
        self.stream = ClientStream(OPENING, WriteScheduler())
        self.sent: dict[Key, list[int]] = defaultdict(list)
        self._details = details

    def tokens(self, key: Key, count: int) -> None:
        start = len(self.sent[key])
        ids = list(range(start, start + count))
        details = pb.TokenDetails(log_probs=[float(i) for i in ids]) if self._details else None
        self.stream.put_tokens(*key, start, ids[:], "".join(f"{i}," for i in ids), details)
        self.sent[key] += ids

    def other(self, key: Key) -> None:
        finished = router_pb.SequenceFinished(generated_tokens=len(self.sent[key]))
        event = router_pb.GenerateEvent(
            batch_index=key[0], sequence_index=key[1], sequence_finished=finished
        )
        self.stream.put(event)


KEYS = st.tuples(st.integers(0, 2), st.integers(0, 1))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("tokens"), KEYS, st.integers(0, 3)),
        st.tuples(st.just("other"), KEYS, st.just(0)),
        st.tuples(st.just("take"), st.just((0, 0)), st.just(0)),
    ),
    max_size=40,
)


@given(ACTIONS, st.booleans())
def test_any_interleaving_gives_every_token_once_and_in_order(
    actions: list[tuple[str, Key, int]], details: bool
) -> None:
    asyncio.run(interleave(actions, details))


async def interleave(actions: list[tuple[str, Key, int]], details: bool) -> None:
    put = Put(details=details)
    taken: list[router_pb.GenerateEvent] = []
    for action, key, count in actions:
        if action == "tokens":
            put.tokens(key, count)
        elif action == "other":
            put.other(key)
        elif put.stream.waiting_tokens or put.stream._followed:
            taken += await take(put.stream)
    put.other((0, 0))
    put.stream.close()
    taken += await take(put.stream)
    assert await put.stream.next_entries() is None
    assert put.stream.waiting_tokens == 0
    assert taken[0] == OPENING
    received: dict[Key, list[int]] = defaultdict(list)
    for event in taken[1:]:
        known = received[event.batch_index, event.sequence_index]
        if event.HasField("tokens"):
            ids = list(event.tokens.token_ids)
            assert event.tokens.token_offset == len(known)
            assert event.tokens.text == "".join(f"{i}," for i in ids)
            assert list(event.tokens.details.log_probs) == (ids if details else [])
            known += ids
        else:
            assert event.sequence_finished.generated_tokens == len(known)
    assert received == put.sent


async def take(stream: ClientStream) -> list[router_pb.GenerateEvent]:
    waiting = await stream.next_entries()
    assert waiting
    return list(as_response(waiting).events)


def opened() -> tuple[Put, ClientStream]:
    put = Put(details=False)
    return put, put.stream


async def test_waiting_tokens_are_merged_into_one_message() -> None:
    put, stream = opened()
    for _ in range(3):
        put.tokens((0, 0), 2)
        put.tokens((1, 0), 1)
    events = await take(stream)
    assert [list(event.tokens.token_ids) for event in events[1:]] == [[0, 1, 2, 3, 4, 5], [0, 1, 2]]
    assert stream.merged_tokens == 6
    put.tokens((0, 0), 1)
    (event,) = await take(stream)
    assert event.tokens.token_offset == 6


async def test_opening_event_shares_the_first_message() -> None:
    put, stream = opened()
    taking = asyncio.create_task(stream.next_entries())
    await asyncio.sleep(0)
    assert not taking.done()
    put.other((0, 0))
    waiting = await taking
    assert waiting
    assert [event.WhichOneof("event") for event in as_response(waiting).events] == [
        "accepted",
        "sequence_finished",
    ]


STARTED = router_pb.GenerateEvent(item_started=router_pb.ItemStarted(worker="w"))


async def test_an_announcement_shares_the_message_of_the_first_tokens() -> None:
    put, stream = opened()
    taking = asyncio.create_task(stream.next_entries())
    stream.announce(STARTED)
    await asyncio.sleep(0)
    put.tokens((0, 0), 1)
    put.other((0, 0))
    waiting = await taking
    assert waiting
    assert [event.WhichOneof("event") for event in as_response(waiting).events] == [
        *("accepted", "item_started", "tokens", "sequence_finished"),
    ]


async def test_an_announcement_leaves_without_tokens_after_a_while() -> None:
    _, stream = opened()
    stream.announce(STARTED)
    waiting = await stream.next_entries()
    assert waiting
    assert [event.WhichOneof("event") for event in as_response(waiting).events] == [
        "accepted",
        "item_started",
    ]


async def test_the_opening_event_leaves_alone_after_a_while() -> None:
    stream = ClientStream(OPENING, WriteScheduler())
    waiting = await stream.next_entries()
    assert waiting
    assert [event.WhichOneof("event") for event in as_response(waiting).events] == ["accepted"]


async def test_details_follow_a_text_without_tokens() -> None:
    _, stream = opened()
    stream.put_tokens(0, 0, 0, [], "a", None)
    stream.put_tokens(0, 0, 0, [1], "b", pb.TokenDetails(log_probs=[0.5]))
    event = (await take(stream))[1]
    assert event.tokens.text == "ab"
    assert list(event.tokens.details.log_probs) == [0.5]


async def test_rewritten_sequence_replaces_waiting_tokens() -> None:
    _, stream = opened()
    stream.put_tokens(0, 1, 0, [1, 2], "ab", pb.TokenDetails(log_probs=[1, 2]))
    assert await take(stream)
    stream.put_tokens(0, 1, 2, [3], "c", pb.TokenDetails(log_probs=[3]))
    stream.put_tokens(0, 1, 0, [4, 5, 6, 7], "defg", pb.TokenDetails(log_probs=[4, 5, 6, 7]))
    stream.put_tokens(0, 1, 4, [8], "h", pb.TokenDetails(log_probs=[8]))
    assert stream.waiting_tokens == 5
    (event,) = await take(stream)
    assert event.tokens.token_offset == 0
    assert list(event.tokens.token_ids) == [4, 5, 6, 7, 8]
    assert event.tokens.text == "defgh"
    assert list(event.tokens.details.log_probs) == [4, 5, 6, 7, 8]
    assert stream.waiting_tokens == 0


async def test_logits_are_never_merged() -> None:
    _, stream = opened()

    def logits() -> pb.TokenDetails:
        tensor = pb.Tensor(data_type=pb.DATA_TYPE_FP32, shape=[1, 2], data=b"x" * 8)
        return pb.TokenDetails(generation_logits=tensor)

    for index in range(3):
        stream.put_tokens(0, 0, index, [index], "", logits())
    events = await take(stream)
    assert [list(event.tokens.token_ids) for event in events[1:]] == [[0], [1], [2]]
    assert all(list(e.tokens.details.generation_logits.shape) == [1, 2] for e in events[1:])


async def test_unread_seconds_measure_the_current_write() -> None:
    put, stream = opened()
    now = asyncio.get_running_loop().time()
    put.tokens((0, 0), 1)
    assert stream.unread_seconds(now + 3600) == 0
    await take(stream)
    assert stream.unread_seconds(now + 3600) > 3000
    taking: asyncio.Task[Any] = asyncio.create_task(stream.next_entries())
    await asyncio.sleep(0)
    assert stream.unread_seconds(now + 3600) == 0
    stream.close()
    assert await taking is None


async def test_logits_leave_in_messages_of_a_bounded_size_in_order() -> None:
    row = b"x" * (MOST_MESSAGE_BYTES // 4 - 100)
    stream = ClientStream(OPENING, WriteScheduler())
    prompt = pb.PromptDetails(context_logits=pb.Tensor(shape=[1, 1], data=row * 3))
    stream.put(router_pb.GenerateEvent(prompt_details=prompt))
    for number in range(7):
        details = pb.TokenDetails(
            log_probs=[-1.0], generation_logits=pb.Tensor(shape=[1, 1], data=row)
        )
        stream.put_tokens(number % 2, 0, number // 2, [number], "t", details)
    stream.put_tokens(5, 0, 0, [99], "plain", None)
    assert 10 * len(row) < stream.waiting_bytes < 10 * (len(row) + 100)
    messages = await all_messages(stream)
    assert [len(message.events) for message in messages] == [3, 4, 3]
    events = [event for message in messages for event in message.events]
    assert [list(e.tokens.token_ids) for e in events[2:]] == [
        [n] for n in (0, 1, 2, 3, 4, 5, 6, 99)
    ]
    assert (stream.waiting_tokens, stream.waiting_bytes) == (0, 0)


async def all_messages(stream: ClientStream) -> list[router_pb.GenerateResponse]:
    stream.close()
    messages = []
    while (waiting := await stream.next_entries()) is not None:
        assert stream.waiting_bytes >= 0
        messages.append(as_response(waiting))
    return messages


async def test_tokens_merge_no_further_than_one_message_holds() -> None:
    put, stream = opened()
    for _ in range(400):
        put.tokens((0, 0), 2000)
    messages = await all_messages(stream)
    assert len(messages) > 1
    assert all(message.ByteSize() < 2 * MOST_MESSAGE_BYTES for message in messages)
    tokens = [list(event.tokens.token_ids) for m in messages for event in m.events]
    assert [token for ids in tokens for token in ids] == put.sent[0, 0]


class Heard(Pace):
    """Records what it is told, and does nothing."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.held: list[int] = []

    def on_waiting(self, held: int) -> None:
        self.held.append(held)

    def on_full(self) -> None:
        self.words.append("full")

    def on_read(self) -> None:
        self.words.append("read")


@pytest.mark.parametrize("credit", [{"buffer_tokens": 10}, {"buffer_bytes": 40}])
async def test_credit_counts_tokens_and_bytes_and_returns_after_the_write(
    credit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, **credit)
    stream, heard = ClientStream(OPENING, WriteScheduler()), Heard()
    stream.watcher = heard
    for number in range(10):
        stream.put_tokens(0, 0, number, [7], "", None)
    assert heard.words == []
    for number in range(10, 15):
        stream.put_tokens(0, 0, number, [7], "", None)
    assert heard.words == ["full"]
    await stream.next_entries()
    # The message is being written.
    assert heard.words == ["full"]
    stream.put_tokens(0, 0, 15, [7], "", None)
    await stream.next_entries()
    assert heard.words == ["full", "read"]


async def test_watcher_hears_of_output_that_a_client_leaves_and_of_its_end() -> None:
    stream, heard = ClientStream(OPENING, WriteScheduler()), Heard()
    stream.watcher = heard
    for number in range(LOOK_BYTES):
        stream.put_tokens(0, 0, number, [7], "text", None)
        await stream.next_entries()
    assert heard.held == []
    for number in range(LOOK_BYTES):
        stream.put_tokens(0, 0, number, [7], "text", None)
    size = TOKEN_BYTES + len("text")
    reports = LOOK_BYTES * size // (LOOK_BYTES + size)
    assert len(heard.held) == reports
    assert heard.held == sorted(heard.held)
    unreported = LOOK_BYTES * (size + OBJECT_BYTES) - heard.held[-1]
    assert 0 <= unreported <= (LOOK_BYTES // size + 1) * (size + OBJECT_BYTES)
    await stream.next_entries()
    assert heard.held[reports:] == [0]
    stream.put_tokens(0, 0, LOOK_BYTES, [7], "text", None)
    await stream.next_entries()
    assert heard.held[reports:] == [0]


async def test_watcher_hears_what_remains_after_a_message() -> None:
    stream, heard = ClientStream(OPENING, WriteScheduler()), Heard()
    stream.watcher = heard
    for number in range(3):
        logits = pb.Tensor(data=bytes(MOST_MESSAGE_BYTES))
        details = pb.TokenDetails(generation_logits=logits)
        stream.put_tokens(0, 0, number, [7], "", details)
    await stream.next_entries()
    while heard.held[-1]:
        assert heard.held[-1] == stream.waiting_bytes + OBJECT_BYTES * stream.waiting_tokens
        await stream.next_entries()
