"""The commands of every family and precision, and the plans that are refused."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.app import app
from trtmesh.tools.engine_build.commands import download, steps_of
from trtmesh.tools.engine_build.families import FAMILIES
from trtmesh.tools.engine_build.mesh_file import mesh_sections
from trtmesh.tools.engine_build.model_facts import ModelFacts
from trtmesh.tools.engine_build.plan_file import read_plan
from trtmesh.tools.engine_build.precisions import Dtype, Flow, KvCache, Precision, Weights
from trtmesh.tools.engine_build.sizes import Split, kv_bytes_per_token, rank_memory
from trtmesh.tools.engine_build.variants import variants_of
from typer.testing import CliRunner

PAGE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "build.py"))
MODELS: Mapping[str, Mapping[str, Any]] = PAGE["MODELS"]
FACTS_OF: Callable[[Mapping[str, Any]], ModelFacts] = PAGE["facts_of"]
BY_FAMILY = {FACTS_OF(config).family.name: config for config in MODELS.values()}

CONVERT = "python3 EXAMPLES/models/{} --model_dir MODEL --output_dir OUT --dtype {} {}"
QUANTIZE = "python3 EXAMPLES/quantization/quantize.py --model_dir MODEL --output_dir OUT --dtype {} --qformat {} {}"
ONE = "--tp_size 1 --pp_size 1"
INT8 = f"--use_weight_only --weight_only_precision int8 {ONE}"
SMOOTH = f"--smoothquant 0.5 --per_token --per_channel {ONE}"
AWQ = "int4_awq --awq_block_size 128"
LLAMA, QWEN, PHI, GPT = (
    f"core/{name}/convert_checkpoint.py" for name in ("llama", "qwen", "phi", "gpt")
)
OPT, FALCON, BLOOM = (f"contrib/{n}/convert_checkpoint.py" for n in ("opt", "falcon", "bloom"))
GEMMA = "core/gemma/convert_checkpoint.py --ckpt-type hf"
FP8 = QUANTIZE.format("bfloat16", "fp8", ONE)
NVFP4 = QUANTIZE.format("bfloat16", "nvfp4", ONE)


def sixteen_bits(script: str, sizes: str = ONE) -> dict[str, str]:
    return {
        "fp16": CONVERT.format(script, "float16", sizes),
        "bf16": CONVERT.format(script, "bfloat16", sizes),
    }


TENSORRT: dict[str, dict[str, str]] = {
    "llama": {
        **sixteen_bits(LLAMA),
        "int8_weight_only": CONVERT.format(LLAMA, "bfloat16", INT8),
        "int8_smoothquant": CONVERT.format(LLAMA, "float16", SMOOTH),
        "fp8": FP8,
        "int4_awq": QUANTIZE.format("bfloat16", AWQ, ONE),
        "nvfp4": NVFP4,
    },
    "mistral": {
        **sixteen_bits(LLAMA),
        "int8_weight_only": CONVERT.format(LLAMA, "bfloat16", INT8),
        "int8_smoothquant": CONVERT.format(LLAMA, "float16", SMOOTH),
        "fp8": FP8,
        "int4_awq": QUANTIZE.format("bfloat16", AWQ, ONE),
    },
    "mixtral": {
        **sixteen_bits(LLAMA, f"{ONE} --moe_tp_size 1 --moe_ep_size 1"),
        "int8_weight_only": CONVERT.format(
            LLAMA, "bfloat16", f"{INT8} --moe_tp_size 1 --moe_ep_size 1"
        ),
        "fp8": FP8,
        "nvfp4": NVFP4,
    },
    "qwen": {
        **sixteen_bits(QWEN),
        "int8_weight_only": CONVERT.format(QWEN, "bfloat16", INT8),
        "int8_smoothquant": CONVERT.format(QWEN, "float16", SMOOTH),
        "fp8": FP8,
        "int4_awq": QUANTIZE.format("bfloat16", AWQ, ONE),
    },
    "gemma2": {
        **sixteen_bits(GEMMA, "--world-size 1"),
        "int8_weight_only": CONVERT.format(
            GEMMA,
            "bfloat16",
            "--use_weight_only --weight_only_precision int8 --world-size 1",
        ),
        "int8_smoothquant": QUANTIZE.format("float16", "int8_sq", ONE),
        "fp8": FP8,
        "int4_awq": QUANTIZE.format("bfloat16", AWQ, ONE),
    },
    "phi3": {
        **sixteen_bits(PHI),
        "int8_weight_only": CONVERT.format(PHI, "bfloat16", INT8),
        "int8_smoothquant": QUANTIZE.format("float16", "int8_sq", ONE),
        "fp8": FP8,
    },
    "gpt2": {
        **sixteen_bits(GPT),
        "int8_weight_only": CONVERT.format(GPT, "bfloat16", INT8),
        "int8_smoothquant": CONVERT.format(GPT, "float16", SMOOTH),
        "fp8": FP8,
    },
    "opt": {
        **sixteen_bits(OPT),
        "int8_weight_only": CONVERT.format(OPT, "bfloat16", INT8),
    },
    "falcon": {
        **sixteen_bits(FALCON),
        "int8_weight_only": CONVERT.format(FALCON, "bfloat16", INT8),
        "fp8": FP8,
        "int4_awq": QUANTIZE.format("bfloat16", AWQ, ONE),
    },
    "bloom": {
        **sixteen_bits(BLOOM),
        "int8_weight_only": CONVERT.format(BLOOM, "bfloat16", INT8),
        "int8_smoothquant": CONVERT.format(BLOOM, "float16", SMOOTH),
        "fp8": FP8,
    },
}
PTQ = (
    "python3 hf_ptq.py --pyt_ckpt_path MODEL --export_path OUT --qformat {} --kv_cache_qformat none"
)
PYTORCH: dict[str, set[str]] = {
    "llama": {"fp16", "bf16", "fp8", "int4_awq", "nvfp4"},
    "mistral": {"fp16", "bf16", "fp8", "int4_awq"},
    "mixtral": {"fp16", "bf16", "fp8", "nvfp4"},
    "qwen": {"fp16", "bf16", "fp8", "int4_awq", "nvfp4"},
    "phi3": {"fp16", "bf16"},
}


def test_page_is_up_to_date() -> None:
    assert PAGE["PAGE"].read_text("utf-8") == PAGE["page"](), "run python docs/build.py"


@pytest.mark.parametrize("weights", Weights)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
def test_dry_run_prints_the_command_or_names_what_is_missing(
    tmp_path: Path, family: Any, weights: Weights
) -> None:
    facts = BY_FAMILY[family.name]
    (tmp_path / "config.json").write_text(json.dumps(facts))
    for flow in Flow:
        plan = {
            "release": "1.2.1",
            "flow": str(flow),
            "output": "out",
            "gpu": {"architecture": 100 if weights is Weights.NVFP4 else 90},
            "tools": {"examples": "EXAMPLES", "hf_ptq": "hf_ptq.py"},
            "models": [
                {
                    "name": "m",
                    "directory": str(tmp_path),
                    "precisions": str(weights),
                    "lengths": {"input": 500, "output": 12},
                    "batch_sizes": 4,
                }
            ],
        }
        file = tmp_path / "plan.yaml"
        file.write_text(yaml.safe_dump(plan))
        result = CliRunner().invoke(app, ["build", str(file), "--dry-run"])
        known = TENSORRT[family.name] if flow is Flow.TENSORRT else PYTORCH.get(family.name, set())
        if str(weights) not in known:
            assert result.exit_code == 2
            assert f"models[0] (m): {weights}: the {flow} flow has no " in result.stderr
            continue
        assert result.exit_code == 0, result.stderr
        commands = [line.strip() for line in result.stdout.splitlines() if line[:5] == "    p"]
        commands = [line for line in commands if line.startswith("python3")]
        named = [
            line.replace(str(tmp_path), "MODEL")
            .replace(f"out/checkpoints/m/{weights}-tp1-pp1", "OUT")
            .replace(f"out/quantized/m-{weights}", "OUT")
            for line in commands
        ]
        if flow is Flow.TENSORRT:
            assert named == [TENSORRT[family.name][weights]]
            assert "    trtllm-build --checkpoint_dir out/checkpoints/m/" in result.stdout
        else:
            assert named == ([PTQ.format(weights)] if weights.is_quantized else [])


def built(tmp_path: Path, config: Mapping[str, Any], **changes: Any) -> list[tuple[Any, Any, Any]]:
    """The variants of a plan with their commands and mesh configuration."""
    model = {
        "name": "m",
        "directory": "MODEL",
        "precisions": "bf16",
        "lengths": {"input": 500, "output": 12},
        "batch_sizes": 4,
        **changes.pop("model", {}),
    }
    plan = {"release": "1.2.1", "output": "out", "gpu": {"architecture": 90}, "models": [model]}
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump({**plan, **changes}))
    read = read_plan(file)
    last = steps_of(read, variants_of(read, 0, FACTS_OF(config)))
    return [(v, step, mesh_sections(read, v, step)) for v, step in last.items()]


def test_engines_with_int8_kv_neither_reuse_nor_chunk(tmp_path: Path) -> None:
    precision = {"weights": "int4_awq", "kv_cache": "int8"}
    ((_, step, mesh),) = built(
        tmp_path, BY_FAMILY["llama"], flow="tensorrt", model={"precisions": [precision]}
    )
    words = step.command()
    assert words[words.index("--use_paged_context_fmha") + 1] == "disable"
    assert "--kv_cache_dtype" in step.needs.command()
    backend = mesh["engine"]["tensorrt_llm"]
    assert backend["kv_cache"] == {"prefix_reuse": False}
    assert backend["batching"]["chunked_context"] is False


@pytest.mark.parametrize(
    ("family", "weights", "options"),
    [
        ("llama", "bf16", ["--int8_kv_cache"]),
        ("qwen", "int8_weight_only", ["--int8_kv_cache"]),
        ("gemma2", "bf16", ["--int8_kv_cache", "--tokenizer_dir", "MODEL"]),
        ("phi3", "int8_smoothquant", ["--kv_cache_dtype", "int8"]),
    ],
)
def test_int8_kv_cache_is_calibrated(
    tmp_path: Path, family: str, weights: str, options: list[str]
) -> None:
    precision = {"weights": weights, "kv_cache": "int8"}
    ((_, step, _),) = built(
        tmp_path, BY_FAMILY[family], flow="tensorrt", model={"precisions": [precision]}
    )
    words = step.needs.command()
    at = words.index(options[0])
    assert words[at : at + len(options)] == options


def test_experts_and_ranks_are_split(tmp_path: Path) -> None:
    sizes = {"tensor": 4, "pipeline": 2, "expert": 2}
    config = BY_FAMILY["mixtral"]
    ((_, step, mesh),) = built(tmp_path, config, flow="tensorrt", model=sizes, build_workers=3)
    words = step.needs.command()
    assert words[words.index("--tp_size") :] == [
        *("--tp_size", "4", "--pp_size", "2", "--moe_tp_size", "2", "--moe_ep_size", "2"),
    ]
    assert step.ranks == 8
    assert step.command()[-2:] == ["--workers", "3"]
    backend = mesh["engine"]["tensorrt_llm"]
    assert backend["parallel"] == {"tensor": 4, "pipeline": 2}
    assert backend["options"] == {"moe_expert_parallel_size": 2}


def test_calibration_reaches_the_tools_that_have_it(tmp_path: Path) -> None:
    calibration = {"dataset": "/data/texts", "samples": 64, "tokens": 128, "batch_size": 2}
    config = BY_FAMILY["llama"]
    ((_, step, _),) = built(
        tmp_path, config, flow="tensorrt", calibration=calibration, model={"precisions": "fp8"}
    )
    assert step.needs.command()[-8:] == [
        *("--calib_dataset", "/data/texts", "--calib_size", "64"),
        *("--calib_max_seq_length", "128", "--batch_size", "2"),
    ]
    del calibration["tokens"]
    ((_, step, _),) = built(tmp_path, config, calibration=calibration, model={"precisions": "fp8"})
    assert step.command()[-6:] == [
        *("--dataset", "/data/texts", "--calib_size", "64", "--batch_size", "2"),
    ]


SMALL_HEADS = {**BY_FAMILY["llama"], "num_attention_heads": 32, "num_key_value_heads": 6}


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        (
            "llama",
            {"gpu": {"architecture": 86}, "model": {"precisions": "fp8"}},
            "fp8 needs gpu.architecture 89 or above, but it is 86",
        ),
        (
            "llama",
            {"model": {"precisions": "nvfp4"}},
            "nvfp4 needs gpu.architecture a Blackwell GPU",
        ),
        (
            "llama",
            {"gpu": {"architecture": 120}, "model": {"precisions": "int4_awq"}},
            "has no int4_awq on gpu.architecture 120",
        ),
        (
            "llama",
            {"model": {"precisions": "int8_smoothquant"}},
            "the pytorch flow has no int8_smoothquant of llama models",
        ),
        (
            "llama",
            {"model": {"precisions": {"weights": "bf16", "kv_cache": "int8"}}},
            "the pytorch flow has no int8 KV cache",
        ),
        (
            "llama",
            {"flow": "tensorrt", "model": {"precisions": {"weights": "bf16", "kv_cache": "fp8"}}},
            "an fp8 KV cache for fp8 and nvfp4 only",
        ),
        (
            "llama",
            {"flow": "tensorrt", "model": {"precisions": {"weights": "fp8", "kv_cache": "int8"}}},
            "an int8 KV cache does not go with fp8",
        ),
        (
            "falcon",
            {"flow": "tensorrt", "model": {"precisions": {"weights": "bf16", "kv_cache": "int8"}}},
            "the converter of falcon has no int8 KV cache",
        ),
        ("gpt2", {}, "the pytorch flow has no gpt2 models"),
        (
            "llama",
            {"release": "1.3.0rc24", "flow": "tensorrt"},
            "release 1.3.0rc24 has no TensorRT engines",
        ),
        ("llama", {"release": "1.1.0"}, "must be a release of 1.2, 1.3, 1.4"),
        ("llama", {"model": {"tensor": 3}}, "32 heads are not divisible by tensor 3"),
        (
            "qwen",
            {"model": {"tensor": 14}},
            "4 KV heads are neither divisible by tensor 14 nor divide it",
        ),
        ("llama", {"model": {"pipeline": 33}}, "pipeline is 33, but there are 32 layers"),
        (
            "llama",
            {"model": {"expert": 2, "tensor": 2}},
            "expert is 2, but the model has no experts",
        ),
        ("mixtral", {"model": {"expert": 2}}, "expert 2 must divide tensor 1"),
        (
            "phi3",
            {"flow": "tensorrt", "model": {"tensor": 2}},
            "the converter of phi3 has no tensor parallelism",
        ),
        (
            "bloom",
            {"flow": "tensorrt", "model": {"pipeline": 2}},
            "the converter of bloom has no pipeline parallelism",
        ),
        (
            "mixtral",
            {"flow": "tensorrt", "model": {"precisions": "fp8", "tensor": 2, "expert": 2}},
            "quantize.py has no expert parallelism",
        ),
        (
            "qwen",
            {"flow": "tensorrt", "model": {"precisions": "int4_awq", "tensor": 28}},
            "no whole groups of 128|not divisible by tensor 28",
        ),
        (
            "gpt2",
            {"flow": "tensorrt", "model": {"lengths": {"input": 1000, "output": 100}}},
            "exceed the model's 1024 tokens",
        ),
        (
            "gemma2",
            {"flow": "tensorrt", "model": {"lengths": {"input": 4000, "output": 100}}},
            "exceed the model's 4096 tokens",
        ),
        (
            "mixtral",
            {"gpu": {"architecture": 90, "memory_gib": 80}},
            "each rank has 87.0 GiB of weights, more than gpu.memory_gib 80",
        ),
        (
            "qwen",
            {
                "flow": "tensorrt",
                "calibration": {"samples": 9},
                "model": {"precisions": "int8_smoothquant"},
            },
            "calibration.samples is 9, but the converter of qwen has no such option",
        ),
        (
            "llama",
            {"calibration": {"tokens": 9}, "model": {"precisions": "fp8"}},
            "calibration.tokens is 9, but hf_ptq.py has no such option",
        ),
        ("llama", {"build_workers": 2}, "build_workers has no effect on the pytorch flow"),
        ("llama", {"paralel": 2}, "paralel is no setting; did you mean parallel"),
        (
            "llama",
            {"model": {"precision": "fp8"}},
            r"models\[0\].precision is no setting; did you mean precisions",
        ),
        ("llama", {"model": {"tensor": ["2"]}}, r"models\[0\].tensor\[0\] is '2'"),
        ("llama", {"model": {"tensor": True}}, r"models\[0\].tensor\[0\] is True"),
        ("llama", {"model": {"tensor": [2, 2]}}, "has a value twice"),
        (
            "llama",
            {"model": {"precisions": "int3"}},
            r"models\[0\].precisions\[0\].weights is 'int3'",
        ),
        (
            "llama",
            {"model": {"precisions": {"weights": "bf16", "dtype": "fp16"}}},
            "weights are bf16, so dtype is too",
        ),
        ("llama", {"model": {"hub": "owner/name"}}, "needs hub or directory, one of them"),
        ("llama", {"model": {"revision": "main"}}, "revision has no effect on a local directory"),
        ("llama", {"model": {"hub": "--token", "directory": None}}, "must be OWNER/NAME"),
        ("llama", {"model": {"name": "../m"}}, r"models\[0\].name is '../m'"),
        ("llama", {"release": 1.2}, "release is 1.2"),
        ("llama", {"gpu": {"architecture": 70}}, "gpu.architecture is 70"),
    ],
)
def test_impossible_plan_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        built(tmp_path, BY_FAMILY[family], **changes)


def test_kv_heads_may_be_fewer_than_ranks(tmp_path: Path) -> None:
    variants = built(tmp_path, BY_FAMILY["llama"], model={"tensor": [2, 16, 32]})
    assert [v.split.tensor for v, *_ in variants] == [2, 16, 32]
    with pytest.raises(SettingsError, match="6 KV heads are neither divisible by tensor 4"):
        built(tmp_path, SMALL_HEADS, model={"tensor": 4})


@pytest.mark.parametrize("text", ["models: [", "- a", "release: '1.2'\nrelease: '1.3'"])
def test_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match="plan"):
        read_plan(file)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_transformers(name: str) -> None:
    """But for norms, biases and what a model type has besides: less than a thousandth."""
    config = dict(MODELS[name])
    with torch.device("meta"):
        kind = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(kind)  # type: ignore[no-untyped-call]  # has no types
    weights = sum(each.numel() for each in model.parameters())
    assert FACTS_OF(config).weights == pytest.approx(weights, rel=1e-3)


def test_memory_of_ranks_adds_up() -> None:
    facts = FACTS_OF(BY_FAMILY["llama"])
    precision = Precision(Weights.BF16, KvCache.AUTO, Dtype.BF16)
    assert kv_bytes_per_token(facts, precision) == 2 * 32 * 8 * 128 * 2
    assert (
        kv_bytes_per_token(facts, precision, Split(tensor=16, pipeline=2)) == 2 * 16 * 1 * 128 * 2
    )
    whole = rank_memory(facts, precision, Split(), batch=2, length=100)
    assert whole.weights == 2 * facts.weights
    assert whole.kv_cache == 200 * kv_bytes_per_token(facts, precision)
    half = rank_memory(facts, precision, Split(tensor=2), batch=2, length=100)
    embedding = 2 * facts.embedding_weights
    assert half.weights == (whole.weights - embedding) / 2 + embedding


def test_download_asks_for_one_copy_of_the_weights(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    model = {
        "name": "m",
        "hub": "o/n",
        "revision": "v1",
        "precisions": "bf16",
        "lengths": {"input": 1, "output": 1},
        "batch_sizes": 1,
    }
    plan = {"release": "1.2.1", "output": "out", "gpu": {"architecture": 90}, "models": [model]}
    file.write_text(yaml.safe_dump(plan))
    read = read_plan(file)
    step = download(read, read.models[0])
    assert step is not None
    words = step.command()
    assert words[:5] == ["hf", "download", "o/n", "--revision", "v1"]
    assert words[-2:] == ["--local-dir", "out/models/m"]
    excluded = [words[at + 1] for at, word in enumerate(words) if word == "--exclude"]
    assert "*.gguf" in excluded
    assert excluded[-1] == "original/*", "the only one that older releases of hf heed"
