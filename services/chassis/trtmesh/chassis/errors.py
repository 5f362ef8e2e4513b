"""Everything that can go wrong, as one tree and one table.

TrtmeshError
├── InvalidRequest            the caller must change the request
│   ├── InvalidField          a field is outside its limits
│   ├── PromptEmpty           a prompt has no tokens
│   ├── PromptTooLong         prompt and new tokens exceed the model's length
│   └── TokenOutOfVocabulary  a token id is no id of the model
├── Unsupported               the request asks for what this process cannot do
│   ├── UnsupportedField      a field that the backend does not act on is set
│   └── UnsupportedCall       an RPC or command that this process does not serve
├── NotFound                  a name is unknown
│   └── ModelNotFound         no worker or tokenizer serves the model
├── AlreadyExists             a live request has the same id
├── Unauthenticated           the caller did not show the admin token, or showed a wrong one
├── Mismatch                  two processes do not fit together
│   ├── TokenizerMismatch     their tokenizers differ
│   └── SchemaMismatch        their proto revisions differ
├── Unavailable               trying again, maybe elsewhere, may help
│   ├── QueueFull             the queue is at its limit
│   ├── QueueTimeout          the item waited too long in the queue
│   ├── Draining              the process stopped admitting
│   ├── NoWorker              no worker is ready
│   ├── NoTokenizer           no tokenizer is ready
│   ├── WorkerLost            the worker died or its stream broke
│   └── TokenizerLost         every tokenizer was lost and none came back in time
├── Exhausted                 a limit of resources is reached
│   ├── OutOfBlocks           the item can never fit the KV block pool
│   ├── RateLimited           an API key used up its tokens
│   └── SlowClient            the client does not read what it asked for
├── DeadlineExceeded          the client's deadline passed
├── Cancelled                 the client itself ended the request
└── InternalError             a defect of this software or its backend
    ├── BackendFailed         the backend could not go on with an item
    └── StreamIncomplete      a stream ended without its terminal events

StartupError                  the process cannot start; it prints the message and exits
├── SettingsError             a setting is wrong (exit status 2)
├── PortInUse                 an address cannot be bound (exit status 3)
└── ModelUnusable             the model directory is missing, broken or refused (exit status 4)
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

import grpc


class TrtmeshError(Exception):
    """Root of every error that reaches a caller. The message names what, where and what to do."""

    def __init__(
        self, message: str, *, worker: str = "", retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.worker = worker
        self.retry_after_ms = retry_after_ms

    def reworded(self, message: str) -> Self:
        """The same error with another message."""
        return type(self)(message, worker=self.worker, retry_after_ms=self.retry_after_ms)

    @property
    def row(self) -> ErrorRow:
        """The row of the nearest class of the table."""
        return next(ROW_BY_CLASS[kind] for kind in type(self).__mro__ if kind in ROW_BY_CLASS)

    @property
    def reason(self) -> str:
        return self.row.reason


class InvalidRequest(TrtmeshError):
    """The caller must change the request."""


class InvalidField(InvalidRequest):
    """A field is outside its limits."""

    @classmethod
    def of(cls, field: str, value: object, limit: str) -> InvalidField:
        """`limit` completes the sentence "must be ..."."""
        return cls(f"{field} is {value!r} but must be {limit}")


class PromptEmpty(InvalidRequest):
    """A prompt has no tokens."""


class PromptTooLong(InvalidRequest):
    """Prompt and new tokens exceed the model's length."""


class TokenOutOfVocabulary(InvalidRequest):
    """A token id is no id of the model."""


class Unsupported(TrtmeshError):
    """The request asks for what this process cannot do."""


class UnsupportedField(Unsupported):
    """A field that the backend does not act on is set."""


class UnsupportedCall(Unsupported):
    """An RPC or command that this process does not serve."""


class NotFound(TrtmeshError):
    """A name is unknown."""


class ModelNotFound(NotFound):
    """No worker or tokenizer serves the model."""


class AlreadyExists(TrtmeshError):
    """A live request has the same id."""


class Unauthenticated(TrtmeshError):
    """The caller did not show the admin token, or showed a wrong one."""


class Mismatch(TrtmeshError):
    """Two processes do not fit together."""


class TokenizerMismatch(Mismatch):
    """Their tokenizers differ."""


class SchemaMismatch(Mismatch):
    """Their proto revisions differ."""


class Unavailable(TrtmeshError):
    """Trying again, maybe elsewhere, may help."""


class QueueFull(Unavailable):
    """The queue is at its limit."""

    @classmethod
    def of(cls, most: int, holds: str, *, retry_after_ms: int | None = None) -> QueueFull:
        """`holds` says what is in the queue. Around it are the words by which clients of Triton, and those of
        TensorRT-LLM, know that they should come back."""
        return cls(
            f"Exceeds maximum queue size: {holds}. Maximum queue size of {most} has been reached, please try again"
            " later",
            retry_after_ms=retry_after_ms,
        )


class QueueTimeout(Unavailable):
    """The item waited too long in the queue."""


class Draining(Unavailable):
    """The process stopped admitting."""


class NoWorker(Unavailable):
    """No worker is ready."""


class NoTokenizer(Unavailable):
    """No tokenizer is ready."""


class WorkerLost(Unavailable):
    """The worker died or its stream broke."""


class TokenizerLost(Unavailable):
    """Every tokenizer was lost and none came back in time."""


class Exhausted(TrtmeshError):
    """A limit of resources is reached."""


class OutOfBlocks(Exhausted):
    """The item can never fit the KV block pool."""


class RateLimited(Exhausted):
    """An API key used up its tokens."""


class SlowClient(Exhausted):
    """The client does not read what it asked for."""


class DeadlineExceeded(TrtmeshError):
    """The client's deadline passed."""


