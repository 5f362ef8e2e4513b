"""Imported model repositories, served by real processes to real clients."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import yaml
from cli.commands import Stack, running_stack, trtmesh
from compat.plain_http import PlainHttp
from compat.releases import MODELS, releases_of, tensors, typed
from compat.repository import disaggregated, five_models, llmapi, of_release
from compat.triton import SyncStream, Triton, joined
from e2e.mesh import DEMO, DEMO_DRAFT, DEMO_VOCABULARY
from tritonclient.utils import InferenceServerException
from trtmesh.client import Client

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def fibonacci(n):"
TOKENS = 8
ASK = {"text_input": PROMPT, "max_tokens": TOKENS}
ENDLESS = {"max_tokens": 1900, "end_id": -1}
SIMULATED_DEMO = {"TRTMESH_ENGINE_SIMULATED_VOCABULARY_SIZE": str(DEMO_VOCABULARY)}
"""Environment of simulated engines with the demo model's ids."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Five models, five renamed models without streams, and an llmapi model: on the small demo model."""
    directory = five_models(tmp_path_factory.mktemp("models"))
    values = {"tensorrt_llm_model_name": "tensorrt_llm_whole", "decoupled_mode": "False"}
    values |= {"max_beam_width": "2", "normalize_log_probs": "False"}
    five_models(directory, values, suffix="_whole")
    llmapi(directory, "llm", DEMO_DRAFT)
    flags = ("--port", "0", "--backend", "torch", "--model", str(DEMO_DRAFT))
    with running_stack(*flags, "--triton-model-repo", str(directory)) as stack:
        stack.wait_ready()
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def triton(stack: Stack) -> AsyncIterator[Triton]:
    async with Triton(stack.wait_ready()) as triton:
        yield triton


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text(stack: Stack) -> str:
    async with Client(stack.wait_ready()) as client:
        (item,) = await client.complete([PROMPT], max_tokens=TOKENS)
        return item.text


async def test_imported_models_are_ready(stack: Stack, triton: Triton) -> None:
    five = ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls")
    names = {*five, *(f"{name}_whole" for name in five), "llm"}
    index = await triton.client.get_model_repository_index()
    assert {model.name for model in index.models} == names
    for name in names:
        assert await triton.client.is_model_ready(name)
    stack.wait_for("carried over  parameters.max_beam_width = 4: router.triton.models")


async def test_imported_models_stream_or_answer_once(triton: Triton, text: str) -> None:
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert joined(await triton.stream(model, ASK | {"stream": True})) == text
        assert (await triton.infer(f"{model}_whole", ASK)).text == PROMPT + text
    steps = (await triton.client.get_model_config("ensemble_whole")).config.ensemble_scheduling.step
    assert [step.model_name for step in steps] == [
        "preprocessing_whole", "tensorrt_llm_whole", "postprocessing_whole",
    ]  # fmt: skip


async def test_imported_steps_equal_the_ensemble(triton: Triton, text: str) -> None:
    """A client that chains the models."""
    given = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": TOKENS}
    encoded = (await triton.infer("preprocessing_whole", given)).outputs
    core = {
        "input_ids": encoded["INPUT_ID"],
        "input_lengths": encoded["REQUEST_INPUT_LEN"],
        "request_output_len": encoded["REQUEST_OUTPUT_LEN"],
        "end_id": encoded["OUT_END_ID"],
        "pad_id": encoded["OUT_PAD_ID"],
        "beam_width": 2,
        "return_log_probs": True,
    }
    generated = (await triton.infer("tensorrt_llm_whole", core)).outputs
    assert generated["output_ids"].shape[:2] == (1, 2)
    assert (generated["cum_log_probs"] < 0).all()
    decoded = await triton.infer(
        "postprocessing_whole",
        {
            "TOKENS_BATCH": generated["output_ids"],
            "SEQUENCE_LENGTH": generated["sequence_length"],
        },
    )
    assert all(str(each, "utf-8").startswith(PROMPT) for each in decoded.outputs["OUTPUT"])


async def test_imported_limits_hold(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match="larger than configured max beam width 2"):
        await triton.infer("ensemble_whole", ASK | {"beam_width": 3})
    rows = {
        "text_input": np.array([["x"]] * 17, np.object_),
        "max_tokens": np.full((17, 1), 1, np.int32),
    }
    with pytest.raises(InferenceServerException, match="batch-size must be <= 16"):
        await triton.infer("ensemble_whole", rows)


