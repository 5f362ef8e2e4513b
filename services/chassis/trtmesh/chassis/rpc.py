"""The frame of every RPC handler: binds the request id and turns errors into statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from trtmesh.chassis.error_wire import to_metadata
from trtmesh.chassis.errors import InternalError, TrtmeshError, Unavailable
from trtmesh.chassis.logs import Occasionally, request_id_bound

log = logging.getLogger(__name__)
occasionally = Occasionally(log)

REQUEST_ID_METADATA_KEY = "x-request-id"


def request_id_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The request id in the call's metadata, or ''."""
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
    """Wraps a handler's body. A TrtmeshError ends the call with its status, its sentence and its data; any other
    exception is logged with a traceback and ends the call with INTERNAL."""
    with request_id_bound(request_id or request_id_of(context)):
        try:
            yield
        except TrtmeshError as error:
            await _abort(context, error, sentence(error))
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            # A defect must reach the client as a status, not as a broken connection.
            log.exception("unexpected error in a call")
            defect = InternalError(f"{type(error).__name__}: {error}")
            await _abort(context, defect, defect.message)


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: TrtmeshError, sentence: str
) -> None:
    # Peers retry an unavailable service all the time.
    level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
    occasionally(error.reason, level, "call refused: %s: %s", error.reason, sentence)
    metadata = to_metadata(error)
    await context.abort(error.row.status, sentence, trailing_metadata=metadata)
