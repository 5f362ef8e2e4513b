"""Conversion of model repositories."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.commands import trtmesh
from cli.triton_import.importing import convert, copy_of_demo, finding
from compat.repository import five_models, llmapi, replace
from compat.test_every_input import MODELS as CASES
from e2e.mesh import DEMO
from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.chassis.settings import load_settings
from trtmesh.engine.backends.torch.fields import SUPPORTED_FIELDS
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.tools.triton_import import Outcome
from trtmesh.tools.triton_import.fields import refusal

TEMPLATES = Path(__file__).parents[2] / "compat" / "repositories" / "five_models"


def test_import_reports_the_outcome_of_every_value(tmp_path: Path) -> None:
    values = {
        "max_queue_size": "7",
        "kv_cache_host_memory_bytes": "1048576",
        "enable_kv_cache_reuse": "false",
        "enable_chunked_context": "True",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "exclude_input_in_output": "1",
        "normalize_log_probs": "true",
        "decoding_mode": "top_k_top_p",
        "gpu_device_ids": "1",
        "kv_cache_free_gpu_mem_fraction": "0.8",
        "sink_token_length": "4",
        "logits_datatype": "TYPE_FP16",
        "accumulate_tokens": "true",
        "add_special_tokens": "false",
        "skip_special_tokens": "false",
    }
    conversion = convert(five_models(tmp_path / "models", values))
    models = conversion.sections["router"]["triton"]["models"]
    common = {"max_batch_size": 16, "max_beam_width": 4, "exclude_input_in_output": True}
    generating = common | {"decoupled": True, "normalize_log_probs": True}
    text = {"add_special_tokens": False, "skip_special_tokens": False}
    assert models == {
        "ensemble": generating
        | text
        | {
            "template": "ensemble",
            "steps": ["preprocessing", "tensorrt_llm", "postprocessing"],
            "logits_data_type": "FP16",
        },
        "tensorrt_llm_bls": generating
        | text
        | {
            "template": "tensorrt_llm_bls",
            "steps": ["preprocessing", "tensorrt_llm", "postprocessing"],
            "accumulate_tokens": True,
        },
        "tensorrt_llm": generating | {"template": "tensorrt_llm", "logits_data_type": "FP16"},
        "preprocessing": {
            "template": "preprocessing",
            "max_batch_size": 16,
            "add_special_tokens": False,
        },
        "postprocessing": {
            "template": "postprocessing",
            "max_batch_size": 16,
            "skip_special_tokens": False,
        },
    }
    assert conversion.sections["mesh"] == {"model": str(DEMO), "devices": {"demo": ["cuda:1"]}}
    assert conversion.sections["engine"]["torch"] == {
        "batching": {
            "policy": "guaranteed_no_evict",
            "chunked_context": True,
        },
        "kv_cache": {"tokens": 8192, "free_memory_fraction": 0.8, "prefix_reuse": False},
        "host_cache": {"bytes": 1048576},
        "limits": {"max_queue_size": 7},
    }
    core = "tensorrt_llm"
    assert finding(conversion, core, "parameters.sink_token_length")[0] is Outcome.UNSUPPORTED
    outcome, words = finding(conversion, core, "parameters.gpt_model_path")
    assert outcome is Outcome.REPLACED
    assert str(DEMO) in words
    assert finding(conversion, core, "parameters.lora_prefetch_dir")[0] is Outcome.UNSET
    pixels = finding(conversion, "preprocessing", "output.PIXEL_VALUES")
    assert pixels[0] is Outcome.UNSUPPORTED
    assert conversion.unserved == {}


def test_import_reports_every_parameter(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models")
    conversion = convert(directory)
    for config in directory.glob("*/config.pbtxt"):
        keys = [line.split('key: "')[1].split('"')[0] for line in config.read_text().splitlines()
                if line.startswith("parameters")]  # fmt: skip
        told = {f.what for f in conversion.findings if f.model == config.parent.name}
        assert {f"parameters.{key}" for key in keys} <= told


def test_imported_settings_are_valid(tmp_path: Path) -> None:
    conversion = convert(five_models(tmp_path / "models"), device="cuda:0")
    file = tmp_path / "mesh.yaml"
    file.write_text(yaml.safe_dump(dict(conversion.sections)))
    router = load_settings(RouterSettings, ["--config", str(file), "--engines", "e:1"], {})
    assert router.triton.models["ensemble"].max_batch_size == 16
    engine = load_settings(EngineSettings, ["--config", str(file)], {})
    assert (engine.torch.kv_cache.tokens, engine.torch.device.text) == (8192, "cuda:0")


def test_placeholders_count_as_unset(tmp_path: Path) -> None:
    unfilled = {"triton_backend": "tensorrtllm"} | {
        key: f"${{{key}}}"
        for key in ("triton_max_batch_size", "decoupled_mode", "engine_dir", "tokenizer_dir")
    }
    directory = five_models(tmp_path / "models", unfilled)
    conversion = convert(directory, str(DEMO))
    models = conversion.sections["router"]["triton"]["models"]
    assert "max_batch_size" not in models["ensemble"]
    # Triton's default for an unset value.
    assert models["ensemble"]["decoupled"] is False
    for what, models_told in (("max_batch_size", 5), ("decoupled", 2)):
        told = [f for f in conversion.findings if f.what.endswith(what)]
        assert {f.outcome for f in told} == {Outcome.UNSET}
        assert len(told) == models_told
        assert all(("false" in f.text) == (what == "decoupled") for f in told)


def test_renamed_models_are_recognised(tmp_path: Path) -> None:
    values = {"tensorrt_llm_model_name": "tensorrt_llm_chat"}
    directory = five_models(tmp_path / "models", values, suffix="_chat")
    five_models(directory, {"decoupled_mode": "False", "skip_special_tokens": "false"})
    llmapi(directory, "llm")
    conversion = convert(directory)
    models = conversion.sections["router"]["triton"]["models"]
    assert len(models) == len(conversion.served) == 11
    assert (models["ensemble"]["decoupled"], models["ensemble_chat"]["decoupled"]) == (False, True)
    assert models["ensemble"]["skip_special_tokens"] is False
    assert "skip_special_tokens" not in models["ensemble_chat"]
    assert models["llm"] == {"template": "llmapi", "decoupled": True}
    steps = [f"{name}_chat" for name in ("preprocessing", "tensorrt_llm", "postprocessing")]
    assert models["ensemble_chat"]["steps"] == steps
    assert models["tensorrt_llm_bls_chat"]["steps"] == [
        "preprocessing", "tensorrt_llm_chat", "postprocessing",
    ]  # fmt: skip
    assert isinstance(conversion.sections["mesh"]["model"], str)


def test_model_that_drafts_for_a_bls_is_named_as_the_mesh_serves_it(tmp_path: Path) -> None:
    values = {"tensorrt_llm_draft_model_name": "tensorrt_llm_small"}
    directory = five_models(tmp_path / "models", values)
    five_models(directory, {"tensorrt_llm_draft_model_name": "nobody"}, suffix="_small")
    for name in ("preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls"):
        if name != "tensorrt_llm_bls":
            shutil.rmtree(directory / f"{name}_small")
    small = DEMO.with_name("demo-draft")
    conversion = convert(directory, f"tensorrt_llm={DEMO}", f"tensorrt_llm_small={small}")
    bls = conversion.sections["router"]["triton"]["models"]["tensorrt_llm_bls"]
    assert (bls["model"], bls["draft_model"]) == ("demo", "demo-draft")
    assert conversion.sections["mesh"]["model"] == [str(DEMO), str(small)]
    what = "parameters.tensorrt_llm_draft_model_name"
    assert finding(conversion, "tensorrt_llm_bls", what)[0] is Outcome.CARRIED
    refusals = [f for f in conversion.findings if f.what == "input" and "draft_tokens" in f.value]
    assert [f.model for f in refusals] == ["tensorrt_llm_bls_small"]
    outcome, words = finding(conversion, "tensorrt_llm_bls_small", what)
    assert outcome is Outcome.UNSUPPORTED
    assert "no model of this name" in words


KNOWN = """
    gpt_model_type gpt_model_path encoder_model_path max_beam_width max_tokens_in_paged_kv_cache
    kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction kv_cache_host_memory_bytes kv_cache_onboard_blocks
    enable_kv_cache_reuse max_attention_window_size sink_token_length batch_scheduler_policy exclude_input_in_output
    cancellation_check_period_ms stats_check_period_ms recv_poll_period_ms iter_stats_max_iterations
    request_stats_max_iterations normalize_log_probs enable_chunked_context gpu_device_ids participant_ids num_nodes
    lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction
    lora_cache_host_memory_bytes lora_prefetch_dir decoding_mode lookahead_window_size lookahead_ngram_size
    lookahead_verification_set_size medusa_choices eagle_choices executor_worker_path gpu_weights_percent
    enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode cuda_graph_cache_size
    speculative_decoding_fast_logits guided_decoding_backend tokenizer_dir xgrammar_tokenizer_info_path
    FORCE_CPU_ONLY_INPUT_TENSORS enable_trt_overlap worker_path
