"""What every RPC handler does around its work: bind the request id, turn errors into statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from trtmesh.chassis.error_wire import to_metadata
from trtmesh.chassis.errors import InternalError, TrtmeshError, Unavailable
from trtmesh.chassis.logs import request_id_bound

log = logging.getLogger(__name__)

REQUEST_ID_METADATA_KEY = "x-request-id"


def request_id_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The request id that the caller sent as metadata, or ''."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_METADATA_KEY:
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


@asynccontextmanager
async def answering(
    context: grpc.aio.ServicerContext[Any, Any],
    request_id: str = "",
    sentence: Callable[[TrtmeshError], str] = str,
) -> AsyncIterator[None]:
    """Wraps a handler's body. A TrtmeshError ends the call with its status, its sentence in the details and its reason
    in the trailing metadata; any other exception is a defect, is logged with its traceback and ends the call with
    INTERNAL."""
    with request_id_bound(request_id or request_id_of(context)):
        try:
            yield
        except TrtmeshError as error:
            await _abort(context, error, sentence(error))
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            # Broad on purpose: a defect must reach the caller as a status, not as a broken connection.
            log.exception("a call failed for an unforeseen reason")
            defect = InternalError(f"{type(error).__name__}: {error}")
            await _abort(context, defect, defect.message)


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: TrtmeshError, sentence: str
) -> None:
    # A peer that is not ready is asked again and again: that is no news.
    level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
    log.log(level, "call refused: %s: %s", error.reason, sentence)
    metadata = to_metadata(error)
    await context.abort(error.row.status, sentence, trailing_metadata=metadata)
