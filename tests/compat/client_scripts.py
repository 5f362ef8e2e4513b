"""The requests of upstream's client scripts, by release, and the table of their outcomes in docs/triton.md.

The scripts themselves are upstream's and not kept here: each function below sends what a script sends (names, types,
shapes, protocol) and checks what the script reads. `python -m compat.client_scripts` (in `tests`) writes the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.http.aio as aio_http
from compat.plain_http import PlainHttp
from compat.releases import RELEASES, end_to_end, tensors, typed
from compat.tiny_llama import END, PAD, TOKENIZER, VOCABULARY_SIZE, WIDTH
from compat.triton import Response, SyncStream, Triton, in_pieces
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from trtmesh.engine.adapters.arrays import write_arrays
from trtmesh.engine.adapters.lora import Lora, Module, Update

PAGE = Path(__file__).parents[2] / "docs" / "triton.md"
BEGIN_MARK = "<!-- Written by tests/compat/client_scripts.py. -->\n"
END_MARK = "<!-- End of what tests/compat/client_scripts.py writes. -->\n"

TEXT = "The quick brown fox"
IDS = [int(each) for each in TOKENIZER.encode(TEXT).ids]
OLD_NAMES = {"min_tokens": "min_length", "seed": "random_seed"}


class Refused(Exception):
    """The server refused a request by name, and the script cannot go on."""


@dataclass(frozen=True)
class Server:
    """Clients of one router."""

    triton: Triton
    http: PlainHttp


Run = Callable[[Server, str], Awaitable[None]]
"""Runs a script as of a release."""


@dataclass(frozen=True)
class Script:
    """A script with options, in the releases that have both."""

    name: str
    options: str
    since: str
    until: str
    run: Run
    server: str = "plain"
    """The configuration it runs against: a key of SERVERS."""
    refused: tuple[str, ...] = ()
    """Tensors that the error names; empty for a script that runs."""

    @property
    def releases(self) -> Sequence[str]:
        """Those that it runs as of."""
        return end_to_end(RELEASES[RELEASES.index(self.since) : RELEASES.index(self.until) + 1])

    @property
    def outcome(self) -> str:
        if self.refused:
            return "refused by name: " + ", ".join(f"`{name}`" for name in self.refused)
        return "runs" + SERVERS[self.server]


SERVERS: Mapping[str, str] = {
    "plain": "",
    "dated": " with `triton.release`",
    "wrapping": " with `triton.wrap_token_ids`",
    "gpt": " with the template `gpt`",
    "llmapi": " with the template `llmapi`",
    "adapted": " with `engine.torch.adapters.host_bytes`",
}
"""Configurations, and how the table says them."""


def request(model: str, release: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors in a release's names and types, without those that it lacks."""
    known = tensors(model, "inputs", release)
    named = {}
    for name, value in values.items():
        old = OLD_NAMES.get(name, name)
        named[old if old in known else name] = value
    return typed(model, release, {name: named[name] for name in named if name in known})


async def over_http(server: Server, model: str, given: Mapping[str, Any]) -> Any:
    """One unary request over HTTP, with binary tensors."""
    async with aio_http.InferenceServerClient(server.http.address) as client:
        inputs = []
        for name, data in given.items():
            tensor = aio_http.InferInput(name, data.shape, np_to_triton_dtype(data.dtype))
            tensor.set_data_from_numpy(data)
            inputs.append(tensor)
        return await client.infer(model, inputs, request_id="1")


def checked(response: Response) -> Response:
    """A response. Raises Refused for an error."""
    if response.error:
        raise Refused(response.error)
    return response


