"""A sequence between a worker and changing decoders, answering at any pace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmesh.chassis.errors import BackendFailed, TrtmeshError, WorkerLost
from trtmesh.chassis.parsing import parse_config
from trtmesh.chassis.vocabulary import Prompt
from trtmesh.client.events import Tokens, events_of
from trtmesh.client.options import build_config
from trtmesh.client.results import SequenceResult
from trtmesh.router.metrics import Latencies, ModelMetrics
from trtmesh.router.streams.client_stream import ClientStream, WriteScheduler, as_response
from trtmesh.router.streams.sequence import Delivery, End, SequenceRun, SequenceTimes
from trtmesh.router.tokenizers.decoding import DecodedSequence
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


class LetterDecoder:
    """WriteScheduler every id into a letter and finds one stop letter; answers on command and holds a letter back."""

    def __init__(self, stop_id: int | None) -> None:
        self._stop_id = stop_id
        self._asked: list[tuple[DecodedSequence, list[int], bool]] = []
        self._held: list[int] = []
        self.dropped = False

    def take_over(self, run: DecodedSequence) -> None:
        """Takes over a sequence, as a tokenizer does."""
        run.decoder = self
        self._held = run.token_ids[: run.decoded][-1:]
        if run.decoded < len(run.token_ids):
            self.decode(run, run.token_ids[run.decoded :])
        if run.ended:
            self.finish(run)

    def decode(self, sequence: DecodedSequence, token_ids: list[int]) -> None:
        self._asked.append((sequence, token_ids, False))

    def finish(self, sequence: DecodedSequence) -> None:
        self._asked.append((sequence, [], True))

    def restart(self, sequence: DecodedSequence) -> None:
        self._asked.clear()
        self._held = []

    def drop(self, sequence: DecodedSequence) -> None:
        self.dropped = True
        self._asked.clear()

    def answer(self) -> bool:
        """Answers the oldest request; False without one."""
        if not self._asked:
            return False
        run, token_ids, last = self._asked.pop(0)
        if last:
            run.on_text(0, letters(self._held))
            run.on_text_complete()
        elif self._stop_id in token_ids:
            count = token_ids.index(self._stop_id) + 1
            run.on_stop_text(count, letters([*self._held, *token_ids[: count - 1]]), 0)
        else:
            *certain, held = [*self._held, *token_ids]
            self._held = [held]
            run.on_text(len(token_ids), letters(certain))
        return True


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(97 + token_id) for token_id in token_ids)


@dataclass
class OneItem:
    """An owner of a sequence with a record of calls."""

    settled: list[SequenceRun] = field(default_factory=list)
    losses: list[TrtmeshError] = field(default_factory=list)
    handed_over: list[SequenceRun] = field(default_factory=list)
    in_two_parts: bool = False

    def on_settled(self, run: SequenceRun) -> None:
        self.settled.append(run)

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        self.losses.append(error)

    def migrate(self, runs: Sequence[SequenceRun], address: str, error: TrtmeshError) -> bool:
        return False

    def continues(self, run: SequenceRun) -> bool:
        return self.in_two_parts

    def on_handed_over(self, run: SequenceRun, end: End) -> None:
        self.handed_over.append(run)

    def hand_over(
        self, runs: Sequence[SequenceRun], address: str, cause: str
    ) -> Sequence[SequenceRun]:
        return runs


@dataclass
class OneWorker:
    """An assignment with a record of calls."""

    address: str = "w"
    stops: list[int] = field(default_factory=list)
    released: bool = False
    leases: list[str] = field(default_factory=list)

    def leave_kv(self, lease_id: str, seconds: float) -> None:
        self.leases.append(lease_id)

    def stop(self, reason: int) -> None:
        self.stops.append(reason)

    def release(self, error: TrtmeshError | None) -> None:
        self.released = True


def make_run(client: ClientStream, owner: OneItem, **options: Any) -> SequenceRun:
    message = build_config(None, options)
    item = ItemRequest(0, Prompt(text="x"), parse_config(message), message)
    return SequenceRun(
        item,
        0,
        prompt=range(1, 12),
        request_id="r",
        model="m",
        times=SequenceTimes(0.0, Latencies()),
        client=client,
        owner=owner,
    )


async def received(client: ClientStream) -> tuple[list[int], str, int]:
    """All ids and text put, with contiguous offsets, and the number of token events."""
    client.put(router_pb.GenerateEvent(item_finished=router_pb.ItemFinished()))
    waiting = await client.next_entries()
    assert waiting
    response = as_response(waiting)
    ids: list[int] = []
    text = ""
    events = [event.tokens for event in response.events if event.HasField("tokens")]
    for tokens in events:
        assert tokens.token_offset == len(ids)
        ids += tokens.token_ids
        text += tokens.text
    return ids, text, len(events)


PLAYS = st.fixed_dictionaries(
    {
        "token_ids": st.lists(st.integers(0, 9), max_size=24),
        "chunks": st.lists(st.integers(1, 4), max_size=24),
        "moments": st.lists(st.sampled_from(["worker", "decoder", "move", "lose"]), max_size=80),
        "stop_id": st.none() | st.integers(0, 9),
        "failed": st.booleans(),
        "stream": st.booleans(),
        "repeat": st.booleans(),
    }
)


@settings(deadline=None)
@given(PLAYS)
def test_any_pace_gives_every_token_and_the_whole_text_once(play: dict[str, Any]) -> None:
    asyncio.run(perform(**play))


async def perform(
    *,
    token_ids: list[int],
    chunks: list[int],
    moments: list[str],
    stop_id: int | None,
    failed: bool,
    stream: bool,
    repeat: bool,
) -> None:
    client = ClientStream(router_pb.GenerateEvent(), WriteScheduler())
    owner = OneItem()
    options: dict[str, Any] = {"stream": stream, "log_probs": True}
    options |= {"stop_texts": ["s"]} if stop_id is not None else {}
    run = make_run(client, owner, **options)
    worker = OneWorker()
    stops = worker.stops
    run.assign(worker)
    decoder = LetterDecoder(stop_id)
    run.decoder = decoder
    script = worker_script(token_ids, chunks, 0, failed=failed, repeat=repeat)

    def lose() -> None:
        """The worker is lost; another continues after the last received token."""
        nonlocal script
        run.on_worker_lost(WorkerLost("gone", worker="w"))
        if run.waits_for_worker:
            run.assign(worker)
            start = len(run.token_ids)
            script = worker_script(token_ids, chunks, start, failed=failed, repeat=False)

    def move() -> None:
        nonlocal decoder
        if not run.over:
            decoder = LetterDecoder(stop_id)
            decoder.take_over(run)

    for moment in [*moments, *["worker"] * 60, *["decoder"] * 60]:
        if moment == "worker" and script:
            part = script.pop(0)
            if isinstance(part, End):
                run.on_end(part)
            else:
                run.on_tokens(*part, log_probs_of(token_ids, *part))
        elif moment == "decoder":
            decoder.answer()
        elif moment == "move":
            move()
        elif moment == "lose":
            lose()
    assert owner.settled == [run]
    assert decoder.dropped
    found = stop_id in token_ids
    count = token_ids.index(stop_id) + 1 if stop_id is not None and found else len(token_ids)
    ids, text, events = await received(client)
    assert ids == run.token_ids == token_ids[:count]
    assert text == letters(token_ids[: count - 1] if found else token_ids)
    assert (run.cumulative_log_prob or 0.0) == sum(token_ids[:count])
    assert (run.stop_text is not None) == found
    assert set(stops) <= {pb.FINISH_REASON_STOP_WORD}
    assert (run.error is None) == (found or not failed)
    assert stream or events <= 1


def log_probs_of(token_ids: list[int], offset: int, part: list[int]) -> pb.TokenDetails:
    """Each token's log-probability is its id."""
    total = sum(token_ids[: offset + len(part)])
    return pb.TokenDetails(log_probs=part, cumulative_log_prob=total)


