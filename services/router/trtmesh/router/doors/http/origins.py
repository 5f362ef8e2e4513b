"""Requests of web pages: a browser sends them from inside a network, so they are refused unless allowed. Allowed ones
get the headers by which browsers let them read answers (CORS)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from trtmesh.chassis.quoting import cut
from trtmesh.router.doors.http.authorising import Handler

ANY = "*"
LOCALHOST = "localhost"
PREFLIGHT_SECONDS = 600
"""How long a browser may remember what it may send."""


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


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Says what a browser may send, to a page that `only_from` has let pass. It asks for any path, and with no key."""
    asked = {hdrs.ORIGIN, hdrs.ACCESS_CONTROL_REQUEST_METHOD} <= request.headers.keys()
    if request.method != hdrs.METH_OPTIONS or not asked:
        return await handler(request)
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
        hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_SECONDS),
    }
    if (wanted := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)) is not None:
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    return web.Response(status=HTTPStatus.NO_CONTENT, headers=headers)


def readable_from(
    allowed: Collection[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Lets pages of the origins in `allowed` read answers and their headers: `on_response_prepare` of an application.
    Cookies and certificates of the browser do not count."""

    async def permit(request: web.Request, response: web.StreamResponse) -> None:
        if not allowed:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and (ANY in allowed or origin in allowed):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ANY

    return permit


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