async def test_log_probs_are_normalized_unless_the_repository_says_otherwise(
    triton: Triton,
) -> None:
    """Among the tokens that a greedy request leaves, the chosen one is certain."""
    ask = ASK | {"return_log_probs": True}
    (normalized,) = await triton.stream("ensemble", ask)
    assert not normalized.outputs["output_log_probs"].any()
    whole = await triton.infer("ensemble_whole", ask)
    assert (whole.outputs["output_log_probs"][..., -TOKENS:] < 0).all()
    sums = [each.outputs["cum_log_probs"].item() for each in (normalized, whole)]
    assert sums == pytest.approx([whole.outputs["output_log_probs"][..., -TOKENS:].sum()] * 2)


async def test_imported_llmapi_model_answers(triton: Triton, text: str) -> None:
    ask = {
        "text_input": np.array([PROMPT], np.object_),
        "sampling_param_max_tokens": np.array([TOKENS], np.int32),
        "return_cumulative_logprob": np.array([True]),
        "streaming": np.array([True]),
    }
    responses = await triton.stream("llm", ask)
    assert responses[-1].text == text
    assert responses[-1].outputs["cumulative_logprob"].dtype == np.float32
    assert responses[-1].outputs["cumulative_logprob"].item() < 0


def shrink(config: Path) -> None:
    """Gives the engines of an imported file a smaller model."""
    config.write_text(config.read_text().replace(str(DEMO), str(DEMO_DRAFT)))


def counted(stack: Stack, family: str) -> dict[str, int]:
    """The samples of a family of counters, by model."""
    url = f"http://127.0.0.1:{stack.child('router-0')['metrics_port']}/metrics"
    with urllib.request.urlopen(url) as answer:
        lines = str(answer.read(), "utf-8")
    found = re.findall(rf'^{family}{{model="(\w+)",.*}} (\d+)$', lines, re.MULTILINE)
    return {model: int(value) for model, value in found}


async def test_requests_count_for_the_steps_of_the_repository(stack: Stack, triton: Triton) -> None:
    """A BLS names the core model in a parameter and the other models in code."""
    families = ("nv_inference_request_success", "nv_llm_output_token_len_count")
    before = [counted(stack, family) for family in families]
    await triton.infer("tensorrt_llm_bls_whole", ASK)
    after = [counted(stack, family) for family in families]
    grown = [{m for m in new if new[m] > old.get(m, 0)}
             for old, new in zip(before, after, strict=True)]  # fmt: skip
    core = "tensorrt_llm_whole"
    assert grown == [{"tensorrt_llm_bls_whole", core, "preprocessing", "postprocessing"}, {core}]


async def test_extra_id_applies_to_the_whole_prompt(triton: Triton) -> None:
    """The engine gets an id for each token, so equal prompts share KV only under equal ids."""
    reused = []
    for extra_id in (1, 1, 2, 2):
        prompt = {"text_input": "def f(a, b):\n    return a + b\n\n" * 4, "max_tokens": 2}
        more = {"prompt_table_extra_id": np.array([[extra_id]], np.uint64)}
        response = await triton.infer(
            "ensemble_whole", prompt | more | {"return_perf_metrics": True}
        )
        reused.append(response.number["kv_cache_reused_blocks"])
    assert reused[0] == reused[2] == 0
    assert reused[1] == reused[3] > 0


