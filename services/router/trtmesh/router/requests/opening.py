"""The sequences of an item as they begin, or as they go on behind what a client got from another router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trtmesh.router.streams.sequence import Charge, Owner, SequenceRun
from trtmesh.router.values.request import ItemRequest
from trtmesh.router.values.resumption import ReceivedSequence

if TYPE_CHECKING:
    from trtmesh.router.requests.live_request import LiveRequest


def open_sequences(
    live: LiveRequest,
    item: ItemRequest,
    received: Mapping[tuple[int, int], ReceivedSequence],
    *,
    owner: Owner,
) -> list[SequenceRun]:
    """All sequences of an item, with a decoder where one is needed."""
    return [
        _open(live, item, index, received.get((item.batch_index, index)), owner)
        for index in range(item.config.sequences)
    ]


def _open(
    live: LiveRequest,
    item: ItemRequest,
    sequence_index: int,
    received: ReceivedSequence | None,
    owner: Owner,
) -> SequenceRun:
    run = SequenceRun(
        item,
        sequence_index,
        request_id=live.request_id,
        model=live.model,
        arrival_time=live.arrival_time,
        client=live.client,
        owner=owner,
    )
    if received is not None:
        run.resume_from(received)
    if live.bucket is not None:
        run.charge = Charge(live.bucket.spend, len(run.token_ids))
    if not run.over and (item.config.output.text or item.config.stopping.stop_texts):
        live.mesh.tokenizers.attach(run)
    return run
