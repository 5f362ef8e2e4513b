"""Live requests as an admin sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.v1 import generation_pb2
from trtmesh.v1 import router_admin_pb2 as pb

NameOf = Callable[[str], str]
"""Name of the worker at an address."""

ITEMS_AT_ONCE = 64
"""Items that are described before the streams of clients go on: a millisecond's work."""


async def describe_requests(live: Iterable[LiveRequest], name_of: NameOf) -> list[pb.LiveRequest]:
    """Requests one after another, each as it is when its turn comes."""
    told, items = [], 0
    for each in live:
        told.append(describe_request(each, name_of))
        items += len(each.items)
        if items >= ITEMS_AT_ONCE:
            items = 0
            await asyncio.sleep(0)
    return told


def describe_request(live: LiveRequest, name_of: NameOf) -> pb.LiveRequest:
    """A request as it is at this moment."""
    client, now = live.client, asyncio.get_running_loop().time()
    return pb.LiveRequest(
        request_id=live.context.request_id,
        model=live.context.model,
        age_ms=int(live.context.age_seconds() * 1000),
        items=[_describe_item(item, name_of) for item in live.items],
        waiting_tokens=client.waiting_tokens,
        unread_ms=int(client.unread_seconds(now) * 1000),
        remaining_ms=live.context.remaining_ms(),
    )


def _describe_item(item: ItemRun, name_of: NameOf) -> pb.LiveItem:
    return pb.LiveItem(
        batch_index=item.batch_index,
        stage=item.stage,
        worker=item.worker,
        prompt_tokens=item.prompt_tokens,
        generated_tokens=item.generated_tokens,
        sequences=[_describe_sequence(run, name_of) for run in item.sequences],
    )


def _describe_sequence(run: SequenceRun, name_of: NameOf) -> pb.LiveSequence:
    return pb.LiveSequence(
        sequence_index=run.sequence_index,
        worker=name_of(run.assignment.address) if run.assignment else "",
        generated_tokens=len(run.token_ids),
        next_token_offset=run.decoded,
        moved=run.moved,
        reason=run.reason if run.over else generation_pb2.FINISH_REASON_UNSPECIFIED,
    )
