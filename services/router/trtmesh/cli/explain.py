"""`trtmesh explain`: the placements of a request's items."""

from __future__ import annotations

from typing import Annotated

import typer
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.completion import complete_request_id
from trtmesh.cli.output import printable, put, put_json
from trtmesh.cli.session import OK
from trtmesh.cli.tables import candidates_table, print_tables
from trtmesh.v1 import router_admin_pb2 as pb


@admin_command
async def explain(
    context: Context,
    request_id: Annotated[
        str, typer.Argument(help="Name of the request.", autocompletion=complete_request_id)
    ],
) -> int:
    """Explain the placements of a request's items, live or ended.

    Exit status: 0 success, 1 unknown request or the call failed, 2 wrong usage.
    """
    response = await context.admin.explain(request_id)
    if context.as_json:
        put_json(response)
        return OK
    for placement in response.placements:
        put(_headline(placement))
        print_tables(candidates_table(placement.candidates))
    for batch_index, usage in zip(response.usage_batch_indexes, response.usages, strict=True):
        put(
            f"item {batch_index} so far: {usage.prompt_tokens} prompt tokens,"
            f" {usage.generated_tokens} new"
        )
    return OK


def _headline(placement: pb.Placement) -> str:
    text = (
        f"item {placement.batch_index} ({placement.cause}): {placement.prompt_tokens} prompt tokens went to"
        f" {placement.worker} by {placement.policy}"
    )
    if placement.regret_tokens:
        text += f"; another worker could have reused {placement.regret_tokens} tokens more"
    return printable(text)
