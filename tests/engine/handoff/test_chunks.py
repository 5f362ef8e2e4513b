"""Chunks without Protobuf are the same bytes as with it."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from trtmesh.engine.handoff import messages
from trtmesh.v1 import kv_transfer_pb2 as pb

SIZES = (0, 1, 127, 128, 2**14 - 3, 2**14, 2**20)


@pytest.mark.parametrize("size", SIZES)
def test_head_and_data_are_the_message(size: int) -> None:
    data = b"\x9a" * size
    expected = pb.FetchResponse(chunk=pb.KvChunk(data=data)).SerializeToString()
    if size:
        assert messages.head_of(size) + data == expected
    assert pb.FetchResponse.FromString(messages.head_of(size) + data).chunk.data == data


@pytest.mark.parametrize("size", SIZES)
def test_chunk_stays_in_its_memory(size: int) -> None:
    memory = bytearray(messages.head_of(size) + b"\x9a" * size)
    found = messages.parse(memoryview(memory))
    assert isinstance(found, memoryview)
    assert found == b"\x9a" * size
    assert found.obj is memory


CHUNK = pb.FetchResponse(chunk=pb.KvChunk(data=b"a" * 200)).SerializeToString()
OTHERS = {
    "another message": pb.FetchResponse(part=pb.KvPart(part=3, blocks=9)).SerializeToString(),
    "an empty message": b"",
    "an empty chunk": pb.FetchResponse(chunk=pb.KvChunk()).SerializeToString(),
    "a field after the chunk": CHUNK + b"\xf8\x01\x01",
    "a field after the data": b"\x2a\x05\x0a\x01a\x10\x07",
    "a second chunk": CHUNK + pb.FetchResponse(chunk=pb.KvChunk(data=b"b")).SerializeToString(),
    "data given twice": b"\x2a\x06\x0a\x01a\x0a\x01b",
    "a chunk before another message": CHUNK + b"\x22\x00",
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_parsed(name: str) -> None:
    message = OTHERS[name]
    found = messages.parse(memoryview(message))
    assert found == messages.parse(message) == pb.FetchResponse.FromString(message)


def test_long_forms_of_lengths_are_equal() -> None:
    message = b"\x2a\x86\x00\x0a\x82\x80\x00ab"
    assert pb.FetchResponse.FromString(message).chunk.data == b"ab"
    assert messages.parse(memoryview(message)) == b"ab"


@pytest.mark.parametrize("message", [CHUNK[:-1], CHUNK[:2], b"\x2a", b"\x2a" + b"\xff" * 11])
def test_broken_messages_are_errors(message: bytes) -> None:
    with pytest.raises(DecodeError):
        messages.parse(memoryview(message))