def worker_script(
    token_ids: list[int], chunks: list[int], start: int, *, failed: bool, repeat: bool
) -> list[tuple[int, list[int]] | End]:
    """A worker's messages from token `start` on: chunks of tokens, possibly repeated, and the end."""
    script: list[tuple[int, list[int]] | End] = []
    for count in [*chunks, len(token_ids)]:
        back = min(start, 1) if repeat else 0
        if part := token_ids[start : start + count]:
            script.append((start - back, token_ids[start - back : start] + part))
        start += len(part)
    error = BackendFailed("no", worker="w") if failed else None
    reason = pb.FINISH_REASON_ERROR if failed else pb.FINISH_REASON_LENGTH
    script.append(End(reason, error, cumulative_log_prob=sum(token_ids)))
    return script


async def test_without_a_decoder_tokens_leave_at_once() -> None:
    client, owner = ClientStream(router_pb.GenerateEvent(), WriteScheduler()), OneItem()
    run = make_run(client, owner, text=False)
    run.on_tokens(0, [1, 2])
    assert client.waiting_tokens == 2
    run.on_end(End(pb.FINISH_REASON_LENGTH))
    assert owner.settled == [run]
    assert (await received(client))[:2] == ([1, 2], "")


async def test_abandoned_sequence_stops_on_the_worker_without_output() -> None:
    client, owner = ClientStream(router_pb.GenerateEvent(), WriteScheduler()), OneItem()
    run = make_run(client, owner)
    worker = OneWorker()
    run.assign(worker)
    decoder = LetterDecoder(None)
    run.decoder = decoder
    run.on_tokens(0, [1])
    run.end(pb.FINISH_REASON_CANCELLED, deliver=Delivery.NOTHING)
    run.on_tokens(1, [2])
    run.on_text(1, "b")
    run.on_end(End(pb.FINISH_REASON_CANCELLED))
    assert worker.stops == [pb.FINISH_REASON_CANCELLED]
    assert decoder.dropped
    assert not owner.settled
    assert (await received(client))[:2] == ([], "")


