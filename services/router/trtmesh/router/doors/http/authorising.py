"""Who makes an HTTP request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from aiohttp import web
from aiohttp.typedefs import Middleware
from trtmesh.chassis.logs import rebind_caller
from trtmesh.chassis.tls.identity import identity_of
from trtmesh.router.callers.callers import Callers, Headers
from trtmesh.router.callers.identity import Identity

IDENTITY = web.RequestKey("identity", Identity)
"""The caller of a request."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def authorising(callers: Callers, open_handlers: Collection[Handler]) -> Middleware:
    """Names the caller of every request, and refuses those without a valid API key, for unknown paths too.

    `open_handlers` answer anyone.
    """

    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.handler in open_handlers:
            return await handler(request)
        name_caller(callers, request, request.headers.items())
        return await handler(request)

    return authorise


def name_caller(callers: Callers, request: web.Request, headers: Headers) -> None:
    """Names the caller by `headers`, those of the request that count, and the certificate. Raises Unauthenticated."""
    certificate = identity_of(request.transport)
    name = certificate.name if certificate is not None else ""
    identity = request[IDENTITY] = callers.identify(headers, name)
    rebind_caller(identity.name)
