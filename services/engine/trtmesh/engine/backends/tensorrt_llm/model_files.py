"""What the files of a model say, without the library and without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.fingerprint import tokenizer_fingerprint
from trtmesh.chassis.model_dir import check_model_dir, read_object, read_optional
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings
from trtmesh.engine.model_fingerprint import model_fingerprint
from trtmesh.v1 import generation_pb2 as pb

DATA_TYPES: Mapping[str, int] = {
    "float32": pb.DATA_TYPE_FP32,
    "float16": pb.DATA_TYPE_FP16,
    "bfloat16": pb.DATA_TYPE_BF16,
}

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names of the longest sequence in configurations."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """Limits that were built into a TensorRT engine."""

    max_sequence_tokens: int
    max_batch_size: int
    max_beam_width: int
    max_prompt_tokens: int
    tokens_per_block: int
    has_context_logits: bool
    has_generation_logits: bool


@dataclass(frozen=True, slots=True)
class ModelFiles:
    config: Mapping[str, Any]
    """config.json, of a model of several kinds of input the part about text."""
    vocabulary_size: int
    max_positions: int | None
    end_ids: tuple[int, ...]
    data_type: int
    fingerprint: str
    tokenizer_fingerprint: str
    engine: BuiltEngine | None


def read_model(model_dir: Path, settings: TensorRtLlmSettings) -> ModelFiles:
    """Raises ModelUnusable for a directory without what a worker must know."""
    check_model_dir(model_dir)
    whole = read_object(model_dir / "config.json")
    config = whole.get("text_config") or whole
    vocabulary_size = config.get("vocab_size")
    if type(vocabulary_size) is not int or vocabulary_size < 1:
        raise ModelUnusable(f"{model_dir / 'config.json'} has no vocab_size above 0")
    dtype = settings.option("dtype") or "auto"
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return ModelFiles(
        config=config,
        vocabulary_size=vocabulary_size,
        max_positions=_length(config),
        end_ids=_end_ids(model_dir, config),
        data_type=DATA_TYPES.get(dtype, pb.DATA_TYPE_BF16),
        fingerprint=_fingerprint(model_dir, settings),
        tokenizer_fingerprint=tokenizer_fingerprint(model_dir),
        engine=_built(settings.engine_dir) if settings.engine_dir else None,
    )


def _length(config: Mapping[str, Any]) -> int | None:
    found = (config.get(name) for name in LENGTHS)
    return next((each for each in found if type(each) is int and each > 1), None)


def _end_ids(model_dir: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Those of generation_config.json, else of config.json: the library adds the former only with a tokenizer."""
    for source in (read_optional(model_dir / "generation_config.json"), config):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if found := tuple(dict.fromkeys(each for each in ids if type(each) is int and each >= 0)):
            return found
    return ()


def _fingerprint(model_dir: Path, settings: TensorRtLlmSettings) -> str:
    """Another backend, flow or number of GPUs rounds otherwise, so its fingerprint is another."""
    parallel, engine_dir = settings.parallel, settings.engine_dir
    weights = settings.option("load_format") or "auto"
    kind = f"tensorrt_llm {settings.flow} {parallel.tensor} {settings.option('dtype') or 'auto'} {weights}"
    directory = engine_dir or model_dir
    pattern = "*.engine" if engine_dir else "*.safetensors"
    return model_fingerprint(directory, sorted(directory.glob(pattern)), kind)


def _built(engine_dir: Path) -> BuiltEngine:
    file = engine_dir / "config.json"
    config = read_object(file)
    build = config.get("build_config")
    if not isinstance(build, dict):
        raise ModelUnusable(f"{file} has no build_config, so {engine_dir} is no built engine")
    plugins = build.get("plugin_config") or {}
    try:
        return BuiltEngine(
            max_sequence_tokens=int(build["max_seq_len"]),
            max_batch_size=int(build["max_batch_size"]),
            max_beam_width=int(build.get("max_beam_width") or 1),
            max_prompt_tokens=int(build["max_input_len"]),
            tokens_per_block=int(plugins.get("tokens_per_block") or 32),
            has_context_logits=bool(build.get("gather_context_logits")),
            has_generation_logits=bool(build.get("gather_generation_logits")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnusable(f"{file} has no usable build_config: {error!r}") from error
