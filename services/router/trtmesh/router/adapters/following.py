"""Follows the registry of another router by its admin address, and fetches contents from there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.bearer import AdminToken
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.error_wire import from_status
from trtmesh.chassis.errors import AdapterMismatch, SettingsError, TrtmeshError, Unavailable
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.router.adapters.assembly import Assembly
from trtmesh.router.adapters.registry import Entry, Registry, Version
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1 import router_admin_pb2_grpc

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval between two looks at the followed registry."""

LIST_SECONDS = 10.0
"""Longest time of a list."""

ATTEMPTS, BACKOFF_SECONDS = 4, 0.25
"""Attempts to fetch a content, and the first pause; each pause doubles."""

T = TypeVar("T")


class Followed:
    """The router at an admin address."""

    def __init__(
        self,
        address: str,
        token: AdminToken | None,
        max_message_bytes: int,
        tls: ClientTls | None = None,
    ) -> None:
        self._address = address
        self._metadata = (token.metadata,) if token else ()
        self._max_message_bytes = max_message_bytes
        self._tls = tls

    async def follow(self, take: Callable[[Registry], None], tell: Callable[[str], None]) -> None:
        """Takes each change of the registry, until cancelled; tells the problem, or ''."""
        while True:
            try:
                async with self._connected() as stub:
                    await self._follow(stub, take, tell)
            except TrtmeshError as error:
                tell(f"{self._address}: {error.message}")
            except SettingsError as error:
                # Certificates that do not fit while they are replaced; a new channel reads them again.
                tell(str(error))
            await asyncio.sleep(POLL_SECONDS)

    async def _follow(
        self, stub: Any, take: Callable[[Registry], None], tell: Callable[[str], None]
    ) -> NoReturn:
        revision = None
        while True:
            registry = await self._list(stub)
            if registry.revision != revision:
                take(registry)
            revision = registry.revision
            tell("")
            await asyncio.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """The admin service of the router."""
        async with open_channel(self._address, self._max_message_bytes, tls=self._tls) as channel:
            yield router_admin_pb2_grpc.RouterAdminServiceStub(channel)

    async def fetch(self, number: int, digest: str) -> AdapterContent:
        """The content of a version. Raises the followed router's error, or AdapterMismatch."""
        pause = BACKOFF_SECONDS
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._fetch_once(number, digest)
            except Unavailable as error:
                log.info("cannot fetch adapter %d from %s: %s", number, self._address, error)
            await asyncio.sleep(pause)
            pause *= 2
        return await self._fetch_once(number, digest)

    async def _list(self, stub: Any) -> Registry:
        try:
            response = await stub.ListAdapters(
                pb.ListAdaptersRequest(), timeout=LIST_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error
        return registry_of(response)

    async def _fetch_once(self, number: int, digest: str) -> AdapterContent:
        request = pb.FetchAdapterRequest(id=number, version=digest)
        async with self._connected() as stub:
            call = stub.FetchAdapter(request, metadata=self._metadata)
            try:
                content = await self._assemble(call)
            except grpc.aio.AioRpcError as error:
                raise _typed(error) from error
            finally:
                call.cancel()
        if (found := await asyncio.to_thread(lambda: content.version)) != digest:
            raise AdapterMismatch(
                f"{self._address} sent content {found} of adapter {number} for version {digest}"
            )
        return content

    async def _assemble(self, call: Any) -> AdapterContent:
        assembly = None
        async for part in call:
            if assembly is None:
                assembly = Assembly.of(part)
            assembly.add(part.data)
        if assembly is None:
            raise Unavailable(f"{self._address} sent no content")
        return await asyncio.to_thread(assembly.content)


def registry_of(response: pb.ListAdaptersResponse) -> Registry:
    """The registry of another router."""
    entries = [_entry(adapter) for adapter in response.adapters if adapter.versions]
    return Registry({entry.key: entry for entry in entries}, response.revision)


def _entry(adapter: pb.Adapter) -> Entry:
    versions = tuple(
        Version(
            each.version,
            each.format,
            each.size_bytes,
            each.source,
            each.share if index else 0,
            each.rank,
        )
        for index, each in enumerate(adapter.versions)
    )
    return Entry(adapter.id, adapter.name, adapter.model, versions, adapter.pinned, adapter.brought)


def _typed(error: grpc.aio.AioRpcError) -> TrtmeshError:
    return from_status(error.code(), error.details() or "", error.trailing_metadata())
