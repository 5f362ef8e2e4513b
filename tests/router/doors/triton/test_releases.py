"""The tensors of every release: declared as in the facts, read, and translated as those of the newest release."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from compat import releases as facts
from compat.triton import asked
from tritonclient.utils import serialize_byte_tensor
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.kserve import model_config_pb2
from trtmesh.router.doors.triton.calls import read_call
from trtmesh.router.doors.triton.models import describe_config, describe_metadata, triton_models
from trtmesh.router.doors.triton.releases import RELEASES, History
from trtmesh.router.doors.triton.settings import NEWEST_RELEASE, TritonSettings
from trtmesh.router.doors.triton.templates.template import Model

VISION_OUTPUTS = frozenset(
    {
        *("PIXEL_VALUES", "ASPECT_RATIO_IDS", "ASPECT_RATIO_MASK", "CROSS_ATTENTION_MASK"),
        *("IMAGE_SIZES", "IS_VIDEO_INPUT", "ATTENTION_MASK", "IMAGE_GRID_THW", "VISION_INPUT_ID"),
    }
)
"""Outputs of a vision encoder's preprocessing: undeclared, and refused where a request names them."""
EVERY = [(model, release) for model in facts.MODELS for release in facts.releases_of(model)]

Tensors = dict[str, tuple[str, tuple[int, ...], bool]]


def models_of(release: str) -> dict[str, Model]:
    return triton_models(TritonSettings.model_validate({"release": release}))


def declared(tensors: Any) -> Tensors:
    names = model_config_pb2.DataType
    return {
        t.name: (
            names.Name(t.data_type).removeprefix("TYPE_").replace("STRING", "BYTES"),
            tuple(t.dims),
            bool(hasattr(t, "optional") and not t.optional),
        )
        for t in tensors
    }


def known(model: str, kind: str, release: str) -> Tensors:
    return {
        t.name: (facts.data_type_of(t), t.dims, t.required)
        for t in facts.tensors(model, kind, release).values()
        if t.name not in VISION_OUTPUTS
    }


@pytest.mark.parametrize(("model", "release"), EVERY)
def test_configuration_declares_the_tensors_of_the_release(model: str, release: str) -> None:
    config = describe_config(models_of(release)[model])
    assert declared(config.input) == known(model, "inputs", release)
    assert declared(config.output) == known(model, "outputs", release)