async def test_moved_sequence_has_the_output_of_an_unmoved_one() -> None:
    """Prompt data and start once, log-probabilities summed over both workers, and times from the first worker on."""
    client, owner = ClientStream(router_pb.GenerateEvent(), WriteScheduler()), OneItem()
    run = make_run(client, owner, text=False, log_probs=True, prompt_log_probs=True)
    run.assign(OneWorker())
    run.on_prompt(pb.PromptDetails(log_probs=[-3.0]))
    run.on_start(pb.PerfMetrics(arrival_time_ns=1))
    run.on_tokens(0, [1, 2], pb.TokenDetails(log_probs=[-1.0, -2.0], cumulative_log_prob=-3.0))
    run.times.first_token = asyncio.get_running_loop().time()
    run.on_worker_lost(WorkerLost("gone", worker="w"))
    assert [error.worker for error in owner.losses] == ["w"]
    assert run.waits_for_worker
    run.assign(OneWorker())
    run.on_prompt(pb.PromptDetails(log_probs=[-3.0]))
    run.on_start(pb.PerfMetrics(arrival_time_ns=2**62))
    run.on_tokens(1, [2, 3], pb.TokenDetails(log_probs=[-2.0, -4.0]))
    later = pb.PerfMetrics(
        arrival_time_ns=2**62, first_scheduled_time_ns=2**62, first_token_time_ns=2**62
    )
    run.on_end(End(pb.FINISH_REASON_LENGTH, perf_metrics=later))
    assert owner.settled == [run]
    assert run.cumulative_log_prob == -7.0
    assert run.ending
    metrics = run.ending.perf_metrics
    assert metrics
    assert metrics.first_scheduled_time_ns == metrics.first_token_time_ns < 2**62
    assert metrics.arrival_time_ns < metrics.first_token_time_ns
    client.close()
    waiting = await client.next_entries()
    assert waiting
    response = as_response(waiting)
    kinds = [event.WhichOneof("event") for event in response.events[1:]]
    assert kinds == ["prompt_details", "sequence_started", "tokens"]
    assert response.events[2].sequence_started.perf_metrics.arrival_time_ns == 1
    details = response.events[3].tokens.details
    assert list(details.log_probs) == [-1.0, -2.0, -4.0]
    assert details.cumulative_log_prob == -7.0


@pytest.mark.parametrize("stream", [True, False])
async def test_start_is_reported_only_for_streamed_tokens(stream: bool) -> None:
    client, owner = ClientStream(router_pb.GenerateEvent(), WriteScheduler()), OneItem()
    run = make_run(client, owner, text=False, stream=stream)
    run.assign(OneWorker())
    run.on_start(pb.PerfMetrics(arrival_time_ns=1))
    run.on_tokens(0, [1])
    run.on_end(End(pb.FINISH_REASON_LENGTH))
    client.close()
    waiting = await client.next_entries()
    assert waiting
    kinds = [event.WhichOneof("event") for event in as_response(waiting).events[1:]]
    assert kinds == ["sequence_started", "tokens"][not stream :]


async def test_stopped_sequence_without_a_worker_ends_at_once() -> None:
    client, owner = ClientStream(router_pb.GenerateEvent(), WriteScheduler()), OneItem()
    run = make_run(client, owner, text=False)
    run.assign(OneWorker())
    run.on_tokens(0, [1])
    run.on_worker_lost(WorkerLost("gone", worker="w"))
    run.end(pb.FINISH_REASON_STOPPED, deliver=Delivery.ALL)
    assert owner.settled == [run]
    assert (run.reason, run.error) == (pb.FINISH_REASON_STOPPED, None)


async def test_stop_that_a_released_lease_overtakes_keeps_its_reason() -> None:
    client, owner = ClientStream(router_pb.GenerateEvent(), WriteScheduler()), OneItem()
    run = make_run(client, owner, text=False)
    worker = OneWorker()
    run.assign(worker)
    run.on_tokens(0, [1])
    run.end(pb.FINISH_REASON_STOPPED, deliver=Delivery.ALL)
    assert worker.stops == [pb.FINISH_REASON_STOPPED]
    run.on_end(End(pb.FINISH_REASON_CANCELLED))
    assert run.reason == pb.FINISH_REASON_STOPPED


