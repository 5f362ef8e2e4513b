"""Every input tensor of the contract is observed at a backend, through a real router and tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.triton import Triton
from e2e.mesh import DEMO, DEMO_VOCABULARY, PATIENT, Mesh, eventually, running_mesh
from engine.config_fields import LEAVES
from engine_streams import serving
from recording_backend import INFO, RecordingBackend
from tokenizers import Tokenizer
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.vocabulary import (
    Adapter,
    GenerationConfig,
    Image,
    Lora,
    Tensor,
    TokenRangeRetention,
)
from trtmesh.engine.backend import AdapterLoad, HeldAdapter
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.catalogue import TEMPLATES
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

F16 = np.ones((1, 2, 3), np.float16)
MODULES = np.ones((1, 2, 3), np.int32)
PIXELS = np.arange(12, dtype=np.float16).reshape(1, 1, 3, 2, 2)
PICTURE = np.zeros((1, 3, 224, 224), np.float16)
BYTES = np.arange(12, dtype=np.uint8).reshape(1, 1, 2, 2, 3)


def i32(*values: int) -> np.ndarray:
    return np.array([values], np.int32)


def u64(*values: int) -> np.ndarray:
    return np.array([values], np.uint64)


def tensor(data: np.ndarray, data_type: int) -> Tensor:
    return Tensor(data_type, data.shape[1:], data.tobytes())


def ids(text: str) -> tuple[int, ...]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Case:
    """The value of an input, its field, the value expected there, and required companions."""

    value: Any
    path: str
    seen: Any
    beside: Mapping[str, Any] | None = None


BEAMS = {"beam_width": 2}
RANGES = {
    "retention_token_range_starts": i32(0, 1),
    "retention_token_range_ends": i32(1, -1),
    "retention_token_range_priorities": i32(10, 20),
    "retention_token_range_durations_ms": i32(-1, 500),
}
RETENTION = (TokenRangeRetention(0, 1, 10), TokenRangeRetention(1, None, 20, 500))
SHARED = {
    "num_return_sequences": Case(2, "sampling.num_return_sequences", 2),
    "beam_width": Case(2, "beam_search.beam_width", 2),
    "end_id": Case(9, "stopping.end_id", 9),
    "temperature": Case(0.5, "sampling.temperature", 0.5, {"top_k": 5, "runtime_top_k": 5}),
    "repetition_penalty": Case(1.5, "sampling.repetition_penalty", 1.5),
    "presence_penalty": Case(0.5, "sampling.presence_penalty", 0.5),
    "frequency_penalty": Case(0.25, "sampling.frequency_penalty", 0.25),
    "early_stopping": Case(2, "beam_search.early_stopping", 3, BEAMS),
    "min_tokens": Case(1, "stopping.min_tokens", 1),
    "min_length": Case(np.array([[1]], np.uint32), "stopping.min_tokens", 1),
    "seed": Case(2**63 + 1, "sampling.seed", 2**63 + 1),
    "random_seed": Case(np.array([[9]], np.uint64), "sampling.seed", 9),
    "return_log_probs": Case(True, "output.log_probs", True),
    "output_log_probs": Case(True, "output.log_probs", True),
    "return_kv_cache_reuse_stats": Case(True, "output.perf_metrics", True),
    "return_context_logits": Case(True, "output.context_logits", True),
    "return_generation_logits": Case(True, "output.generation_logits", True),
    "return_perf_metrics": Case(True, "output.perf_metrics", True),
    "prompt_embedding_table": Case(
        F16, "prompt_tuning.embedding_table", tensor(F16, pb.DATA_TYPE_FP16)
    ),
    "prompt_vocab_size": Case(2, "prompt_tuning.vocabulary_size", 2),
    "lora_task_id": Case(7, "lora.id", 7),
    "guided_decoding_guide_type": Case(
        "regex", "guided_decoding.guide_type", 3, {"guided_decoding_guide": "a+"}
    ),
    "guided_decoding_guide": Case(
        "a+", "guided_decoding.guide", "a+", {"guided_decoding_guide_type": "regex"}
    ),
}
TEXT = SHARED | {
    "max_tokens": Case(3, "stopping.max_tokens", 3),
    "decoder_text_input": Case("hello", "encoder_decoder.decoder_prompt.text", "hello"),
    "bad_words": Case(["one two", ""], "stopping.bad_token_ids", (ids("one two"), ids(" one two"))),
    "top_k": Case(5, "sampling.top_k", 5),
    "top_p": Case(0.5, "sampling.top_p", 0.5),
    "prompt_ignore_length": Case(1, "sampling.prompt_ignore_length", 1),
    "length_penalty": Case(2.0, "beam_search.length_penalty", 2.0, BEAMS),
    "prompt_table_extra_id": Case(u64(8), "prompt_tuning.extra_ids", (8,) * len(ids("a prompt"))),
    "embedding_bias_words": Case(
        ["x"], "sampling.embedding_bias_token_ids", (ids("x"),), {"embedding_bias_weights": 0.5}
    ),
    "embedding_bias_weights": Case(
        0.5, "sampling.embedding_bias_weights", (0.5,), {"embedding_bias_words": ["x"]}
    ),
}
ENSEMBLE = TEXT | {
    "image_input": Case(
        PICTURE, "multimodal.images", (Image(pixels=tensor(PICTURE, pb.DATA_TYPE_FP16)),)
    ),
}
BLS = TEXT | {
    "image_input": Case(
        PIXELS, "multimodal.images", (Image(pixels=tensor(PIXELS, pb.DATA_TYPE_FP16)),)
    ),
    "image_bytes_input": Case(
        BYTES, "multimodal.images", (Image(pixels=tensor(BYTES, pb.DATA_TYPE_UINT8)),)
    ),
    "image_url_input": Case(
        "https://example.org/a.png", "multimodal.images", (Image(url="https://example.org/a.png"),)
    ),
    "video_bytes_input": Case(BYTES, "multimodal.video", tensor(BYTES, pb.DATA_TYPE_UINT8)),
    "num_draft_tokens": Case(4, "draft.num_draft_tokens", 4),
    "use_draft_logits": Case(True, "draft.use_draft_logits", True),
}
TOKENS = SHARED | {
    "request_output_len": Case(3, "stopping.max_tokens", 3),
    "encoder_input_features": Case(
        F16, "encoder_decoder.encoder_features", tensor(F16, pb.DATA_TYPE_FP16)
    ),
    "encoder_output_lengths": Case(2, "encoder_decoder.encoder_output_length", 2),
    "decoder_input_ids": Case(
        i32(4, 5, 0), "encoder_decoder.decoder_prompt.token_ids", (4, 5), {"decoder_input_lengths": 2}
    ),
    "decoder_input_lengths": Case(
        1, "encoder_decoder.decoder_prompt.token_ids", (4,), {"decoder_input_ids": i32(4, 5)}
    ),
    "draft_input_ids": Case(i32(4, 5), "draft.token_ids", (4, 5)),
    "draft_logits": Case(
        F16.astype(np.float32),
        "draft.logits",
        tensor(F16.astype(np.float32), pb.DATA_TYPE_FP32),
    ),
    "draft_acceptance_threshold": Case(0.5, "draft.acceptance_threshold", 0.5),
    "stop_words_list": Case(
        np.array([[[14480, 326, 262, 1171], [1, 4, -1, -1]]], np.int32),
        "stopping.stop_token_ids",
        ((14480,), (326, 262, 1171)),
    ),
    "bad_words_list": Case(
        np.array([[[24044, 76, 1230], [2, 3, -1]]], np.int32),
        "stopping.bad_token_ids",
        ((24044, 76), (1230,)),
    ),
    "embedding_bias": Case(
        np.array([[0.5, -1.0, 2.0]], np.float32), "sampling.embedding_bias", (0.5, -1.0, 2.0)
    ),
    "runtime_top_k": Case(5, "sampling.top_k", 5),
    "runtime_top_p": Case(0.5, "sampling.top_p", 0.5),
    "len_penalty": Case(2.0, "beam_search.length_penalty", 2.0, BEAMS),
    "beam_search_diversity_rate": Case(0.5, "beam_search.diversity_rate", 0.5, BEAMS),
    "runtime_top_p_min": Case(0.5, "sampling.top_p_min", 0.5),
    "runtime_top_k_min": Case(0.5, "sampling.top_p_min", 0.5),
    "runtime_top_p_decay": Case(0.5, "sampling.top_p_decay", 0.5),
    "runtime_top_p_reset_ids": Case(6, "sampling.top_p_reset_id", 6),
    "prompt_ignore_length": Case(1, "sampling.prompt_ignore_length", 1),
    "no_repeat_ngram_size": Case(3, "sampling.no_repeat_ngram_size", 3),
    "prompt_table_extra_ids": Case(u64(8, 9, 0), "prompt_tuning.extra_ids", (8, 9)),
    "cross_attention_mask": Case(
        np.ones((1, 2, 2), np.bool_),
        "encoder_decoder.cross_attention_mask",
        tensor(np.ones((1, 2, 2), np.bool_), pb.DATA_TYPE_BOOL),
    ),
    "skip_cross_attn_blocks": Case(True, "encoder_decoder.skip_cross_attention", True),
    "mrope_rotary_cos_sin": Case(
        np.ones((1, 4), np.float32),
        "multimodal.mrope_rotary_cos_sin",
        tensor(np.ones((1, 4), np.float32), pb.DATA_TYPE_FP32),
    ),
    "mrope_position_deltas": Case(np.array([[-3]], np.int64), "multimodal.mrope_position_delta", -3),
    "multimodal_embedding": Case(F16, "multimodal.embedding", tensor(F16, pb.DATA_TYPE_FP16)),
    "multimodal_hashes": Case(
        np.ones((1, 2, 8), np.int32),
        "multimodal.hashes",
        tensor(np.ones((1, 2, 8), np.int32), pb.DATA_TYPE_INT32),
    ),
    "multimodal_item_runs": Case(
        np.ones((1, 2, 3), np.int32),
        "multimodal.item_runs",
        tensor(np.ones((1, 2, 3), np.int32), pb.DATA_TYPE_INT32),
    ),
    "retention_decode_priority": Case(60, "kv_cache.decode_priority", 60),
    "retention_decode_duration_ms": Case(70, "kv_cache.decode_duration_ms", 70),
    **{
        name: Case(RANGES[name], "kv_cache.token_ranges", RETENTION, RANGES) for name in RANGES
    },
    "lookahead_window_size": Case(
        4, "lookahead.window_size", 4,
        {"lookahead_ngram_size": 2, "lookahead_verification_set_size": 3},
    ),
    "lookahead_ngram_size": Case(
        2, "lookahead.ngram_size", 2,
        {"lookahead_window_size": 4, "lookahead_verification_set_size": 3},
    ),
    "lookahead_verification_set_size": Case(
        3, "lookahead.verification_set_size", 3,
        {"lookahead_window_size": 4, "lookahead_ngram_size": 2},
    ),
}  # fmt: skip
DISAGGREGATED = {
    name: case
    for name, case in TOKENS.items()
    if not name.startswith(
        ("encoder_", "cross_", "skip_cross", "mrope_", "multimodal_", "context_phase", "retention_")
    )
    and not name.startswith("lookahead_")
}
GPT = {
    name: case
    for name, case in TOKENS.items()
    if name in {spec.name for spec in TEMPLATES["gpt"].inputs}
}
LLMAPI = {
    "image_url": Case(
        np.array(["https://a/b.png"], np.object_),
        "multimodal.images",
        (Image(url="https://a/b.png"),),
    ),
    "sampling_param_best_of": Case(np.array([2], np.int32), "sampling.best_of", 2),
    "sampling_param_temperature": Case(np.array([0.5], np.float32), "sampling.temperature", 0.5),
    "sampling_param_top_k": Case(np.array([5], np.int32), "sampling.top_k", 5),
    "sampling_param_top_p": Case(np.array([0.5], np.float32), "sampling.top_p", 0.5),
    "sampling_param_frequency_penalty": Case(
        np.array([0.25], np.float32), "sampling.frequency_penalty", 0.25
    ),
    "sampling_param_presence_penalty": Case(
        np.array([0.5], np.float32), "sampling.presence_penalty", 0.5
    ),
    "sampling_param_max_tokens": Case(np.array([3], np.int32), "stopping.max_tokens", 3),
    "sampling_param_seed": Case(np.array([2**63 + 1], np.uint64), "sampling.seed", 2**63 + 1),
    "sampling_param_return_perf_metrics": Case(np.array([True]), "output.perf_metrics", True),
    "sampling_param_logits_post_processor_name": Case(
        np.array(["a"], np.object_), "sampling.logits_post_processor", "a"
    ),
    "return_cumulative_logprob": Case(np.array([True]), "output.log_probs", True),
    "lora_id": Case(
        np.array([7], np.uint64), "lora.id", 7, {"lora_name": np.array(["a"], np.object_)}
    ),
    "lora_name": Case(
        np.array(["a"], np.object_), "lora.name", "a", {"lora_id": np.array([7], np.uint64)}
    ),
}
NOT_FOR_BACKENDS = {
    "stop": "acted on by the door",
    "stream": "acted on by the router",
    "streaming": "acted on by the router",
    "stop_words": "acted on by the router and a tokenizer",
    "pad_id": "without effect, as in Triton: rows are padded with -1",
    "exclude_input_in_output": "acted on by the door",
    "return_num_input_tokens": "always counted",
    "return_num_output_tokens": "always counted",
    "return_finish_reason": "always known",
    "return_stop_reason": "always known",
    "sampling_param_stop": "acted on by the router and a tokenizer",
    "sampling_param_exclude_input_from_output": "acted on by the door",
    "context_phase_params": "acted on by the router",
    "lora_weights": "loaded ahead of the item",
    "lora_config": "loaded ahead of the item",
    "lora_path": "refused by the door",
    "lora_ckpt_source": "refused by the door",
    "text_input": "seen as the prompt's ids",
    "input_ids": "seen as the prompt's ids",
    "input_lengths": "seen as the prompt's ids",
}
MODELS = {
    "ensemble": ENSEMBLE,
    "tensorrt_llm_bls": BLS,
    "tensorrt_llm": TOKENS,
    "disaggregated_serving_bls": DISAGGREGATED,
    "gpt": GPT,
    "llmapi": LLMAPI,
}
CASES = [(model, name, case) for model, cases in MODELS.items() for name, case in cases.items()]
CONFIGURED = {model: {"template": model, "decoupled": True} for model in MODELS}
"""`gpt` answers once all the same."""
TRITON = triton_models(TritonSettings.model_validate({"models": CONFIGURED}))


@pytest.mark.parametrize(("model", "cases"), MODELS.items())
async def test_every_declared_input_has_a_case(model: str, cases: dict[str, Case]) -> None:
    declared = set(TRITON[model].inputs)
    assert declared - set(cases) <= set(NOT_FOR_BACKENDS)
    assert set(cases) <= declared


class LoadingBackend(RecordingBackend):
    """Has every adapter ready at once."""

    def load_adapter(self, load: AdapterLoad) -> None:
        super().load_adapter(load)
        self.step({}, adapters=[HeldAdapter(load.identity)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> RecordingBackend:
    return LoadingBackend(
        replace(
            INFO,
            model="demo",
            vocabulary_size=DEMO_VOCABULARY,
            supported_fields=frozenset(LEAVES),
            max_sequence_tokens=4096,
            max_adapter_bytes=2**20,
        ),
        adapters=[HeldAdapter(Adapter(7, "a", "v1"))],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(backend: RecordingBackend) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(backend))

        async def start(mesh: Mesh) -> None:
            await mesh.start_tokenizer()
            # The engine runs in this process; the router only needs an address.
            mesh.engines.append(engine)  # type: ignore[arg-type]
            await mesh.start_router(*PATIENT, "--triton-models", json.dumps(CONFIGURED))
            await mesh.ready(1, 1)

        yield await stack.enter_async_context(running_mesh(start=start))


async def seen_config(
    triton: Triton,
    backend: RecordingBackend,
    model: str,
    tensors: Mapping[str, Any],
    **more: Any,
) -> GenerationConfig:
    """The config at the backend; the sequences end at once. Inputs unknown to the model are dropped."""
    needed: dict[str, Any] = {"text_input": "a prompt", "max_tokens": 5}
    if model == "llmapi":
        needed = {"text_input": np.array(["a prompt"], np.object_)}
    elif "input_ids" in TRITON[model].inputs:
        needed = {"input_ids": i32(1, 2), "input_lengths": 2, "request_output_len": 5}
    if model == "gpt":
        needed |= {"end_id": 9, "pad_id": 9}
    declared = TRITON[model].inputs
    known = {name: value for name, value in tensors.items() if name in declared}
    before = len(backend.items)
    stream = asyncio.create_task(triton.stream(model, needed | known, **more))

    async def arrived_or_refused() -> bool:
        return len(backend.items) > before or stream.done()

    await eventually(arrived_or_refused)
    backend.end(*list(backend.live), reason=pb.FINISH_REASON_END_ID)
    responses = await stream
    assert not [response.error for response in responses if response.error]
    return backend.items[before].config


async def test_padding_words_are_dropped_with_their_weights(
    triton: Triton, backend: RecordingBackend
) -> None:
    tensors = {"embedding_bias_words": ["x", ""], "embedding_bias_weights": [0.5, 9.0]}
    config = await seen_config(triton, backend, "ensemble", tensors)
    assert config.sampling.embedding_bias_token_ids == (ids("x"),)
    assert config.sampling.embedding_bias_weights == (0.5,)


@pytest.mark.parametrize(("model", "name", "case"), CASES, ids=[f"{m}-{n}" for m, n, _ in CASES])
async def test_input_reaches_the_backend(
    triton: Triton, backend: RecordingBackend, model: str, name: str, case: Case
) -> None:
    config: Any = await seen_config(
        triton, backend, model, {**(case.beside or {}), name: case.value}
    )
    value = config
    for part in case.path.split("."):
        value = getattr(value, part)
    assert value == case.seen


@pytest.mark.parametrize(
    ("number", "model"),
    [*enumerate(name for name, model in TRITON.items() if "lora_weights" in model.inputs)],
)
async def test_adapter_with_weights_is_loaded_ahead_of_the_item(
    triton: Triton, backend: RecordingBackend, number: int, model: str
) -> None:
    weights = np.full((1, 2, 3), number, np.float16)
    tensors = {"lora_task_id": 100 + number, "lora_weights": weights, "lora_config": MODULES}
    config = await seen_config(triton, backend, model, tensors)
    content = AdapterContent.of_arrays(
        tensor(weights, pb.DATA_TYPE_FP16), tensor(MODULES, pb.DATA_TYPE_INT32)
    )
    assert backend.loads[-1].content == content
    assert backend.loads[-1].identity == Adapter(100 + number, "", content.version)
    assert config.lora == Lora(id=100 + number, name="", version=content.version)


async def test_early_stopping_may_be_bool(triton: Triton, backend: RecordingBackend) -> None:
    """It was BOOL before it was INT32."""
    tensors = {"beam_width": 2, "early_stopping": True}
    config = await seen_config(triton, backend, "tensorrt_llm", tensors)
    assert config.beam_search.early_stopping == pb.EARLY_STOPPING_FIRST_COMPLETE


@pytest.mark.parametrize("asked", ["return_perf_metrics", "return_kv_cache_reuse_stats"])
async def test_perf_metrics_need_one_of_two_inputs(
    triton: Triton, backend: RecordingBackend, asked: str
) -> None:
    tensors = {"return_perf_metrics": False, "return_kv_cache_reuse_stats": False}
    config = await seen_config(triton, backend, "tensorrt_llm", tensors)
    assert not config.output.perf_metrics
    config = await seen_config(triton, backend, "tensorrt_llm", tensors | {asked: True})
    assert config.output.perf_metrics


async def test_defaults_of_the_models(triton: Triton, backend: RecordingBackend) -> None:
    """Greedy without top_k and top_p, no end id in the core model, no beam search with one beam."""
    tensors = {"temperature": 0.7, "beam_width": 1, "len_penalty": 1.0, "runtime_top_p": 0.0}
    config = await seen_config(triton, backend, "tensorrt_llm", tensors)
    assert config.sampling.greedy
    assert config.stopping.ignore_end_id
    assert "beam_search.length_penalty" not in config.fields_set
    config = await seen_config(triton, backend, "ensemble", {})
    assert not config.stopping.ignore_end_id
    config = await seen_config(triton, backend, "ensemble", {"end_id": -1})
    assert config.stopping.ignore_end_id


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["presence_penalty", "frequency_penalty"])
async def test_penalties_count_the_prompt_as_upstream(
    triton: Triton, backend: RecordingBackend, model: str, kind: str
) -> None:
    """The native API counts what was generated alone."""
    name = f"sampling_param_{kind}" if model == "llmapi" else kind
    value = np.array([0.5], np.float32) if model == "llmapi" else 0.5
    plain = await seen_config(triton, backend, model, {})
    assert plain.sampling.prompt_ignore_length is None
    penalised = await seen_config(triton, backend, model, {name: value})
    assert penalised.sampling.prompt_ignore_length == 0
    asked = await seen_config(triton, backend, model, {name: value, "prompt_ignore_length": 3})
    declared = "prompt_ignore_length" in TRITON[model].inputs
    assert asked.sampling.prompt_ignore_length == (3 if declared else 0)


async def test_request_parameters_reach_the_backend(
    triton: Triton, backend: RecordingBackend
) -> None:
    phases = {"request_type": "context_and_generation", "Streaming": True}
    config = await seen_config(triton, backend, "tensorrt_llm", {}, priority=3, parameters=phases)
    assert config.handoff is None
    assert config.priority == 16 - 3


async def test_priorities_keep_their_order(triton: Triton, backend: RecordingBackend) -> None:
    """The lower the earlier; 0 is unset."""
    given = [1, 2, 3, 15, 16, 17, 1000, 10**6, 10**6 + 1, 2**31, 2**31 + 16]
    seen = [
        (await seen_config(triton, backend, "tensorrt_llm", {}, priority=each)).priority
        for each in given
    ]
    assert all(early > late for early, late in pairwise(seen))
    unset = (await seen_config(triton, backend, "tensorrt_llm", {}, priority=0)).priority
    assert unset == seen[given.index(16)] == 0


@pytest.mark.parametrize("model", MODELS)
async def test_negative_filters_are_off(
    triton: Triton, backend: RecordingBackend, model: str
) -> None:
    """Clients of other servers say so; 0 as a top_p is greedy for llmapi alone, as upstream."""
    names = ("top_k", "runtime_top_k", "sampling_param_top_k")
    others = ("top_p", "runtime_top_p", "sampling_param_top_p")

    def given(name: str, value: float) -> Any:
        kind = np.int32 if "top_k" in name else np.float32
        return np.array([value] if model == "llmapi" else [[value]], kind)

    for top_k, top_p in ((-1, -0.1), (-7, 0.0), (0, -1.0)):
        tensors = {name: given(name, top_k) for name in names}
        tensors |= {name: given(name, top_p) for name in others}
        sampling = (await seen_config(triton, backend, model, tensors)).sampling
        assert sampling.top_p == (None if model != "llmapi" or top_p else 0.0)
        # The LLM API draws among all tokens for a top_k of 0.
        assert sampling.greedy == (model != "llmapi" or top_k < 0)
        temperature = {"temperature": 0.5, "sampling_param_temperature": given("top_p", 0.5)}
        sampling = (await seen_config(triton, backend, model, tensors | temperature)).sampling
        # The executor samples only with top_k or top_p.
        assert sampling.greedy == (model != "llmapi" or top_p == 0)
        assert sampling.top_k in (None, 0, 1)


async def test_draws_of_beams_are_dropped(triton: Triton, backend: RecordingBackend) -> None:
    """The executor accepts them and ranks beams without them."""
    draws = {
        "runtime_top_k": 5,
        "runtime_top_p": 0.5,
        "runtime_top_p_min": 0.1,
        "runtime_top_p_decay": 0.9,
        "runtime_top_p_reset_ids": 3,
    }
    plain = await seen_config(triton, backend, "tensorrt_llm", BEAMS)
    config = await seen_config(triton, backend, "tensorrt_llm", {**BEAMS, **draws})
    assert config.fields_set == plain.fields_set
    config = await seen_config(triton, backend, "ensemble", {**BEAMS, "top_k": 5, "top_p": 0.5})
    assert (config.sampling.top_k, config.sampling.top_p) == (None, None)


async def test_min_tokens_may_exceed_max_tokens(triton: Triton, backend: RecordingBackend) -> None:
    stopping = (await seen_config(triton, backend, "ensemble", {"min_tokens": 9})).stopping
    assert (stopping.min_tokens, stopping.max_tokens) == (9, 5)
