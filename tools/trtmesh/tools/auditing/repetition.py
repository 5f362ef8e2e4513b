"""Repeats the items of receipts over a mesh, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from trtmesh.chassis.errors import RateLimited, TrtmeshError
from trtmesh.client import Client, ItemFailed, ItemFinished
from trtmesh.client.results import Results
from trtmesh.tools.auditing.findings import AuditResult, found, not_compared, promise_of, why_not
from trtmesh.tools.auditing.receipt_file import FiledReceipt
from trtmesh.v1 import receipt_pb2 as receipt_pb
from trtmesh.v1 import router_pb2 as router_pb

LEAST_PAUSE_SECONDS = 0.05
"""Before an item is asked again for which the caller's limit had no room."""


async def audited(
    client: Client, receipts: Iterable[FiledReceipt], at_once: int, *, inexact: bool
) -> AsyncGenerator[AuditResult, None]:
    """Yields the findings in the order of the receipts."""
    running: list[asyncio.Task[AuditResult]] = []
    try:
        for filed in receipts:
            running.append(asyncio.create_task(_audit(client, filed, inexact=inexact)))
            if len(running) == at_once:
                yield await running.pop(0)
        while running:
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _audit(client: Client, filed: FiledReceipt, *, inexact: bool) -> AuditResult:
    receipt, item = filed.receipt, filed.item
    if filed.forgery:
        return not_compared(receipt, filed.forgery)
    if item is None:
        why = "the file lacks its request; router.receipts.requests keeps it up to 8 MiB, or give it with --item"
        return not_compared(receipt, why)
    if why := why_not(receipt, item, inexact=inexact):
        return not_compared(receipt, why)
    while True:
        try:
            return await _repeat(client, filed, item, inexact=inexact)
        except RateLimited as error:
            if error.retry_after_ms is None:
                return not_compared(receipt, f"{error.reason}: {error.message}")
            await asyncio.sleep(max(error.retry_after_ms / 1000, LEAST_PAUSE_SECONDS))
        except TrtmeshError as error:
            return not_compared(receipt, f"{error.reason}: {error.message}")


async def _repeat(
    client: Client,
    filed: FiledReceipt,
    item: router_pb.GenerateItem,
    *,
    inexact: bool,
) -> AuditResult:
    """Raises TrtmeshError."""
    receipt = filed.receipt
    asked = router_pb.GenerateItem()
    asked.CopyFrom(item)
    asked.config.output.receipt = True
    results = Results(receipt.draw_index + 1)
    again = receipt_pb.Receipt()
    events = client.repeat(asked, receipt.draw_index, model=receipt.model)
    async with aclosing(events):
        async for event in events:
            results.add(event)
            if isinstance(event, ItemFailed):
                raise event.error
            if isinstance(event, ItemFinished) and event.receipt is not None:
                again = receipt_pb.Receipt.FromString(event.receipt.receipt)
    if not again.workers:
        return not_compared(receipt, "the router gives no receipts; it is of an older release")
    for worker in again.workers:
        if not (worker.exact or inexact):
            return not_compared(receipt, promise_of(worker.worker))
    repeated = results.items[receipt.draw_index].sequences
    return found(receipt, filed.token_ids, again, [sequence.token_ids for sequence in repeated])
