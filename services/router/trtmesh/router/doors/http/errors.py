"""Errors over HTTP: `{"error": ...}` under the status of the error."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import hdrs, web
from trtmesh.chassis.error_wire import REASON_METADATA_KEY
from trtmesh.chassis.errors import InternalError, SlowClient, TrtmeshError, Unavailable
from trtmesh.chassis.logs import NO_CALLER, Occasionally, caller_bound, request_id_bound
from trtmesh.chassis.rpc import REQUEST_ID_METADATA_KEY
from trtmesh.router.doors.generation import ErrorWording
from trtmesh.router.doors.http.answers import json_response

log = logging.getLogger(__name__)
occasionally = Occasionally(log)

WORDING = web.RequestKey("wording", ErrorWording)
"""Says the errors of a request."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Wraps every handler. A TrtmeshError ends the request with the error's status; any other exception is a defect, is
    logged with a traceback and ends the request with 500."""
    wording = request[WORDING] = ErrorWording()
    request_id = request.headers.get(REQUEST_ID_METADATA_KEY, "")
    # The requests of a connection share a task.
    with request_id_bound(request_id), caller_bound(NO_CALLER):
        try:
            return await handler(request)
        except SlowClient as error:
            # The client does not read, so no response would reach it.
            log.info("request ended: %s: %s", error.reason, error.message)
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from error
        except TrtmeshError as error:
            return refuse(error, wording(error))
        except web.HTTPException as error:
            return _as_json(error)
        except ConnectionError as error:
            # The client left during a write; the cancellation of the handler follows.
            raise asyncio.CancelledError from error
        except Exception as error:
            # Broad on purpose: a defect must reach the caller as a status, not as a broken connection.
            log.exception("a request failed unexpectedly")
            sentence = f"{type(error).__name__}: {error}"
            return refuse(InternalError(sentence), sentence)


def refuse(error: TrtmeshError, sentence: str) -> web.Response:
    """The response that carries an error."""
    level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
    occasionally(error.reason, level, "request refused: %s: %s", error.reason, sentence)
    response = json_response({"error": sentence}, error.row.http)
    response.headers.update(error_headers(error))
    return response


def error_headers(error: TrtmeshError) -> dict[str, str]:
    """The reason word, a known time to retry, and the scheme of a missing key."""
    headers = {REASON_METADATA_KEY: error.reason}
    if error.row.http is HTTPStatus.UNAUTHORIZED:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if error.retry_after_ms is not None:
        headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    return headers


def _as_json(error: web.HTTPException) -> web.Response:
    """An HTTP error without a row in the table, in Triton's form."""
    # aiohttp's router raises these two, whose text repeats the status.
    routing = isinstance(error, (web.HTTPNotFound, web.HTTPMethodNotAllowed))
    told = error.reason if routing else error.text
    response = json_response({"error": told}, error.status)
    if hdrs.ALLOW in error.headers:
        response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
    return response
