"""`trtmesh status`, `trtmesh workers` and `trtmesh policy`: show and change the fleet of a router."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer
from trtmesh.chassis.errors import InvalidField
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.coming_back import followed
from trtmesh.cli.completion import complete_policy, complete_worker
from trtmesh.cli.output import local_time, say, say_error
from trtmesh.cli.plain_help import CommandGroup
from trtmesh.cli.session import FAILED, OK, USAGE
from trtmesh.cli.tables import moves_table, role_word, tokenizers_table, worker_state, workers_table
from trtmesh.v1 import router_admin_pb2 as pb

policy = CommandGroup(name="policy", help="The placement policy of a router.", no_args_is_help=True)
workers = CommandGroup(name="workers", help="The workers of a router.", no_args_is_help=True)

MOST_SECONDS = 4_000_000

WorkerArgument = Annotated[
    str,
    typer.Argument(
        help="Name of a worker, or its address if several have the name.",
        autocompletion=complete_worker,
    ),
]


class Role(StrEnum):
    """Phases of a worker."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


@admin_command
async def status(context: Context) -> int:
    """Show the router's workers and tokenizers.

    Exit status: 0 a worker and a tokenizer are ready, 1 otherwise or no answer, 2 wrong usage.
    """
    router, seen = context.admin.address, await context.admin.list_workers()
    drains = ", drains: it refuses new requests" if seen.draining else ""
    headline = f"router {router}: policy {seen.policy}, {seen.live_requests} live requests{drains}"
    context.answer(seen, headline, workers_table(seen.workers), tokenizers_table(seen.tokenizers))
    if _anything_ready(seen.workers) and _anything_ready(seen.tokenizers):
        return OK
    say(f"router {router} cannot serve: it needs a ready worker and a ready tokenizer")
    return FAILED


@workers.command("list")
@admin_command
async def list_workers(context: Context) -> int:
    """List the workers; with --json one worker per line."""
    seen = (await context.admin.list_workers()).workers
    return context.answer_each(seen, workers_table(seen))


@workers.command()
@admin_command
async def watch(context: Context) -> int:
    """Print the workers now and after each join, leave or change of state, until Ctrl-C.

    With --json one list per line, also after changes of load only. After a lost connection it asks again. Exit
    status: 1 the first call failed, 2 wrong usage, 130 Ctrl-C.
    """
    told = None
    async for seen in followed(context.admin.watch_workers):
        if (standing := _standing(seen)) != told or context.as_json:
            told = standing
            headline = f"{local_time()}: {len(seen.workers)} workers"
            context.answer(seen, headline, workers_table(seen.workers))
    return FAILED


def _standing(seen: pb.WatchWorkersResponse) -> list[tuple[str, str, str, str, str]]:
    """State and role of each worker. Loads are left out: they change with each step."""
    return [(w.worker, w.address, worker_state(w), role_word(w), w.problem) for w in seen.workers]


@workers.command()
@admin_command
async def add(
    context: Context,
    address: Annotated[
        str,
        typer.Argument(help="Address of the worker, host:port or vllm://host:port and its like."),
    ],
    wait: Annotated[
        float,
        typer.Option(
            min=0, max=86400, help="Seconds for the worker to answer; 0 adds it without waiting."
        ),
    ] = 5.0,
) -> int:
    """Make the router connect to a worker, and wait for its answer; without one it is removed again.

    It stays until the router restarts; list it in `router.engines` to keep it.

    Exit status: 0 added, 1 no answer or the call failed, 2 wrong usage.
    """
    try:
        response = await context.admin.add_worker(address, wait_seconds=wait)
    except InvalidField as error:
        say_error(f"{error.reason}: {error}")
        return USAGE
    return context.answer(response, _state_line(response.worker))


