"""Writes docs/build.md: the settings of a build plan and the commands of each model, from the code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from inspect import getdoc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from trtmesh.tools.engine_build.commands import steps_of
from trtmesh.tools.engine_build.model_facts import ModelFacts, read_facts
from trtmesh.tools.engine_build.plan_file import (
    BuildPlan,
    Calibration,
    Gpu,
    Lengths,
    ModelPlan,
    PrecisionPlan,
    Tools,
)
from trtmesh.tools.engine_build.precisions import Flow, KvCache, Precision, Weights, usual_dtype
from trtmesh.tools.engine_build.sizes import as_gib, checkpoint_bytes, kv_bytes_per_token
from trtmesh.tools.engine_build.variants import variants_of

PAGE = Path(__file__).with_suffix(".md")
GROUPS: Mapping[str, type[BaseModel]] = {
    "": BuildPlan,
    "models": ModelPlan,
    "models.precisions": PrecisionPlan,
    "models.lengths": Lengths,
    "gpu": Gpu,
    "tools": Tools,
    "calibration": Calibration,
}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama 3 8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "Qwen 2.5 7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Mistral 7B": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Mixtral 8x7B": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Gemma 2 9B": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    },
    "Phi-3 mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "tie_word_embeddings": False,
    },
    "GPT-2 XL": {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "OPT 6.7B": {
        "model_type": "opt",
        "hidden_size": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 4096,
    },
    "Falcon 11B": {
        "model_type": "falcon",
        "hidden_size": 4096,
        "ffn_hidden_size": 16384,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "vocab_size": 65024,
        "max_position_embeddings": 8192,
        "new_decoder_architecture": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
        "tie_word_embeddings": False,
    },
    "BLOOM 7B1": {
        "model_type": "bloom",
        "hidden_size": 4096,
        "n_layer": 30,
        "n_head": 32,
        "vocab_size": 250880,
    },
}
"""The published config.json of each model, as far as a build reads it."""

HEAD = """\
# Preparing models for TensorRT-LLM

Written by `python docs/build.py` from the code. `trtmesh build` takes a plan and makes all variants of its models: for
the PyTorch flow checkpoints quantized by ModelOpt, for the TensorRT-engine flow (release 1.2, the last with it)
engines. It writes the configuration of a mesh for each.

```yaml
release: "1.2.1"
flow: tensorrt
output: engines
gpu: {architecture: 90, memory_gib: 80}
models:
  - name: llama-3-8b
    hub: meta-llama/Meta-Llama-3-8B-Instruct
    config: config.json
    precisions: [bf16, {weights: fp8, kv_cache: fp8}]
    tensor: [1, 2]
    lengths: {input: 2048, output: 512}
    batch_sizes: 64
```

```
hf download meta-llama/Meta-Llama-3-8B-Instruct config.json --local-dir .
trtmesh build plan.yaml --dry-run    # the commands in order, sizes on disk, GPU memory per rank
trtmesh build plan.yaml              # runs them; a second run continues
trtmesh up --config engines/mesh/llama-3-8b-bf16-tp1-pp1-b64-i2048-o512.yaml
```

* The dry run runs nothing and needs none of the tools. Of a model that is not downloaded, `config` gives it the sizes:
  a file that must exist.
* A build needs the tools on its machine: TensorRT-LLM with its `examples`, for the PyTorch flow ModelOpt, for downloads
  `hf`, which reads its token as always. No shell interprets anything of a plan. `examples` and the installed
  TensorRT-LLM are of the plan's release. `hf` before 1.0 of huggingface_hub leaves out `original/*` alone, and
  downloads other copies of the weights too.
* All combinations of a model's lists are built; steps that variants share run once. Impossible combinations are refused
  before the first step: a precision that the GPU, the flow or the model's family lacks, heads that `tensor` does not
  divide, sequences longer than the model's, weights larger than a GPU.
* A step writes to a hidden directory, which gets its name when the output is complete and on the disk. An interrupted
  step (Ctrl-C, `kill -9`, a full disk) leaves nothing under that name, and the next run repeats it; a download
  continues. A step also runs again when its command or its source changed. Tools end with the build.
* Each step has a log in `OUTPUT/logs`. After a failed step the steps that do not need it still run, and the exit status
  is 1.
* Sizes are estimates from the shape of the model: quantized are the linear layers alone, and GPU memory is without
  activations and CUDA's own.

| Directory of `output` | Content |
|---|---|
| `models/NAME` | the downloaded model |
| `quantized/NAME-PRECISION` | PyTorch flow: the quantized model, in Hugging Face's format |
| `checkpoints/NAME/PRECISION-tpT-ppP` | TensorRT-engine flow: the converted model |
| `engines/NAME/PRECISION-tpT-ppP/bB-iI-oO` | the engine |
| `mesh` | a file for `trtmesh up --config` for each variant |

## Settings

