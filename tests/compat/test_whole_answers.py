"""Models that are not decoupled: a single response with all rows, unary or on a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise

import numpy as np
import pytest
import pytest_asyncio
from compat.triton import Response, Triton
from e2e.mesh import Mesh, decode, router_before
from tritonclient.utils import InferenceServerException
from trtmesh.chassis.errors import UnsupportedField

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(workers: Mesh) -> AsyncIterator[Mesh]:
    async with router_before(workers, "--triton-decoupled", "") as mesh:
        yield mesh


def texts(*values: str) -> np.ndarray:
    return np.array([[value] for value in values], dtype=np.object_)


def column(*values: int) -> np.ndarray:
    return np.array([[value] for value in values], dtype=np.int32)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_whole_response_begins_with_the_prompt(
    mesh: Mesh, triton: Triton, model: str
) -> None:
    response = await triton.infer(model, {"text_input": "def f(", "max_tokens": TOKENS})
    (item,) = await mesh.client.complete(["def f("], max_tokens=TOKENS)
    assert response.text == "def f(" + item.text
    assert set(response.outputs) == {"text_output"}
    assert response.final is None
    (streamed,) = await triton.stream(model, {"text_input": "def f(", "max_tokens": TOKENS})
    assert streamed.final
    assert streamed.text == response.text


async def test_batch_keeps_the_order_of_rows(mesh: Mesh, triton: Triton) -> None:
    prompts = ["one", "another prompt", "x"]
    response = await triton.infer(
        "ensemble",
        {
            "text_input": texts(*prompts),
            "max_tokens": column(3, 12, 7),
            "exclude_input_in_output": np.ones((3, 1), bool),
            "return_num_input_tokens": np.ones((3, 1), bool),
            "return_num_output_tokens": np.ones((3, 1), bool),
        },
    )
    items = [
        (await mesh.client.complete([prompt], max_tokens=count))[0]
        for prompt, count in zip(prompts, (3, 12, 7), strict=True)
    ]
    assert response.outputs["text_output"].tolist() == [item.text.encode() for item in items]
    assert response.outputs["num_output_tokens"].tolist() == [[3], [12], [7]]
    counts = [[item.usage.prompt_tokens] for item in items]
    assert response.outputs["num_input_tokens"].tolist() == counts
    assert "batch_index" not in response.outputs


async def test_exclude_input_is_per_row(mesh: Mesh, triton: Triton) -> None:
    tensors = {"text_input": texts("one", "two"), "max_tokens": column(5, 5)}
    items = await mesh.client.complete(["one", "two"], max_tokens=5)
    new = [item.text for item in items]
    for excluded, expected in (
        ([[True], [False]], [new[0], "two" + new[1]]),
        ([[False], [True]], ["one" + new[0], new[1]]),
    ):
        response = await triton.infer(
            "ensemble", tensors | {"exclude_input_in_output": np.array(excluded)}
        )
        assert response.outputs["text_output"].tolist() == [text.encode() for text in expected]


async def test_ragged_rows_are_trimmed_to_their_lengths(mesh: Mesh, triton: Triton) -> None:
    ids = np.array([[11, 12, 13, 14], [21, 22, 0, 0]], dtype=np.int32)
    tensors = {
        "input_ids": ids,
        "input_lengths": column(4, 2),
        "request_output_len": column(5, 3),
        "pad_id": column(77, 78),
    }
    response = await triton.infer("tensorrt_llm", tensors)
    generated = await mesh.client.complete([[11, 12, 13, 14]], max_tokens=5, ignore_end_id=True)
    first = [11, 12, 13, 14, *generated[0].token_ids]
    generated = await mesh.client.complete([[21, 22]], max_tokens=3, ignore_end_id=True)
    second = [21, 22, *generated[0].token_ids]
    assert response.outputs["output_ids"].tolist() == [[first], [second + [-1] * 4]]
    assert response.outputs["sequence_length"].tolist() == [[9], [5]]
    excluded = await triton.infer(
        "tensorrt_llm", tensors | {"exclude_input_in_output": np.ones((2, 1), bool)}
    )
    assert excluded.outputs["output_ids"].tolist() == [[first[4:]], [second[2:] + [-1] * 2]]
    assert excluded.outputs["sequence_length"].tolist() == [[5], [3]]


async def test_pad_id_pads_only_preprocessing(mesh: Mesh) -> None:
    """Triton declares a `pad_id` without effect. The native API has no such field."""
    (item,) = await mesh.client.complete([[5]], max_tokens=1, pad_id=7)
    assert isinstance(item.error, UnsupportedField)
    assert "stopping.pad_id" in item.error.message


async def test_sequences_take_the_places_of_beams(triton: Triton) -> None:
    response = await triton.infer(
        "ensemble",
        {
            "text_input": "x",
            "max_tokens": TOKENS,
            "num_return_sequences": 3,
            "top_k": 50,
            "seed": 7,
        },
    )
    (values,) = response.outputs.values()
    assert len(set(values.tolist())) == 3


async def test_only_requested_outputs_are_returned(triton: Triton) -> None:
    tensors = {
        "input_ids": [5, 6],
        "input_lengths": 2,
        "request_output_len": 3,
        "return_perf_metrics": True,
    }
    everything = await triton.infer("tensorrt_llm", tensors)
    assert len(everything.outputs) == 12
    assert everything.number["last_token_time_ns"] >= everything.number["arrival_time_ns"] > 0
    assert everything.outputs["acceptance_rate"].shape == (1, 1)
    names = ["output_ids", "sequence_length", "arrival_time_ns"]
    some = await triton.infer("tensorrt_llm", tensors, outputs=names)
    assert set(some.outputs) == set(names)


async def test_stop_word_ends_the_text_after_the_word(mesh: Mesh, triton: Triton) -> None:
    """Found across tokens; the text ends right after the word."""
    (whole,) = await mesh.client.complete(["stop"], max_tokens=60)
    word = decode(whole.token_ids[20:23])[1:]
    cut = whole.text[: whole.text.index(word) + len(word)]
    for model in ("ensemble", "tensorrt_llm_bls"):
        for excluded in (True, False):
            response = await triton.infer(
                model,
                {
                    "text_input": "stop",
                    "max_tokens": 60,
                    "stop_words": ["", "no such word", word],
                    "exclude_input_in_output": excluded,
                },
            )
            assert response.text == ("" if excluded else "stop") + cut


async def test_chained_models_equal_the_ensemble(triton: Triton) -> None:
    """The ensemble's result, from a client that chains the models."""
    prompt, words = "The capital of France is", ["zzz", "qq qq"]
    encoded = await triton.infer(
        "preprocessing",
        {"QUERY": prompt, "REQUEST_OUTPUT_LEN": TOKENS, "STOP_WORDS_DICT": words},
    )
    outputs = encoded.outputs
    assert outputs["INPUT_ID"].shape == (1, encoded.number["REQUEST_INPUT_LEN"])
    assert outputs["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert outputs["EMBEDDING_BIAS"].shape == (1, 0)
    generated = await triton.infer(
        "tensorrt_llm",
        {
            "input_ids": outputs["INPUT_ID"],
            "input_lengths": outputs["REQUEST_INPUT_LEN"],
            "request_output_len": outputs["REQUEST_OUTPUT_LEN"],
            "stop_words_list": outputs["STOP_WORDS_IDS"],
            "bad_words_list": outputs["BAD_WORDS_IDS"],
            "embedding_bias": outputs["EMBEDDING_BIAS"],
            "end_id": outputs["OUT_END_ID"],
            "pad_id": outputs["OUT_PAD_ID"],
            "prompt_table_extra_ids": outputs["OUT_PROMPT_TABLE_EXTRA_IDS"],
        },
    )
    decoded = await triton.infer(
        "postprocessing",
        {
            "TOKENS_BATCH": generated.outputs["output_ids"],
            "SEQUENCE_LENGTH": generated.outputs["sequence_length"],
        },
    )
    whole = await triton.infer("ensemble", {"text_input": prompt, "max_tokens": TOKENS})
    assert decoded.outputs["OUTPUT"].tolist() == [whole.text.encode()]


async def test_stopped_row_waits_for_its_batch(mesh: Mesh, triton: Triton) -> None:
    """The prompt and truncated text stay unchanged until the others end."""
    (whole,) = await mesh.client.complete(["stop"], max_tokens=60)
    word = decode(whole.token_ids[20:23])[1:]
    cut = whole.text[: whole.text.index(word) + len(word)]
    response = await triton.infer(
        "ensemble",
        {
            "text_input": texts("stop", "two", "three"),
            "max_tokens": column(60, 200, 400),
            "stop_words": texts(word, "no such word", "no such word"),
        },
    )
    assert response.outputs["text_output"].tolist()[0] == ("stop" + cut).encode()


async def test_zero_draft_tokens_are_accepted(mesh: Mesh, triton: Triton) -> None:
    """0 means no speculation."""
    (item,) = await mesh.client.complete(["x"], max_tokens=3)
    tensors = GOOD_TEXT | {"num_draft_tokens": 0, "use_draft_logits": False}
    response = await triton.infer("tensorrt_llm_bls", tensors)
    assert response.text == "x" + item.text


async def test_preprocessing_pads_and_formats(mesh: Mesh, triton: Triton) -> None:
    response = await triton.infer(
        "preprocessing",
        {
            "QUERY": texts("a longer query than the other", "short"),
            "REQUEST_OUTPUT_LEN": column(3, 4),
            "PAD_ID": column(77, 78),
            "BAD_WORDS_DICT": np.array([["one two", "three"], ["", "four"]], dtype=np.object_),
            "EMBEDDING_BIAS_WORDS": np.array([["five", ""], ["six", "six"]], dtype=np.object_),
            "EMBEDDING_BIAS_WEIGHTS": np.array([[1.5, 9], [-1, -1]], dtype=np.float32),
            "PROMPT_TABLE_EXTRA_ID": np.array([[8], [9]], dtype=np.uint64),
        },
    )
    outputs = response.outputs
    long, short = outputs["REQUEST_INPUT_LEN"][:, 0].tolist()
    ids = outputs["INPUT_ID"]
    assert ids.shape == (2, long)
    assert decode(ids[1, :short].tolist()) == "short"
    assert ids[1, short:].tolist() == [78] * (long - short)
    word_ids, offsets = outputs["BAD_WORDS_IDS"][0].tolist()
    assert spelled(word_ids, offsets) == ["one two", " one two", "three", " three"]
    word_ids, offsets = outputs["BAD_WORDS_IDS"][1].tolist()
    assert spelled(word_ids, offsets) == ["four", " four"]
    bias = outputs["EMBEDDING_BIAS"]
    assert bias.shape == (2, 6144)
    assert decode(np.flatnonzero(bias[0]).tolist()) == "five"
    assert set(bias[1].tolist()) == {0.0, -2.0}
    assert outputs["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[8] * long, [9] * long]
    assert outputs["DECODER_INPUT_ID"].tolist() == [[77], [78]]


def spelled(word_ids: list[int], offsets: list[int]) -> list[str]:
    ends = [end for end in offsets if end != -1]
    return [decode(word_ids[start:end]) for start, end in pairwise([0, *ends])]


async def failure(triton: Triton, model: str, tensors: dict[str, object]) -> tuple[str, str]:
    """Status and message of a failed request, equal for unary calls and streams."""
    with pytest.raises(InferenceServerException) as caught:
        await triton.infer(model, tensors)
    (response,) = await triton.stream(model, tensors)
    assert isinstance(response, Response)
    assert response.error == caught.value.message()
    return str(caught.value.status()).removeprefix("StatusCode."), str(caught.value.message())


GOOD_IDS = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 3}
GOOD_TEXT = {"text_input": "x", "max_tokens": 3}
TWO_ROWS = {"text_input": texts("one", "two"), "max_tokens": column(3, 3)}
FAILURES = [
    ("ensemble", GOOD_TEXT | {"stream": True}, "INTERNAL",
     "Streaming is only supported if model is deployed using decoupled mode."),
    ("ensemble", {"text_input": "x"}, "INVALID_ARGUMENT",
     "but got 1 inputs for model 'ensemble'. Got input(s) ['text_input'], but missing required"),
    ("ensemble", GOOD_TEXT | {"top_q": 3}, "INVALID_ARGUMENT",
     "unexpected inference input 'top_q' for model 'ensemble'"),
    ("ensemble", GOOD_TEXT | {"top_k": 3.5}, "INVALID_ARGUMENT",
     "inference input 'top_k' data-type is 'FP32', but model 'ensemble' expects 'INT32'"),
    ("ensemble", GOOD_TEXT | {"top_k": [3, 4]}, "INVALID_ARGUMENT",
     "unexpected shape for input 'top_k' for model 'ensemble'. Expected [-1,1], got [1,2]."),
    ("ensemble", GOOD_TEXT | {"top_k": column(1, 2)}, "INVALID_ARGUMENT",
     "input 'top_k' batch size does not match other inputs for 'ensemble'"),
    ("ensemble", {"text_input": texts(*"x" * 129), "max_tokens": column(*[1] * 129)}, "INVALID_ARGUMENT",
     "inference request batch-size must be <= 128 for 'ensemble'"),
    ("tensorrt_llm_bls", GOOD_TEXT | {"max_tokens": 0}, "INVALID_ARGUMENT",
     "max_tokens must be a single value > 0"),
    ("ensemble", GOOD_TEXT | {"seed": np.array([[-1]], np.int64)}, "INVALID_ARGUMENT",
     "inference input 'seed' data-type is 'INT64'"),
    ("ensemble", GOOD_TEXT | {"guided_decoding_guide_type": "yaml"}, "INVALID_ARGUMENT",
     "guided_decoding_guide_type is 'yaml' but must be one of json,"),
    ("tensorrt_llm", {"input_lengths": 2, "request_output_len": 3}, "INTERNAL",
     "input_ids or encoder_input_features is not present in the request"),
    ("tensorrt_llm", GOOD_IDS | {"input_lengths": 3}, "INVALID_ARGUMENT", "input_lengths is 3"),
    ("tensorrt_llm", GOOD_IDS | {"stop_words_list": np.array([[[262], [5]]], np.int32)}, "INVALID_ARGUMENT",
     "Invalid format for word list"),
    ("tensorrt_llm", GOOD_IDS | {"lora_task_id": 7}, "UNIMPLEMENTED", "lora_task_id not supported"),
    ("ensemble", GOOD_TEXT | {"text_input": "x " * 9000}, "INTERNAL",
     "Prompt length (9001) exceeds maximum input length (8191)"),
    ("ensemble", TWO_ROWS | {"return_log_probs": np.array([[False], [True]])}, "INVALID_ARGUMENT",
     "return_log_probs differs between the rows of the batch"),
    ("tensorrt_llm_bls", TWO_ROWS | {"beam_width": column(1, 2)}, "INVALID_ARGUMENT",
     "beam_width differs between the rows of the batch"),
    ("tensorrt_llm_bls", GOOD_TEXT | {"num_draft_tokens": 4}, "INTERNAL",
     "cannot perform speculative decoding without draft model"),
    *(("preprocessing", {"QUERY": "x", "REQUEST_OUTPUT_LEN": 3, name: value}, "UNIMPLEMENTED",
       f"{name} of model 'preprocessing' needs a vision encoder")
      for name, value in (("IMAGE_BYTES", np.ones((1, 1, 2, 2, 3), np.uint8)),
                          ("IMAGE_URL", "https://example.org/a.png"),
                          ("IMAGES", ["https://example.org/a.png"]),
                          ("VIDEO_BYTES", np.ones((1, 1, 2, 2, 3), np.uint8)))),
    ("nothing", GOOD_TEXT, "NOT_FOUND", "Request for unknown model: 'nothing' is not found"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "tensors", "status", "message"), FAILURES)
async def test_invalid_request_is_refused_in_tritons_words(
    mesh: Mesh, triton: Triton, model: str, tensors: dict[str, object], status: str, message: str
) -> None:
    seen = await failure(triton, model, tensors)
    assert seen[0] == status
    assert message in seen[1]
    await mesh.idle()
