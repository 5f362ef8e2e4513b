"""tritonclient's compression: it compresses requests, and large answers come back the same way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from compat.triton import Response, Triton
from e2e.mesh import Mesh
from forwarder import Forwarder, forwarded

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


@asynccontextmanager
async def counted(mesh: Mesh) -> AsyncIterator[tuple[Triton, Forwarder]]:
    """A client, and the count of bytes that it receives."""
    async with forwarded(mesh.router.address) as forwarder, Triton(forwarder.address) as triton:
        yield triton, forwarder


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_large_answers_come_compressed_as_their_request(mesh: Mesh, algorithm: str) -> None:
    async with counted(mesh) as (triton, forwarder):
        plain = await triton.infer("preprocessing", QUERIES)
        assert forwarder.answered_bytes > BIAS_BYTES
    async with counted(mesh) as (triton, forwarder):
        answer = await triton.infer("preprocessing", QUERIES, compression_algorithm=algorithm)
        assert forwarder.answered_bytes < BIAS_BYTES // 10
    assert answer.outputs.keys() == plain.outputs.keys()
    for name, values in plain.outputs.items():
        assert np.array_equal(answer.outputs[name], values)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_streams_of_compressed_requests(mesh: Mesh, algorithm: str) -> None:
    async with counted(mesh) as (triton, forwarder):
        tensors = {"text_input": "def f(", "max_tokens": 20, "stream": True}
        plain = await triton.stream("ensemble", tensors)
        answer = await triton.stream("ensemble", tensors, compression_algorithm=algorithm)
        assert whole_text(answer) == whole_text(plain)
        large = await triton.stream("preprocessing", QUERIES, compression_algorithm=algorithm)
        assert large[0].outputs["EMBEDDING_BIAS"].nbytes == BIAS_BYTES
        assert forwarder.answered_bytes < BIAS_BYTES // 2


def whole_text(responses: list[Response]) -> str:
    return "".join(each.text for each in responses)
