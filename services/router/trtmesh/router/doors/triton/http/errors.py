"""What a client of the HTTP door hears when something goes wrong: `{"error": ...}` under the status of the error."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from trtmesh.chassis.error_wire import REASON_METADATA_KEY
from trtmesh.chassis.errors import (
    InternalError,
    SlowClient,
    TrtmeshError,
    Unavailable,
)
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.rpc import REQUEST_ID_METADATA_KEY
from trtmesh.router.doors.triton.http.bodies import json_response

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Around every handler. A TrtmeshError ends the request with its status; any other exception is a defect, is logged
    with its traceback and ends the request with 500."""
    with request_id_bound(request.headers.get(REQUEST_ID_METADATA_KEY, "")):
        try:
            return await handler(request)
        except SlowClient as error:
            # Whatever is written waits behind what the client does not read.
            log.info("request ended: %s: %s", error.reason, error.message)
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from error
        except TrtmeshError as error:
            return refuse(error)
        except web.HTTPException as error:
            return _as_json(error)
        except ConnectionError as error:
            # The client left while something was written: as good as the cancel that is on its way.
            raise asyncio.CancelledError from error
        except Exception as error:
            # Broad on purpose: a defect must reach the caller as a status, not as a broken connection.
            log.exception("a request failed for an unforeseen reason")
            return refuse(InternalError(f"{type(error).__name__}: {error}"))


def refuse(error: TrtmeshError) -> web.Response:
    """The response that carries an error."""
    level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
    log.log(level, "request refused: %s: %s", error.reason, error.message)
    response = json_response({"error": error.message}, error.row.http)
    response.headers.update(error_headers(error))
    return response


def error_headers(error: TrtmeshError) -> dict[str, str]:
    """The reason word, and when to try again where the error says."""
    headers = {REASON_METADATA_KEY: error.reason}
    if error.retry_after_ms is not None:
        headers[hdrs.RETRY_AFTER] = str(math.ceil(error.retry_after_ms / 1000))
    return headers


def _as_json(error: web.HTTPException) -> web.Response:
    """What aiohttp says, such as 404 and 405, in Triton's form."""
    text = error.text
    told = error.reason if text is None or text.startswith(f"{error.status}:") else text
    response = json_response({"error": told}, error.status)
    if hdrs.ALLOW in error.headers:
        response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
    return response
