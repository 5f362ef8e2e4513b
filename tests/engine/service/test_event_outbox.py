"""Credit and merging, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from engine_streams import eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmesh.chassis.errors import Draining, InvalidField, SlowClient
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.engine.backend import PromptDetails, SequenceStart, TokenDetails
from trtmesh.engine.service import event_outbox
from trtmesh.engine.service.event_outbox import (
    MAX_ANSWERS,
    MAX_KV_EVENTS,
    MAX_PARTS,
    MERGED_TOKENS,
    EventOutbox,
    StepPart,
    merge,
    split,
)
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

FAREWELL = Draining("the worker stops; use another")


def part(step: int, tokens: dict[int, list[int]], offsets: dict[int, int]) -> StepPart:
    handles = list(tokens)
    made = StepPart(
        step,
        handles,
        [offsets.get(handle, 0) for handle in handles],
        [len(ids) for ids in tokens.values()],
        [token for ids in tokens.values() for token in ids],
    )
    for handle, ids in tokens.items():
        offsets[handle] = offsets.get(handle, 0) + len(ids)
    return made


class Reader:
    """Puts steps together again and checks them."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.steps = 0

    def read(self, response: epb.EngineServiceConnectResponse | None) -> None:
        for event in response.events if response else ():
            if event.HasField("step"):
                self.steps += 1
                self._read_step(event.step)

    def _read_step(self, step: epb.Step) -> None:
        assert len(set(step.handles)) == len(step.handles)
        ids = iter(step.token_ids)
        for handle, offset, count in zip(
            step.handles, step.token_offsets, step.token_counts, strict=True
        ):
            assert handle not in self.ended
            known = self.tokens.setdefault(handle, [])
            assert offset == len(known)
            known += [next(ids) for _ in range(count)]
        assert list(ids) == []
        for end in step.ends:
            assert end.handle not in self.ended
            self.ended.add(end.handle)


steps = st.lists(
    st.dictionaries(st.integers(0, 4), st.lists(st.integers(0, 99), min_size=1, max_size=3)),
    max_size=150,
)


@settings(deadline=None)
@given(steps, st.integers(1, 3), st.data())
def test_tokens_arrive_once_under_any_acknowledgements(
    history: list[dict[int, list[int]]], credit: int, data: st.DataObject
) -> None:
    outbox, reader = EventOutbox(credit, EngineMetrics()), Reader()
    offsets: dict[int, int] = {}
    expected: dict[int, list[int]] = {}
    for number, tokens in enumerate(history):
        outbox.put_step(part(number, tokens, offsets))
        for handle, ids in tokens.items():
            expected.setdefault(handle, []).extend(ids)
        if data.draw(st.booleans()):
            reader.read(outbox.take())
            assert outbox.unacknowledged_steps <= credit
        if data.draw(st.booleans()):
            outbox.acknowledge(data.draw(st.integers(0, reader.steps)))
    for handle in expected:
        outbox.put_end(epb.SequenceEnd(handle=handle))
    while outbox.holds_steps:
        outbox.acknowledge(reader.steps)
        reader.read(outbox.take())
    assert reader.tokens == expected
    assert reader.ended == set(expected)


rewritings = st.lists(
    st.dictionaries(
        st.integers(0, 2), st.tuples(st.integers(0, 6), st.lists(st.integers(0, 99), max_size=3))
    ),
    min_size=1,
    max_size=20,
)


@given(rewritings, st.data())
def test_rewritten_sequence_keeps_latest_tokens(
    history: list[dict[int, tuple[int, list[int]]]], data: st.DataObject
) -> None:
    known: dict[int, list[int]] = {}
    parts = []
    for number, changes in enumerate(history):
        made = StepPart(number)
        for handle, (back, ids) in changes.items():
            tokens = known.setdefault(handle, [])
            offset = max(0, len(tokens) - back)
            tokens[offset:] = ids
            made.handles.append(handle)
            made.token_offsets.append(offset)
            made.token_counts.append(len(ids))
            made.token_ids += ids
            made.details.append(TokenDetails(handle, [float(token) for token in ids]))
        parts.append(made)
    cut = data.draw(st.integers(0, len(parts)))
    found: dict[int, list[int]] = {}
    for half in (parts[:cut], parts[cut:]):
        if not half:
            continue
        merged = merge(half)
        fresh = iter(merged.token_ids)
        log_probs = {details.key: details.log_probs for details in merged.details}
        for handle, offset, count in zip(
            merged.handles, merged.token_offsets, merged.token_counts, strict=True
        ):
            tokens = found.setdefault(handle, [])
            assert offset <= len(tokens)
            tokens[offset:] = [next(fresh) for _ in range(count)]
            assert log_probs[handle] == [float(token) for token in tokens[offset:]]
    assert found == known


