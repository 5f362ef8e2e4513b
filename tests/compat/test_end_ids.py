"""A tokenizer whose end id differs from the model's: texts end at either."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.triton import Triton
from e2e.mesh import PATIENT, SIMULATED, Mesh, running_mesh
from trtmesh.client import FinishReason
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZERS_END, MODELS_END, OTHER = 0, 5, 9
MOST, LEAST = 24, 4
MODELS = {
    name: {"template": name}
    for name in ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "llmapi", "preprocessing")
}
GENERATED = {"return_num_output_tokens": True, "exclude_input_in_output": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[TOKENIZERS_END, MODELS_END])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """The engine generates one of the two end ids whenever it may."""
    end = str(request.param)

    async def start(mesh: Mesh) -> None:
        await mesh.start_tokenizer()
        ids = {"first-token-id": end, "last-token-id": str(request.param + 1), "end-id": "5"}
        flags = [
            word
            for name, token in ids.items()
            for word in (f"--simulated-vocabulary-{name}", token)
        ]
        await mesh.start_engine(*SIMULATED, *flags)
        await mesh.start_router(*PATIENT, "--triton-models", json.dumps(MODELS))
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


@pytest.fixture(name="end")
def end_of(request: pytest.FixtureRequest, mesh: Mesh) -> int:
    """The id that the engine generates."""
    return int(request.node.callspec.params["mesh"])


@pytest.mark.parametrize("least", [0, LEAST])
@pytest.mark.parametrize("prompt", ["a text", [300, 301]])
async def test_native_texts_end_at_either(
    mesh: Mesh, end: int, prompt: str | list[int], least: int
) -> None:
    (item,) = await mesh.client.complete([prompt], max_tokens=MOST, min_tokens=least)
    (sequence,) = item.sequences
    assert sequence.reason is FinishReason.END_ID
    assert len(sequence.token_ids) > least
    assert sequence.token_ids.index(end) == len(sequence.token_ids) - 1
    (again,) = await mesh.client.complete([prompt], max_tokens=MOST, min_tokens=least, text=False)
    knows = end == MODELS_END or isinstance(prompt, str)
    assert (again.sequences[0].reason is FinishReason.END_ID) == knows


@pytest.mark.parametrize("options", [{"end_id": OTHER}, {"ignore_end_id": True}])
async def test_what_a_client_says_of_end_ids_is_all_that_counts(
    mesh: Mesh, options: dict[str, Any]
) -> None:
    (item,) = await mesh.client.complete(["a text"], max_tokens=MOST, **options)
    (sequence,) = item.sequences
    assert (sequence.reason, len(sequence.token_ids)) == (FinishReason.LENGTH, MOST)


async def test_a_resumed_text_ends_at_either(mesh: Mesh, end: int) -> None:
    (whole,) = await mesh.client.complete(["a text"], max_tokens=MOST, min_tokens=LEAST)
    request = router_pb.GenerateRequest(request_id="resumed")
    request.items.add().prompt.text = "a text"
    request.config.stopping.max_tokens, request.config.stopping.min_tokens = MOST, LEAST
    resumed = router_pb.ResumeRequest(request=request)
    resumed.received.add(token_ids=whole.sequences[0].token_ids[:2])
    call = router_pb2_grpc.MeshServiceStub(mesh.channel).Resume(resumed)
    answers = [answer async for answer in call]
    ids = [i for answer in answers for event in answer.events for i in event.tokens.token_ids]
    assert tuple(ids) == whole.sequences[0].token_ids[2:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_triton_texts_end_at_either(triton: Triton, model: str, stream: bool) -> None:
    async def count(**tensors: Any) -> int:
        asked = {"text_input": "a text", "max_tokens": MOST, "stream": stream, **GENERATED}
        responses = [each for each in await triton.stream(model, asked | tensors) if each.outputs]
        return int(responses[-1].number["num_output_tokens"])

    ended = await count()
    assert ended < MOST
    assert await count(min_tokens=LEAST) > LEAST
    assert await count(end_id=OTHER) == await count(end_id=-1) == MOST


async def test_llmapi_ends_at_either(triton: Triton) -> None:
    asked = {
        "text_input": np.array(["a text"], np.object_),
        "sampling_param_max_tokens": np.array([MOST], np.int32),
        "return_finish_reason": np.array([True]),
    }
    (response,) = await triton.stream("llmapi", asked)
    assert response.outputs["finish_reason"].tolist() == [b"stop"]


async def test_core_ends_at_the_id_that_it_is_given(triton: Triton, end: int) -> None:
    asked = {"input_ids": [300, 301], "input_lengths": 2, "request_output_len": MOST, **GENERATED}

    async def count(**tensors: Any) -> int:
        response = await triton.infer("tensorrt_llm", asked | tensors)
        return int(response.number["num_output_tokens"])

    made = await triton.infer("preprocessing", {"QUERY": "a text", "REQUEST_OUTPUT_LEN": MOST})
    end_id = int(made.outputs["OUT_END_ID"][0][0])
    assert end_id == TOKENIZERS_END
    assert await count() == MOST
    assert (await count(end_id=end_id) < MOST) == (end == TOKENIZERS_END)
