"""A computed model with a tokenizer like Llama 2's: texts, words, beams and all numbers are the native API's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.triton import Response, SyncStream, Triton, joined
from e2e.mesh import PATIENT, Mesh, decode, running_mesh
from oracle import tiny_models
from tokenizer.tokenizers_zoo import ids_of, llama2_bpe, save_model_dir
from tokenizers import Tokenizer
from trtmesh.chassis.spellings import Speller
from trtmesh.client import ItemResult
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox doesn't mind; naïve 😀 done."
TOKENS = 24
WIDTH = 3
BEAMS = {"beam_width": WIDTH, "return_log_probs": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = llama2_bpe()
    begin, end, pad = ids_of(tokenizer, "<s>", "</s>", "<pad>")
    tiny_models.build(
        folder,
        "llama",
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=pad,
    )
    return save_model_dir(tokenizer, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(folder: Path) -> AsyncIterator[Mesh]:
    """`tensorrt_llm_bls` answers once, the others with streams."""
    flags = (
        *("--model-dir", str(folder), "--torch-dtype", "float32", "--torch-threads", "1"),
        *("--torch-kv-cache-tokens", "4096"),
    )
    decoupled = (*PATIENT, "--triton-decoupled", "ensemble,tensorrt_llm")
    async with running_mesh(engine_flags=flags, router_flags=decoupled, model_dir=folder) as mesh:
        yield mesh
        await mesh.idle()


async def native(mesh: Mesh, prompt: str = PROMPT, **options: Any) -> ItemResult:
    given = {"max_tokens": TOKENS, "ignore_end_id": True, **options}
    (item,) = await mesh.client.complete([prompt], **given)
    assert item.error is None
    return item


def ask(**tensors: Any) -> dict[str, Any]:
    """A text request without the prompt in the output."""
    request = {"text_input": PROMPT, "max_tokens": TOKENS, "end_id": -1}
    return request | {"exclude_input_in_output": True} | tensors


async def core_tensors(triton: Triton, **tensors: Any) -> dict[str, Any]:
    """The same for the core model, by way of preprocessing."""
    words = {name: tensors.pop(name) for name in ("stop_words", "bad_words") if name in tensors}
    encoded = await triton.infer(
        "preprocessing",
        {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": TOKENS}
        | {f"{name.upper()}_DICT": value for name, value in words.items()},
    )
    request = {
        "input_ids": encoded.outputs["INPUT_ID"],
        "input_lengths": encoded.outputs["REQUEST_INPUT_LEN"],
        "request_output_len": TOKENS,
        "exclude_input_in_output": True,
    }
    for name in words:
        request[f"{name}_list"] = encoded.outputs[f"{name.upper()}_IDS"]
    return request | tensors


async def test_stream_joins_to_the_whole_text(mesh: Mesh, triton: Triton, folder: Path) -> None:
    """Streams join to the whole text; with the prompt, the text of all ids."""
    item = await native(mesh, exclude_prompt=False)
    assert item.started
    whole = decode([*item.started.prompt_token_ids, *item.token_ids], folder)
    assert whole.startswith("The quick brown fox")
    assert "\ufffd" not in whole[: len(PROMPT)]
    assert (await triton.infer("tensorrt_llm_bls", ask())).text == item.text
    with_prompt = ask(exclude_input_in_output=False)
    assert (await triton.infer("tensorrt_llm_bls", with_prompt)).text == whole
    (response,) = await triton.stream("ensemble", with_prompt)
    assert response.text == whole
    chunks = await triton.stream("ensemble", ask(stream=True))
    assert len(chunks) > 2
    assert joined(chunks) == item.text
    core = await triton.stream("tensorrt_llm", await core_tensors(triton))
    decoded = await triton.infer(
        "postprocessing",
        {
            "TOKENS_BATCH": core[0].outputs["output_ids"],
            "SEQUENCE_LENGTH": core[0].outputs["sequence_length"],
        },
    )
    assert decoded.outputs["OUTPUT"].tolist() == [decode(item.token_ids, folder).encode()]


async def test_stop_words_across_tokens_and_chunks(
    mesh: Mesh, triton: Triton, folder: Path
) -> None:
    """At any position of the word, whatever the tokens."""
    item = await native(mesh)
    text = item.text
    borders = {len(decode(item.token_ids[:count], folder)) for count in range(TOKENS)}
    starts = [at for at in range(2, len(text) - 6, 5) if "\ufffd" not in text[at : at + 5]][:8]
    assert any(border in range(at + 1, at + 5) for at in starts for border in borders)
    for at in starts:
        word = text[at : at + 5]
        cut = text[: text.index(word) + len(word)]
        request = ask(stop_words=["never there", word])
        assert (await triton.infer("tensorrt_llm_bls", request)).text == cut
        chunks = await triton.stream("ensemble", request | {"stream": True})
        assert joined(chunks) == cut
        assert [chunk.final for chunk in chunks].count(True) == 1


async def test_bad_words(mesh: Mesh, triton: Triton, folder: Path) -> None:
    plain = await native(mesh)
    speller = Speller(Tokenizer.from_file(str(folder / "tokenizer.json")))
    # Kernels, and so texts, differ between machines.
    said = [plain.token_ids[at : at + size] for size in (1, 2, 3) for at in range(TOKENS - size)]
    written = [
        text for ids in said if (text := decode(ids, folder)) and [*ids] in speller.spellings(text)
    ]
    assert written, f"nothing of what the model said is written as it was said: {plain.text!r}"
    word = written[0]
    words = ["fox", word]
    steered = await native(mesh, bad_texts=words)
    assert steered.token_ids != plain.token_ids
    assert (await triton.infer("tensorrt_llm_bls", ask(bad_words=words))).text == steered.text
    chunks = await triton.stream("ensemble", ask(bad_words=words, stream=True))
    assert joined(chunks) == steered.text
    core = await triton.stream(
        "tensorrt_llm", await core_tensors(triton, bad_words=words, streaming=True)
    )
    assert ids_told(core) == list(steered.token_ids)


def ids_told(responses: Sequence[Response]) -> list[int]:
    return [i for r in responses for i in r.outputs["output_ids"].ravel().tolist()]


async def test_beams_best_first(mesh: Mesh, triton: Triton) -> None:
    item = await native(mesh, beam_width=WIDTH, log_probs=True, length_penalty=1.0)
    response = await triton.infer("tensorrt_llm_bls", ask(**BEAMS, length_penalty=1.0))
    texts = [sequence.text.encode() for sequence in item.sequences]
    assert response.outputs["text_output"].tolist() == texts
    check_log_probs(response.outputs, item)
    (core,) = await triton.stream(
        "tensorrt_llm", await core_tensors(triton, **BEAMS, len_penalty=1.0)
    )
    assert core.outputs["output_ids"].tolist() == [[list(s.token_ids) for s in item.sequences]]
    assert core.outputs["sequence_length"].tolist() == [[TOKENS] * WIDTH]
    check_log_probs(core.outputs, item)
    assert core.final


def check_log_probs(outputs: Mapping[str, Any], item: ItemResult) -> None:
    """Log-probabilities of each sequence and their sums, [1, sequences(, tokens)]."""
    sums = [s.finished.cumulative_log_prob or 0.0 for s in item.sequences if s.finished]
    assert outputs["cum_log_probs"].shape == (1, len(item.sequences))
    np.testing.assert_allclose(outputs["cum_log_probs"][0], sums, atol=1e-2)
    each = [sequence.log_probs for sequence in item.sequences]
    assert np.all(np.array(each) < 0)
    np.testing.assert_allclose(outputs["output_log_probs"][0], each, atol=1e-2)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
async def test_streamed_beams_come_whole_each_time(mesh: Mesh, triton: Triton, model: str) -> None:
    """Any of them may be rewritten by the next step, so each response has all of all."""
    item = await native(mesh, beam_width=WIDTH, log_probs=True)
    request = (
        ask(**BEAMS, stream=True)
        if model == "ensemble"
        else await core_tensors(triton, **BEAMS, streaming=True)
    )
    responses = await triton.stream(model, request)
    assert len(responses) > 2
    assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
    assert all(r.outputs["cum_log_probs"].shape == (1, WIDTH) for r in responses)
    if model == "ensemble":
        assert all(r.outputs["text_output"].shape == (WIDTH,) for r in responses)
        texts = [sequence.text.encode() for sequence in item.sequences]
        assert responses[-1].outputs["text_output"].tolist() == texts
    else:
        lengths = [r.outputs["sequence_length"].max() for r in responses]
        assert lengths == sorted(lengths)
        ids = [[list(sequence.token_ids) for sequence in item.sequences]]
        assert responses[-1].outputs["output_ids"].tolist() == ids
    check_log_probs(responses[-1].outputs, item)


@pytest.mark.parametrize(
    ("data_type", "given"),
    [(np.bool_, False), (np.bool_, True), (np.int32, 0), (np.int32, 1), (np.int32, 2)],
)
async def test_early_stopping_in_both_types(
    mesh: Mesh, triton: Triton, data_type: Any, given: int
) -> None:
    """Triton's models took BOOL first and INT32 later."""
    options: dict[str, Any] = {"beam_width": WIDTH, "max_tokens": 12, "ignore_end_id": False}
    item = await native(mesh, early_stopping=pb.EarlyStopping.ValueType(int(given) + 1), **options)
    tensors = {"beam_width": WIDTH, "early_stopping": np.array([[given]], data_type)}
    request = ask(**tensors, max_tokens=12)
    del request["end_id"]
    response = await triton.infer("tensorrt_llm_bls", request)
    texts = [sequence.text.encode() for sequence in item.sequences]
    assert response.outputs["text_output"].tolist() == texts