class Cancelled(TrtmeshError):
    """The client itself ended the request."""


class InternalError(TrtmeshError):
    """A defect of this software or its backend."""


class BackendFailed(InternalError):
    """The backend could not go on with an item."""


class StreamIncomplete(InternalError):
    """A stream ended without its terminal events."""


class StartupError(Exception):
    """The process cannot start; it prints the message and exits with `exit_status`."""

    exit_status = 1


class SettingsError(StartupError):
    """A setting is wrong."""

    exit_status = 2


class PortInUse(StartupError):
    """An address cannot be bound."""

    exit_status = 3


class ModelUnusable(StartupError):
    """The model directory is missing, broken or refused."""

    exit_status = 4


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one kind of error looks from outside."""

    error: type[TrtmeshError]
    status: grpc.StatusCode
    http: HTTPStatus
    reason: str


_S, _H = grpc.StatusCode, HTTPStatus

ERROR_TABLE: tuple[ErrorRow, ...] = (
    ErrorRow(InvalidRequest, _S.INVALID_ARGUMENT, _H.BAD_REQUEST, "INVALID_REQUEST"),
    ErrorRow(InvalidField, _S.INVALID_ARGUMENT, _H.BAD_REQUEST, "INVALID_FIELD"),
    ErrorRow(PromptEmpty, _S.INVALID_ARGUMENT, _H.BAD_REQUEST, "PROMPT_EMPTY"),
    ErrorRow(PromptTooLong, _S.INVALID_ARGUMENT, _H.BAD_REQUEST, "PROMPT_TOO_LONG"),
    ErrorRow(TokenOutOfVocabulary, _S.INVALID_ARGUMENT, _H.BAD_REQUEST, "TOKEN_OUT_OF_VOCABULARY"),
    ErrorRow(Unsupported, _S.UNIMPLEMENTED, _H.NOT_IMPLEMENTED, "UNSUPPORTED"),
    ErrorRow(UnsupportedField, _S.UNIMPLEMENTED, _H.NOT_IMPLEMENTED, "UNSUPPORTED_FIELD"),
    ErrorRow(UnsupportedCall, _S.UNIMPLEMENTED, _H.NOT_IMPLEMENTED, "UNSUPPORTED_CALL"),
    ErrorRow(NotFound, _S.NOT_FOUND, _H.NOT_FOUND, "NOT_FOUND"),
    ErrorRow(ModelNotFound, _S.NOT_FOUND, _H.NOT_FOUND, "MODEL_NOT_FOUND"),
    ErrorRow(AlreadyExists, _S.ALREADY_EXISTS, _H.CONFLICT, "ALREADY_EXISTS"),
    ErrorRow(Unauthenticated, _S.UNAUTHENTICATED, _H.UNAUTHORIZED, "UNAUTHENTICATED"),
    ErrorRow(Mismatch, _S.FAILED_PRECONDITION, _H.PRECONDITION_FAILED, "MISMATCH"),
    ErrorRow(
        TokenizerMismatch, _S.FAILED_PRECONDITION, _H.PRECONDITION_FAILED, "TOKENIZER_MISMATCH"
    ),
    ErrorRow(SchemaMismatch, _S.FAILED_PRECONDITION, _H.PRECONDITION_FAILED, "SCHEMA_MISMATCH"),
    ErrorRow(Unavailable, _S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE, "UNAVAILABLE"),
    ErrorRow(QueueFull, _S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE, "QUEUE_FULL"),
    ErrorRow(QueueTimeout, _S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE, "QUEUE_TIMEOUT"),
    ErrorRow(Draining, _S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE, "DRAINING"),
    ErrorRow(NoWorker, _S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE, "NO_WORKER"),
    ErrorRow(NoTokenizer, _S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE, "NO_TOKENIZER"),
    ErrorRow(WorkerLost, _S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE, "WORKER_LOST"),
    ErrorRow(TokenizerLost, _S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE, "TOKENIZER_LOST"),
    ErrorRow(Exhausted, _S.RESOURCE_EXHAUSTED, _H.TOO_MANY_REQUESTS, "EXHAUSTED"),
    ErrorRow(OutOfBlocks, _S.RESOURCE_EXHAUSTED, _H.TOO_MANY_REQUESTS, "OUT_OF_BLOCKS"),
    ErrorRow(RateLimited, _S.RESOURCE_EXHAUSTED, _H.TOO_MANY_REQUESTS, "RATE_LIMITED"),
    ErrorRow(SlowClient, _S.RESOURCE_EXHAUSTED, _H.TOO_MANY_REQUESTS, "SLOW_CLIENT"),
    ErrorRow(DeadlineExceeded, _S.DEADLINE_EXCEEDED, _H.GATEWAY_TIMEOUT, "DEADLINE_EXCEEDED"),
    ErrorRow(Cancelled, _S.CANCELLED, _H.BAD_REQUEST, "CANCELLED"),
    ErrorRow(InternalError, _S.INTERNAL, _H.INTERNAL_SERVER_ERROR, "INTERNAL"),
    ErrorRow(BackendFailed, _S.INTERNAL, _H.INTERNAL_SERVER_ERROR, "BACKEND_FAILED"),
    ErrorRow(StreamIncomplete, _S.INTERNAL, _H.INTERNAL_SERVER_ERROR, "STREAM_INCOMPLETE"),
    ErrorRow(TrtmeshError, _S.UNKNOWN, _H.INTERNAL_SERVER_ERROR, "UNKNOWN"),
)

ROW_BY_CLASS = {row.error: row for row in ERROR_TABLE}
ROW_BY_REASON = {row.reason: row for row in ERROR_TABLE}
ROW_BY_STATUS = {row.status: row for row in reversed(ERROR_TABLE)}