@workers.command()
@admin_command
async def drain(
    context: Context,
    worker: WorkerArgument,
    finish_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=4_000_000,
            help="Time for its sequences to end, in seconds, before the rest moves; unset waits for all.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="Time after which the worker is gone, such as 20s: its sequences move before, what pays most first."
        ),
    ] = None,
) -> int:
    """Have a worker refuse new items, of all routers, and wait until its sequences of this router have ended or moved.

    The worker stays drained until `resume` or its end, even if the router restarts.

    Exit status: 0 drained, 1 sequences are left or the call failed, 2 wrong usage, 130 Ctrl-C.
    """
    if by is not None and finish_seconds is not None:
        say_error("--by and --finish-seconds exclude each other")
        return USAGE
    try:
        by_seconds = None if by is None else _seconds(by)
    except ValueError:
        say_error(f"--by is {by!r}, which is no time such as 20s or 2m")
        return USAGE
    response = await context.admin.drain_worker(
        worker, finish_seconds=finish_seconds, by_seconds=by_seconds
    )
    ended = f"{response.finished_sequences} ended, {response.moved_sequences} moved"
    context.answer(response, _state_line(response.worker), f"sequences: {ended}")
    if response.only_here:
        say(
            "this router alone places nothing more there, until it restarts: the worker is not connected, or older"
        )
    if response.left_sequences:
        say(f"{response.left_sequences} sequences are left: no other worker accepts them")
        return FAILED
    return OK


def _seconds(text: str) -> float:
    """Raises ValueError."""
    number, factor = (
        (text[:-1], {"s": 1, "m": 60}[text[-1:]]) if text[-1:] in ("s", "m") else (text, 1)
    )
    seconds = float(number) * factor
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError
    return seconds


@workers.command()
@admin_command
async def rebalance(
    context: Context,
    *,
    room: Annotated[
        int,
        typer.Option(min=0, max=2**31, help="Make room for a prompt of so many tokens."),
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the moves only.")] = False,
) -> int:
    """Move streams, with their KV, where that pays by the predictions of placement: to even out load and KV, to gather
    the sequences of adapters, or for --room.
    """
    response = await context.admin.rebalance_workers(room_tokens=room, dry_run=dry_run)
    began = sum(move.began for move in response.moves)
    told = "planned" if dry_run else f"of which {began} began"
    return context.answer(
        response, moves_table(response.moves), f"{len(response.moves)} moves, {told}"
    )


@workers.command()
@admin_command
async def resume(context: Context, worker: WorkerArgument) -> int:
    """Place items on a drained worker again. `add` brings back a removed one."""
    response = await context.admin.resume_worker(worker)
    return context.answer(response, _state_line(response.worker))


@workers.command()
@admin_command
async def role(
    context: Context,
    worker: WorkerArgument,
    role: Annotated[Role, typer.Argument(help="The phases that it is for.")],
) -> int:
    """Change the role of a worker, for all routers; sequences of another phase are handed over.

    Exit status: 0 changed, 1 the backend has no such role or the call failed, 2 wrong usage, 130 Ctrl-C.
    """
    response = await context.admin.set_worker_role(worker, role)
    moved = f"{response.moved_sequences} sequences moved"
    return context.answer(response, f"worker {worker} is for {role}; {moved}")


@workers.command()
@admin_command
async def remove(context: Context, worker: WorkerArgument) -> int:
    """Remove a worker from the router; its sequences move.

    A router that restarts connects again to what `router.engines` names.
    """
    response = await context.admin.remove_worker(worker)
    moved = f"{response.moved_sequences} sequences moved"
    return context.answer(response, f"{worker} was removed; {moved}")


def _anything_ready(peers: Iterable[pb.Worker] | Iterable[pb.TokenizerReplica]) -> bool:
    return any(peer.state == pb.WORKER_STATE_READY for peer in peers)


def _state_line(worker: pb.Worker) -> str:
    name = f"{worker.worker} at {worker.address}" if worker.worker else worker.address
    problem = f": {worker.problem}" if worker.problem else ""
    return f"worker {name} is {worker_state(worker)}{problem}"


@policy.command("get")
@admin_command
async def get_policy(context: Context) -> int:
    """Print all policies and mark the current one."""
    response = await context.admin.get_policy()
    marks = ("*" if name == response.policy else " " for name in response.available)
    return context.answer(response, *map(" ".join, zip(marks, response.available, strict=True)))


@policy.command("set")
@admin_command
async def set_policy(
    context: Context,
    policy: Annotated[
        str, typer.Argument(help="One of `policy get`.", autocompletion=complete_policy)
    ],
) -> int:
    """Change the policy until the router ends.

    Exit status: 0 changed, 1 the call failed, 2 unknown policy or other wrong usage.
    """
    try:
        response = await context.admin.set_policy(policy)
    except InvalidField as error:
        say_error(f"{error.reason}: {error}")
        return USAGE
    return context.answer(response, f"policy {policy}, {response.previous} until now")
