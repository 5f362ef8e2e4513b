from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from trtmesh.router.doors.admin.descriptions import ITEMS_AT_ONCE, describe_requests
from trtmesh.v1 import generation_pb2 as pb


def sequence(**values: Any) -> Any:
    known: dict[str, Any] = {
        "sequence_index": 0,
        "assignment": SimpleNamespace(address="h:1"),
        "token_ids": [1, 2, 3],
        "decoded": 2,
        "moved": False,
        "over": False,
        "reason": pb.FINISH_REASON_UNSPECIFIED,
    }
    return SimpleNamespace(**known | values)


def request(items: int, *sequences: Any) -> Any:
    item = {
        "stage": "generate",
        "worker": "w",
        "prompt_tokens": 4,
        "generated_tokens": 3,
        "sequences": sequences,
    }
    return SimpleNamespace(
        context=SimpleNamespace(
            owner="anonymous",
            request_id="r",
            model="m",
            age_seconds=lambda: 1.5,
            remaining_ms=lambda: None,
        ),
        client=SimpleNamespace(waiting_tokens=5, unread_seconds=lambda _: 0.25),
        items=[SimpleNamespace(batch_index=index, **item) for index in range(items)],
    )


async def test_live_request_shows_the_state_of_each_sequence() -> None:
    ended = sequence(assignment=None, over=True, reason=pb.FINISH_REASON_STOP_WORD)
    moving = sequence(assignment=None, moved=True)
    (described,) = await describe_requests(
        [request(1, sequence(), moving, ended)], {"h:1": "w"}.__getitem__
    )
    assert (described.age_ms, described.unread_ms, described.waiting_tokens) == (1500, 250, 5)
    assert not described.HasField("remaining_ms")
    running, moving, ended = described.items[0].sequences
    assert (running.worker, running.generated_tokens, running.next_token_offset) == ("w", 3, 2)
    assert (moving.worker, moving.moved, moving.reason) == ("", True, 0)
    assert ended.reason == pb.FINISH_REASON_STOP_WORD


async def test_long_list_yields_to_the_event_loop() -> None:
    turns = 0

    async def stream() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    streaming = asyncio.create_task(stream())
    described = await describe_requests([request(ITEMS_AT_ONCE // 2)] * 20, str)
    streaming.cancel()
    assert len(described) == 20
    assert turns == 10
