"""Errors over HTTP: under the status of the error, in the form of the door at the path."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from http import HTTPStatus
from time import perf_counter
from typing import ClassVar, Protocol

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from trtmesh.chassis.error_wire import REASON_METADATA_KEY
from trtmesh.chassis.errors import (
    InternalError,
    SlowClient,
    TrtmeshError,
    Unavailable,
    forget_frames,
)
from trtmesh.chassis.logs import NO_CALLER, Occasionally, caller_bound, request_id_bound
from trtmesh.chassis.rpc import REQUEST_ID_METADATA_KEY
from trtmesh.router.doors.generation import ErrorWording
from trtmesh.router.doors.http.answers import json_response
from trtmesh.router.doors.http.authorising import Handler

log = logging.getLogger(__name__)
occasionally = Occasionally(log)

WORDING = web.RequestKey("wording", ErrorWording)
"""Says the errors of a request."""


CLIENT_LEFT = 499
"""Counted in place of a status where the client left before the answer."""


class ErrorForm(Protocol):
    """How the errors of a door look."""

    door: ClassVar[str]
    """The door's name in metrics."""

    def refused(self, request: web.Request, error: TrtmeshError, sentence: str) -> web.Response:
        """The response that carries an error."""

    def failed(self, request: web.Request, error: web.HTTPException) -> web.Response:
        """The response that carries an HTTP error without a row in the table."""


class PlainForm:
    """`{"error": ...}`, as Triton writes errors."""

    door: ClassVar[str] = "triton"

    def refused(self, request: web.Request, error: TrtmeshError, sentence: str) -> web.Response:
        response = json_response({"error": sentence}, error.row.http)
        response.headers.update(error_headers(error))
        return response

    def failed(self, request: web.Request, error: web.HTTPException) -> web.Response:
        # aiohttp's router raises these two, whose text repeats the status.
        routing = isinstance(error, (web.HTTPNotFound, web.HTTPMethodNotAllowed))
        response = json_response({"error": error.reason if routing else error.text}, error.status)
        keep_allow(response, error)
        return response


def answering(forms: Mapping[str, ErrorForm], count: Callable[[str, int], None]) -> Middleware:
    """Wraps every handler. A TrtmeshError ends the request with the error's status; any other exception is a defect, is
    logged with a traceback and ends the request with 500. `forms` are the doors' by path, or by the first part of
    their paths; `count` counts a request by door and status."""
    plain = PlainForm()

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        form = forms.get(path) or forms.get(path[1:].partition("/")[0], plain)
        request_id = request.headers.get(REQUEST_ID_METADATA_KEY, "")
        began, status = perf_counter(), CLIENT_LEFT
        # The requests of a connection share a task.
        with request_id_bound(request_id), caller_bound(NO_CALLER):
            try:
                response = await _answer(form, request, handler)
                status = response.status
                return response
            finally:
                count(form.door, status)
                log.debug(
                    "%s %s: %d in %.3f s",
                    request.method,
                    request.path,
                    status,
                    perf_counter() - began,
                )

    return answer


async def _answer(form: ErrorForm, request: web.Request, handler: Handler) -> web.StreamResponse:
    wording = request[WORDING] = ErrorWording()
    try:
        return await handler(request)
    except SlowClient as error:
        # The client does not read, so no response would reach it.
        log.info("request ended: %s: %s", error.reason, error.message)
        if request.transport is not None:
            request.transport.abort()
        raise asyncio.CancelledError from error
    except TrtmeshError as error:
        sentence = wording(error)
        level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
        occasionally(error.reason, level, "request refused: %s: %s", error.reason, sentence)
        forget_frames(error)
        return form.refused(request, error, sentence)
    except web.HTTPException as error:
        # aiohttp keeps it in the request.
        forget_frames(error)
        return form.failed(request, error)
    except ConnectionError as error:
        # The client left during a write; the cancellation of the handler follows.
        raise asyncio.CancelledError from error
    except Exception as error:
        # Broad on purpose: a defect must reach the caller as a status, not as a broken connection.
        log.exception("a request failed unexpectedly")
        forget_frames(error)
        sentence = f"{type(error).__name__}: {error}"
        return form.refused(request, InternalError(sentence), sentence)


def error_headers(error: TrtmeshError) -> dict[str, str]:
    """The reason word, a known time to retry, and the scheme of a missing key."""
    headers = {REASON_METADATA_KEY: error.reason}
    if error.row.http is HTTPStatus.UNAUTHORIZED:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if error.retry_after_ms is not None:
        headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    return headers


def keep_allow(response: web.Response, error: web.HTTPException) -> None:
    """Names the methods that a path has."""
    if hdrs.ALLOW in error.headers:
        response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
