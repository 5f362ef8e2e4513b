"""Models that are served, and the reasons of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cli.commands import trtmesh
from cli.triton_import.importing import convert, copy_of_demo, finding
from compat.repository import disaggregated, five_models, replace
from e2e.mesh import DEMO
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.settings import load_settings
from trtmesh.router.settings import RouterSettings
from trtmesh.tools.triton_import import Outcome

WHISPER = """backend: "python" max_batch_size: 8
    input { name: "TEXT_PREFIX" data_type: TYPE_STRING dims: [ 1 ] }
    input { name: "WAV" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "TRANSCRIPTS" data_type: TYPE_STRING dims: [ 1 ] }
    parameters { key: "engine_dir" value { string_value: "/engines/whisper" } }"""
ENCODERS = """backend: "python" max_batch_size: 8
    input { name: "pixel_values" data_type: TYPE_FP16 dims: [ -1, -1, -1, -1 ] optional: true }
    output { name: "OUT_PROMPT_EMBEDDING_TABLE" data_type: TYPE_FP16 dims: [ -1, -1 ] }"""
ENSEMBLE = """platform: "ensemble" max_batch_size: 8
    input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
    ensemble_scheduling { step { model_name: "preprocessing" model_version: -1 }
        step { model_name: "multimodal_encoders" model_version: -1 } }"""


def model(repository: Path, name: str, config: str) -> Path:
    (repository / name).mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    return repository


def test_lone_whisper_and_multimodal_directories_get_verdicts(tmp_path: Path) -> None:
    whisper = model(tmp_path / "whisper", "whisper_bls", WHISPER)
    assert convert(whisper).unserved == {
        "whisper_bls": "the mesh generates text from text and takes no speech"
    }
    multimodal = model(tmp_path / "multimodal", "multimodal_encoders", ENCODERS)
    model(multimodal, "ensemble", ENSEMBLE)
    conversion = convert(multimodal)
    assert (conversion.served, conversion.sections) == ([], {})
    assert conversion.unserved == {
        "ensemble": "it asks model 'preprocessing', which the repository does not have",
        "multimodal_encoders": "the mesh takes no images and no video; requests with them are refused by name",
    }


def test_command_lists_the_verdicts_and_writes_nothing(tmp_path: Path) -> None:
    whisper = str(model(tmp_path / "whisper", "whisper_bls", WHISPER))
    file = tmp_path / "mesh.yaml"
    result = trtmesh("import-triton", whisper, "--output", str(file))
    assert result.returncode == 4
    assert "whisper_bls:\n  unsupported   the whole model" in result.stdout
    assert "wrote" not in result.stdout
    assert not file.exists()
    as_json = trtmesh("import-triton", whisper, "--json", "--output", str(file))
    end = json.loads(as_json.stdout.splitlines()[-1])
    assert (end["file"], end["served"], list(end["unserved"])) == (None, [], ["whisper_bls"])
    up = trtmesh("up", "--triton-model-repo", whisper, "--port", "0")
    assert up.returncode == 4
    assert "whisper_bls:" in up.stderr


def test_encoder_decoder_engine_is_not_served(tmp_path: Path) -> None:
    directory = five_models(
        tmp_path / "models", {"encoder_engine_dir": "/engines/encoder", "tokenizer_dir": ""}
    )
    reason = "the embedded engine runs decoder-only models"
    assert convert(directory).unserved["tensorrt_llm"] == reason
    t5 = copy_of_demo(tmp_path / "t5")
    (t5 / "config.json").unlink()
    (t5 / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    with pytest.raises(ModelUnusable, match="has an encoder-decoder model"):
        convert(directory, str(t5))
    named = convert(five_models(tmp_path / "named", {"tokenizer_dir": str(t5)}))
    assert "has an encoder-decoder model" in named.unserved["ensemble"]


def test_pickled_weights_are_named_with_the_remedy(tmp_path: Path) -> None:
    """The manuals' own recipe: tokenizer_dir is a clone of gpt2 with pytorch_model.bin."""
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    (gpt2 / "config.json").write_text('{"model_type": "gpt2"}')
    (gpt2 / "pytorch_model.bin").touch()
    directory = five_models(tmp_path / "models", {"tokenizer_dir": str(gpt2)})
    remedy = f"`trtmesh convert {gpt2}`"
    assert remedy in convert(directory).unserved["tensorrt_llm"]
    with pytest.raises(ModelUnusable, match=r"has no config.json with .*trtmesh convert"):
        convert(directory, str(gpt2))