def core_inputs(release: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What `inflight_batcher_llm_client.py` always sends; v0.5 leaves the last four out."""
    first = {"input_ids": IDS, "input_lengths": len(IDS), "request_output_len": 16}
    first |= {"beam_width": 1, "temperature": 1.0, "streaming": False}
    if release != "v0.5.0":
        first |= {"end_id": END, "pad_id": PAD, "runtime_top_k": 1, "runtime_top_p": 0.0}
    return request("tensorrt_llm", release, {**first, **values})


def core_client(values: Mapping[str, Any], outputs: Sequence[str] = ()) -> Run:
    """A unary call, which carries the parameter `Streaming`; the prompt leads each beam."""

    async def run(server: Server, release: str) -> None:
        try:
            response = await server.triton.infer(
                "tensorrt_llm", core_inputs(release, values), parameters={"Streaming": False}
            )
        except InferenceServerException as error:
            raise Refused(error.message()) from error
        beams = response.outputs["output_ids"][0].tolist()
        assert len(beams) == values.get("beam_width", 1)
        excluded = values.get("exclude_input_in_output", False)
        assert all((beam[: len(IDS)] == IDS) != excluded for beam in beams)
        assert set(outputs) <= set(response.outputs)

    return run


async def core_streaming(server: Server, release: str) -> None:
    tokens: list[int] = []
    for response in await server.triton.stream(
        "tensorrt_llm", core_inputs(release, {"streaming": True})
    ):
        tokens += checked(response).outputs["output_ids"][0][0].tolist()
    assert len(tokens) == 16


async def core_sequences(server: Server, release: str) -> None:
    sampled = {"num_return_sequences": 2, "runtime_top_k": 5}
    responses = await server.triton.stream("tensorrt_llm", core_inputs(release, sampled))
    indexes = [checked(response).outputs["sequence_index"][0][0] for response in responses]
    assert sorted(indexes) == [0, 1]


async def core_stop(server: Server, release: str) -> None:
    """The stop has the name of the request and no outputs; the request ends early."""
    given = core_inputs(release, {"request_output_len": 400, "streaming": True})
    stop = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    with SyncStream(server.triton.address) as stream:
        stream.send("tensorrt_llm", given, request_id="stopped")
        first = await asyncio.to_thread(stream.next)
        stop_inputs = request("tensorrt_llm", release, stop)
        more = {"request_id": "stopped", "parameters": {"Streaming": True}}
        stream.send("tensorrt_llm", stop_inputs, **more)
        responses = [checked(each) for each in (first, *await asyncio.to_thread(stream.half_close))]
    assert any(not response.outputs for response in responses)
    tokens = sum(r.outputs["output_ids"].shape[2] for r in responses if r.outputs)
    assert tokens < 400


TABLE = np.zeros((2, 64))
RANK = 4
ADAPTER = Lora(
    {
        (0, Module.ATTN_Q): Update(
            torch.ones(RANK, WIDTH) / 4, torch.linspace(-1, 1, WIDTH * RANK).view(WIDTH, RANK)
        )
    }
)
"""An adapter of compat.tiny_llama that changes its tokens."""


def adapter_tensors() -> dict[str, Any]:
    """The files of --lora-path."""
    weights, config = write_arrays(ADAPTER, torch.float16)
    return {"lora_weights": weights.numpy(), "lora_config": config.numpy()}


def adapter_client(ask: Callable[[Server, str, Mapping[str, Any]], Awaitable[object]]) -> Run:
    """The script is run with --lora-path, then with --lora-task-id alone; releases without the number send all."""

    async def run(server: Server, release: str) -> None:
        number = {"lora_task_id": 7}
        base = await ask(server, release, {})
        first = await ask(server, release, {**number, **adapter_tensors()})
        assert first != base
        if "lora_task_id" in tensors("tensorrt_llm", "inputs", release):
            assert await ask(server, release, number) == first

    return run


async def core_beams(server: Server, release: str, values: Mapping[str, Any]) -> object:
    try:
        response = await server.triton.infer("tensorrt_llm", core_inputs(release, values))
    except InferenceServerException as error:
        raise Refused(error.message()) from error
    return response.outputs["output_ids"].tolist()


async def ensemble_text(server: Server, release: str, values: Mapping[str, Any]) -> object:
    given = request("ensemble", release, {"text_input": TEXT, "max_tokens": 16, **values})
    (response,) = await server.triton.stream("ensemble", given, outputs=["text_output"])
    return checked(response).outputs["text_output"].tolist()


LOOKAHEAD = {
    "lookahead_window_size": 2,
    "lookahead_ngram_size": 2,
    "lookahead_verification_set_size": 2,
}


def text_client(model: str, values: Mapping[str, Any], outputs: Sequence[str] = ()) -> Run:
    """`end_to_end_grpc_client.py`: always a stream, even for a whole answer, with named outputs."""

    async def run(server: Server, release: str) -> None:
        first = {"text_input": TEXT, "max_tokens": 16, "stream": False, "beam_width": 1}
        first |= {"temperature": 1.0, "num_return_sequences": 1}
        first |= {"exclude_input_in_output": False}
        given = request(model, release, {**first, **values})

        async def ask() -> list[Response]:
            responses = await server.triton.stream(
                model, given, outputs=["text_output", *outputs], request_id="1"
            )
            return [checked(response) for response in responses]

        responses = await (in_pieces(ask) if values.get("stream") else ask())
        text = responses[0].outputs["text_output"][0].decode()
        assert values.get("stream") or text.startswith(TEXT)
        assert set(outputs) <= set(responses[-1].outputs)

    return run


async def text_batch(server: Server, release: str) -> None:
    """--batch-inputs stacks the prompts and tells the rows by batch_index."""
    values = {"text_input": TEXT, "max_tokens": 16, "stream": True, "beam_width": 1}
    row = request("ensemble", release, values)
    given = {name: np.concatenate([data, data]) for name, data in row.items()}
    texts = ["", ""]
    for response in await server.triton.stream(
        "ensemble", given, outputs=["text_output", "batch_index"]
    ):
        index = checked(response).outputs["batch_index"][0][0]
        texts[index] += response.outputs["text_output"][0].decode()
    assert texts[0] == texts[1] != ""


async def streaming_client(server: Server, release: str) -> None:
    """`end_to_end_streaming_client.py`, the first of the text clients."""
    values = {"text_input": TEXT, "max_tokens": 16, "bad_words": [""], "stop_words": [""]}
    given = request("ensemble", release, {**values, "stream": True, "beam_width": 1})

    async def ask() -> list[str]:
        responses = await server.triton.stream("ensemble", given, request_id="1")
        return [checked(response).text for response in responses]

    await in_pieces(ask)


DETAILS = ("cum_log_probs", "output_log_probs", "context_logits", "generation_logits")


async def chain(server: Server, release: str) -> None:
    """`end_to_end_test.py`: the three models by hand, then the ensemble, over HTTP; the texts must be equal.

    From v0.6 to v0.13 it reads the details without asking, and sends them through postprocessing.
    """
    words = {"BAD_WORDS_DICT": [""], "STOP_WORDS_DICT": [""]}
    query = {"QUERY": TEXT, "REQUEST_OUTPUT_LEN": 16, **words}
    encoded = await over_http(server, "preprocessing", request("preprocessing", release, query))
    names = {
        "input_ids": "INPUT_ID",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
    }
    known = tensors("preprocessing", "outputs", release)
    given = {n: encoded.as_numpy(output) for n, output in names.items() if output in known}
    generated = await over_http(server, "tensorrt_llm", given)
    passing = tensors("postprocessing", "inputs", release)
    sent = {"TOKENS_BATCH": generated.as_numpy("output_ids")}
    if "SEQUENCE_LENGTH" in passing:
        sent["SEQUENCE_LENGTH"] = generated.as_numpy("sequence_length")
    for name in DETAILS:
        if name.upper() in passing:
            sent[name.upper()] = generated.as_numpy(name).astype(np.float32)
    decoded = await over_http(server, "postprocessing", sent)
    for name in DETAILS:
        if name.upper() in passing:
            passed = decoded.as_numpy(f"OUT_{name.upper()}")
            np.testing.assert_array_equal(passed, sent[name.upper()])
    values = {"text_input": TEXT, "max_tokens": 16, "bad_words": [""], "stop_words": [""]}
    whole = await over_http(server, "ensemble", request("ensemble", release, values))
    assert decoded.as_numpy("OUTPUT").tolist() == whole.as_numpy("text_output").tolist()


def benchmark(protocol: str, ids: Sequence[int], *, with_ids: bool) -> Run:
    """`benchmark_core_model.py`, before `identity_test.py`, which sends no pad and end ids."""

    async def run(server: Server, release: str) -> None:
        values = {"input_ids": list(ids), "input_lengths": len(ids), "request_output_len": 16}
        given = request(
            "tensorrt_llm", release, values | ({"pad_id": PAD, "end_id": END} if with_ids else {})
        )
        try:
            if protocol == "http":
                ids_told = (await over_http(server, "tensorrt_llm", given)).as_numpy("output_ids")
            else:
                response = await server.triton.infer("tensorrt_llm", given, request_id="1")
                assert response.request_id == "1"
                assert next(iter(response.outputs)) == "output_ids"
                ids_told = response.outputs["output_ids"]
        except InferenceServerException as error:
            raise Refused(error.message()) from error
        assert ids_told.shape[2] > len(ids)

    return run


def gpt_values(release: str) -> dict[str, Any]:
    """The tensors of `tools/utils/utils.py`: by release, UINT32 or INT32, and the names of then."""
    count = np.uint32 if release in ("v0.5.0", "v0.6.0", "v0.6.1") else np.int32
    new = release == "2025-05"
    numbers: dict[str, Any] = {
        "request_output_len": count(10),
        "pad_id": count(END),
        "end_id": count(END),
        "beam_width": count(1),
        "temperature": np.float32(1.0),
        "runtime_top_k": count(1),
        "runtime_top_p": np.float32(0.0),
        "len_penalty": np.float32(1.0),
        "repetition_penalty": np.float32(1.0),
        "min_tokens" if new else "min_length": count(1),
        "presence_penalty": np.float32(0.0),
        "seed" if new else "random_seed": np.uint64(0),
        "output_log_probs": np.bool_(True),
    }
    return {name: np.array([[number]]) for name, number in numbers.items()}


def gpt_core(protocol: str) -> Run:
    """`tools/gpt/client.py` and `client_async.py` decode what follows the prompt."""

    async def run(server: Server, release: str) -> None:
        given = gpt_values(release) | {
            "input_ids": np.array([IDS], np.int32),
            "input_lengths": np.array([[len(IDS)]], np.int32),
        }
        if protocol == "http":
            result = await over_http(server, "tensorrt_llm", given)
            ids, log_probs = result.as_numpy("output_ids"), result.as_numpy("log_probs")
        else:
            outputs = (await server.triton.infer("tensorrt_llm", given)).outputs
            ids, log_probs = outputs["output_ids"], outputs["log_probs"]
        assert ids.shape == (1, 1, len(IDS) + 10)
        assert ids.ravel()[: len(IDS)].tolist() == IDS
        assert log_probs.shape == (1, len(IDS) + 10, 1)
        assert (log_probs[0, : len(IDS)] == 0).all()
        assert (log_probs[0, len(IDS) :] < 0).all()

    return run


async def gpt_chain(server: Server, release: str) -> None:
    """`tools/gpt/end_to_end_test.py`: two prompts as a batch through the three models, then the ensemble."""
    prompts = np.array([[TEXT], ["The lazy dog does not mind"]], np.object_)
    empty = np.array([[""], [""]], np.object_)
    core = {name: np.concatenate([row, row]) for name, row in gpt_values(release).items()}
    length = core.pop("request_output_len")
    encoded = await over_http(
        server,
        "preprocessing",
        {
            "QUERY": prompts,
            "BAD_WORDS_DICT": empty,
            "STOP_WORDS_DICT": empty,
            "REQUEST_OUTPUT_LEN": length,
        },
    )
    generated = await over_http(
        server,
        "tensorrt_llm",
        core
        | {
            "input_ids": encoded.as_numpy("INPUT_ID"),
            "input_lengths": encoded.as_numpy("REQUEST_INPUT_LEN"),
            "request_output_len": encoded.as_numpy("REQUEST_OUTPUT_LEN"),
        },
    )
    tokens = {"TOKENS_BATCH": generated.as_numpy("output_ids")}
    decoded = await over_http(server, "postprocessing", tokens)
    names = {"runtime_top_k": "top_k", "runtime_top_p": "top_p", "len_penalty": "length_penalty"}
    whole = await over_http(
        server,
        "ensemble",
        {names.get(name, name): rows for name, rows in core.items()}
        | {
            "text_input": prompts,
            "max_tokens": length,
            "bad_words": empty,
            "stop_words": empty,
        },
    )
    assert decoded.as_numpy("OUTPUT").tolist() == whole.as_numpy("text_output").tolist()


async def speculative(server: Server, release: str) -> None:
    """`e2e_grpc_speculative_decoding_client.py`: drafts of the first model go to the second, round by round, until both
    agree or the text is long enough. `speculative_decoding_test.py` compares the result with that without drafts."""

    async def asked(ids: list[int], length: int, **values: Any) -> Response:
        values |= {"input_ids": ids, "input_lengths": len(ids), "request_output_len": length}
        values |= {"beam_width": 1, "temperature": 1.0}
        tensors = request("tensorrt_llm", release, values)
        return checked(await server.triton.infer("tensorrt_llm", tensors, request_id="1"))

    async def ids_of(ids: list[int], length: int, **values: Any) -> list[int]:
        found = (await asked(ids, length, **values)).outputs["output_ids"][0][0].tolist()
        assert found[: len(ids)] == ids
        return list(found)

    whole = await ids_of(IDS, 16)
    ids = list(IDS)
    while len(ids) < len(whole):
        drafted = await ids_of(ids, min(4, len(whole) - len(ids)))
        # This draft model is as good as the other.
        drafted[-1] = 7
        answer = await asked(
            ids,
            len(drafted) - len(ids) + 1,
            draft_input_ids=drafted[len(ids) :],
            return_perf_metrics=True,
        )
        if "total_draft_tokens" in answer.outputs:
            assert answer.outputs["total_draft_tokens"].item() == len(drafted) - len(ids)
        ids = answer.outputs["output_ids"][0][0].tolist()
    assert ids[: len(whole)] == whole


def curl(model: str, body: Mapping[str, Any]) -> Run:
    """`curl -X POST localhost:8000/v2/models/MODEL/generate`."""

    async def run(server: Server, release: str) -> None:
        reply = await server.http.post(f"/v2/models/{model}/generate", body)
        assert reply.status == 200
        assert reply.json["text_output"].startswith(TEXT)

    return run


async def curl_stream(server: Server, release: str) -> None:
    body = {"text_input": TEXT, "max_tokens": 16, "bad_words": "", "stop_words": "", "stream": True}

    async def events() -> Sequence[Any]:
        reply = await server.http.post("/v2/models/ensemble/generate_stream", body)
        assert reply.status == 200
        return reply.events

    await in_pieces(events)


async def llmapi_client(server: Server, release: str) -> None:
    """`llmapi_client.py`."""
    given = {
        "text_input": np.array([TEXT], np.object_),
        "sampling_param_max_tokens": np.array([16], np.int32),
    }
    responses = await server.triton.stream("tensorrt_llm", given, request_id="1")
    assert checked(responses[-1]).outputs["text_output"].size == 1


CURL = {"text_input": TEXT, "max_tokens": 16, "bad_words": "", "stop_words": ""}
OUTSIDE = [*IDS, VOCABULARY_SIZE + 40_000]
CLIENT, GRPC = "inflight_batcher_llm_client.py", "end_to_end_grpc_client.py"
BENCHMARK, GPT = "benchmark_core_model.py", "tools/gpt/"
FIRST, LAST = RELEASES[0], RELEASES[-1]
LOG_PROBS = {"return_log_probs": True}
LOGITS = {"return_context_logits": True, "return_generation_logits": True}

SCRIPTS = (
    Script(CLIENT, "", FIRST, LAST, core_client({})),
    Script(CLIENT, "--streaming", FIRST, LAST, core_streaming),
    Script(CLIENT, "--streaming --stop-after-ms", FIRST, LAST, core_stop),
    Script(
        CLIENT, "--beam-width 2", FIRST, LAST, core_client({"beam_width": 2, "runtime_top_k": 0})
    ),
    Script(CLIENT, "--return-log-probs", "v0.6.0", LAST, core_client(LOG_PROBS, DETAILS[:2])),
    Script(
        CLIENT,
        "--return-context-logits --return-generation-logits",
        "v0.8.0",
        LAST,
        core_client(LOGITS, DETAILS[2:]),
    ),
    Script(
        CLIENT,
        "--prompt-embedding-table-path",
        "v0.6.0",
        LAST,
        core_client({"prompt_embedding_table": TABLE, "prompt_vocab_size": 2}),
    ),
    Script(CLIENT, "--num-return-sequences 2", "v0.14.0", LAST, core_sequences),
    Script(
        CLIENT,
        "--exclude-input-in-output",
        "v0.14.0",
        LAST,
        core_client({"exclude_input_in_output": True}),
    ),
    Script(
        CLIENT,
        "--return-perf-metrics",
        "v0.19.0",
        LAST,
        core_client({"return_perf_metrics": True}, ("arrival_time_ns",)),
    ),
    Script(
        CLIENT,
        "--lora-path",
        "v0.8.0",
        LAST,
        adapter_client(core_beams),
        server="adapted",
    ),
    Script(
        CLIENT,
        "--draft-tokens-csv",
        "v0.7.0",
        LAST,
        core_client({"draft_input_ids": [5, 6]}),
    ),
    Script(
        CLIENT,
        "--lookahead_config",
        "v0.19.0",
        LAST,
        core_client(LOOKAHEAD),
        refused=tuple(LOOKAHEAD),
    ),
    Script("end_to_end_streaming_client.py", "--streaming", FIRST, "v0.6.1", streaming_client),
    Script(GRPC, "", "v0.7.0", LAST, text_client("ensemble", {})),
    Script(GRPC, "--streaming", "v0.7.0", LAST, text_client("ensemble", {"stream": True})),
    Script(
        GRPC,
        "--model-name tensorrt_llm_bls --streaming",
        "v0.7.0",
        LAST,
        text_client("tensorrt_llm_bls", {"stream": True}),
    ),
    Script(GRPC, "--batch-inputs", "v0.12.0", LAST, text_batch),
    Script(
        GRPC,
        "--stop-words --bad-words --embedding-bias-words --embedding-bias-weights",
        "v0.7.0",
        LAST,
        text_client(
            "ensemble",
            {
                "stop_words": ["zz"],
                "bad_words": ["qq"],
                "embedding_bias_words": ["quick"],
                "embedding_bias_weights": [-10.0],
            },
        ),
    ),
    Script(
        GRPC,
        "--return-log-probs --return-context-logits --return-generation-logits",
        "v0.8.0",
        LAST,
        text_client("ensemble", {**LOG_PROBS, **LOGITS}, DETAILS),
    ),
    Script(
        GRPC,
        "--model-name tensorrt_llm_bls --num-draft-tokens 4",
        "v0.9.0",
        LAST,
        text_client("tensorrt_llm_bls", {"num_draft_tokens": 4}),
        refused=("num_draft_tokens",),
    ),
    Script(
        GRPC,
        "--lora-path",
        "v0.15.0",
        LAST,
        adapter_client(ensemble_text),
        server="adapted",
    ),
    Script(
        GRPC,
        "--guided-decoding-guide-type",
        "v0.19.0",
        LAST,
        text_client("ensemble", {"guided_decoding_guide_type": "json"}),
    ),
    Script("end_to_end_test.py", "", FIRST, FIRST, chain),
    Script("end_to_end_test.py", "", "v0.6.0", "v0.13.0", chain, server="dated"),
    Script("end_to_end_test.py", "", "v0.14.0", LAST, chain),
    Script("identity_test.py", "", FIRST, "v0.7.2", benchmark("http", IDS, with_ids=False)),
    Script("identity_test.py", "-i grpc", FIRST, "v0.7.2", benchmark("grpc", IDS, with_ids=False)),
    Script(BENCHMARK, "dataset", "v0.8.0", LAST, benchmark("http", IDS, with_ids=True)),
    Script(BENCHMARK, "-i grpc dataset", "v0.8.0", LAST, benchmark("grpc", IDS, with_ids=True)),
    Script(
        BENCHMARK,
        "token-norm-dist",
        "v0.8.0",
        LAST,
        benchmark("http", OUTSIDE, with_ids=True),
        refused=("input_ids",),
    ),
    Script(
        BENCHMARK,
        "token-norm-dist",
        "v0.8.0",
        LAST,
        benchmark("http", OUTSIDE, with_ids=True),
        server="wrapping",
    ),
    Script(
        "e2e_grpc_speculative_decoding_client.py, speculative_decoding_test.py",
        "",
        "v0.7.0",
        LAST,
        speculative,
    ),
    Script(GPT + "client.py, client_async.py", "", FIRST, LAST, gpt_core("http"), server="gpt"),
    Script(
        GPT + "client.py, client_async.py", "-i grpc", FIRST, LAST, gpt_core("grpc"), server="gpt"
    ),
    Script(GPT + "end_to_end_test.py", "", FIRST, LAST, gpt_chain, server="gpt"),
    Script("curl .../ensemble/generate", "", FIRST, LAST, curl("ensemble", CURL)),
    Script(
        "curl .../ensemble/generate",
        "with pad_id and end_id",
        FIRST,
        LAST,
        curl("ensemble", CURL | {"pad_id": END, "end_id": END}),
    ),
    Script("curl .../ensemble/generate_stream", "", FIRST, LAST, curl_stream),
    Script(
        "curl .../tensorrt_llm_bls/generate", "", "v0.7.0", LAST, curl("tensorrt_llm_bls", CURL)
    ),
    Script("llmapi_client.py", "", LAST, LAST, llmapi_client, server="llmapi"),
)


def render() -> str:
    """The table of docs/triton.md."""
    head = "| Script | Options | Releases | Outcome |\n|---|---|---|---|\n"
    return head + "".join(map(_row, SCRIPTS))


def _row(script: Script) -> str:
    name = ", ".join(f"`{part}`" for part in script.name.split(", "))
    options = f"`{script.options}`" if script.options.startswith("-") else script.options
    span = script.since if script.since == script.until else f"{script.since} to {script.until}"
    return f"| {name} | {options} | {span} | {script.outcome} |\n"


def write() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN_MARK)
    _, _, after = rest.partition(END_MARK)
    PAGE.write_text(f"{before}{BEGIN_MARK}\n{render()}\n{END_MARK}{after}", "utf-8")


if __name__ == "__main__":
    write()