Where a list is expected, a single value is a list of one.
"""


def page() -> str:
    settings = "\n".join(line for group, kind in GROUPS.items() for line in _group(group, kind))
    return "\n".join([HEAD, settings, *_pytorch(), *_tensorrt(), *_engines()])


def _group(group: str, kind: type[BaseModel]) -> Iterator[str]:
    if group:
        yield f"### {group}\n"
    yield f"{getdoc(kind)}\n"
    yield "| Setting | Default | Meaning |\n|---|---|---|"
    for name, info in kind.model_fields.items():
        default = "" if info.default is PydanticUndefined else _shown(info.default)
        words = _words(info.annotation)
        meaning = " ".join(filter(None, [(info.description or "").replace("\n", " "), words]))
        yield f"| `{name}` | {default} | {meaning} |"
    yield ""


def _shown(value: object) -> str:
    if value is None or isinstance(value, BaseModel):
        return ""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _words(kind: object) -> str:
    if kind not in (Weights, KvCache):
        return ""
    words: type[Weights | KvCache] = Weights if kind is Weights else KvCache
    return "One of " + ", ".join(f"`{each}`" for each in words)


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    with TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        return read_facts(file)


def precisions_of(facts: ModelFacts, flow: Flow) -> Iterator[Precision]:
    """Yields every precision that the flow has of the family."""
    for weights in Weights:
        for kv_cache in KvCache:
            precision = Precision(weights, kv_cache, usual_dtype(weights))
            if not facts.family.refusal(precision, flow):
                yield precision


def commands_of(facts: ModelFacts, precision: Precision, flow: Flow) -> list[str]:
    """The commands that make the precision of the model in `MODEL`, into `OUT`, and then its engine in `ENGINE`."""
    architecture = 100 if precision.weights is Weights.NVFP4 else 90
    plan = BuildPlan.model_validate(
        {
            "release": "1.2.1",
            "flow": flow,
            "output": "x",
            "gpu": {"architecture": architecture},
            "models": [
                {
                    "name": "m",
                    "directory": "MODEL",
                    "precisions": [{"weights": precision.weights, "kv_cache": precision.kv_cache}],
                    "lengths": {"input": 512, "output": 512},
                    "batch_sizes": 8,
                }
            ],
        }
    )
    ((_, step),) = steps_of(plan, variants_of(plan, 0, facts)).items()
    commands: list[str] = []
    if step is not None and step.needs is not None:
        built = shlex.join(step.command(Path("ENGINE")))
        commands = [built.replace(str(step.needs.output), "OUT")]
        step = step.needs
    if step is not None:
        commands.insert(0, shlex.join(step.command(Path("OUT"))))
    directories = (f"{plan.tools.examples}/", f"{plan.tools.hf_ptq.parent}/")
    return [command.replace(directories[0], "").replace(directories[1], "") for command in commands]


def _tensorrt() -> Iterator[str]:
    yield "## Commands of the TensorRT-engine flow\n"
    yield (
        "For one GPU. Sizes are those of the checkpoint, and of the engine that `trtllm-build` makes from it. A"
        " quantized KV cache adds `--int8_kv_cache` (Gemma: and `--tokenizer_dir MODEL`) to a converter,"
        " `--kv_cache_dtype` to quantize.py.\n"
    )
    yield "| Model | Precision | Size | KV bytes a token | KV cache | Command |"
    yield "|---|---|---|---|---|---|"
    for name, config in MODELS.items():
        facts = facts_of(config)
        known = list(precisions_of(facts, Flow.TENSORRT))
        for precision in (each for each in known if each.kv_cache is KvCache.AUTO):
            others = [each.kv_cache for each in known if each.weights is precision.weights]
            size = as_gib(checkpoint_bytes(facts, precision))
            token = kv_bytes_per_token(facts, precision)
            command = commands_of(facts, precision, Flow.TENSORRT)[0]
            yield (
                f"| {name} | {precision.name} | {size} | {token} | {', '.join(others)} | `{command}` |"
            )
    yield ""


def _engines() -> Iterator[str]:
    yield "## Commands of trtllm-build\n"
    yield (
        "For every model alike, here with 512 tokens each way and 8 sequences. Engines with an int8 KV cache neither"
        " reuse KV nor compute prompts in chunks.\n"
    )
    yield "| Precisions | KV cache | Command |\n|---|---|---|"
    facts = facts_of(MODELS["Llama 3 8B"])
    alike: dict[tuple[str, KvCache], list[Weights]] = {}
    for precision in precisions_of(facts, Flow.TENSORRT):
        command = commands_of(facts, precision, Flow.TENSORRT)[1]
        alike.setdefault((command, precision.kv_cache), []).append(precision.weights)
    for (command, kv_cache), weights in alike.items():
        yield f"| {', '.join(weights)} | {kv_cache} | `{command}` |"
    yield ""


def _pytorch() -> Iterator[str]:
    yield "## Commands of the PyTorch flow\n"
    yield (
        "fp16 and bf16 need no command, and an fp8 KV cache beside them is a setting of the engine. All precisions may"
        " have an fp8 KV cache: `--kv_cache_qformat fp8`.\n"
    )
    yield "| Precision | Models | Command |\n|---|---|---|"
    for weights in Weights:
        precision = Precision(weights, KvCache.AUTO, usual_dtype(weights))
        facts = {name: facts_of(config) for name, config in MODELS.items()}
        names = [n for n, f in facts.items() if not f.family.refusal(precision, Flow.PYTORCH)]
        if names:
            shown = ", ".join(
                f"`{command}`" for command in commands_of(facts[names[0]], precision, Flow.PYTORCH)
            )
            yield f"| {precision.name} | {', '.join(names)} | {shown} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
