"""The classes of all errors, and the table of their statuses and meaning.

A `TrtmeshError` ends a call or an item; a `StartupError` ends a process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Self

import grpc
from trtmesh.chassis.quoting import cut, cut_inside

MAX_PROBLEM_CHARACTERS = 768
"""Longest problem. Percent-encoded, even this fits the metadata limit of gRPC's clients."""
MAX_FIELDS = 16
"""Most fields in an error."""


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that is kept or was told, and of its causes.

    Their frames may lead to whoever keeps the error. All that the frames hold, such as a request, would then be freed
    by the rare collections of garbage alone.
    """
    seen, errors = set[int](), list[BaseException | None]((error,))
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            errors += each.__cause__, each.__context__


class TrtmeshError(Exception):
    """Root of all errors that reach a client. Holds data, cut to a length; the door composes the sentence.

    `problem` continues a sentence that starts with the fields ("has 3 prompts but must have 1 or 2"), or is the whole
    sentence if no field is to blame. Without a problem, the sentence consists of field, value and limit; `limit`
    continues "must be ...".
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
        problem = cut_inside(problem, MAX_PROBLEM_CHARACTERS)
        super().__init__(problem)
        self.problem = problem
        self.fields = tuple(map(cut, (fields or ((field,) if field else ()))[:MAX_FIELDS]))
        """Paths below GenerationConfig or the request message, such as `sampling.top_p`."""
        self.value = cut(value)
        """The value as a Python literal, cut."""
        self.limit = cut_inside(limit, MAX_PROBLEM_CHARACTERS)
        self.limit_field = limit_field
        """The field of the limit, or ''."""
        self.batch_index = batch_index
        """The item to blame for the failure of the whole request."""
        self.worker = cut(worker)
        self.retry_after_ms = retry_after_ms

    @property
    def field(self) -> str:
        """The first field, or ''."""
        return self.fields[0] if self.fields else ""

    @property
    def message(self) -> str:
        """The sentence with the names of the native API."""
        text = self.sentence(str)
        return text if self.batch_index is None else f"items[{self.batch_index}]: {text}"

    def sentence(self, name: Callable[[str], str]) -> str:
        """The sentence without the item; `name` translates the fields for other APIs."""
        problem = self.problem
        if self.limit and not problem:
            source = f" ({name(self.limit_field)})" if self.limit_field else ""
            problem = f"is {self.value} but must be {self.limit}{source}"
        # Several fields may have one name in another API.
        return f"{', '.join(dict.fromkeys(map(name, self.fields)))} {problem}".strip()

    def __str__(self) -> str:
        return self.message

    def of_item(self, batch_index: int) -> Self:
        """Returns a copy of the error for an item."""
        error = copy.copy(self)
        error.batch_index = batch_index
        return error

    @property
    def row(self) -> ErrorRow:
        """Returns the table's row of the class or of the nearest base."""
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
        """`limit` continues "must be ..."; `limit_field` sets it."""
        return cls(field=field, value=_shown(value), limit=limit, limit_field=limit_field)


class PromptEmpty(InvalidRequest):
    """A prompt has no tokens."""


class PromptTooLong(InvalidRequest):
    """Prompt and new tokens exceed the model's length."""


class TokenOutOfVocabulary(InvalidRequest):
    """A token id is not in the vocabulary."""


class OutOfBlocks(InvalidRequest):
    """The item can never fit the KV block pool."""


class Unsupported(TrtmeshError):
    """This process does not support the request."""


class UnsupportedField(Unsupported):
    """The backend does not support a field."""


class UnsupportedCall(Unsupported):
    """This process does not serve an RPC or command."""


class NotUnderstood(Unsupported):
    """A message has a field of a later release than this process."""


class NotFound(TrtmeshError):
    """A name is unknown."""


class ModelNotFound(NotFound):
    """No worker or tokenizer serves the model."""


class AdapterNotFound(NotFound):
    """No such adapter on the worker."""


class AlreadyExists(TrtmeshError):
    """A live request has the same id."""


class Unauthenticated(TrtmeshError):
    """The API key or the admin token is missing, wrong or expired."""


class Mismatch(TrtmeshError):
    """Two processes are incompatible."""


class TokenizerMismatch(Mismatch):
    """Two processes have different tokenizers."""


class SchemaMismatch(Mismatch):
    """Two processes have different proto revisions."""


class AdapterMismatch(Mismatch):
    """The content of an adapter differs from its version."""


class Unavailable(TrtmeshError):
    """A retry, maybe elsewhere, may help."""


