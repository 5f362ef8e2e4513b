"""Writes docs/limits.md: the limits on what clients send, from the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtmesh.chassis import errors, http_input, http_server, logs, metrics_endpoint, parsing
from trtmesh.chassis.fair.limits import Rate
from trtmesh.chassis.grpc.large_message import MessageLimits
from trtmesh.chassis.grpc.server.call import REQUEST_SECONDS, UNREAD_SECONDS
from trtmesh.chassis.grpc.server.connection import (
    HELD_ANSWERS,
    HELD_MESSAGES,
    IDLE_CALLS,
    MAX_CONCURRENT_STREAMS,
)
from trtmesh.chassis.http2 import connection, frames, headers
from trtmesh.chassis.http2.rates import RATES
from trtmesh.chassis.quoting import MAX_QUOTED_CHARACTERS
from trtmesh.engine.backends.torch.guided import grammars, guidance, schemas, trial
from trtmesh.engine.backends.torch.sampling import mask_time
from trtmesh.router.doors.http import json_bodies, port
from trtmesh.router.doors.triton import calls, tensors
from trtmesh.router.doors.triton.grpc.door import MOST_REQUESTS_OF_A_STREAM
from trtmesh.router.doors.triton.http.door import HttpSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.router.streams import client_stream
from trtmesh.router.values import request
from trtmesh.router.values.handoff_state import MAX_STATE_BYTES
from trtmesh.tokenizer.settings import TokenizerSettings
from trtmesh.v1.generation_fields import LIMITS, MOST_CHARACTERS, MOST_ENTRIES

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Limits

Written by `python docs/limits.py` from the code. Parts of a request are counted before they are copied; the error names
the field, the value cut to a length, and the limit. Limits with a setting in brackets can be changed
([settings](settings.md)).
"""

Row = tuple[str, int | float, str]

INVALID = "INVALID_ARGUMENT, 400"
CALM = "the connection ends"
REFUSED = "GOAWAY, closed"
REPLACES = "replaces the one that waits longest for a request; 503, closed, if none does"


def _pace(rate: Rate) -> str:
    parts = [f"{rate.per_second:,g} a second"]
    for count, what in ((rate.per_served, "served call"), (rate.per_opened, "call")):
        parts += [f"{count} for each {what}"] if count else []
    return " and ".join(parts)


def page() -> str:
    return "\n".join([HEAD, *(line for table in TABLES.items() for line in _table(*table))])