LOGITS = {
    "return_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
}


def values(tensor: pb.Tensor | None) -> Any:
    assert tensor is not None
    return np.frombuffer(tensor.data, dtype=np.float32).reshape(tensor.shape)


async def test_log_probs_and_logits(mesh: Mesh, triton: Triton) -> None:
    item = await native(
        mesh,
        log_probs=True,
        context_logits=True,
        generation_logits=True,
        logits_data_type=pb.DATA_TYPE_FP32,
    )
    assert item.prompt_details
    context = values(item.prompt_details.context_logits)
    generation = values(item.sequences[0].generation_logits)
    assert generation.shape[0] == TOKENS
    assert generation.argmax(axis=1).tolist() == list(item.token_ids)
    near: dict[str, Any] = {"atol": 1e-3, "rtol": 1e-3}
    whole = await triton.infer("tensorrt_llm_bls", ask(**LOGITS))
    chunks = await triton.stream("ensemble", ask(**LOGITS, stream=True))
    assert len(chunks) > 2
    for outputs in (whole.outputs, chunks[-1].outputs):
        np.testing.assert_allclose(outputs["context_logits"], [context], **near)
    np.testing.assert_allclose(whole.outputs["generation_logits"], [[generation]], **near)
    check_log_probs(whole.outputs, item)
    parts = np.concatenate([chunk.outputs["generation_logits"] for chunk in chunks], axis=2)
    np.testing.assert_allclose(parts, [[generation]], **near)
    told = np.concatenate([chunk.outputs["output_log_probs"] for chunk in chunks], axis=2)
    sums = chunks[-1].outputs["cum_log_probs"]
    check_log_probs({"output_log_probs": told, "cum_log_probs": sums}, item)