def test_stalled_router_keeps_rewritten_sequence_about_once() -> None:
    outbox = EventOutbox(1, EngineMetrics())
    for step in range(500):
        ids = list(range(step, step + 10_000))
        outbox.put_step(StepPart(step, [7], [0], [len(ids)], ids))
        assert sum(len(part.token_ids) for part in outbox._parts) <= MERGED_TOKENS + 10_000
    response = outbox.take()
    assert response
    (event,) = response.events
    assert list(event.step.token_ids) == list(range(499, 10_499))


def test_stable_batch_merges_like_changing_batch() -> None:
    offsets: dict[int, int] = {}
    parts = [part(step, {7: [step], 8: [10 + step]}, offsets) for step in range(3)]
    parts[1].handles = list(parts[1].handles)
    merged = merge(parts)
    assert (merged.handles, merged.token_offsets, merged.token_counts) == ([7, 8], [0, 0], [3, 3])
    assert merged.token_ids == [0, 1, 2, 10, 11, 12]
    assert merged.step_count == 2


def test_details_merge_with_their_tokens() -> None:
    def with_details(step: int) -> StepPart:
        made = part(step, {7: [step]}, {7: step})
        logits = Tensor(1, (1, 2), bytes([step] * 8))
        made.details = [TokenDetails(7, [float(step)], float(step), [([step], [0.0])], logits)]
        return made

    merged = merge([with_details(1), with_details(2)])
    (details,) = merged.details
    assert details.log_probs == [1.0, 2.0]
    assert details.cumulative_log_prob == 2.0
    assert details.top_log_probs == [([1], [0.0]), ([2], [0.0])]
    assert details.generation_logits == Tensor(1, (2, 2), bytes([1] * 8 + [2] * 8))


def test_merged_steps_are_counted() -> None:
    metrics = EngineMetrics()
    outbox = EventOutbox(1, metrics)
    offsets: dict[int, int] = {}
    total = 3 * MAX_PARTS
    for step in range(total):
        outbox.put_step(part(step, {1: [step]}, offsets))
    assert outbox.take()
    assert metrics.merged_steps == total - 1


def test_only_steps_need_credit() -> None:
    outbox = EventOutbox(1, EngineMetrics())
    outbox.put_end(epb.SequenceEnd(handle=1))
    assert outbox.take()
    outbox.put_end(epb.SequenceEnd(handle=2))
    assert outbox.take() is None
    outbox.put_load(epb.Load(step_count=1))
    outbox.put_load(epb.Load(step_count=2))
    response = outbox.take()
    assert response
    assert [event.load.step_count for event in response.events] == [2]
    outbox.finish(FAREWELL)
    response = outbox.take()
    assert response
    assert response.events[0].step.ends[0].handle == 2
    with pytest.raises(Draining):
        outbox.check_open()


class Told:
    """A sink with room, which notes the kinds of events in each message."""

    def __init__(self) -> None:
        self.messages: list[list[str | None]] = []

    def write_now(self, message: epb.EngineServiceConnectResponse) -> bool:
        self.messages.append([event.WhichOneof("event") for event in message.events])
        return True

    async def write(self, message: epb.EngineServiceConnectResponse) -> None:
        self.write_now(message)


async def test_load_goes_with_a_step_but_for_news(monkeypatch: pytest.MonkeyPatch) -> None:
    # No busy machine lets a load go alone before its step.
    monkeypatch.setattr(event_outbox, "LOAD_SECONDS", 60.0)
    outbox, told = EventOutbox(100, EngineMetrics()), Told()
    async with asyncio.TaskGroup() as group:
        group.create_task(outbox.forward(told))
        load, step = outbox.put_load, outbox.put_step
        puts: list[tuple[Callable[[], None], list[list[str]]]] = [
            (partial(load, epb.Load()), [["load"]]),
            (partial(step, StepPart(1, [7], [0], [1], [1])), [["step"]]),
            (partial(load, epb.Load()), []),
            (partial(step, StepPart(2, [7], [1], [1], [1])), [["step", "load"]]),
            (partial(load, epb.Load(draining=True)), [["load"]]),
        ]
        for put, messages in puts:
            put()
            for _ in range(3):
                await asyncio.sleep(0)
            assert told.messages == messages
            told.messages.clear()
        monkeypatch.setattr(event_outbox, "LOAD_SECONDS", 0.01)
        outbox.put_step(StepPart(3, [7], [2], [1], [1]))
        await asyncio.sleep(0)
        outbox.put_load(epb.Load(draining=True))
        await eventually(lambda: len(told.messages) > 1)
        assert told.messages == [["step"], ["load"]]
        outbox.finish(FAREWELL)


def test_acknowledgement_of_unsent_steps_is_refused() -> None:
    outbox = EventOutbox(1, EngineMetrics())
    with pytest.raises(
        InvalidField, match=r"acknowledge.received_steps is 1 but must be at most 0"
    ):
        outbox.acknowledge(1)