async def test_stop_text_from_a_lost_worker_ends_no_beam() -> None:
    """The tokenizer finds it only then. The search of the next worker may have another beam in this place."""
    client, owner = ClientStream(router_pb.GenerateEvent(), WriteScheduler()), OneItem()
    run = make_run(client, owner, beam_width=2, stop_texts=["s"])
    run.decoder = decoder = LetterDecoder(stop_id=1)
    run.assign(OneWorker())
    run.on_tokens(0, [0, 1])
    run.on_worker_lost(WorkerLost("it is gone"))
    assert decoder.answer()
    assert not run.over
    run.assign(OneWorker("another"))
    run.on_tokens(0, [2])
    run.on_end(End(pb.FINISH_REASON_LENGTH))
    while decoder.answer():
        pass
    assert owner.settled == [run]
    assert (run.reason, run.token_ids) == (pb.FINISH_REASON_LENGTH, [2])


BEAM_PLAYS = st.fixed_dictionaries(
    {
        "versions": st.lists(
            st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=6)),
            min_size=1,
            max_size=8,
        ),
        "moments": st.lists(st.sampled_from(["worker", "decoder", "move", "take"]), max_size=60),
        "stop_id": st.none() | st.integers(0, 9),
        "stream": st.booleans(),
        "text": st.booleans(),
    }
)


@settings(deadline=None)
@given(BEAM_PLAYS)
def test_client_keeps_the_last_version_of_a_rewritten_beam(play: dict[str, Any]) -> None:
    asyncio.run(rewrite(**play))


async def rewrite(
    *,
    versions: list[tuple[bool, list[int]]],
    moments: list[str],
    stop_id: int | None,
    stream: bool,
    text: bool,
) -> None:
    """Each version extends or replaces the earlier one; log-probs are the ids."""
    client, owner, worker = (
        ClientStream(router_pb.GenerateEvent(), WriteScheduler()),
        OneItem(),
        OneWorker(),
    )
    options: dict[str, Any] = {"stream": stream, "text": text, "log_probs": True, "beam_width": 2}
    if stop_id is not None:
        options["stop_texts"] = ["s"]
    run = make_run(client, owner, **options)
    run.assign(worker)
    decoder = LetterDecoder(stop_id)
    if text or stop_id is not None:
        run.decoder = decoder
    sequence, result = 0, SequenceResult()
    script: list[tuple[int, list[int]]] = []
    known: list[int] = []
    for replaces, ids in versions:
        offset = 0 if replaces else len(known)
        known[offset:] = ids
        script.append((offset, ids))

    async def take() -> None:
        if waiting := await client.next_entries():
            for event in events_of(as_response(waiting)):
                if isinstance(event, Tokens):
                    result.add(event)

    for moment in [*moments, *["worker"] * len(script), *["decoder"] * (len(script) + 1)]:
        if moment == "worker" and sequence < len(script):
            offset, ids = script[sequence]
            sequence += 1
            run.on_tokens(offset, ids, pb.TokenDetails(log_probs=[float(each) for each in ids]))
            if sequence == len(script):
                run.on_end(End(pb.FINISH_REASON_LENGTH))
        elif moment == "decoder":
            decoder.answer()
        elif moment == "move" and run.decoder is not None and not run.over:
            decoder = LetterDecoder(stop_id)
            decoder.take_over(run)
        elif moment == "take" and client.waiting_tokens:
            await take()
    client.put(router_pb.GenerateEvent(item_finished=router_pb.ItemFinished()))
    await take()
    assert owner.settled == [run]
    assert worker.stops == []
    found = stop_id is not None and stop_id in known
    count = known.index(stop_id) + 1 if found and stop_id is not None else len(known)
    assert list(result.token_ids) == run.token_ids == known[:count]
    assert result.text == (letters(known[: count - 1] if found else known) if text else "")
    log_probs = [
        value for chunk in result.chunks if chunk.details for value in chunk.details.log_probs
    ]
    assert log_probs == known[:count]
    assert (run.stop_text is not None) == found
    assert stream or len(result.chunks) <= 1


def test_latencies_are_those_of_the_tokens_seen_here() -> None:
    """Of a sampled request, with exemplars; tokens from another router count for no time."""
    latencies, trace = Latencies(), "a" * 32
    times = SequenceTimes(10.0, latencies, trace, received=2)
    for count, now in ((1, 10.5), (3, 11.0), (1, 12.5)):
        times.on_tokens(count, now, ModelMetrics())
    times.on_finished(7)
    first, each = latencies.time_to_first_token, latencies.time_per_output_token
    assert (first.sum, each.sum) == (0.5, 0.5)
    for histogram in (first, each):
        (exemplar,) = filter(None, (bucket[2] for bucket in histogram.exemplars()))
        assert (exemplar.labels, exemplar.value) == ({"trace_id": trace}, 0.5)
    SequenceTimes(10.0, latencies).on_finished(1)
    assert each.buckets()[-1][1] == 1
