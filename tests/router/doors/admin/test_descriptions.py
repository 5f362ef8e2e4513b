from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

from router.fleet.test_worker import link
from trtmesh.chassis.service import Runtime
from trtmesh.router.adapters.adapters import Adapters
from trtmesh.router.adapters.registry import Entry, Registry, Version
from trtmesh.router.adapters.settings import AdapterSettings
from trtmesh.router.doors.admin.descriptions import (
    ITEMS_AT_ONCE,
    RUNS_PER_ITEM,
    WORKER_ITEMS,
    describe_handoffs,
    describe_requests,
    describe_workers,
)
from trtmesh.router.doors.admin.service import RouterAdminService
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.membership import Membership
from trtmesh.router.handoffs.table import HandoffTable
from trtmesh.router.hedging.hedger import Hedger
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.movement.movement import Movement
from trtmesh.router.requests.requests import Requests
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb


def sequence(**values: Any) -> Any:
    known: dict[str, Any] = {
        "sequence_index": 0,
        "assignment": SimpleNamespace(address="h:1"),
        "token_ids": [1, 2, 3],
        "decoded": 2,
        "moved": False,
        "queued": False,
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
    queued = sequence(token_ids=[], decoded=0, queued=True)
    (described,) = await describe_requests(
        [request(1, sequence(), moving, ended, queued)], {"h:1": "w"}.__getitem__
    )
    assert (described.age_ms, described.unread_ms, described.waiting_tokens) == (1500, 250, 5)
    assert not described.HasField("remaining_ms")
    running, moving, ended, queued = described.items[0].sequences
    assert [each.queued for each in (running, moving, ended, queued)] == [False] * 3 + [True]
    assert (running.worker, running.generated_tokens, running.next_token_offset) == ("w", 3, 2)
    assert (moving.worker, moving.moved, moving.reason) == ("", True, 0)
    assert ended.reason == pb.FINISH_REASON_STOP_WORD


async def passes_during(describing: Coroutine[Any, Any, Sequence[Any]]) -> tuple[int, int]:
    """Descriptions, and passes of the event loop meanwhile."""
    turns = 0

    async def stream() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    streaming = asyncio.create_task(stream())
    described = await describing
    streaming.cancel()
    return len(described), turns


async def test_long_list_yields_to_the_event_loop() -> None:
    requests = [request(ITEMS_AT_ONCE // 2)] * 20
    assert await passes_during(describe_requests(requests, str)) == (20, 10)


async def test_many_workers_yield_to_the_event_loop() -> None:
    count = 10 * ITEMS_AT_ONCE // WORKER_ITEMS
    workers = [link(f"h:{number}") for number in range(count)]
    assert await passes_during(describe_workers(workers)) == (count, 10)
    busy = link("h:1")
    run = cast(SequenceRun, SimpleNamespace(owner=1))
    busy._assignments.sequences.update(dict.fromkeys(range(RUNS_PER_ITEM * ITEMS_AT_ONCE), run))
    assert await passes_during(describe_workers([busy] * 10)) == (10, 10)


async def test_many_handoffs_yield_to_the_event_loop() -> None:
    handoff: Any = SimpleNamespace(
        lease_id="l",
        item=SimpleNamespace(request_id="r", batch_index=0, sequence_index=0),
        sender=None,
        receiver=None,
        stage="offered",
        cause="split",
        tokens=1,
        present_tokens=0,
        opened_at=0.0,
        renewed_at=0.0,
        life_seconds=1.0,
        state=SimpleNamespace(by_state=False),
    )
    count = 10 * ITEMS_AT_ONCE
    assert await passes_during(describe_handoffs([handoff] * count, [])) == (count, 10)


async def test_many_adapters_yield_to_the_event_loop() -> None:
    adapters, count = Adapters(AdapterSettings(), RouterMetrics()), 10 * ITEMS_AT_ONCE
    entries = [
        Entry(number, f"a{number}", "", (Version("d", 0, 1),)) for number in range(1, count + 1)
    ]
    adapters.registry = Registry({entry.key: entry for entry in entries})
    service = RouterAdminService(
        cast(Fleet, SimpleNamespace(workers={})),
        cast(HandoffTable, None),
        adapters,
        cast(Membership, None),
        cast(TokenizerPool, None),
        cast(Requests, None),
        cast(Hedger, None),
        cast(Movement, None),
        (),
        cast(Runtime, None),
    )

    async def listed() -> Sequence[Any]:
        context: Any = SimpleNamespace(invocation_metadata=tuple)
        return (await service.ListAdapters(admin_pb.ListAdaptersRequest(), context)).adapters

    assert await passes_during(listed()) == (count, 10)