def message_of(model: str, given: Mapping[str, tuple[str, Any]]) -> Any:
    """A request of inputs by name: each a data type and an array with a batch dimension."""
    message = kserve.ModelInferRequest(model_name=model)
    for name, (data_type, array) in given.items():
        message.inputs.add(name=name, datatype=data_type, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if data_type == "BYTES" else array.tobytes()
        message.raw_input_contents.append(raw)
    return message


def zeros(tensor: facts.Tensor) -> tuple[str, Any]:
    """A tensor of zeros or empty texts as a release declares it, two long where the length is open."""
    data_type = facts.data_type_of(tensor)
    shape = (1,) if tensor.is_scalar else [2 if extent < 0 else extent for extent in tensor.dims]
    array = np.zeros((1, *shape), facts.NUMPY[data_type])
    if data_type == "BYTES":
        array[...] = ""
    return data_type, array


@pytest.mark.parametrize(("model", "release"), EVERY)
def test_inputs_of_the_release_are_read_together(model: str, release: str) -> None:
    """By a server of the newest release, in the types, shapes and names of the other."""
    given = {name: zeros(t) for name, t in facts.tensors(model, "inputs", release).items()}
    call = read_call(triton_models(TritonSettings())[model], message_of(model, given))
    for name, (_, array) in given.items():
        sent = [each.encode() if array.dtype == object else each for each in array.ravel().tolist()]
        assert list(call.inputs[name].elements) == sent


PROMPTS: Mapping[str, Any] = {"text_input": "hi", "max_tokens": 7}
CORE_PROMPT: Mapping[str, Any] = {"input_ids": [3, 4], "input_lengths": 2, "request_output_len": 7}
CHANGED: Mapping[str, Mapping[str, Any]] = {
    "text_input": {},
    "max_tokens": {},
    "input_ids": {},
    "request_output_len": {},
    "bad_words": {"bad_words": ["bad"]},
    "stop_words": {"stop_words": ["stop"]},
    "decoder_text_input": {"decoder_text_input": "more"},
    "end_id": {"end_id": 5},
    "pad_id": {"pad_id": 5},
    "top_k": {"top_k": 5},
    "runtime_top_k": {"runtime_top_k": 5},
    "min_length": {"min_length": 3},
    "beam_width": {"beam_width": 2},
    "prompt_vocab_size": {"prompt_vocab_size": 2, "prompt_embedding_table": np.ones((2, 3))},
    "draft_logits": {"draft_logits": np.ones((2, 3)), "draft_input_ids": [5, 6]},
}
"""Values for the inputs that releases declare differently, and what must be beside them."""
PICTURE = "image_input"
"""Has other dims by release, so it is another value in each."""
GENERATING = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")


def changed_inputs() -> list[tuple[str, str]]:
    return [
        (model, name)
        for model in GENERATING
        for name, entries in facts.FACTS[model]["inputs"].items()
        if len(entries) > 1 and name != PICTURE
    ]


@pytest.mark.parametrize(("model", "name"), changed_inputs())
def test_an_input_of_every_release_asks_for_the_same(model: str, name: str) -> None:
    prompt = CORE_PROMPT if model == "tensorrt_llm" else PROMPTS
    read = triton_models(TritonSettings())[model]
    requests = []
    for release in facts.releases_of(model):
        known = facts.tensors(model, "inputs", release)
        if name in known:
            values = {each: v for each, v in {**prompt, **CHANGED[name]}.items() if each in known}
            rows = facts.typed(model, release, values)
            given = {each: (facts.data_type_of(known[each]), row) for each, row in rows.items()}
            requests.append(asked(read_call(read, message_of(model, given))))
    assert all(each == requests[-1] for each in requests)


def test_metadata_declares_what_the_configuration_does() -> None:
    model = models_of("v0.5.0")["ensemble"]
    metadata = describe_metadata(model)
    listed = {t.name: (t.datatype, tuple(t.shape)) for t in metadata.inputs}
    assert listed["max_tokens"] == ("UINT32", (-1, -1))
    assert "seed" not in listed
    assert listed["random_seed"] == ("UINT64", (-1, 1))


def test_a_model_may_have_a_release_of_its_own() -> None:
    settings = {"release": "v0.9.0", "models": {"new": {}, "old": {"release": "v0.6.1"}}}
    for own in settings["models"].values():  # type: ignore[attr-defined] # a mapping
        own["template"] = "ensemble"
    models = triton_models(TritonSettings.model_validate(settings))
    assert (models["new"].release, models["old"].release) == ("v0.9.0", "v0.6.1")


def test_newest_release_is_the_default() -> None:
    assert TritonSettings().release == NEWEST_RELEASE == RELEASES[-1]
    names = {
        given.name for given in describe_config(triton_models(TritonSettings())["ensemble"]).input
    }
    assert {"seed", "min_tokens"} <= names
    assert not {"random_seed", "min_length", "output_log_probs"} & names


def test_history_with_a_gap() -> None:
    history = History.parse("v0.6 UINT32 -1 required; v0.7 absent; v0.9 INT32 2,-1")
    found = [history.at(release) for release in ("v0.5.0", "v0.6.1", "v0.8.0", "v0.9.0")]
    assert [each and each.data_types for each in found] == [None, ("UINT32",), None, ("INT32",)]
    assert not history.required
    assert history.data_types == ("INT32", "UINT32")
    assert history.former_dims == ((-1,),)


def request(*inputs: tuple[str, str, bytes]) -> Any:
    message = kserve.ModelInferRequest(model_name="ensemble")
    for name, data_type, data in (
        ("text_input", "BYTES", struct.pack("<I", 2) + b"hi"),
        ("max_tokens", "INT32", struct.pack("<i", 7)),
        *inputs,
    ):
        message.inputs.add(name=name, datatype=data_type, shape=(1, 1))
        message.raw_input_contents.append(data)
    return message


NAMES = [
    (("seed", "UINT64", "<Q"), ("random_seed", "UINT64", "<Q")),
    (("min_tokens", "INT32", "<i"), ("min_length", "UINT32", "<I")),
]


@pytest.mark.parametrize(("new", "old"), NAMES)
def test_both_names_of_an_input_must_agree(
    new: tuple[str, str, str], old: tuple[str, str, str]
) -> None:
    ensemble = triton_models(TritonSettings())["ensemble"]

    def both(one: int, other: int) -> Any:
        return request(
            (old[0], old[1], struct.pack(old[2], one)), (new[0], new[1], struct.pack(new[2], other))
        )

    assert {new[0], old[0]} <= set(read_call(ensemble, both(3, 3)).inputs)
    with pytest.raises(InvalidRequest) as caught:
        read_call(ensemble, both(3, 4))
    assert set(caught.value.fields) == {new[0], old[0]}


def test_typed_contents_of_uint32() -> None:
    message = kserve.ModelInferRequest(model_name="ensemble")
    for name, data_type, field, value in (
        ("text_input", "BYTES", "bytes_contents", b"hi"),
        ("max_tokens", "UINT32", "uint_contents", 7),
    ):
        given = message.inputs.add(name=name, datatype=data_type, shape=(1, 1))
        getattr(given.contents, field).append(value)
    assert (
        read_call(triton_models(TritonSettings())["ensemble"], message)
        .inputs["max_tokens"]
        .scalar(0)
        == 7
    )
