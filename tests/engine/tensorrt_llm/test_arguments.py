"""Settings become arguments of the constructor; what a release lacks is refused by the name of the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.backend_lab import lab
from engine.tensorrt_llm.harness import DEMO, backend, executor, info_of, tokens
from pydantic import ValidationError
from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings
from trtmesh.engine.settings import EngineSettings

UCX = {"backend": "UCX"}

KEPT: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    "parallel.tensor": ({"parallel": {"tensor": 2}}, "", "tensor_parallel_size", 2),
    "parallel.pipeline": ({"parallel": {"pipeline": 2}}, "", "pipeline_parallel_size", 2),
    "options.moe_expert_parallel_size": (
        {"options": {"moe_expert_parallel_size": 4}},
        "",
        "moe_expert_parallel_size",
        4,
    ),
    "options.kv_cache_config": (
        {"options": {"kv_cache_config": {"event_buffer_max_size": 7}}},
        "kv_cache_config",
        "event_buffer_max_size",
        7,
    ),
    "options.stream_interval": ({"options": {"stream_interval": 4}}, "", "stream_interval", 4),
    "kv_cache.tokens": ({"kv_cache": {"tokens": 6400}}, "kv_cache_config", "max_tokens", 6400),
    "options.kv_cache_config.dtype": (
        {"options": {"kv_cache_config": {"dtype": "fp8"}}},
        "kv_cache_config",
        "dtype",
        "fp8",
    ),
    "kv_cache.prefix_reuse": (
        {"kv_cache": {"prefix_reuse": False}},
        "kv_cache_config",
        "event_buffer_max_size",
        0,
    ),
    "options.scheduler_config": (
        {"options": {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}},
        "scheduler_config",
        "capacity_scheduler_policy",
        "MAX_UTILIZATION",
    ),
    "options.cuda_graph_config": (
        {"options": {"cuda_graph_config": None}},
        "",
        "cuda_graph_config",
        None,
    ),
    "batching.max_step_tokens": ({"batching": {"max_step_tokens": 512}}, "", "max_num_tokens", 512),
    "limits.max_batch_size": ({"limits": {"max_batch_size": 7}}, "", "max_batch_size", 7),
    "adapters.max_rank": (
        {"adapters": {"disk_bytes": 2**20, "max_rank": 16}},
        "lora_config",
        "max_lora_rank",
        16,
    ),
    "options.cache_transceiver_config": (
        {"options": {"cache_transceiver_config": {**UCX, "kv_transfer_timeout_ms": 7000}}},
        "cache_transceiver_config",
        "kv_transfer_timeout_ms",
        7000,
    ),
    "the life of KV that nobody fetches": (
        {"options": {"cache_transceiver_config": UCX}},
        "cache_transceiver_config",
        "kv_transfer_timeout_ms",
        60_000,
    ),
    "the longest sequence": (
        {"options": {"cache_transceiver_config": UCX}},
        "cache_transceiver_config",
        "max_tokens_in_buffer",
        2048,
    ),
    "options.speculative_config": (
        {"options": {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}},
        "speculative_config",
        "max_draft_len",
        3,
    ),
    "the search of drafts": (
        {"options": {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}},
        "speculative_config",
        "max_matching_ngram_size",
        2,
    ),
    "options": ({"options": {"print_iter_log": True}}, "", "print_iter_log", True),
}
"""By setting: the settings, the configuration and its argument, and the value."""


@pytest.mark.parametrize("name", KEPT)
async def test_a_setting_arrives_at_the_constructor(name: str, release: str) -> None:
    settings, of, argument, value = KEPT[name]
    async with lab(backend(**settings)):
        given = executor().arguments
        assert (getattr(given[of], argument) if of else given[argument]) == value


NEEDS: dict[str, dict[str, Any]] = {
    "options.cache_transceiver_config.transceiver_runtime": {
        "options": {"cache_transceiver_config": {**UCX, "transceiver_runtime": "CPP"}},
    },
    "options.scheduler_config.waiting_queue_policy": {
        "options": {"scheduler_config": {"waiting_queue_policy": "priority"}}
    },
    "options.telemetry_config": {"options": {"telemetry_config": {"disabled": True}}},
}
"""Settings that only newer releases know."""


@pytest.mark.parametrize("name", NEEDS)
async def test_a_setting_that_the_release_lacks_is_refused_by_name(name: str, target: str) -> None:
    with pytest.raises(SettingsError) as refused:
        async with lab(backend(**NEEDS[name])):
            pass
    assert refused.value.setting == f"engine.tensorrt_llm.{name}"
    assert target in str(refused.value)


async def test_newer_settings_work_on_the_newer_release(newer: str) -> None:
    for settings in NEEDS.values():
        async with lab(backend(**settings)) as on:
            await tokens(on, max_tokens=2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_batch_size": 3}, "max_batch_size"),
        ({"kv_cache_config": {"max_tokens": 3, "enable_block_reuse": False}}, "enable_block_reuse"),
        ({"speculative_config": {"max_draft_len": 3}}, "speculative_config"),
        ({"tokenizer": "gpt2"}, "tokenizer"),
    ],
)
async def test_an_option_that_a_setting_covers_is_refused(
    options: dict[str, Any], name: str, target: str
) -> None:
    with pytest.raises(SettingsError, match=name):
        async with lab(backend(options=options)):
            pass


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "beams handed over": (
        {"options": {"cache_transceiver_config": UCX}, "limits": {"max_beam_width": 2}},
        "max_beam_width",
    ),
    "speculation with an engine": (
        {
            "engine_dir": "/engine",
            "options": {"speculative_config": {"decoding_type": "NGram"}},
        },
        "speculation",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_contradict_each_other_are_refused(name: str) -> None:
    settings, problem = WRONG[name]
    with pytest.raises(ValidationError, match=problem):
        TensorRtLlmSettings.model_validate(settings)


@pytest.mark.parametrize(
    ("role", "settings", "problem"),
    [
        ("decode", {}, "cache_transceiver_config"),
        ("prefill", {"options": {"cache_transceiver_config": UCX}}, "disable_overlap_scheduler"),
    ],
)
def test_a_role_needs_what_moves_the_kv(role: str, settings: Any, problem: str) -> None:
    given = {"backend": "tensorrt_llm", "role": role, "tensorrt_llm": settings}
    with pytest.raises(ValidationError, match=problem):
        EngineSettings.model_validate(given)


def built_engine(directory: Path, **changes: Any) -> Path:
    """A directory as trtllm-build leaves it, but for the engine."""
    import json

    config = json.loads((DEMO / "config.json").read_text())
    build = {
        "max_seq_len": 512,
        "max_batch_size": 8,
        "max_input_len": 256,
        "max_beam_width": 2,
        "plugin_config": {"tokens_per_block": 64},
        **changes,
    }
    directory.mkdir()
    content = {"pretrained_config": config, "build_config": build}
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "rank0.engine").write_bytes(b"engine")
    return directory


async def test_a_built_engine_brings_its_limits(target: str, tmp_path: Path) -> None:
    engine = built_engine(tmp_path / "engine")
    settings = {"engine_dir": engine, "limits": {"max_batch_size": 4}}
    async with lab(backend(**settings)) as on:
        info = info_of(on)
        assert (info.max_sequence_tokens, info.max_prompt_tokens) == (512, 256)
        # They were not built in.
        assert "output.log_probs" not in info.supported_fields
        assert "output.context_logits" not in info.supported_fields
        assert len(await tokens(on, max_tokens=3, ignore_end_id=True)) == 3
    with pytest.raises(SettingsError, match="built for at most 8"):
        async with lab(backend(engine_dir=engine)):
            pass


async def test_a_release_without_built_engines_says_so(newer: str, tmp_path: Path) -> None:
    engine = built_engine(tmp_path / "engine")
    with pytest.raises(SettingsError, match="runs no built engines"):
        async with lab(backend(engine_dir=engine)):
            pass


async def test_a_length_beyond_the_model_is_refused(target: str) -> None:
    with pytest.raises(ModelUnusable, match="2048 positions"):
        async with lab(backend(limits={"max_sequence_tokens": 4096})):
            pass
