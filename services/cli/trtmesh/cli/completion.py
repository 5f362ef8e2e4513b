"""Shell completion of a router's names; empty unless the router answers at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import fields

import typer
from trtmesh.chassis.errors import StartupError, TrtmeshError
from trtmesh.cli.admin_command import AdminOptions
from trtmesh.cli.tls import TlsOptions
from trtmesh.client import AdminClient
from trtmesh.v1 import router_admin_pb2 as pb

PATIENCE_SECONDS = 1.0

Ask = Callable[[AdminClient], Awaitable[Iterable[str]]]
Complete = Callable[[typer.Context, str], list[str]]


def _completing(ask: Ask) -> Complete:
    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            names = asyncio.run(_names(context, ask))
        except (TrtmeshError, StartupError):
            return []
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


async def _names(context: typer.Context, ask: Ask) -> Iterable[str]:
    given = {name: value for name, value in context.params.items() if value}
    names = {field.name for field in fields(TlsOptions)}
    tls = TlsOptions(**{name: given[name] for name in names & given.keys()})
    options = AdminOptions(given.get("admin"), given.get("token_file"), PATIENCE_SECONDS, tls)
    client, _ = options.client()
    async with client as admin:
        return await ask(admin)


async def _worker_names(admin: AdminClient) -> Iterable[str]:
    return names_of_workers((await admin.list_workers()).workers)


def names_of_workers(workers: Sequence[pb.Worker]) -> set[str]:
    """Returns a unique name for each worker: the address if the name is missing or shared."""
    carriers = Counter(worker.worker for worker in workers)
    return {
        worker.worker if worker.worker and carriers[worker.worker] == 1 else worker.address
        for worker in workers
    }


async def _request_ids(admin: AdminClient) -> Iterable[str]:
    seen = await admin.list_requests(limit=100)
    return {request.request_id for request in seen.requests}


async def _adapters(admin: AdminClient) -> Iterable[str]:
    seen = await admin.list_adapters()
    return {adapter.name or str(adapter.id) for adapter in seen.adapters}


async def _policies(admin: AdminClient) -> Iterable[str]:
    return (await admin.get_policy()).available


complete_worker = _completing(_worker_names)
complete_request_id = _completing(_request_ids)
complete_adapter = _completing(_adapters)
complete_policy = _completing(_policies)
