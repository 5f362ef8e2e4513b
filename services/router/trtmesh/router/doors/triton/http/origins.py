"""Requests of web pages: a browser sends them from inside a network, so they are refused unless allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from trtmesh.chassis.quoting import cut

ANY = "*"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def only_from(allowed: Collection[str]) -> Middleware:
    """Refuses requests of web pages whose origin is neither this server nor in `allowed`.

    Browsers name the origin with every POST, and ask nobody before they send plain text or a form, which is all that a
    request here needs. What is not a browser sends no origin.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and not _is_allowed(origin, request.host):
            raise web.HTTPForbidden(
                text=f"web pages of origin {cut(origin)!r} may not send requests (http.allowed_origins)"
            )
        return await handler(request)

    def _is_allowed(origin: str, host: str) -> bool:
        return ANY in allowed or origin in allowed or _host_of(origin) == host

    return check


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