def test_lost_kv_events_leave_a_gap() -> None:
    outbox = EventOutbox(1, EngineMetrics())
    event = epb.KvEvent(cleared=epb.KvBlocksCleared())
    outbox.put_kv_events(9, 0, [event] * MAX_KV_EVENTS)
    outbox.put_kv_events(9, MAX_KV_EVENTS, [event, event])
    response = outbox.take()
    assert response
    assert response.events[0].kv_events.first_sequence == MAX_KV_EVENTS
    assert len(response.events[0].kv_events.events) == 2


def test_kv_snapshot_replaces_waiting_events() -> None:
    outbox = EventOutbox(1, EngineMetrics())
    event = epb.KvEvent(cleared=epb.KvBlocksCleared())
    outbox.put_kv_events(9, 0, [event])
    outbox.put_kv_snapshot(epb.KvEvents(epoch=9, first_sequence=1, snapshot=True))
    outbox.put_kv_events(9, 1, [event])
    response = outbox.take()
    assert response
    assert [e.kv_events.snapshot for e in response.events] == [True, False]
    assert response.events[1].kv_events.first_sequence == 1


def test_unread_answers_are_bounded() -> None:
    outbox = EventOutbox(1, EngineMetrics())
    for _ in range(MAX_ANSWERS):
        outbox.put_answer(epb.EngineEvent())
    with pytest.raises(SlowClient):
        outbox.put_answer(epb.EngineEvent())


ROW_BYTES = 8


def with_logits(made: StepPart) -> StepPart:
    """Gives every token a distinguishable row of logits, and a prompt before the first token."""
    ids = iter(made.token_ids)
    for handle, offset, count in zip(
        made.handles, made.token_offsets, made.token_counts, strict=True
    ):
        data = b"".join(next(ids).to_bytes(ROW_BYTES, "little") for _ in range(count))
        made.details.append(TokenDetails(handle, generation_logits=Tensor(1, (count, 2), data)))
        if not offset:
            made.prompts.append(PromptDetails(handle, context_logits=Tensor(1, (1, 2), b"p" * 8)))
            made.starts.append(SequenceStart(handle, pb.PerfMetrics(arrival_time_ns=handle + 1)))
    return made


def bytes_of(step: epb.Step) -> int:
    tensors = [each.details.generation_logits for each in step.details]
    return sum(len(t.data) for t in [*tensors, *(p.details.context_logits for p in step.prompts)])


@settings(deadline=None)
@given(steps, st.integers(1, 10), st.data())
def test_logits_are_split_without_loss(
    history: list[dict[int, list[int]]], rows: int, data: st.DataObject
) -> None:
    most = rows * ROW_BYTES
    outbox, reader = EventOutbox(2, EngineMetrics(), most), Reader()
    offsets: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    prompts: set[int] = set()
    starts: dict[int, int] = {}

    def read(response: epb.EngineServiceConnectResponse | None) -> None:
        reader.read(response)
        for event in response.events if response else ():
            assert bytes_of(event.step) <= most
            for prompt in event.step.prompts:
                assert prompt.handle not in prompts
                prompts.add(prompt.handle)
            for start in event.step.starts:
                assert start.handle not in starts
                starts[start.handle] = start.perf_metrics.arrival_time_ns
            for each in event.step.details:
                assert starts[each.handle] == each.handle + 1, "the start comes first"
                raw = each.details.generation_logits.data
                values = [raw[at : at + ROW_BYTES] for at in range(0, len(raw), ROW_BYTES)]
                found.setdefault(each.handle, []).extend(
                    int.from_bytes(value, "little") for value in values
                )
                assert each.handle in prompts, "the prompt comes first"

    for number, tokens in enumerate(history):
        outbox.put_step(with_logits(part(number, tokens, offsets)))
        if data.draw(st.booleans()):
            read(outbox.take())
        if data.draw(st.booleans()):
            outbox.acknowledge(reader.steps)
    for handle in offsets:
        outbox.put_end(epb.SequenceEnd(handle=handle))
    outbox.finish(FAREWELL)
    while response := outbox.take():
        assert len(reader.ended) in (0, len(offsets))
        read(response)
    assert found == reader.tokens
    assert reader.ended == set(offsets)


def test_part_without_logits_is_not_split() -> None:
    whole = part(1, {1: [5, 6], 2: [7]}, {})
    (same,) = split(whole, 1)
    assert same is whole


def test_message_has_as_many_states_as_fit() -> None:
    outbox = EventOutbox(8, EngineMetrics(), most_tensor_bytes=100)
    descriptor = transfer.HandoffDescriptor(backend_state=bytes(40))
    for handle in range(5):
        outbox.put_end(epb.SequenceEnd(handle=handle, handoff=descriptor))
    sent = []
    while response := outbox.take():
        (event,) = response.events
        sent.append([end.handle for end in event.step.ends])
        assert outbox.ending == set(range(sum(map(len, sent)), 5))
    assert sent == [[0, 1], [2, 3], [4]]