def _table(title: str, rows: list[Row]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| Limit | Default | Beyond it |\n|---|---|---|"
    yield from (f"| {name} | {value:,} | {beyond} |" for name, value, beyond in rows)
    yield ""


_HTTP, _ROUTER = HttpSettings(), RouterSettings(engines=())
_TOKENIZER = TokenizerSettings(model_dir=Path())
_MESSAGE = MessageLimits()

TABLES: dict[str, list[Row]] = {
    "A request, on every door": [
        ("bytes of a message (`max_message_bytes`)", _ROUTER.max_message_bytes, "refused"),
        ("prompts", request.MAX_ITEMS, INVALID),
        (
            "bytes of all requests of 128 KiB or more (`admission.max_request_bytes`)",
            _ROUTER.admission.max_request_bytes,
            "QUEUE_FULL",
        ),
        ("token ids of a prompt", parsing.MAX_PROMPT_TOKENS, INVALID),
        ("token ids of all prompts", request.MAX_REQUEST_TOKENS, INVALID),
        (
            "bytes of a text with its words (a sixteenth of the tokenizer's `max_message_bytes`)",
            _TOKENIZER.max_text_bytes,
            f"{INVALID}, at the router",
        ),
        ("characters of a request id", request.MAX_REQUEST_ID_LENGTH, INVALID),
        ("characters of a model's name", request.MAX_MODEL_CHARACTERS, INVALID),
        ("words in a list of words", parsing.MAX_WORDS, INVALID),
        (
            "words of `stop_token_ids` and `bad_token_ids`",
            MOST_ENTRIES["stopping.stop_token_ids"],
            INVALID,
        ),
        ("tokens or characters of a word", parsing.MAX_WORD_LENGTH, INVALID),
        ("characters of all stop texts", parsing.MAX_STOP_TEXT_CHARACTERS, INVALID),
        ("entries of `embedding_bias`", MOST_ENTRIES["sampling.embedding_bias"], INVALID),
        ("retention ranges", MOST_ENTRIES["kv_cache.token_ranges"], INVALID),
        ("dimensions of a tensor", parsing.MAX_DIMENSIONS, INVALID),
        ("images", MOST_ENTRIES["multimodal.images"], INVALID),
        ("inputs of a multimodal model", MOST_ENTRIES["multimodal.model_inputs"], INVALID),
        (
            "characters of an adapter's name, a salt or a URL",
            MOST_CHARACTERS["lora.name"],
            INVALID,
        ),
        ("characters of a guide", MOST_CHARACTERS["guided_decoding.guide"], INVALID),
        ("bytes of a handoff state", MAX_STATE_BYTES, INVALID),
        (
            "`top_k`, ids, lengths and other counts",
            int(LIMITS["sampling.top_k"][1]),
            INVALID,
        ),
    ],
    "A guide, on the embedded engine": [
        ("bytes", guidance.MOST_BYTES, INVALID),
        ("levels of a schema", schemas.MOST_DEPTH, INVALID),
        ("values of all enums of a schema", schemas.MOST_ENUM_VALUES, INVALID),
        ("properties of an object", schemas.MOST_PROPERTIES, INVALID),
        ("items of the parser after a character, under a grammar", trial.MAX_ROW_ITEMS, INVALID),
        ("states of the lexer", trial.MAX_LEXER_STATES, INVALID),
        ("the library's units of work for the first state", trial.INITIAL_LEXER_FUEL, INVALID),
        ("seconds of CPU time to follow it", grammars.FREE_SECONDS, INVALID),
        ("and seconds for each token", grammars.SECONDS_OF_TOKEN, INVALID),
        ("items with a guide in a worker", grammars.MOST_WAITING, "QUEUE_FULL"),
        ("seconds for masks in a step", mask_time.STEP_SECONDS, "the sequence sits out"),
    ],
    "A Triton request": [
        ("requests of a stream at once", MOST_REQUESTS_OF_A_STREAM, "QUEUE_FULL; stops are taken"),
        ("characters of its id", calls.MOST_ID_CHARACTERS, INVALID),
        ("parameters, also of an input or output", calls.MOST_PARAMETERS, INVALID),
        ("requested outputs", calls.MOST_OUTPUTS, INVALID),
        ("elements of an input of BYTES", tensors.MOST_TEXTS, INVALID),
        ("elements of typed contents", calls.MOST_TYPED_ELEMENTS, f"{INVALID}; raw contents"),
    ],
    "HTTP": [
        ("connections (`connections.max_open`)", _ROUTER.connections.max_open, REPLACES),
        (
            "connections of an IPv4 address or IPv6 network (`connections.max_per_address`)",
            _ROUTER.connections.max_per_address,
            REPLACES,
        ),
        ("connections of the metrics port", metrics_endpoint.LIMITS.max_open, REPLACES),
        ("bytes of the request line or a header", http_server.MAX_LINE_BYTES, "400, closed"),
        ("headers", http_server.MAX_HEADERS, "400, closed"),
        ("parts of a path", http_server.MAX_SEGMENTS, "404"),
        (
            "bytes of sizes of chunks, extensions and trailers beyond as many of the body",
            http_input.MAX_FRAMING_BYTES,
            "closed",
        ),
        ("seconds to send a body", port.RECEIVE_SECONDS, "408"),
        ("bytes of a body, also decompressed", _ROUTER.max_message_bytes, "413"),
        ("seconds to send a head, from its first byte", http_server.HEAD_SECONDS, "closed"),
        ("seconds from an answer to the next request", port.IDLE_SECONDS, "closed"),
        (
            "seconds in which nothing of an answer is read",
            client_stream.UNREAD_SECONDS + port.UNREAD_MARGIN_SECONDS,
            "closed",
        ),
        (
            "unparsed bytes of all connections",
            port.MAX_UNFINISHED_BYTES,
            "429 for the largest body, or the connection with more ends",
        ),
        ("bytes of JSON", port.MAX_JSON_BYTES, "400"),
        ("nested lists and objects of JSON", json_bodies.MAX_DEPTH, "400"),
        ("keys of an object", json_bodies.MAX_KEYS, "400"),
        ("characters of a key", json_bodies.MAX_KEY_CHARACTERS, "400"),
        ("numbers in lists", json_bodies.MAX_NUMBERS, "400"),
        ("other values", json_bodies.MAX_VALUES, "400"),
    ],
    "A gRPC connection": [
        ("connections (`connections.max_open`)", _ROUTER.connections.max_open, REFUSED),
        (
            "connections of an IPv4 address or IPv6 network (`connections.max_per_address`)",
            _ROUTER.connections.max_per_address,
            REFUSED,
        ),
        (
            "seconds of age, 0 for no limit (`connections.max_age_seconds`)",
            _ROUTER.connections.max_age_seconds,
            "GOAWAY; the connection ends after its calls",
        ),
        ("calls at once", MAX_CONCURRENT_STREAMS, "refused"),
        ("messages of a single request", 1, "INTERNAL"),
        ("fields of a message of 128 KiB or more", _MESSAGE.fields, "INVALID_ARGUMENT"),
        (
            "numbers in lists of such a message; 64-bit numbers count twice",
            _MESSAGE.numbers,
            "INVALID_ARGUMENT",
        ),
        ("bytes of texts in such a message", _MESSAGE.text_bytes, "INVALID_ARGUMENT"),
        ("bytes of a header block", headers.MAX_BLOCK_BYTES, CALM),
        ("bytes of a header list", headers.MAX_HEADER_LIST_SIZE, "RESOURCE_EXHAUSTED"),
        ("bytes of a header list with a block within its limit", headers.MAX_LIST_BYTES, CALM),
        (
            "unread bytes of all connections, unparsed input included (twice `max_message_bytes`)",
            HELD_MESSAGES * _ROUTER.max_message_bytes,
            "the largest call of the largest connection ends with RESOURCE_EXHAUSTED, or it ends",
        ),
        (
            "calls with unsent requests or unread answers, watches of health (twice `connections.max_open`)",
            IDLE_CALLS * _ROUTER.connections.max_open,
            "the latest such call of the connection with most ends with RESOURCE_EXHAUSTED, or is reset",
        ),
        (
            "unread bytes of answers to all connections (four times `max_message_bytes`)",
            HELD_ANSWERS * _ROUTER.max_message_bytes,
            "the largest answer to the largest connection ends with RESOURCE_EXHAUSTED, or the connection ends",
        ),
        (
            "bytes of output that waits for all clients (`client.total_bytes`)",
            _ROUTER.client.total_bytes,
            "the request with most ends with SLOW_CLIENT",
        ),
        ("bytes of a frame other than DATA", frames.MAX_CONTROL_FRAME_SIZE, CALM),
        ("bytes of SETTINGS", connection.MAX_SETTINGS_BYTES, CALM),
        *((f"{rate.what}, at once", rate.burst, f"then {_pace(rate)}; {CALM}") for rate in RATES),
        ("seconds to send SETTINGS", connection.PING_AFTER_SECONDS, "closed"),
        ("seconds to send a header block", connection.FRAME_SECONDS, CALM),
        ("seconds to send a single request", REQUEST_SECONDS, "DEADLINE_EXCEEDED"),
        ("seconds of silence before a PING", connection.PING_AFTER_SECONDS, "PING"),
        ("seconds to answer it", connection.PING_TIMEOUT_SECONDS, "closed"),
        (
            "seconds in which nothing of a stream's message is read",
            client_stream.UNREAD_SECONDS,
            "SLOW_CLIENT",
        ),
        (
            "seconds in which nothing of any other answer is read",
            UNREAD_SECONDS,
            "the stream is reset",
        ),
        ("seconds in which nothing is read, PINGs included", connection.PAUSE_SECONDS, "closed"),
    ],
    "What is told of a request": [
        ("characters of a quoted name or value", MAX_QUOTED_CHARACTERS, "cut"),
        ("characters of an error", errors.MAX_PROBLEM_CHARACTERS, "cut inside"),
        ("characters of a log message", logs.MAX_MESSAGE_CHARACTERS, "cut inside"),
        ("characters of a traceback", logs.MAX_TRACEBACK_CHARACTERS, "cut inside"),
    ],
}

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