class QueueFull(Unavailable):
    """The queue is at its limit."""

    @classmethod
    def of(cls, most: int, holds: str, *, retry_after_ms: int | None = None) -> QueueFull:
        """`holds` describes the queue. Clients of Triton and TensorRT-LLM match the other words to retry."""
        return cls(
            f"Exceeds maximum queue size: {holds}. Maximum queue size of {most} has been reached, please try again"
            " later",
            limit=f"at most {most}",
            retry_after_ms=retry_after_ms,
        )


class QueueTimeout(Unavailable):
    """The item waited too long in the queue."""


class Draining(Unavailable):
    """The process admits nothing more."""


class NoWorker(Unavailable):
    """No worker is ready."""


class NoTokenizer(Unavailable):
    """No tokenizer is ready."""


class WorkerLost(Unavailable):
    """The worker died or its stream broke."""


class HandoffFailed(Unavailable):
    """The KV of a sequence did not arrive; its tokens suffice to continue."""


class TokenizerLost(Unavailable):
    """No tokenizer was left and none returned in time."""


class Exhausted(TrtmeshError):
    """A limit of resources is reached."""


class AdaptersFull(Exhausted):
    """The adapters of running items take all the memory for adapters."""


class RateLimited(Exhausted):
    """A caller has exhausted its own limit."""


class SlowClient(Exhausted):
    """The client does not read its stream."""


class DeadlineExceeded(TrtmeshError):
    """The client's deadline passed."""


class Cancelled(TrtmeshError):
    """The client ended the request."""


class InternalError(TrtmeshError):
    """A defect of this software or its backend."""


class AdapterBroken(InternalError):
    """A registered adapter cannot be loaded. The operator must repair the adapter."""


class BackendFailed(InternalError):
    """The backend could not continue an item."""


class StreamIncomplete(InternalError):
    """A stream ended without its terminal events."""


def _shown(value: object) -> str:
    # A literal of a long text would be made only to be cut.
    return repr(cut(value) if isinstance(value, str) else value)


STARTUP_ERROR_PREFIX = "trtmesh {section}: error: "
"""Start of the last line on standard error of a service process."""


class StartupError(Exception):
    """The process cannot start: prints the message and exits with `exit_status`."""

    exit_status = 1

    def __init__(self, problem: str, *, setting: str = "") -> None:
        """`problem` continues a sentence that starts with `setting`, a dotted name such as `engine.torch.device`; or
        is the whole sentence."""
        super().__init__(problem)
        self.problem = problem
        self.setting = setting

    def __str__(self) -> str:
        return f"{self.setting} {self.problem}".strip()


class SettingsError(StartupError):
    """A setting is wrong."""

    exit_status = 2


class PortInUse(StartupError):
    """An address cannot be bound."""

    exit_status = 3


class ModelUnusable(StartupError):
    """The model directory is missing, invalid or refused."""

    exit_status = 4


