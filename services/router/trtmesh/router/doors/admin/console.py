"""The console: a page for operators at the admin address, and the paths that the page calls.

`/console/feed` is an endless stream of snapshots of the router, `/console/calls/METHOD` a method of the admin API with
messages as JSON, and the paths of the OpenAI door below `/console` serve the playground. Snapshots and the calls of
READS change nothing and need no token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from http import HTTPStatus
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import orjson
from aiohttp import hdrs, web
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message
from trtmesh.chassis.bearer import BEARER_METADATA_KEY, AdminToken
from trtmesh.chassis.errors import InvalidRequest, Unauthenticated
from trtmesh.chassis.http_server import HttpLimits, HttpServer
from trtmesh.chassis.quoting import cut
from trtmesh.chassis.rpc import RpcContext
from trtmesh.router.callers.callers import Callers
from trtmesh.router.doors.admin.service import RouterAdminService
from trtmesh.router.doors.admin.settings import AdminSettings
from trtmesh.router.doors.http.authorising import Handler, name_caller
from trtmesh.router.doors.http.errors import PlainForm, answering
from trtmesh.router.doors.http.json_bodies import parse_json
from trtmesh.router.doors.http.origins import only_from, only_under
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.requests import Requests
from trtmesh.v1 import router_admin_pb2 as pb

READS = frozenset({"Explain", "ListAdapters"})
"""Methods for all viewers."""
CHANGES = frozenset({"DrainWorker", "ResumeWorker", "MoveRequest", "SetWorkerRole", "StopRequest"})
"""Methods for admins."""
PAGE_CALL = cast(RpcContext, None)
"""The methods used here need no context."""

SNAPSHOT_SECONDS = 1.0
"""Time between two snapshots."""
MOST_VIEWERS = 32
"""Most streams of snapshots at once."""
MOST_ROWS = 200
"""Most workers, tokenizers, requests, handoffs or adapters in an answer."""
MOST_ITEMS = 8
"""Most items of a request in a snapshot."""
ITEMS_PER_SNAPSHOT = 512
"""Items after which a snapshot leaves out the younger requests."""
MOST_BYTES = 2**16
"""Longest body of a call."""
RECEIVE_SECONDS = 10.0
"""Time for a browser to send it."""
LIMITS = HttpLimits(
    max_open=256, max_per_address=64, held_bytes=2**24, idle_seconds=75.0, unread_seconds=10.0
)

PAGE = Path(__file__).with_name("page")
TYPES = MappingProxyType({".html": "text/html", ".css": "text/css", ".js": "text/javascript"})
HEADERS = MappingProxyType(
    {
        hdrs.CACHE_CONTROL: "no-cache",
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
            " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
)


class ConsoleForm(PlainForm):
    door: ClassVar[str] = "console"


class Console:
    """Serves the page on connections of the admin address, from `http.open` to `close`."""

    def __init__(
        self,
        service: RouterAdminService,
        settings: AdminSettings,
        token: AdminToken | None,
        requests: Requests,
        callers: Callers,
        metrics: RouterMetrics,
        generating: Mapping[str, Handler],
        name: str,
    ) -> None:
        """`generating` are the handlers of the playground by path, none without a port for HTTP; `name` is the
        router's."""
        self._service, self._requests, self._callers = service, requests, callers
        self._token = token
        self._reads_need_token = settings.console == "token"
        self._generating = generating
        self._facts = {"router": name, "guarded": token is not None}
        self._viewers = 0
        self._taken_at = -SNAPSHOT_SECONDS
        self._taking: asyncio.Task[bytes] | None = None
        answer = answering({"": ConsoleForm(), "console": ConsoleForm()}, metrics.note_http_request)
        origins, setting = settings.allowed_origins, "admin.allowed_origins"
        app = web.Application(
            middlewares=[answer, only_under(origins, setting), only_from(origins, setting)],
            client_max_size=MOST_BYTES,
        )
        app.router.add_get("/", _go_to_page)
        for file in sorted(PAGE.iterdir()):
            path = "/console" if file.name == "console.html" else f"/console/{file.name}"
            app.router.add_get(path, _file_handler(file))
        app.router.add_get("/console/feed", self._feed)
        app.router.add_post("/console/calls/{method}", self._call)
        for path in generating:
            app.router.add_post(f"/console{path}", self._generate)
        self.http = HttpServer(app, LIMITS)

    async def close(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
        await self.http.close()

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        self._check_reader(request)
        if self._viewers >= MOST_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_VIEWERS} others look already")
        self._viewers += 1
        try:
            response = web.StreamResponse(headers=HEADERS)
            response.content_type = "text/event-stream"
            await response.prepare(request)
            while True:
                await response.write(b"data: " + await self._next_snapshot() + b"\n\n")
        finally:
            self._viewers -= 1

    async def _next_snapshot(self) -> bytes:
        """The next snapshot, taken once for all viewers. None is taken without viewers."""
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(self._snapshot_in_time())
        return await asyncio.shield(self._taking)

    async def _snapshot_in_time(self) -> bytes:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._taken_at + SNAPSHOT_SECONDS - loop.time())
        self._taken_at = loop.time()
        fleet = await self._service.ListWorkers(pb.ListWorkersRequest(), PAGE_CALL)
        for worker in fleet.workers:
            for long in ("supported_fields", "end_ids", "kv_shapes", "kv_transports"):
                worker.engine.ClearField(long)
        listed = pb.ListRequestsRequest(limit=self._requests_in_snapshot())
        requests = await self._service.ListRequests(listed, PAGE_CALL)
        items = [len(each.items) for each in requests.requests]
        for each in requests.requests:
            del each.items[MOST_ITEMS:]
        handoffs = await self._service.ListHandoffs(pb.ListHandoffsRequest(), PAGE_CALL)
        snapshot = self._facts | {
            "time": time.time(),
            "playground": bool(self._generating),
            "needs_key": self._callers.check_keys,
            "fleet": await _as_dict(fleet),
            "requests": await _as_dict(requests),
            "items": items,
            "handoffs": await _as_dict(handoffs),
        }
        return orjson.dumps(snapshot)

    def _requests_in_snapshot(self) -> int:
        """How many requests, the oldest first, have few items together; at least one."""
        sizes = accumulate(len(live.items) for live in self._requests.live.values())
        few = sum(
            1
            for _, size in zip(range(MOST_ROWS), sizes, strict=False)
            if size <= ITEMS_PER_SNAPSHOT
        )
        return max(1, few)

    async def _call(self, request: web.Request) -> web.Response:
        method = request.match_info["method"]
        if method not in READS | CHANGES:
            raise web.HTTPNotFound
        (self._check_token if method in CHANGES else self._check_reader)(request)
        try:
            async with asyncio.timeout(RECEIVE_SECONDS):
                body = parse_json(await request.read(), MOST_BYTES)
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        try:
            asked = ParseDict(body, getattr(pb, f"{method}Request")())
        except ParseError as error:
            raise InvalidRequest(f"the body is no {method}Request: {cut(str(error))}") from None
        answer = await getattr(self._service, method)(asked, PAGE_CALL)
        return web.Response(
            body=orjson.dumps(await _as_dict(answer)),
            content_type="application/json",
            headers=HEADERS,
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Serves the playground, for admins. It is a client like others, with a key of its own."""
        self._check_token(request)
        keys = request.headers.getall("x-api-key", ())
        name_caller(self._callers, request, [("x-api-key", key) for key in keys])
        return await self._generating[request.path.removeprefix("/console")](request)

    def _check_reader(self, request: web.Request) -> None:
        """Raises Unauthenticated. Refuses a wrong token even where none is needed, so that a page learns of it."""
        if self._reads_need_token or hdrs.AUTHORIZATION in request.headers:
            self._check_token(request)

    def _check_token(self, request: web.Request) -> None:
        """Raises Unauthenticated."""
        shown = request.headers.getall(hdrs.AUTHORIZATION, ())
        if self._token and not self._token.is_in((BEARER_METADATA_KEY, each) for each in shown):
            raise Unauthenticated("the call has no admin token or a wrong one")


async def _as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON has it, with at most MOST_ROWS of a list; a long list yields to the event loop."""
    written: dict[str, Any] = {}
    rows = {field.name: value for field, value in message.ListFields() if _is_list(value)}
    for name in rows:
        written[name] = []
        for each in list(rows[name])[:MOST_ROWS]:
            written[name].append(_plain(each))
            await asyncio.sleep(0)
        message.ClearField(name)
    return _plain(message) | written


def _is_list(value: Any) -> bool:
    return not isinstance(value, (str, bytes, Message)) and hasattr(value, "add")


def _plain(message: Message) -> dict[str, Any]:
    return MessageToDict(
        message, always_print_fields_with_no_presence=True, preserving_proto_field_name=True
    )


async def _go_to_page(_: web.Request) -> web.Response:
    return web.Response(status=HTTPStatus.FOUND, headers={hdrs.LOCATION: "console"})


def _file_handler(file: Path) -> Handler:
    body, content_type = file.read_bytes(), TYPES.get(file.suffix, "image/svg+xml")

    async def send(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, headers=HEADERS)

    return send