@pytest.mark.parametrize("backend", ["tensorrtllm", "inflight_batcher_llm", "python", "${own}"])
def test_core_model_is_recognised_with_every_backend(tmp_path: Path, backend: str) -> None:
    conversion = convert(five_models(tmp_path / "models", {"triton_backend": backend}))
    assert conversion.unserved == {}


def test_documented_disaggregated_repository_is_imported(tmp_path: Path) -> None:
    conversion = convert(disaggregated(tmp_path / "models"))
    assert conversion.unserved == {}
    models = conversion.sections["router"]["triton"]["models"]
    assert models["ensemble"]["steps"] == [
        "preprocessing", "disaggregated_serving_bls", "postprocessing",
    ]  # fmt: skip
    assert models["disaggregated_serving_bls"]["steps"] == ["generation"]
    assert (models["ensemble"]["decoupled"], models["ensemble"]["max_beam_width"]) == (True, 4)
    mesh = conversion.sections["mesh"]
    assert (mesh["prefill"], mesh["decode"]) == (1, 1)
    assert mesh["devices"] == {"demo": ["cuda:0", "cuda:1"]}


def test_disaggregated_repository_without_a_half_is_not_served(tmp_path: Path) -> None:
    directory = disaggregated(tmp_path / "models")
    replace(directory, "disaggregated_serving_bls", '"generation"', '"other"')
    unserved = convert(directory, str(DEMO)).unserved
    assert set(unserved) == {"ensemble", "disaggregated_serving_bls"}
    assert unserved["ensemble"].startswith("its step 'disaggregated_serving_bls' is not served")


def test_scheduler_policy_has_its_first_name_too(tmp_path: Path) -> None:
    directory = with_parameter(
        tmp_path / "models", "batch_scheduler_policy", "guaranteed_completion"
    )
    torch = convert(directory).sections["engine"]["torch"]
    assert torch["batching"]["policy"] == "guaranteed_no_evict"


@pytest.mark.parametrize("name", ["max_attention_window_size", "max_kv_cache_length"])
@pytest.mark.parametrize(
    ("window", "outcome"),
    [
        ("2048", Outcome.REPLACED),
        ("4096,2048", Outcome.REPLACED),
        ("1024", Outcome.UNSUPPORTED),
        ("4096,1024", Outcome.UNSUPPORTED),
    ],
)
def test_window_counts_as_a_change_where_sequences_may_pass_it(
    tmp_path: Path, name: str, window: str, outcome: Outcome
) -> None:
    assert json.loads((DEMO / "config.json").read_text())["max_position_embeddings"] == 2048
    directory = with_parameter(tmp_path / "models", name, window)
    assert finding(convert(directory), "tensorrt_llm", f"parameters.{name}")[0] is outcome


