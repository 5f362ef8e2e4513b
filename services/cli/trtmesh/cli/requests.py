"""`trtmesh requests` and `trtmesh explain`: the live requests of a router, and the placements of their items."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from trtmesh.chassis.errors import NotFound
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.completion import complete_request_id
from trtmesh.cli.plain_help import CommandGroup
from trtmesh.cli.session import OK
from trtmesh.cli.tables import candidates_table, items_table, requests_table, short_version
from trtmesh.v1 import router_admin_pb2 as pb

requests = CommandGroup(
    name="requests", help="The live requests of a router.", no_args_is_help=True
)

RequestArgument = Annotated[
    str, typer.Argument(help="Name of the request.", autocompletion=complete_request_id)
]
OwnerOption = Annotated[
    str, typer.Option(help="Owner, where requests of several owners have the name.")
]


@requests.command("list")
@admin_command
async def list_requests(
    context: Context,
    limit: Annotated[
        int, typer.Option(min=0, max=2**31, help="Most requests, the oldest first; 0 means all.")
    ] = 0,
) -> int:
    """List the live requests; with --json one request per line."""
    seen = await context.admin.list_requests(limit=limit)
    count = f"{len(seen.requests)} of {seen.live_requests} live requests"
    note = [count] if seen.live_requests > len(seen.requests) else []
    return context.answer_each(seen.requests, requests_table(seen.requests), *note)


@requests.command()
@admin_command
async def show(context: Context, request_id: RequestArgument) -> int:
    """Show a live request: its items, their stages and workers, and the progress of their sequences.

    Exit status: 0 success, 1 not live or the call failed, 2 wrong usage.
    """
    seen = await context.admin.list_requests(request_id)
    if not seen.requests:
        raise NotFound(
            f"request {request_id!r} is not live on router {context.admin.address};"
            " `trtmesh explain` knows ended requests, --admin names another router"
        )
    for request in seen.requests:
        context.answer(request, _headline(request), items_table(request))
    return OK


@requests.command()
@admin_command
async def stop(
    context: Context,
    request_id: RequestArgument,
    item: Annotated[
        list[int] | None,
        typer.Option(min=0, max=2**32 - 1, help="Stop only this batch_index; repeatable."),
    ] = None,
    owner: OwnerOption = "",
) -> int:
    """Stop a request, or some of its items; the client keeps the output so far.

    Exit status: 0 stopped, 1 not live or the call failed, 2 wrong usage.
    """
    stopped = await context.admin.stop_request(request_id, item or (), owner=owner)
    line = [f"stopped {stopped} items of request {request_id}"] if stopped else []
    context.answer(pb.StopRequestResponse(stopped_items=stopped), *line)
    if not stopped:
        raise NotFound(
            f"no item to stop: request {request_id!r} or its named items are not live on router"
            f" {context.admin.address}; each router knows only its own requests: --admin names another one"
        )
    return OK


@admin_command
async def explain(context: Context, request_id: RequestArgument, owner: OwnerOption = "") -> int:
    """Explain the placements of a request's items, live or ended.

    Exit status: 0 success, 1 unknown request or the call failed, 2 wrong usage.
    """
    response = await context.admin.explain(request_id, owner=owner)
    shown: list[str | Table] = []
    for placement in response.placements:
        shown += (_placement_line(placement), *filter(None, [split_line(placement)]))
        shown.append(candidates_table(placement))
    shown += map(_hedge_line, response.hedges)
    for batch_index, usage in zip(response.usage_batch_indexes, response.usages, strict=True):
        counts = f"{usage.prompt_tokens} prompt tokens, {usage.generated_tokens} new"
        shown.append(f"item {batch_index} so far: {counts}")
    return context.answer(response, *shown)


def _headline(request: pb.LiveRequest) -> str:
    parts = [
        f"request {request.request_id} of {request.owner}",
        f"model {request.model}",
        f"age {request.age_ms / 1000:.1f} s",
        f"{request.waiting_tokens} tokens wait for the client",
    ]
    if request.unread_ms:
        parts.append(f"unread for {request.unread_ms / 1000:.1f} s")
    if request.HasField("remaining_ms"):
        parts.append(f"{request.remaining_ms / 1000:.1f} s to its deadline")
    return ", ".join(parts)


def _placement_line(placement: pb.Placement) -> str:
    text = (
        f"item {placement.batch_index} ({placement.cause}): {placement.prompt_tokens} prompt tokens went to"
        f" {placement.worker} by {placement.policy}"
    )
    if placement.adapter:
        text += (
            f"; adapter {placement.adapter} (version {short_version(placement.adapter_version)}, rank"
            f" {placement.adapter_rank or '?'}) is meant for {placement.adapter_replicas} workers"
        )
    if placement.regret_tokens:
        text += f"; another worker could have reused {placement.regret_tokens} tokens more"
    return text


def _hedge_line(hedge: pb.Hedge) -> str:
    text = (
        f"item {hedge.batch_index}, sequence {hedge.sequence_index} was late ({hedge.cause}) at token"
        f" {hedge.token_offset} on {hedge.worker}: "
    )
    if not hedge.second_worker:
        return f"{text}no second copy, {hedge.detail}"
    text += f"copy on {hedge.second_worker} {hedge.outcome}, {hedge.wasted_tokens} tokens computed twice"
    if hedge.saved_seconds:
        text += f", {hedge.saved_seconds * 1000:.0f} ms saved"
    if hedge.differs:
        text += "; THE COPIES HAVE OTHER TOKENS"
    return f"{text}; {hedge.detail}" if hedge.detail else text


def split_line(placement: pb.Placement) -> str:
    """Describes both legs, or the only leg, and the reason. Returns '' if no worker has a role."""
    if not placement.split_reason:
        return ""
    if placement.prefill_worker:
        legs = f"prefill on {placement.prefill_worker}, decode on {placement.worker}"
        if placement.handoff_kind:
            legs += f", KV moved by their backends ({placement.handoff_kind})"
    else:
        legs = f"prefill and decode on {placement.worker}"
    costs = f"{placement.whole_seconds * 1000:.0f} ms on one worker"
    if placement.split_seconds:
        costs = f"{placement.split_seconds * 1000:.0f} ms on two, {costs}"
    return f"  {legs}: {placement.split_reason} (predicted cost: {costs})"
