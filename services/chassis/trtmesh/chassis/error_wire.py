"""Errors on the wire: a message inside a stream, a status with metadata at the end of a call."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf.message import DecodeError
from trtmesh.chassis.errors import ROW_BY_REASON, ROW_BY_STATUS, TrtmeshError
from trtmesh.v1 import generation_pb2 as pb

Metadata = Iterable[tuple[str, str | bytes]]

REASON_METADATA_KEY = "trtmesh-error-reason"
RETRY_METADATA_KEY = "trtmesh-retry-after-ms"
ERROR_METADATA_KEY = "trtmesh-error-bin"
"""The whole error as a serialized `Error`."""

MAX_ERROR_BYTES = 2048
"""Limit of the `Error` in metadata. A larger error is left out; status, details and reason remain."""

MAX_RETRY_MS = 2**32 - 1


def to_proto(error: TrtmeshError) -> pb.Error:
    """The message for a stream."""
    retry = error.retry_after_ms
    message = pb.Error(
        code=error.row.status.value[0],
        reason=error.reason,
        message=error.message,
        worker=error.worker,
        retry_after_ms=None if retry is None else min(retry, MAX_RETRY_MS),
        fields=error.fields,
        value=error.value,
        limit=error.limit,
        limit_field=error.limit_field,
        batch_index=error.batch_index,
    )
    if _has_parts(message):
        message.problem = error.problem
    return message


def from_proto(message: pb.Error) -> TrtmeshError:
    """The error of a message; an unknown reason becomes the root class."""
    row = ROW_BY_REASON.get(message.reason)
    return (row.error if row else TrtmeshError)(
        message.problem if _has_parts(message) else message.message,
        fields=tuple(message.fields),
        value=message.value,
        limit=message.limit,
        limit_field=message.limit_field,
        batch_index=message.batch_index if message.HasField("batch_index") else None,
        worker=message.worker,
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
    )


def _has_parts(message: pb.Error) -> bool:
    """Whether the sentence contains more than the problem."""
    return bool(message.fields) or message.HasField("batch_index")


def to_metadata(error: TrtmeshError) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata of a failed call."""
    metadata: list[tuple[str, str | bytes]] = [(REASON_METADATA_KEY, error.reason)]
    if error.retry_after_ms is not None:
        metadata.append((RETRY_METADATA_KEY, str(error.retry_after_ms)))
    whole = to_proto(error).SerializeToString()
    if len(whole) <= MAX_ERROR_BYTES:
        metadata.append((ERROR_METADATA_KEY, whole))
    return tuple(metadata)


def from_status(code: grpc.StatusCode, details: str, metadata: Metadata | None) -> TrtmeshError:
    """The error of a failed call, from the metadata, else from reason or status code."""
    found = dict(metadata or ())
    whole = found.get(ERROR_METADATA_KEY)
    if isinstance(whole, bytes):
        try:
            return from_proto(pb.Error.FromString(whole))
        except DecodeError:
            # Truncated by a proxy: the other metadata remain.
            pass
    row = ROW_BY_REASON.get(_text(found.get(REASON_METADATA_KEY))) or ROW_BY_STATUS.get(code)
    retry = _text(found.get(RETRY_METADATA_KEY))
    return (row.error if row else TrtmeshError)(
        details, retry_after_ms=int(retry) if retry.isdecimal() else None
    )


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
