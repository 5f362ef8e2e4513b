"""A sequence between a worker and a decoder that answer at any pace, and decoders that change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.errors import WorkerLost, to_proto
from trtmesh.chassis.parsing import parse_config
from trtmesh.chassis.vocabulary import Prompt
from trtmesh.client.options import build_config
from trtmesh.router.client_stream import ClientStream
from trtmesh.router.request import ItemRequest
from trtmesh.router.sequence import SequenceRun
from trtmesh.router.turns import Turns
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


class LetterDecoder:
    """Makes a letter of every id and finds one stop letter; answers when it is told to. Holds a letter back."""

    def __init__(self, stop_id: int | None) -> None:
        self._stop_id = stop_id
        self._asked: list[tuple[SequenceRun, list[int], bool]] = []
        self._held: list[int] = []
        self.dropped = False

    def take_over(self, run: SequenceRun) -> None:
        """What a tokenizer does with a sequence that comes from another one."""
        run.decoder = self
        self._held = run.token_ids[: run.decoded][-1:]
        if run.decoded < len(run.token_ids):
            self.decode(run, run.token_ids[run.decoded :])
        if run.end is not None:
            self.finish(run)

    def decode(self, sequence: SequenceRun, token_ids: list[int]) -> None:
        self._asked.append((sequence, token_ids, False))

    def finish(self, sequence: SequenceRun) -> None:
        self._asked.append((sequence, [], True))

    def drop(self, sequence: SequenceRun) -> None:
        self.dropped = True
        self._asked.clear()

    def answer(self) -> bool:
        """Answers the oldest question; False when there is none."""
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


def make_run(client: ClientStream, settled: list[SequenceRun], **options: Any) -> SequenceRun:
    message = build_config(None, options)
    item = ItemRequest(0, Prompt(text="x"), parse_config(message), message)
    return SequenceRun(
        item,
        0,
        request_id="r",
        model="m",
        arrival_time=0.0,
        client=client,
        settled=settled.append,
    )


async def received(client: ClientStream) -> tuple[list[int], str, int]:
    """All ids and text that were put, with contiguous offsets, and the number of token events."""
    client.put(router_pb.GenerateEvent(item_finished=router_pb.ItemFinished()))
    response = await client.take()
    assert response
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
        "moments": st.lists(st.sampled_from(["worker", "decoder", "move"]), max_size=80),
        "stop_id": st.none() | st.integers(0, 9),
        "lost": st.booleans(),
        "stream": st.booleans(),
        "repeat": st.booleans(),
    }
)


@given(PLAYS)
def test_any_pace_gives_every_token_and_the_whole_text_once(play: dict[str, Any]) -> None:
    asyncio.run(perform(**play))


async def perform(
    *,
    token_ids: list[int],
    chunks: list[int],
    moments: list[str],
    stop_id: int | None,
    lost: bool,
    stream: bool,
    repeat: bool,
) -> None:
    client = ClientStream(router_pb.GenerateEvent(), Turns())
    settled: list[SequenceRun] = []
    options = {"stream": stream} | ({"stop_texts": ["s"]} if stop_id is not None else {})
    run = make_run(client, settled, **options)
    stops: list[int] = []
    run.stop_worker = stops.append
    decoder = LetterDecoder(stop_id)
    run.decoder = decoder
    script = worker_script(token_ids, chunks, lost=lost, repeat=repeat)

    def move() -> None:
        nonlocal decoder
        if not run.over:
            decoder = LetterDecoder(stop_id)
            decoder.take_over(run)

    for moment in [*moments, *["worker"] * (len(script) + 1), *["decoder"] * (len(script) + 1)]:
        if moment == "worker" and script:
            part = script.pop(0)
            if isinstance(part, epb.SequenceEnd):
                run.on_end(part)
            else:
                run.on_tokens(*part)
        elif moment == "decoder":
            decoder.answer()
        elif moment == "move":
            move()
    assert settled == [run]
    assert decoder.dropped
    found = stop_id in token_ids
    count = token_ids.index(stop_id) + 1 if stop_id is not None and found else len(token_ids)
    ids, text, events = await received(client)
    assert ids == run.token_ids == token_ids[:count]
    assert text == letters(token_ids[: count - 1] if found else token_ids)
    assert (run.stop_text is not None) == found
    assert set(stops) <= {pb.FINISH_REASON_STOP_WORD}
    assert (run.error is None) == (found or not lost)
    assert stream or events <= 1


def worker_script(
    token_ids: list[int], chunks: list[int], *, lost: bool, repeat: bool
) -> list[tuple[int, list[int]] | epb.SequenceEnd]:
    """What the worker sends: tokens in chunks, maybe some of them twice, and the end."""
    script: list[tuple[int, list[int]] | epb.SequenceEnd] = []
    start = 0
    for count in [*chunks, len(token_ids)]:
        back = min(start, 1) if repeat else 0
        if part := token_ids[start : start + count]:
            script.append((start - back, token_ids[start - back : start] + part))
        start += len(part)
    end = epb.SequenceEnd(reason=pb.FINISH_REASON_LENGTH)
    if lost:
        end.reason = pb.FINISH_REASON_ERROR
        end.error.CopyFrom(to_proto(WorkerLost("gone", worker="w")))
    script.append(end)
    return script


async def test_without_a_decoder_tokens_leave_at_once() -> None:
    client, settled = ClientStream(router_pb.GenerateEvent(), Turns()), list[SequenceRun]()
    run = make_run(client, settled, text=False)
    run.on_tokens(0, [1, 2])
    assert client.waiting_tokens == 2
    run.on_end(epb.SequenceEnd(reason=pb.FINISH_REASON_LENGTH))
    assert settled == [run]
    assert (await received(client))[:2] == ([1, 2], "")


async def test_an_abandoned_sequence_stops_its_worker_and_says_nothing_more() -> None:
    client, settled = ClientStream(router_pb.GenerateEvent(), Turns()), list[SequenceRun]()
    run = make_run(client, settled)
    stops: list[int] = []
    run.stop_worker = stops.append
    decoder = LetterDecoder(None)
    run.decoder = decoder
    run.on_tokens(0, [1])
    run.abandon(pb.FINISH_REASON_CANCELLED)
    run.on_tokens(1, [2])
    run.on_text(1, "b")
    run.on_end(epb.SequenceEnd(reason=pb.FINISH_REASON_CANCELLED))
    assert stops == [pb.FINISH_REASON_CANCELLED]
    assert decoder.dropped
    assert not settled
    assert (await received(client))[:2] == ([], "")
