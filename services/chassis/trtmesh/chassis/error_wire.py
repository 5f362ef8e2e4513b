"""Errors as they travel: inside a stream as a message, at the end of a call as a status with metadata."""

from __future__ import annotations

import grpc
from trtmesh.chassis.errors import ROW_BY_REASON, ROW_BY_STATUS, TrtmeshError
from trtmesh.v1 import generation_pb2 as pb

REASON_METADATA_KEY = "trtmesh-error-reason"
RETRY_METADATA_KEY = "trtmesh-retry-after-ms"


def to_proto(error: TrtmeshError) -> pb.Error:
    """The error as it travels inside a stream."""
    message = pb.Error(
        code=error.row.status.value[0],
        reason=error.reason,
        message=error.message,
        worker=error.worker,
    )
    if error.retry_after_ms is not None:
        message.retry_after_ms = error.retry_after_ms
    return message


def from_proto(message: pb.Error) -> TrtmeshError:
    """The error that `message` carried; a reason unknown here gives the root class."""
    row = ROW_BY_REASON.get(message.reason)
    kind = row.error if row else TrtmeshError
    retry_after_ms = message.retry_after_ms if message.HasField("retry_after_ms") else None
    return kind(message.message, worker=message.worker, retry_after_ms=retry_after_ms)


def from_status(
    code: grpc.StatusCode, reason: str | None, details: str, retry_after_ms: str | None = None
) -> TrtmeshError:
    """The error behind a failed call: by its reason word, else by its status code."""
    row = ROW_BY_REASON.get(reason or "") or ROW_BY_STATUS.get(code)
    hint = int(retry_after_ms) if retry_after_ms and retry_after_ms.isdecimal() else None
    return (row.error if row else TrtmeshError)(details, retry_after_ms=hint)