async def test_perf_metrics(mesh: Mesh, triton: Triton) -> None:
    """The second of two requests with a prompt of several blocks reuses the blocks."""
    item = await native(mesh, "Another prompt " * 4, perf_metrics=True)
    assert item.perf_metrics
    request = ask(text_input="One more prompt" * 4, return_perf_metrics=True)
    first, second = [(await triton.infer("tensorrt_llm_bls", request)).number for _ in range(2)]
    for number in (first, second):
        assert 0 < number["arrival_time_ns"] <= number["first_scheduled_time_ns"]
        assert number["first_scheduled_time_ns"] < number["first_token_time_ns"]
        assert number["first_token_time_ns"] < number["last_token_time_ns"]
        assert str(number["acceptance_rate"]) == "0.0"
        assert number["total_accepted_draft_tokens"] == number["total_draft_tokens"] == 0
        assert number["kv_cache_alloc_total_blocks"] == number["kv_cache_alloc_new_blocks"]
    assert first["kv_cache_reused_blocks"] == 0
    assert second["kv_cache_reused_blocks"] > 1
    blocks = [n["kv_cache_alloc_new_blocks"] + n["kv_cache_reused_blocks"] for n in (first, second)]
    assert blocks[0] == blocks[1]
    # Every response of a stream has all ten outputs; the last has the final values.
    chunks = await triton.stream("ensemble", request | {"stream": True})
    names = {field.name for field in pb.PerfMetrics.DESCRIPTOR.fields}
    assert all(names <= set(chunk.outputs) for chunk in chunks)
    last = {name: chunks[-1].number[name] for name in names}
    # Figures known at the first token come with the first token.
    for name in ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"):
        assert {chunk.number[name] for chunk in chunks} == {last[name]} - {0}
    assert chunks[0].number["kv_cache_reused_blocks"] == last["kv_cache_reused_blocks"] > 1
    assert 0 < chunks[0].number["kv_cache_alloc_new_blocks"] <= last["kv_cache_alloc_new_blocks"]
    again = await native(mesh, "One more prompt" * 4, perf_metrics=True)
    assert again.perf_metrics
    for name in (name for name in names if not name.endswith("time_ns")):
        assert last[name] == getattr(again.perf_metrics, name)