class Blame(Enum):
    """Who causes an error."""

    CALLER = "caller"
    """The request is invalid or cannot be served."""
    LOAD = "load"
    """There is too much load or too little capacity."""
    CLIENT = "client"
    """The client ended the request or stopped reading."""
    PEER = "peer"
    """A worker or a tokenizer failed."""
    OPERATOR = "operator"
    """The operator of the mesh must repair something."""
    DEFECT = "defect"
    """A defect of this software."""
    UNKNOWN = "unknown"
    """A peer sent a reason unknown to this release."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Statuses, reason and meaning of a kind of error."""

    error: type[TrtmeshError]
    status: grpc.StatusCode
    http: HTTPStatus
    reason: str
    blame: Blame
    movable: bool = False
    """Another worker may continue a sequence after this error."""
    back_pressure: bool = False
    """The worker is healthy: the error does not use up an attempt of the item."""

    @property
    def is_ours(self) -> bool:
        """Whether the mesh or its operator causes the error, and not who calls it."""
        return self.blame not in (Blame.CALLER, Blame.CLIENT)

    @property
    def is_fault(self) -> bool:
        """Whether the error counts against the worker."""
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
    ErrorRow(OutOfBlocks, *_INVALID, "OUT_OF_BLOCKS", _B.CALLER),
    ErrorRow(Unsupported, *_UNIMPLEMENTED, "UNSUPPORTED", _B.CALLER),
    ErrorRow(UnsupportedField, *_UNIMPLEMENTED, "UNSUPPORTED_FIELD", _B.CALLER),
    ErrorRow(UnsupportedCall, *_UNIMPLEMENTED, "UNSUPPORTED_CALL", _B.CALLER),
    ErrorRow(
        NotUnderstood,
        *_UNIMPLEMENTED,
        "NOT_UNDERSTOOD",
        _B.OPERATOR,
        movable=True,
        back_pressure=True,
    ),
    ErrorRow(NotFound, _S.NOT_FOUND, _H.NOT_FOUND, "NOT_FOUND", _B.CALLER),
    ErrorRow(ModelNotFound, _S.NOT_FOUND, _H.NOT_FOUND, "MODEL_NOT_FOUND", _B.CALLER),
    ErrorRow(
        AdapterNotFound, _S.NOT_FOUND, _H.NOT_FOUND, "ADAPTER_NOT_FOUND", _B.CALLER, movable=True
    ),
    ErrorRow(AlreadyExists, _S.ALREADY_EXISTS, _H.CONFLICT, "ALREADY_EXISTS", _B.CALLER),
    ErrorRow(Unauthenticated, _S.UNAUTHENTICATED, _H.UNAUTHORIZED, "UNAUTHENTICATED", _B.CALLER),
    ErrorRow(Mismatch, *_MISMATCH, "MISMATCH", _B.CALLER),
    ErrorRow(TokenizerMismatch, *_MISMATCH, "TOKENIZER_MISMATCH", _B.CALLER),
    ErrorRow(SchemaMismatch, *_MISMATCH, "SCHEMA_MISMATCH", _B.CALLER),
    ErrorRow(AdapterMismatch, *_MISMATCH, "ADAPTER_MISMATCH", _B.CALLER),
    ErrorRow(Unavailable, *_UNAVAILABLE, "UNAVAILABLE", _B.LOAD),
    ErrorRow(QueueFull, *_UNAVAILABLE, "QUEUE_FULL", _B.LOAD, movable=True, back_pressure=True),
    ErrorRow(QueueTimeout, *_UNAVAILABLE, "QUEUE_TIMEOUT", _B.LOAD),
    ErrorRow(Draining, *_UNAVAILABLE, "DRAINING", _B.LOAD, movable=True, back_pressure=True),
    ErrorRow(NoWorker, *_UNAVAILABLE, "NO_WORKER", _B.LOAD),
    ErrorRow(NoTokenizer, *_UNAVAILABLE, "NO_TOKENIZER", _B.LOAD),
    ErrorRow(WorkerLost, *_UNAVAILABLE, "WORKER_LOST", _B.PEER, movable=True),
    ErrorRow(HandoffFailed, *_UNAVAILABLE, "HANDOFF_FAILED", _B.LOAD, movable=True),
    ErrorRow(TokenizerLost, *_UNAVAILABLE, "TOKENIZER_LOST", _B.PEER),
    ErrorRow(Exhausted, *_EXHAUSTED, "EXHAUSTED", _B.LOAD),
    ErrorRow(AdaptersFull, *_EXHAUSTED, "ADAPTERS_FULL", _B.LOAD, movable=True, back_pressure=True),
    ErrorRow(RateLimited, *_EXHAUSTED, "RATE_LIMITED", _B.LOAD),
    ErrorRow(SlowClient, *_EXHAUSTED, "SLOW_CLIENT", _B.CLIENT),
    ErrorRow(
        DeadlineExceeded, _S.DEADLINE_EXCEEDED, _H.GATEWAY_TIMEOUT, "DEADLINE_EXCEEDED", _B.CALLER
    ),
    ErrorRow(Cancelled, _S.CANCELLED, _H.BAD_REQUEST, "CANCELLED", _B.CLIENT),
    ErrorRow(InternalError, *_INTERNAL, "INTERNAL", _B.DEFECT),
    ErrorRow(
        AdapterBroken,
        *_INTERNAL,
        "ADAPTER_BROKEN",
        _B.OPERATOR,
        movable=True,
        back_pressure=True,
    ),
    ErrorRow(BackendFailed, *_INTERNAL, "BACKEND_FAILED", _B.PEER),
    ErrorRow(StreamIncomplete, *_INTERNAL, "STREAM_INCOMPLETE", _B.PEER),
    ErrorRow(TrtmeshError, _S.UNKNOWN, _H.INTERNAL_SERVER_ERROR, "UNKNOWN", _B.UNKNOWN),
)

ROW_BY_CLASS = {row.error: row for row in ERROR_TABLE}
ROW_BY_REASON = {row.reason: row for row in ERROR_TABLE}
ROW_BY_STATUS = {row.status: row for row in reversed(ERROR_TABLE)}
