"""A model with more, or fewer, rows than its tokenizer has ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.triton import Triton
from e2e.mesh import DEMO_VOCABULARY, PATIENT, Mesh, eventually, running_mesh
from engine.config_fields import LEAVES
from engine_streams import serving
from recording_backend import INFO, RecordingBackend
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[56, -44])
async def backend(request: pytest.FixtureRequest) -> RecordingBackend:
    info = replace(
        INFO,
        model="demo",
        vocabulary_size=DEMO_VOCABULARY + request.param,
        supported_fields=frozenset(LEAVES),
    )
    return RecordingBackend(info)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(backend: RecordingBackend) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(backend))

        async def start(mesh: Mesh) -> None:
            await mesh.start_tokenizer()
            # The engine runs in this process; the router only needs an address.
            mesh.engines.append(engine)  # type: ignore[arg-type]
            await mesh.start_router(*PATIENT)
            await mesh.ready(1, 1)

        yield await stack.enter_async_context(running_mesh(start=start))


async def seen_bias(triton: Triton, backend: RecordingBackend, bias: Any) -> tuple[float, ...]:
    """The bias at the backend of a request to the core model."""
    rows = len(bias)
    asked = {
        "input_ids": np.full((rows, 1), 5, np.int32),
        "input_lengths": np.ones((rows, 1), np.int32),
        "request_output_len": np.full((rows, 1), 3, np.int32),
        "embedding_bias": bias,
    }
    before = len(backend.items)
    answer = asyncio.create_task(triton.stream("tensorrt_llm", asked))

    async def arrived() -> bool:
        return len(backend.items) == before + rows

    await eventually(arrived)
    backend.end(*list(backend.live), reason=pb.FINISH_REASON_END_ID)
    assert not [response.error for response in await answer if response.error]
    by_row = sorted(backend.items[before:], key=lambda item: item.batch_index)
    return by_row[-1].config.sampling.embedding_bias


async def test_bias_of_preprocessing_fits_the_core_model(
    triton: Triton, backend: RecordingBackend
) -> None:
    words = {
        "QUERY": np.array([["x"], ["y"]], np.object_),
        "REQUEST_OUTPUT_LEN": np.array([[3], [3]], np.int32),
        "EMBEDDING_BIAS_WORDS": np.array([["a"], ["b"]], np.object_),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[1.5], [2.5]], np.float32),
    }
    made = (await triton.infer("preprocessing", words)).outputs["EMBEDDING_BIAS"]
    assert made.shape == (2, DEMO_VOCABULARY)
    seen = await seen_bias(triton, backend, made)
    size = backend.info.vocabulary_size
    expected = [*made[1].tolist(), *[0.0] * 100][:size]
    assert list(seen) == expected
    assert 2.5 in seen


async def test_bias_of_any_other_length_stays_as_it_is(
    triton: Triton, backend: RecordingBackend
) -> None:
    """For the engine to refuse it."""
    other = np.zeros((1, DEMO_VOCABULARY - 1), np.float32)
    assert len(await seen_bias(triton, backend, other)) == DEMO_VOCABULARY - 1
    last = np.zeros((1, DEMO_VOCABULARY), np.float32)
    last[0, -1] = 3.0
    seen = await seen_bias(triton, backend, last)
    grows = backend.info.vocabulary_size > DEMO_VOCABULARY
    assert len(seen) == (backend.info.vocabulary_size if grows else DEMO_VOCABULARY)
    assert seen[DEMO_VOCABULARY - 1] == 3.0