def infer(stack: Stack, *arguments: str) -> list[str]:
    """The lines printed by `trtmesh triton infer`."""
    result = trtmesh(
        "triton", "infer", "--url", stack.wait_ready(), "--max-tokens", "5", *arguments
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


async def test_triton_infer_prints_all_outputs(stack: Stack) -> None:
    details = ("--log-probs", "--generation-logits", "--context-logits", "--perf-metrics")
    ids = ("--ids", "5 6 7", *details)
    lines = infer(stack, *ids)
    shapes = dict(line.split(": ")[0].split(" ", 1) for line in lines)
    assert shapes["output_ids"] == "[1, 1, 5]"
    assert shapes["output_log_probs"] == "[1, 1, 5]"
    assert shapes["generation_logits"] == f"[1, 1, 5, {DEMO_VOCABULARY}]"
    assert shapes["context_logits"] == f"[1, 3, {DEMO_VOCABULARY}]"
    assert {"cum_log_probs", "last_token_time_ns"} <= set(shapes)
    # The joined stream is equal.
    whole = infer(stack, *ids, "--model", "tensorrt_llm_whole", "--exclude-input")
    for name in ("output_ids", "sequence_length"):
        assert [line for line in lines if line.startswith(name)] == [
            line for line in whole if line.startswith(name)
        ]


async def test_triton_infer_labels_beams_and_rows(stack: Stack) -> None:
    beams = ("--beam-width", "2", "--exclude-input", "def f(", "class A")
    whole = "\n".join(infer(stack, *beams, "--model", "ensemble_whole", "--batch"))
    tags = [f"[{row}.{beam}] " for row in (0, 1) for beam in (0, 1)]
    assert [tag for tag in tags if tag in whole] == tags
    # Rows of a decoupled model come in the order of their ends.
    for how in (("--batch", "--no-stream"), ("--stream",)):
        assert sorted(infer(stack, *beams, *how)) == sorted(whole.splitlines())


async def test_triton_infer_asks_the_llmapi_model(stack: Stack, text: str) -> None:
    lines = infer(stack, "--model", "llm", "--max-tokens", str(TOKENS), "--log-probs", PROMPT)
    assert "\n".join(lines).startswith(text)
    assert lines[-1].startswith("cumulative_logprob [1]: -")


async def test_full_engine_queue_is_reported_in_tritons_words(tmp_path: Path) -> None:
    """Overload scripts look for these words."""
    directory = five_models(tmp_path / "models", {"max_queue_size": "1"})
    flags = ("--port", "0", "--backend", "torch", "--model", str(DEMO_DRAFT))
    env = {"TRTMESH_ENGINE_TORCH_LIMITS_MAX_BATCH_SIZE": "1"}
    with (
        running_stack(*flags, "--triton-model-repo", str(directory), env=env) as stack,
        SyncStream(stack.wait_ready()) as stream,
    ):
        for name in ("running", "waiting", "refused"):
            stream.send("ensemble", ASK | ENDLESS | {"stream": True}, request_id=name)
        while not (response := await asyncio.to_thread(stream.next)).error:
            pass
        async with PlainHttp(stack.child("router-0")["http_address"]) as http:
            reply = await http.post("/v2/models/tensorrt_llm_bls/generate", ASK)
        assert reply.status == 503
        for told in (response.error, reply.json["error"]):
            assert "Exceeds maximum queue size" in told
            assert "Maximum queue size of 1 has been reached, please try again later" in told


async def test_two_engines_serve_two_models(tmp_path: Path) -> None:
    """A repository with two engines: a stack with engines of both, from an imported file."""
    directory = five_models(tmp_path / "models")
    five_models(directory, {"engine_dir": "/engines/other"}, suffix="_b")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in DEMO.iterdir():
            (tmp_path / name / file.name).symlink_to(file)
    models = (
        f"--model=tensorrt_llm={tmp_path / 'one'}",
        f"--model=tensorrt_llm_b={tmp_path / 'two'}",
    )
    config = tmp_path / "mesh.yaml"
    assert (
        trtmesh("import-triton", str(directory), *models, "--output", str(config)).returncode == 0
    )
    with running_stack("--port", "0", "--config", str(config), env=SIMULATED_DEMO) as stack:
        router = stack.wait_ready()
        assert len(stack.children) == 5
        async with Triton(router) as triton, Client(router) as client:
            tensors = ASK | {"stream": True}
            first = joined(await triton.stream("ensemble", tensors))
            second = joined(await triton.stream("ensemble_b", tensors))
            for model, own in (("one", first), ("two", second)):
                (item,) = await client.complete([PROMPT], model=model, max_tokens=TOKENS)
                assert item.text == own


@pytest.mark.parametrize(
    ("release", "backend"),
    [
        ("v0.5.0", "torch"),
        # Their engines have no other settings than those of v0.5.0.
        *((release, "simulated") for release in ("v0.11.0", "2025-05")),
        pytest.param("v0.6.1", "simulated", marks=pytest.mark.soak),
    ],
)
async def test_repository_of_every_age_is_served_as_imported(
    tmp_path: Path, release: str, backend: str
) -> None:
    """Every model called served answers a request in the types of its release, and declares that release's tensors."""
    config = tmp_path / "mesh.yaml"
    directory = of_release(tmp_path / "models", release)
    result = trtmesh("import-triton", str(directory), "--output", str(config), "--json")
    assert result.returncode == 0, result.stderr
    served = json.loads(result.stdout.splitlines()[-1])["served"]
    assert served == [name for name in sorted(MODELS) if release in releases_of(name)]
    engine = yaml.safe_load(config.read_text()).get("engine", {"torch": {}})["torch"]
    assert engine.keys() <= {"batching", "limits"}
    shrink(config)
    flags = ("--port", "0", "--backend", backend, "--config", str(config))
    with running_stack(*flags, env=SIMULATED_DEMO) as stack:
        async with Triton(stack.wait_ready()) as triton:
            for name in served:
                assert await triton.client.is_model_ready(name)
                metadata = await triton.client.get_model_metadata(name)
                assert {each.name for each in metadata.inputs} == set(
                    tensors(name, "inputs", release)
                )
            (text, *_) = await steps_of_release(triton, release)
            for name in set(served) & {"ensemble", "tensorrt_llm_bls"}:
                words = {"bad_words": [""], "stop_words": [""]}
                whole = await triton.infer(name, typed(name, release, ASK | words))
                assert whole.text == text


async def steps_of_release(triton: Triton, release: str) -> list[str]:
    """The texts of a client that chains the steps by hand."""
    query = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": TOKENS}
    words = {"BAD_WORDS_DICT": [""], "STOP_WORDS_DICT": [""]}
    encode = typed("preprocessing", release, query | words)
    encoded = (await triton.infer("preprocessing", encode)).outputs
    core = {
        "input_ids": encoded["INPUT_ID"],
        "input_lengths": encoded["REQUEST_INPUT_LEN"],
        "request_output_len": encoded["REQUEST_OUTPUT_LEN"],
    }
    generated = (await triton.infer("tensorrt_llm", core)).outputs
    lengths = {"SEQUENCE_LENGTH": generated["sequence_length"]}
    logs = {"CUM_LOG_PROBS": np.zeros((1, 1), np.float32)}
    logs |= {"OUTPUT_LOG_PROBS": np.zeros((1, 1, TOKENS), np.float32)}
    known = tensors("postprocessing", "inputs", release)
    needed = {n: each for n, each in (lengths | logs).items() if n in known and known[n].required}
    decode = {"TOKENS_BATCH": generated["output_ids"], **needed}
    decoded = (await triton.infer("postprocessing", decode)).outputs["OUTPUT"]
    return [str(each, "utf-8") for each in decoded.flat]


async def test_documented_disaggregated_repository_is_served(tmp_path: Path) -> None:
    directory = disaggregated(tmp_path / "models")
    config = tmp_path / "mesh.yaml"
    given = ("--device", "cpu", "--output", str(config))
    assert trtmesh("import-triton", str(directory), *given).returncode == 0
    shrink(config)
    with running_stack("--port", "0", "--backend", "torch", "--config", str(config)) as stack:
        router = stack.wait_ready()
        async with Triton(router) as triton, Client(router) as client:
            (item,) = await client.complete([PROMPT], max_tokens=TOKENS)
            assert joined(await triton.stream("ensemble", ASK | {"stream": True})) == item.text
            config_of = (await triton.client.get_model_config("ensemble")).config
            assert [each.model_name for each in config_of.ensemble_scheduling.step] == [
                "preprocessing", "disaggregated_serving_bls", "postprocessing",
            ]  # fmt: skip
            success = counted(stack, "nv_inference_request_success")
        assert {name for name, count in success.items() if count} == {
            *("ensemble", "preprocessing", "disaggregated_serving_bls", "generation"),
            "postprocessing",
        }


async def test_engines_run_on_the_devices_of_their_model(tmp_path: Path) -> None:
    """Two instances of a model on named devices, which are CPUs here. `tests/cli/test_up.py` starts an absent one."""
    config = tmp_path / "mesh.yaml"
    directory = five_models(
        tmp_path / "models", {"gpu_device_ids": "62;63", "tokenizer_dir": str(DEMO_DRAFT)}
    )
    assert trtmesh("import-triton", str(directory), "--output", str(config)).returncode == 0
    text, devices = re.subn(r"cuda:6[23]", "cpu", config.read_text())
    assert devices == 2
    config.write_text(text)
    with running_stack("--port", "0", "--backend", "torch", "--config", str(config)) as stack:
        async with Triton(stack.wait_ready()) as triton:
            assert joined(await triton.stream("ensemble", ASK | {"stream": True}))
        assert sum(child["service"] == "engine" for child in stack.children) == 2