def with_parameter(directory: Path, name: str, value: str) -> Path:
    five_models(directory)
    with (directory / "tensorrt_llm" / "config.pbtxt").open("a") as file:
        file.write(f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n')
    return directory


def test_own_sliding_window_of_the_model_is_kept(tmp_path: Path) -> None:
    mistral = copy_of_demo(tmp_path / "mistral")
    config = json.loads((DEMO / "config.json").read_text()) | {"sliding_window": 512}
    (mistral / "config.json").unlink()
    (mistral / "config.json").write_text(json.dumps(config))
    directory = with_parameter(tmp_path / "models", "max_attention_window_size", "512")
    what = "parameters.max_attention_window_size"
    assert finding(convert(directory, str(mistral)), "tensorrt_llm", what)[0] is Outcome.REPLACED
    assert finding(convert(directory), "tensorrt_llm", what)[0] is Outcome.UNSUPPORTED


def test_number_of_sequences_of_old_releases_is_carried(tmp_path: Path) -> None:
    conversion = convert(with_parameter(tmp_path / "models", "max_num_sequences", "48"))
    assert conversion.sections["engine"]["torch"]["limits"]["max_batch_size"] == 48


def test_unset_log_probs_are_normalized_as_in_triton(tmp_path: Path) -> None:
    conversion = convert(five_models(tmp_path / "models"))
    models = conversion.sections["router"]["triton"]["models"]
    normalizing = {name for name, own in models.items() if own.get("normalize_log_probs")}
    assert normalizing == {"ensemble", "tensorrt_llm", "tensorrt_llm_bls"}
    outcome, text = finding(conversion, "tensorrt_llm", "parameters.normalize_log_probs")
    assert (outcome, text) == (Outcome.UNSET, "it is true, Triton's default")
    off = convert(five_models(tmp_path / "off", {"normalize_log_probs": "False"}))
    own = off.sections["router"]["triton"]["models"]["ensemble"]
    assert own["normalize_log_probs"] is False


def test_values_that_a_router_refuses_are_not_called_served(tmp_path: Path) -> None:
    directory = five_models(tmp_path / "models", {"triton_max_batch_size": "100000"})
    (directory / "ensemble").rename(directory / "my ensemble")
    replace(directory, "my ensemble", 'name: "ensemble"', 'name: "my ensemble"')
    conversion = convert(directory)
    assert set(conversion.unserved) == {"my ensemble"}
    outcome, _ = finding(conversion, "tensorrt_llm", "max_batch_size")
    assert outcome is Outcome.UNSUPPORTED
    file = tmp_path / "mesh.yaml"
    file.write_text(yaml.safe_dump(dict(conversion.sections)))
    settings = load_settings(RouterSettings, ["--config", str(file), "--engines", "e:1"], {})
    assert settings.triton.models["tensorrt_llm"].max_batch_size == 65536


@pytest.mark.parametrize(("value", "setting"), [("true", True), ("false", None)])
def test_long_prompts_stay_served_without_chunks(
    tmp_path: Path, value: str, setting: bool | None
) -> None:
    conversion = convert(five_models(tmp_path / "models", {"enable_chunked_context": value}))
    batching = conversion.sections["engine"]["torch"].get("batching", {})
    assert batching.get("chunked_context") is setting
    assert finding(conversion, "tensorrt_llm", "parameters.enable_chunked_context")[0] in (
        Outcome.CARRIED,
        Outcome.REPLACED,
    )


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [("guaranteed_no_evict", Outcome.REPLACED), ("max_utilization", Outcome.UNSUPPORTED)],
)
def test_static_batches_are_a_policy_of_their_own(
    policy: str, outcome: Outcome, tmp_path: Path
) -> None:
    directory = five_models(tmp_path / "models", {"batch_scheduler_policy": policy})
    replace(directory, "tensorrt_llm", '"inflight_fused_batching"', '"V1"')
    conversion = convert(directory)
    assert conversion.sections["engine"]["torch"]["batching"]["policy"] == "static_batch"
    assert finding(conversion, "tensorrt_llm", "parameters.gpt_model_type")[0] is Outcome.CARRIED
    assert finding(conversion, "tensorrt_llm", "parameters.batch_scheduler_policy")[0] is outcome


@pytest.mark.parametrize("static", ["tensorrt_llm", "tensorrt_llm_b"])
def test_static_batches_of_one_model_are_not_those_of_another(static: str, tmp_path: Path) -> None:
    unset = {"batch_scheduler_policy": "${batch_scheduler_policy}"}
    directory = five_models(five_models(tmp_path / "models", unset), unset, suffix="_b")
    replace(directory, static, '"inflight_fused_batching"', '"V1"')
    outcome, text = finding(convert(directory), "tensorrt_llm_b", "parameters.gpt_model_type")
    assert outcome is Outcome.UNSUPPORTED
    assert "all engines of a stack share" in text, text
