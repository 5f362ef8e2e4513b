"""The port for HTTP, and everything common to all requests there."""

from __future__ import annotations

import logging
from typing import Annotated

from aiohttp import web
from pydantic import BeforeValidator
from trtmesh.chassis.connection_settings import ConnectionSettings
from trtmesh.chassis.fair.messages import MessageAdmission
from trtmesh.chassis.http_server import HttpLimits, HttpServer
from trtmesh.chassis.settings import OptionalPort, Settings, split_commas
from trtmesh.chassis.tls.certificates import ServerTls
from trtmesh.router.callers.callers import Callers
from trtmesh.router.doors.http.answers import json_response
from trtmesh.router.doors.http.authorising import Handler, authorising
from trtmesh.router.doors.http.bodies import Bodies, BodyLimits
from trtmesh.router.doors.http.errors import ErrorForm, answering
from trtmesh.router.doors.http.origins import answer_preflight, only_from, readable_from
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.streams import client_stream

log = logging.getLogger(__name__)

MAX_UNFINISHED_BYTES = 128 * 2**20
"""Most bytes of requests that are not parsed yet, of all connections together: twice the largest message."""
MAX_JSON_BYTES = 2**24
"""Largest JSON in a body. Binary tensors after the JSON count for the whole body alone."""
RECEIVE_SECONDS = 60.0
"""Time for a client to send the body of a request."""
IDLE_SECONDS = 75.0
"""How long a connection may idle."""
UNREAD_MARGIN_SECONDS = 1.0
"""How much longer than a request's client a connection may leave an answer unread."""


class PortSettings(Settings):
    """The port for HTTP."""

    port: OptionalPort = 8000
    """Port to listen on; `none` serves no HTTP."""
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = ()
    """Origins of web pages, such as `https://chat.example`, that may send requests and read answers (CORS); `*` allows
    all. Pages of this port are allowed under `localhost` and under an IP address."""


class HttpPort:
    """Serves the routes of its doors. Call order: the doors add to `app`, `open_handlers`, `error_forms` and `served`;
    `listen`, then `open` and `close` of `server`."""

    def __init__(
        self,
        callers: Callers,
        settings: PortSettings,
        connections: ConnectionSettings,
        max_body_bytes: int,
        tls: ServerTls | None,
        admission: MessageAdmission,
        metrics: RouterMetrics,
    ) -> None:
        self.open_handlers = set[Handler]()
        """They answer anyone, with or without an API key."""
        self.error_forms: dict[str, ErrorForm] = {}
        """The doors' own, by path or by the first part of their paths."""
        self.served: dict[str, str] = {}
        """What is served, by path."""
        authorise = authorising(callers, self.open_handlers)
        answer = answering(self.error_forms, metrics.note_http_request)
        self.app = web.Application(
            middlewares=[answer, only_from(settings.allowed_origins), answer_preflight, authorise],
            client_max_size=max_body_bytes,
        )
        self.app.on_response_prepare.append(readable_from(settings.allowed_origins))
        self.app.router.add_get("/", self._tell_served)
        limits = HttpLimits(
            max_open=connections.max_open,
            max_per_address=connections.max_per_address,
            held_bytes=MAX_UNFINISHED_BYTES,
            idle_seconds=IDLE_SECONDS,
            # A stream ends by the limit of its request, which tells why.
            unread_seconds=client_stream.UNREAD_SECONDS + UNREAD_MARGIN_SECONDS,
        )
        self.server = HttpServer(self.app, limits, tls)
        self.bodies = Bodies(
            BodyLimits(max_body_bytes, min(MAX_JSON_BYTES, max_body_bytes), RECEIVE_SECONDS),
            self.server,
            admission,
        )

    async def _tell_served(self, request: web.Request) -> web.Response:
        return json_response({"server": "trtmesh", "serves": self.served})

    def listen(self, host: str, port: int) -> str:
        """Takes the address and returns it. Raises StartupError."""
        address, _ = self.server.listen(host, port, "listen for HTTP")
        log.info("listening for HTTP on %s", address)
        return address
