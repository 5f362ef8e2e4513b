"""Named models with individual settings."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from compat.test_metrics import inference, samples
from compat.triton import Triton, joined, request
from e2e.mesh import Mesh, router_before
from tritonclient.utils import InferenceServerException
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.settings import load_settings
from trtmesh.router.settings import RouterSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = {
    "chat": {
        "template": "ensemble",
        "strict_transaction_policy": True,
        "steps": ["chat_pre", "chat_core", "chat_post"],
    },
    "chat_whole": {
        "template": "ensemble",
        "decoupled": False,
        "max_batch_size": 2,
        "exclude_input_in_output": True,
    },
    "chat_bls": {"template": "tensorrt_llm_bls", "accumulate_tokens": True},
    "chat_core": {"template": "tensorrt_llm", "max_beam_width": 2},
    "chat_disaggregated": {"template": "disaggregated_serving_bls", "steps": ["chat_core"]},
    "chat_pre": {"template": "preprocessing", "add_special_tokens": False},
    "chat_post": {"template": "postprocessing", "skip_special_tokens": False},
    "chat_post_clean": {"template": "postprocessing"},
}
BOS = 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(workers: Mesh) -> AsyncIterator[Mesh]:
    flags = ("--triton-models", json.dumps(MODELS))
    async with router_before(workers, *flags) as mesh:
        yield mesh


async def native_text(mesh: Mesh, prompt: str) -> str:
    (item,) = await mesh.client.complete([prompt], max_tokens=9)
    return item.text


async def test_only_configured_models_are_served(triton: Triton) -> None:
    index = await triton.client.get_model_repository_index()
    assert [model.name for model in index.models] == list(MODELS)
    assert not await triton.client.is_model_ready("ensemble")
    config = (await triton.client.get_model_config("chat")).config
    steps = [step.model_name for step in config.ensemble_scheduling.step]
    assert steps == ["chat_pre", "chat_core", "chat_post"]


async def test_two_ensembles_keep_their_settings(mesh: Mesh, triton: Triton) -> None:
    text = await native_text(mesh, "a prompt")
    tensors = {"text_input": "a prompt", "max_tokens": 9}
    assert joined(await triton.stream("chat", tensors | {"stream": True})) == text
    assert (await triton.infer("chat_whole", tensors)).text == text
    with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
        await triton.infer("chat", tensors)
    with pytest.raises(InferenceServerException, match="Streaming is only supported"):
        await triton.infer("chat_whole", tensors | {"stream": True})
    three = np.array([["x"]] * 3, np.object_), np.full((3, 1), 9, np.int32)
    with pytest.raises(InferenceServerException, match="batch-size must be <= 2"):
        await triton.infer("chat_whole", {"text_input": three[0], "max_tokens": three[1]})


async def test_accumulate_tokens_is_per_model(mesh: Mesh, triton: Triton) -> None:
    tensors = {"text_input": "a prompt", "max_tokens": 9, "stream": True}
    responses = await triton.stream("chat_bls", tensors)
    assert responses[-1].text == await native_text(mesh, "a prompt")
    assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(responses))


async def test_max_beam_width_is_per_model(triton: Triton) -> None:
    tensors = {"input_ids": [7], "input_lengths": 1, "request_output_len": 3, "beam_width": 3}
    (response,) = await triton.stream("chat_core", tensors)
    assert "Requested beam width 3 is larger than configured max beam width 2" in response.error


async def test_special_tokens_are_per_model(triton: Triton) -> None:
    query = {"QUERY": "hello", "REQUEST_OUTPUT_LEN": 1}
    ids = (await triton.infer("chat_pre", query)).outputs["INPUT_ID"].ravel().tolist()
    assert ids
    tokens = {
        "TOKENS_BATCH": np.array([[[BOS, *ids]]], np.int32),
        "SEQUENCE_LENGTH": np.array([[len(ids) + 1]], np.int32),
    }
    kept = (await triton.infer("chat_post", tokens)).outputs["OUTPUT"].tolist()
    assert (await triton.infer("chat_post_clean", tokens)).outputs["OUTPUT"].tolist() == [b"hello"]
    assert kept[0].endswith(b"hello")
    assert kept != [b"hello"]


async def test_disaggregated_model_equals_the_core_model(triton: Triton) -> None:
    """A single engine computes and continues a prompt."""
    tensors = {"input_ids": [7, 8], "input_lengths": 2, "request_output_len": 5, "streaming": True}
    core, whole = [
        [i for r in responses for i in r.outputs["output_ids"].ravel().tolist()]
        for responses in (
            await triton.stream("chat_core", tensors),
            await triton.stream("chat_disaggregated", tensors),
        )
    ]
    assert core == whole
    config = (await triton.client.get_model_config("chat_disaggregated")).config
    inputs = {given.name: given for given in config.input}
    assert not inputs["input_lengths"].HasField("reshape")
    assert not {"context_phase_params", "encoder_input_features", "lookahead_window_size"} & set(
        inputs
    )
    assert "context_phase_params" not in {out.name for out in config.output}


async def test_disaggregated_model_refuses_single_phases(triton: Triton) -> None:
    tensors = {"input_ids": [7], "input_lengths": 1, "request_output_len": 5}
    (response,) = await triton.stream(
        "chat_disaggregated", tensors, parameters={"request_type": "context_only"}
    )
    assert "request_type" in response.error
    assert "chat_disaggregated" in response.error


async def test_disaggregated_requests_count_for_the_core_model(mesh: Mesh, triton: Triton) -> None:
    """Without an executor there are no executor metrics."""
    key = 'nv_llm_output_token_len_count{model="chat_core",response_metric_type="total_output_tokens",version="1"}'
    before = await samples(mesh)
    tensors = {"input_ids": [7], "input_lengths": 1, "request_output_len": 5}
    assert not (await triton.stream("chat_disaggregated", tensors))[-1].error
    after = await samples(mesh)
    assert int(after[key]) - int(before[key]) == 1
    for model in ("chat_disaggregated", "chat_core"):
        name = inference(model, "request_success")
        assert int(after[name]) - int(before.get(name, 0)) == 1
    own = [name for name in after if 'model="chat_disaggregated"' in name]
    assert own
    assert all(name.startswith("nv_inference_") for name in own)


async def test_disaggregated_stream_ends_with_an_empty_response(triton: Triton) -> None:
    tensors = {"input_ids": [7], "input_lengths": 1, "request_output_len": 5, "streaming": True}
    *data, last = await triton.stream("chat_disaggregated", tensors, empty_final=True)
    assert last.final
    assert not last.outputs
    assert data
    assert not any(response.final for response in data)


async def test_a_stream_for_several_models(mesh: Mesh, triton: Triton) -> None:
    tensors = {"text_input": "a prompt", "max_tokens": 9}
    responses = await triton.stream_all(
        [request("chat", tensors, request_id="a"), request("chat_whole", tensors, request_id="b")]
    )
    text = await native_text(mesh, "a prompt")
    assert {r.request_id: r.text for r in responses} == {"a": "a prompt" + text, "b": text}


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ('{"x": {}}', "--triton-models.x.template is missing"),
        ('{"x": {"template": "nothing"}}', "--triton-models.x.template is 'nothing'"),
        ('{"x": {"template": "ensemble", "decupled": true}}', "--triton-models.x.decupled"),
        ('{"a/b": {"template": "ensemble"}}', "--triton-models.a/b"),
        (
            '{"x": {"template": "llmapi", "steps": ["y"]}}',
            "a model of template llmapi has no steps",
        ),
        ("ensemble", "--triton-models is 'ensemble'"),
    ],
)
async def test_invalid_model_settings_are_named(models: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(RouterSettings, ["--engines", "e:1", "--triton-models", models], {})
    assert complaint in str(caught.value)