"""
"""Parameters of `tensorrt_llm`."""


def test_every_known_parameter_has_a_reason(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models")
    config = directory / "tensorrt_llm" / "config.pbtxt"
    present = config.read_text()
    with config.open("a") as file:
        for key in (*KNOWN.split(), "made_up"):
            if f'"{key}"' not in present:
                value = '{ string_value: "1" }'
                file.write(f'parameters: {{ key: "{key}" value: {value} }}\n')
    unknown = [f.what for f in convert(directory).findings if "no model of Tensor" in f.text]
    assert unknown == ["parameters.made_up"]


@pytest.mark.parametrize(
    ("model", "name"),
    [("preprocessing", "add_special_tokens"), ("postprocessing", "skip_special_tokens")],
)
def test_unclear_special_tokens_setting_means_true(tmp_path: Path, model: str, name: str) -> None:
    conversion = convert(five_models(tmp_path / "models", {name: "maybe"}))
    assert conversion.sections["router"]["triton"]["models"][model][name] is True
    outcome, words = finding(conversion, model, f"parameters.{name}")
    assert (outcome, words.split(" and counts")[0]) == (
        Outcome.UNSUPPORTED,
        "it is neither true nor false",
    )


def test_model_with_a_missing_step_is_not_served(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models", suffix="_chat")
    (directory / "custom").mkdir()
    (directory / "custom" / "config.pbtxt").write_text('backend: "python"')
    conversion = convert(directory)
    assert conversion.unserved == {
        "custom": "it is not one of TensorRT-LLM's models, and no code of a repository is run",
        "tensorrt_llm_bls_chat": "it asks model 'tensorrt_llm', which the repository does not have",
    }
    assert "custom" not in conversion.sections["router"]["triton"]["models"]


def test_several_engines_need_separate_directories(tmp_path: Path) -> None:
    first, second = copy_of_demo(tmp_path / "one"), copy_of_demo(tmp_path / "two")
    nothing = {"tokenizer_dir": "${tokenizer_dir}"}
    directory = five_models(tmp_path / "models", nothing)
    five_models(directory, nothing | {"engine_dir": "/engines/other"}, suffix="_b")
    without = convert(directory)
    assert (without.served, without.sections) == ([], {})
    assert re.search(
        r"names /engines/llama.* --model tensorrt_llm=DIR", without.unserved["tensorrt_llm"]
    )
    with pytest.raises(
        SettingsError, match=r"several engines: tensorrt_llm .*llama.*tensorrt_llm_b"
    ):
        convert(directory, str(DEMO))
    with pytest.raises(SettingsError, match="names 'nothing', but the models"):
        convert(directory, f"nothing={DEMO}")
    with pytest.raises(ModelUnusable, match=r"no config.json"):
        convert(directory, f"tensorrt_llm={tmp_path}")
    conversion = convert(directory, f"tensorrt_llm={first}", f"tensorrt_llm_b={second}")
    assert conversion.sections["mesh"] == {"model": [str(first), str(second)]}
    models = conversion.sections["router"]["triton"]["models"]
    of_second = [name for name, own in models.items() if own["model"] == "two"]
    assert sorted(of_second) == [
        "ensemble_b",
        "postprocessing_b",
        "preprocessing_b",
        "tensorrt_llm_b",
    ]
    assert models["ensemble"]["model"] == "one"
    only_first = convert(directory, f"tensorrt_llm={first}")
    assert set(only_first.unserved) == set(of_second)
    assert "--model tensorrt_llm_b=DIR" in only_first.unserved["ensemble_b"]
    namesake = copy_of_demo(tmp_path / "deeper" / "one")
    with pytest.raises(SettingsError, match="have the same name"):
        convert(directory, f"tensorrt_llm={first}", f"tensorrt_llm_b={namesake}")


def test_conflicting_engine_settings_are_reported(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models")
    five_models(directory, {"max_tokens_in_paged_kv_cache": "99"}, suffix="_b")
    conversion = convert(directory)
    what = "parameters.max_tokens_in_paged_kv_cache"
    outcome, words = finding(conversion, "tensorrt_llm_b", what)
    assert outcome is Outcome.UNSUPPORTED
    assert "engine.torch.kv_cache.tokens is 8192 for model 'tensorrt_llm'" in words


def test_differing_tokenizer_is_reported(tmp_path: Path) -> None:
    own = tmp_path / "tokenizer"
    own.mkdir()
    shutil.copy(DEMO / "tokenizer.json", own)
    conversion = convert(five_models(tmp_path / "models", {"tokenizer_dir": str(own)}), str(DEMO))
    outcome, words = finding(conversion, "preprocessing", "parameters.tokenizer_dir")
    assert outcome is Outcome.UNSUPPORTED
    assert "differs and is used" in words


def test_beam_width_raises_the_sequence_limit(tmp_path: Path) -> None:
    conversion = convert(five_models(tmp_path / "models", {"max_beam_width": "40"}))
    assert conversion.sections["engine"]["torch"]["limits"] == {"max_sequences_per_item": 40}


def test_disaggregated_model_is_imported(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models")
    (directory / "disaggregated_serving_bls").mkdir()
    config = directory / "disaggregated_serving_bls" / "config.pbtxt"
    config.write_text(
        """backend: "python" max_batch_size: 8 model_transaction_policy { decoupled: true }
        input { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }
        parameters { key: "context_model_name" value { string_value: "tensorrt_llm" } }
        parameters { key: "generation_model_name" value { string_value: "generation" } }"""
    )
    unserved = convert(directory).unserved
    assert unserved == {
        "disaggregated_serving_bls": "it asks model 'generation', which the repository does not have"
    }
    replace(directory, "disaggregated_serving_bls", '"generation"', '"tensorrt_llm"')
    models = convert(directory).sections["router"]["triton"]["models"]
    assert models["disaggregated_serving_bls"] == {
        "template": "disaggregated_serving_bls",
        "steps": ["tensorrt_llm"],
        "decoupled": True,
        "max_batch_size": 8,
        "max_beam_width": 4,
        "normalize_log_probs": True,
    }


def test_llmapi_arguments_are_imported(tmp_path: Path) -> None:
    directory = llmapi(tmp_path / "models")
    arguments = directory / "tensorrt_llm" / "1" / "model.yaml"
    arguments.write_text(
        arguments.read_text()
        + "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}\nmoe_config: {x: 1}\n"
        "logits_post_processors: {evil: 'os:system'}\n"
    )
    conversion = convert(directory)
    assert conversion.sections["engine"]["torch"] == {
        "limits": {"max_batch_size": 8},
        "kv_cache": {"prefix_reuse": True, "tokens": 4096},
        "batching": {"policy": "max_utilization"},
    }
    for name in ("moe_config", "logits_post_processors"):
        outcome, _ = finding(conversion, "tensorrt_llm", f"model.yaml: {name}")
        assert outcome is Outcome.UNSUPPORTED


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('backend: "tensorrtllm"', 'bakend: "tensorrtllm"'), r"config.pbtxt:2: .*bakend"),
        (("max_batch_size: 16", "max_batch_size: many"), r"config.pbtxt:3: .*many"),
        (('name: "tensorrt_llm"', 'name: "other"'), "name is 'other' but its directory"),
        (('"inflight_fused_batching"', '"magic"'), "Invalid gpt_model_type: .* is 'magic' but"),
        (('"8192"', '"lots"'), "max_tokens_in_paged_kv_cache is 'lots' but must be a whole number"),
        (('name: "tensorrt_llm"', "# " + "x" * 2**20), "is larger than 1048576 bytes"),
    ],
)
def test_unreadable_repository_is_refused(
    tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    directory = five_models(tmp_path / "models")
    replace(directory, "tensorrt_llm", *change)
    with pytest.raises(SettingsError, match=complaint):
        convert(directory)


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (lambda file: file.mkdir(), "no regular file"),
        (os.mkfifo, "no regular file"),
        (lambda file: file.write_bytes(b"\xff"), "cannot read"),
    ],
)
def test_special_files_are_not_read(
    tmp_path: Path, write: Callable[[Path], Any], complaint: str
) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "config.pbtxt")
    with pytest.raises(SettingsError, match=complaint):
        convert(tmp_path)


def test_nothing_of_a_repository_is_executed(tmp_path: Path) -> None:
    directory = llmapi(five_models(tmp_path / "models"), "llm")
    for model in directory.iterdir():
        (model / "1" / "model.py").write_text("raise SystemExit('executed')")
    arguments = directory / "llm" / "1" / "model.yaml"
    arguments.write_text("model: !!python/object/apply:os.system ['exit 1']\n")
    with pytest.raises(SettingsError, match=r"model.yaml is not YAML"):
        convert(directory)
    arguments.write_text("[" * 100_000)
    with pytest.raises(SettingsError, match=r"model.yaml is not YAML"):
        convert(directory)
    arguments.write_text(f"model: {DEMO}\n")
    assert "llm" in convert(directory).served


@pytest.mark.parametrize("model", CASES)
def test_unsupported_inputs_are_reported(model: str) -> None:
    """The list agrees with the fields of the embedded engine."""
    beyond_fields = {"output.text", "multimodal.images"}
    for name, case in CASES[model].items():
        supported = case.path in SUPPORTED_FIELDS and case.path not in beyond_fields
        assert (refusal(name) == "") == supported, name


def test_import_command_writes_the_file(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models")
    file = tmp_path / "mesh.yaml"
    result = trtmesh("import-triton", str(directory), "--output", str(file))
    assert result.returncode == 0, result.stderr
    assert "carried over  parameters.max_beam_width = 4: router.triton" in result.stdout
    *rest, told = result.stdout.splitlines()
    assert "5 of 5 models are served" in rest
    assert told == f"wrote {file}: trtmesh up --config {file}"
    assert yaml.safe_load(file.read_text())["mesh"] == {"model": str(DEMO)}
    again = trtmesh("import-triton", str(directory), "--output", str(file))
    assert again.returncode == 2
    assert "--force replaces it" in again.stderr
    forced = trtmesh("import-triton", str(directory), "--output", str(file), "--force", "--json")
    assert forced.returncode == 0, forced.stderr
    *values, end = [json.loads(line) for line in forced.stdout.splitlines()]
    assert {value["event"] for value in values} == {"value"}
    assert {"carried", "replaced", "unsupported", "unset"} == {v["outcome"] for v in values}
    assert (end["event"], end["unserved"], len(end["served"])) == ("written", {}, 5)


def test_import_command_reports_unserved_models(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models", suffix="_chat")
    result = trtmesh("import-triton", str(directory), "--output", "-")
    assert result.returncode == 1
    assert yaml.safe_load(result.stdout)["router"]
    assert "unsupported   the whole model = tensorrt_llm_bls: it asks" in result.stderr
    assert re.search(r"^4 of 5 models are served$", result.stderr, re.MULTILINE)
    assert re.search(r"^  not tensorrt_llm_bls\w*: it asks", result.stderr, re.MULTILINE)


def test_import_command_ends_with_a_summary(tmp_path: Path) -> None:
    """What is refused and what is left to fill in of upstream's templates; long lists of unset values are folded."""
    file = ("--model", str(DEMO), "--output", str(tmp_path / "mesh.yaml"))
    result = trtmesh("import-triton", str(TEMPLATES), *file)
    assert result.returncode == 0
    served, refused, to_fill, _ = result.stdout.splitlines()[-4:]
    assert served == "5 of 5 models are served"
    assert refused.startswith("  refused in requests: IMAGE_URL of preprocessing, ")
    assert "num_draft_tokens of tensorrt_llm_bls" in refused
    assert to_fill.startswith(
        "  to fill in with --fill KEY:VALUE,...: decoupled_mode (false until then"
    )
    assert to_fill.endswith(" whose defaults serve")
    unset = [line for line in result.stdout.splitlines() if line.startswith("  unset")]
    assert any("and 16 more (--json names all): the default holds" in line for line in unset)
    assert max(map(len, unset)) < 250


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("/nowhere",), 2, "is no directory"),
        ((str(DEMO),), 2, "has no directory with a config.pbtxt"),
        (("REPOSITORY", "--model", "=x"), 2, "must be DIR or NAME=DIR"),
        (("REPOSITORY", "--model", "/nowhere"), 4, "/nowhere does not exist"),
        (("REPOSITORY", "--model", "owner/name"), 4, "hf download owner/name"),
        (("REPOSITORY", "--output", "/nowhere/mesh.yaml"), 2, "cannot write"),
    ],
)
def test_import_command_exit_statuses(
    tmp_path: Path, arguments: tuple[str, ...], status: int, complaint: str
) -> None:
    directory = str(five_models(tmp_path / "models"))
    given = [directory if argument == "REPOSITORY" else argument for argument in arguments]
    result = trtmesh("import-triton", *given)
    assert result.returncode == status
    assert complaint in result.stderr
