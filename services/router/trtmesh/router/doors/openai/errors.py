"""Errors as OpenAI's specification has them."""

from __future__ import annotations

import json
import secrets
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from aiohttp import hdrs, web
from trtmesh.chassis.errors import Blame, TrtmeshError
from trtmesh.chassis.quoting import cut
from trtmesh.chassis.rpc import REQUEST_ID_METADATA_KEY
from trtmesh.router.doors.http.answers import json_response
from trtmesh.router.doors.http.errors import error_headers, keep_allow
from trtmesh.router.doors.openai.fields import NAMES
from trtmesh.router.values.request import MAX_REQUEST_ID_LENGTH

REQUEST_ID = web.RequestKey("openai_request_id", str)
FIELD_NAMES = web.RequestKey("openai_field_names", dict)
"""The fields of errors, under the names used by a request."""

IGNORED = web.RequestKey("openai_ignored_fields", list)
"""Names of ignored fields."""
MOST_IGNORED = 16

CODES = MappingProxyType(
    {
        "UNAUTHENTICATED": "invalid_api_key",
        "PROMPT_TOO_LONG": "context_length_exceeded",
        "RATE_LIMITED": "rate_limit_exceeded",
    }
)
"""Codes known to clients, by reason. Any other reason is a code in lower case."""

R = TypeVar("R", bound=web.StreamResponse)

TYPES = MappingProxyType({HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"})


def id_of(request: web.Request) -> str:
    """The client's name of a request, else a generated name."""
    if REQUEST_ID not in request:
        given = request.headers.get(REQUEST_ID_METADATA_KEY, "")
        usable = given.isprintable() and len(given) <= MAX_REQUEST_ID_LENGTH
        request[REQUEST_ID] = given if given and usable else secrets.token_hex(8)
    return request[REQUEST_ID]


def error_object(request: web.Request, error: TrtmeshError) -> dict[str, Any]:
    """An error as an object, with the fields under the names of this API."""
    names = {**NAMES, **request.get(FIELD_NAMES, {})}
    param = names.get(error.field, error.field) or None
    sentence = error.sentence(lambda field: names.get(field, field))
    if error.batch_index:
        sentence = f"prompt[{error.batch_index}]: {sentence}"
    code = CODES.get(error.reason, error.reason.lower())
    return _object(sentence, error.row.http, code, param)


class OpenAiForm:
    """`{"error": {"message", "type", "param", "code"}}`."""

    door: ClassVar[str] = "openai"

    def refused(self, request: web.Request, error: TrtmeshError, sentence: str) -> web.Response:
        response = json_response({"error": error_object(request, error)}, error.row.http)
        response.headers.update(error_headers(error))
        # Other errors, such as a lost worker, ended work; a retry would repeat the work.
        may_retry = error.row.blame is Blame.LOAD
        response.headers["x-should-retry"] = str(may_retry).lower()
        if error.retry_after_ms is not None:
            response.headers["retry-after-ms"] = str(error.retry_after_ms)
        return named(request, response)

    def failed(self, request: web.Request, error: web.HTTPException) -> web.Response:
        told, code = error.text or error.reason, error.reason.lower().replace(" ", "_")
        if isinstance(error, (web.HTTPNotFound, web.HTTPMethodNotAllowed)):
            told, code = f"{request.method} {cut(request.path)} is not served here", "unknown_url"
        response = json_response({"error": _object(told, error.status, code)}, error.status)
        keep_allow(response, error)
        response.headers["x-should-retry"] = "false"
        return named(request, response)


def named(request: web.Request, response: R) -> R:
    """The response, with the name of the request."""
    response.headers[REQUEST_ID_METADATA_KEY] = id_of(request)
    response.headers[hdrs.CACHE_CONTROL] = "no-cache"
    if ignored := request.get(IGNORED):
        # Without line ends, since a line end begins another header.
        response.headers["x-ignored-fields"] = json.dumps(list(map(cut, ignored[:MOST_IGNORED])))
    return response


def _object(sentence: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = TYPES.get(HTTPStatus(status), "server_error" if server else "invalid_request_error")
    return {"message": sentence, "type": kind, "param": param, "code": code}
