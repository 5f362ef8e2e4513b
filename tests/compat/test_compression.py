"""tritonclient's compression: it compresses requests, and large answers come back the same way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from compat.triton import Response, Triton
from e2e.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = 8
QUERIES = {
    "QUERY": np.array([["one two three"]] * ROWS, np.object_),
    "REQUEST_OUTPUT_LEN": np.full((ROWS, 1), 3, np.int32),
    "EMBEDDING_BIAS_WORDS": np.array([["five"]] * ROWS, np.object_),
    "EMBEDDING_BIAS_WEIGHTS": np.ones((ROWS, 1), np.float32),
}
"""The answer has the rows' EMBEDDING_BIAS, an element a token of the vocabulary, nearly all of them 0."""
BIAS_BYTES = ROWS * 6144 * 4


class Forwarder:
    """Forwards connections to a server and counts the bytes of its answers."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.answered_bytes = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = await asyncio.open_connection(self._host, self._port)
        try:
            await asyncio.gather(self._copy(reader, far), self._copy(near, writer, counts=True))
        finally:
            far.close()
            writer.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool = False
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                self.answered_bytes += len(data) * counts
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def forwarded(address: str) -> AsyncIterator[tuple[Triton, Forwarder]]:
    """A client of a server, and the count of bytes that it receives."""
    forwarder = Forwarder(address)
    server = await asyncio.start_server(forwarder.forward, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        async with Triton(f"{host}:{port}") as triton:
            yield triton, forwarder


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_large_answers_come_compressed_as_their_request(mesh: Mesh, algorithm: str) -> None:
    async with forwarded(mesh.router.address) as (triton, counted):
        plain = await triton.infer("preprocessing", QUERIES)
        assert counted.answered_bytes > BIAS_BYTES
    async with forwarded(mesh.router.address) as (triton, counted):
        answer = await triton.infer("preprocessing", QUERIES, compression_algorithm=algorithm)
        assert counted.answered_bytes < BIAS_BYTES // 10
    assert answer.outputs.keys() == plain.outputs.keys()
    for name, values in plain.outputs.items():
        assert np.array_equal(answer.outputs[name], values)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_streams_of_compressed_requests(mesh: Mesh, algorithm: str) -> None:
    async with forwarded(mesh.router.address) as (triton, counted):
        tensors = {"text_input": "def f(", "max_tokens": 20, "stream": True}
        plain = await triton.stream("ensemble", tensors)
        answer = await triton.stream("ensemble", tensors, compression_algorithm=algorithm)
        assert whole_text(answer) == whole_text(plain)
        large = await triton.stream("preprocessing", QUERIES, compression_algorithm=algorithm)
        assert large[0].outputs["EMBEDDING_BIAS"].nbytes == BIAS_BYTES
        assert counted.answered_bytes < BIAS_BYTES // 2


def whole_text(responses: list[Response]) -> str:
    return "".join(each.text for each in responses)