BLOCKS = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks")


async def test_perf_metrics_of_several_sequences(mesh: Mesh, triton: Triton) -> None:
    """Each sequence has its own: the first computes the prompt's blocks and the others reuse them."""
    sampled = {"num_return_sequences": 3, "top_k": 20, "seed": 1}
    item = await native(mesh, "Some other prompt " * 4, perf_metrics=True, **sampled)
    each = [s.finished.perf_metrics for s in item.sequences if s.finished]
    blocks = [[getattr(metrics, name) for name in BLOCKS] for metrics in each]
    assert blocks[0] != blocks[1] == blocks[2]
    assert item.perf_metrics
    assert [getattr(item.perf_metrics, name) for name in BLOCKS] == np.sum(blocks, 0).tolist()
    request = ask(text_input="Yet another prompt" * 4, return_perf_metrics=True, **sampled)
    for stream in (True, False):
        prompt = f"Prompt of its own {stream}" * 4
        responses = await triton.stream(
            "ensemble", request | {"stream": stream, "text_input": prompt}
        )
        last = {response.number["sequence_index"]: response.number for response in responses}
        assert all(last[index]["last_token_time_ns"] > 0 for index in range(3))
        told = [[last[index][name] for name in BLOCKS] for index in range(3)]
        assert told[0] != told[1] == told[2]
    # A single response for all has the sums; both requests find the same blocks.
    warm = await native(mesh, prompt, perf_metrics=True, **sampled)
    whole = (await triton.infer("tensorrt_llm_bls", request | {"text_input": prompt})).number
    assert warm.perf_metrics
    assert {name: whole[name] for name in BLOCKS} == {
        name: getattr(warm.perf_metrics, name) for name in BLOCKS
    }


async def test_ids_beyond_the_vocabulary_end_their_request_alone(triton: Triton) -> None:
    tensors = await core_tensors(triton)
    wrong = tensors | {"input_ids": [5, 30_000], "input_lengths": 2}
    (response,) = await triton.stream("tensorrt_llm", wrong)
    assert "30000" in response.error
    (response,) = await triton.stream("tensorrt_llm", tensors)
    assert response.outputs


@pytest.mark.parametrize(
    "tensors", [{}, LOGITS, BEAMS, {"num_return_sequences": 3, "top_k": 20, "seed": 1}]
)
async def test_cancelled_requests_leave_nothing(mesh: Mesh, tensors: dict[str, Any]) -> None:
    with SyncStream(mesh.router.address) as stream:
        for _ in range(3):
            stream.send("ensemble", ask(**tensors, max_tokens=400, stream=True))
        assert not (await asyncio.to_thread(stream.next)).error
        stream.cancel()
    await mesh.idle()
