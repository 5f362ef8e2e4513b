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

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Self

import grpc

LONGEST_VALUE = 256
"""Characters of a value that an error repeats."""


class TrtmeshError(Exception):
    """Root of every error that reaches a caller: data, from which the door that answers makes the sentence.

    `problem` completes a sentence that begins with the fields ("has 3 prompts but must have 1 or 2"), or is the whole
    sentence where no field is to blame. Without a problem the sentence is made of field, value and limit; `limit`
    completes "must be ...".
    """

    def __init__(
        self,
        problem: str = "",
        *,
        field: str = "",
        fields: tuple[str, ...] = (),
        value: str = "",
        limit: str = "",
        limit_field: str = "",
        batch_index: int | None = None,
        worker: str = "",
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fields = fields or ((field,) if field else ())
        """Paths below GenerationConfig or the message that was sent, such as `sampling.top_p`."""
        self.value = value
        """Python's literal of the value, shortened."""
        self.limit = limit
        self.limit_field = limit_field
        """The field that sets the limit, where one does."""
        self.batch_index = batch_index
        """The item that is to blame for the failure of its whole request."""
        self.worker = worker
        self.retry_after_ms = retry_after_ms

    @property
    def field(self) -> str:
        """The first field to blame, or ''."""
        return self.fields[0] if self.fields else ""

    @property
    def message(self) -> str:
        """The sentence in the words of the native API."""
        text = self.sentence(str)
        return text if self.batch_index is None else f"items[{self.batch_index}]: {text}"

    def sentence(self, name: Callable[[str], str]) -> str:
        """The sentence without the item; `name` gives each field the name that its reader knows it by."""
        problem = self.problem
        if self.limit and not problem:
            source = f" ({name(self.limit_field)})" if self.limit_field else ""
            problem = f"is {self.value} but must be {self.limit}{source}"
        return f"{', '.join(map(name, self.fields))} {problem}".strip()

    def __str__(self) -> str:
        return self.message

    def of_item(self, batch_index: int) -> Self:
        """The same error, blamed on one item of the request."""
        error = copy.copy(self)
        error.batch_index = batch_index
        return error

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
    def of(cls, field: str, value: object, limit: str, limit_field: str = "") -> InvalidField:
        """`limit` completes the sentence "must be ..."; `limit_field` is the field that sets it."""
        return cls(field=field, value=_shown(value), limit=limit, limit_field=limit_field)


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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


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


class Blame(Enum):
    """Whose doing an error is."""

    CALLER = "caller"
    """The request asks for what cannot be done."""
    LOAD = "load"
    """Nobody's: there is too much to do, or nobody there to do it."""
    CLIENT = "client"
    """The client ended the request, or stopped reading it."""
    PEER = "peer"
    """A worker or a tokenizer failed at a request that it took."""
    DEFECT = "defect"
    """A defect of this software."""
    UNKNOWN = "unknown"
    """A peer said what this release does not know."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one kind of error looks from outside, and what it means for the item that meets it."""

    error: type[TrtmeshError]
    status: grpc.StatusCode
    http: HTTPStatus
    reason: str
    blame: Blame
    movable: bool = False
    """A worker that ends a sequence with it says nothing of the sequence: another worker may continue it."""
    back_pressure: bool = False
    """The worker that says it is well: no attempt of the item is used up."""

    @property
    def is_fault(self) -> bool:
        """Whether it counts against the worker that says it."""
        return self.blame in (Blame.PEER, Blame.DEFECT)


_S, _H, _B = grpc.StatusCode, HTTPStatus, Blame
_INVALID = (_S.INVALID_ARGUMENT, _H.BAD_REQUEST)
_UNIMPLEMENTED = (_S.UNIMPLEMENTED, _H.NOT_IMPLEMENTED)
_MISMATCH = (_S.FAILED_PRECONDITION, _H.PRECONDITION_FAILED)
_UNAVAILABLE = (_S.UNAVAILABLE, _H.SERVICE_UNAVAILABLE)
_EXHAUSTED = (_S.RESOURCE_EXHAUSTED, _H.TOO_MANY_REQUESTS)
_INTERNAL = (_S.INTERNAL, _H.INTERNAL_SERVER_ERROR)

ERROR_TABLE: tuple[ErrorRow, ...] = (
    ErrorRow(InvalidRequest, *_INVALID, "INVALID_REQUEST", _B.CALLER),
    ErrorRow(InvalidField, *_INVALID, "INVALID_FIELD", _B.CALLER),
    ErrorRow(PromptEmpty, *_INVALID, "PROMPT_EMPTY", _B.CALLER),
    ErrorRow(PromptTooLong, *_INVALID, "PROMPT_TOO_LONG", _B.CALLER),
    ErrorRow(TokenOutOfVocabulary, *_INVALID, "TOKEN_OUT_OF_VOCABULARY", _B.CALLER),
    ErrorRow(Unsupported, *_UNIMPLEMENTED, "UNSUPPORTED", _B.CALLER),
    ErrorRow(UnsupportedField, *_UNIMPLEMENTED, "UNSUPPORTED_FIELD", _B.CALLER),
    ErrorRow(UnsupportedCall, *_UNIMPLEMENTED, "UNSUPPORTED_CALL", _B.CALLER),
    ErrorRow(NotFound, _S.NOT_FOUND, _H.NOT_FOUND, "NOT_FOUND", _B.CALLER),
    ErrorRow(ModelNotFound, _S.NOT_FOUND, _H.NOT_FOUND, "MODEL_NOT_FOUND", _B.CALLER),
    ErrorRow(AlreadyExists, _S.ALREADY_EXISTS, _H.CONFLICT, "ALREADY_EXISTS", _B.CALLER),
    ErrorRow(Unauthenticated, _S.UNAUTHENTICATED, _H.UNAUTHORIZED, "UNAUTHENTICATED", _B.CALLER),
    ErrorRow(Mismatch, *_MISMATCH, "MISMATCH", _B.CALLER),
    ErrorRow(TokenizerMismatch, *_MISMATCH, "TOKENIZER_MISMATCH", _B.CALLER),
    ErrorRow(SchemaMismatch, *_MISMATCH, "SCHEMA_MISMATCH", _B.CALLER),
    ErrorRow(Unavailable, *_UNAVAILABLE, "UNAVAILABLE", _B.LOAD),
    ErrorRow(QueueFull, *_UNAVAILABLE, "QUEUE_FULL", _B.LOAD, movable=True, back_pressure=True),
    ErrorRow(QueueTimeout, *_UNAVAILABLE, "QUEUE_TIMEOUT", _B.LOAD),
    ErrorRow(Draining, *_UNAVAILABLE, "DRAINING", _B.LOAD, movable=True, back_pressure=True),
    ErrorRow(NoWorker, *_UNAVAILABLE, "NO_WORKER", _B.LOAD),
    ErrorRow(NoTokenizer, *_UNAVAILABLE, "NO_TOKENIZER", _B.LOAD),
    ErrorRow(WorkerLost, *_UNAVAILABLE, "WORKER_LOST", _B.PEER, movable=True),
    ErrorRow(TokenizerLost, *_UNAVAILABLE, "TOKENIZER_LOST", _B.PEER),
    ErrorRow(Exhausted, *_EXHAUSTED, "EXHAUSTED", _B.LOAD),
    ErrorRow(OutOfBlocks, *_EXHAUSTED, "OUT_OF_BLOCKS", _B.LOAD),
    ErrorRow(RateLimited, *_EXHAUSTED, "RATE_LIMITED", _B.LOAD),
    ErrorRow(SlowClient, *_EXHAUSTED, "SLOW_CLIENT", _B.CLIENT),
    ErrorRow(
        DeadlineExceeded, _S.DEADLINE_EXCEEDED, _H.GATEWAY_TIMEOUT, "DEADLINE_EXCEEDED", _B.CALLER
    ),
    ErrorRow(Cancelled, _S.CANCELLED, _H.BAD_REQUEST, "CANCELLED", _B.CLIENT),
    ErrorRow(InternalError, *_INTERNAL, "INTERNAL", _B.DEFECT),
    ErrorRow(BackendFailed, *_INTERNAL, "BACKEND_FAILED", _B.PEER),
    ErrorRow(StreamIncomplete, *_INTERNAL, "STREAM_INCOMPLETE", _B.PEER),
    ErrorRow(TrtmeshError, _S.UNKNOWN, _H.INTERNAL_SERVER_ERROR, "UNKNOWN", _B.UNKNOWN),
)

ROW_BY_CLASS = {row.error: row for row in ERROR_TABLE}
ROW_BY_REASON = {row.reason: row for row in ERROR_TABLE}
ROW_BY_STATUS = {row.status: row for row in reversed(ERROR_TABLE)}
