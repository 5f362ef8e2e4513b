"""Requests of web pages: a browser sends them from inside a network, so they are refused unless allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from trtmesh.chassis.quoting import cut

ANY = "*"
LOCALHOST = "localhost"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def only_from(allowed: Collection[str], setting: str = "http.allowed_origins") -> Middleware:
    """Refuses requests of web pages with an origin other than this server and the origins in `allowed`, which is the
    value of `setting`.

    Browsers name the origin with every POST, and ask nobody before sending plain text or a form, which suffices for a
    request here. Other clients send no origin. An origin equal to the host of the request shows little: the owner of a
    name can have the name point here (DNS rebinding). Nobody can do so with an address, or with localhost.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and not _is_allowed(origin, request.host):
            raise web.HTTPForbidden(
                text=f"web pages of origin {cut(origin)!r} may not send requests ({setting})"
            )
        return await handler(request)

    def _is_allowed(origin: str, host: str) -> bool:
        return ANY in allowed or origin in allowed or _is_own(origin, host)

    return check


def only_under(allowed: Collection[str], setting: str) -> Middleware:
    """Refuses requests to a name that may point anywhere, unless an origin in `allowed` has it: a page under such a
    name reads answers as its own, and names no origin to read."""
    names = {urlsplit(each).netloc for each in allowed}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.host
        if not (ANY in allowed or host in names or _is_own(f"http://{host}", host)):
            raise web.HTTPForbidden(text=f"this is not served under {cut(host)!r} ({setting})")
        return await handler(request)

    return check


def _is_own(origin: str, host: str) -> bool:
    """Whether a page has the address of the request, and no name that may point anywhere."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
        if name != LOCALHOST:
            ip_address(name)
    except ValueError:
        return False
    return parts.netloc == host
