"""Reads and writes adapters as PEFT directories: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save_file
from torch import Tensor
from trtmesh.chassis.adapter_content import FILE_NAMES, MOST_CONFIG_BYTES, AdapterContent
from trtmesh.chassis.errors import InvalidRequest, UnsupportedField
from trtmesh.chassis.validation import problem_of
from trtmesh.engine.adapters.layer_patterns import LayerPatterns
from trtmesh.engine.adapters.lora import DTYPES, MODULE_BY_NAME, Lora, Place, Update, place_of
from trtmesh.engine.adapters.safetensors_file import read_safetensors
from trtmesh.v1 import generation_pb2 as pb

CONFIG, WEIGHTS = FILE_NAMES[pb.ADAPTER_FORMAT_PEFT]
PREFIX = "base_model.model."
MOST_TENSORS = 4096
MOST_KEY_CHARACTERS = 256

Rank = Annotated[int, Field(ge=1, lt=2**31)]
Alpha = Annotated[float, Field(ge=-(2**31), le=2**31)]

_KEY = re.compile(r"^(?P<layer>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight$")


class PeftConfig(BaseModel):
    """The fields of adapter_config.json that say what an adapter computes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    peft_type: str
    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, Alpha] = {}
    bias: str = "none"
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    use_qalora: bool = False
    alora_invocation_tokens: list[int] | None = None

    def check(self) -> None:
        """Raises UnsupportedField for what is not a plain LoRA."""
        refused = {
            "peft_type": self.peft_type.upper() != "LORA",
            "use_dora": self.use_dora,
            "use_qalora": self.use_qalora,
            "bias": self.bias != "none",
            "lora_bias": self.lora_bias,
            "modules_to_save": bool(self.modules_to_save),
            "trainable_token_indices": bool(self.trainable_token_indices),
            "layer_replication": bool(self.layer_replication),
            "alora_invocation_tokens": bool(self.alora_invocation_tokens),
        }
        for field, is_refused in refused.items():
            if is_refused:
                value = getattr(self, field)
                raise UnsupportedField(
                    "is not supported; only plain LoRA updates of linear layers are",
                    field=f"adapter_config.{field}",
                    value=str(value)[:200],
                )


class Scaling:
    """Ranks and scales of layers, by their names."""

    def __init__(self, config: PeftConfig) -> None:
        """Raises UnsupportedField for patterns that are not supported."""
        self._config = config
        self._ranks = LayerPatterns("rank_pattern", config.rank_pattern)
        self._alphas = LayerPatterns("alpha_pattern", config.alpha_pattern)

    def scale(self, name: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA."""
        rank = self.rank(name)
        alpha = self._alphas.value(name, self._config.lora_alpha)
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)

    def rank(self, name: str) -> int:
        return int(self._ranks.value(name, self._config.r))


def read_peft(directory: Path, most_bytes: int) -> Lora:
    """Reads a directory of at most `most_bytes`. Raises NotFound, or the errors of `parse_peft` with its path."""
    return parse_peft(AdapterContent.read(directory, most_bytes), f"{directory}/")


def parse_peft(content: AdapterContent, where: str = "") -> Lora:
    """Takes a content apart. Raises InvalidRequest or UnsupportedField with file, layer and reason; `where` precedes
    the names of files. Nothing is unpickled."""
    config = parse_config(content.config, where + CONFIG)
    config.check()
    scaling = Scaling(config)
    tensors = read_safetensors(content.weights, where + WEIGHTS)
    if len(tensors) > MOST_TENSORS:
        limit = f"at most {MOST_TENSORS}"
        raise InvalidRequest(f"has {len(tensors)} tensors", field=where + WEIGHTS, limit=limit)
    return _assemble(tensors, scaling)


def write_peft(
    lora: Lora,
    directory: Path,
    base: str,
    names: Mapping[Place, str],
    *,
    fan_in_fan_out: bool = False,
) -> None:
    """Writes an adapter whose scale is part of B, as alpha = r says.

    `base` names the model, `names` its layers; `fan_in_fan_out` says that they are Conv1D layers. A layer whose rank is
    not the largest is listed in rank_pattern and alpha_pattern.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for place, update in sorted(lora.updates.items()):
        name = names[place]
        tensors[f"{PREFIX}{name}.lora_A.weight"] = update.a.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = update.b.contiguous()
        if update.rank != lora.rank:
            ranks[name] = update.rank
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "lora_alpha": lora.rank,
        "lora_dropout": 0.0,
        "alpha_pattern": ranks,
        "rank_pattern": ranks,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted({_own_name(names[place]) for place in lora.updates}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _own_name(name: str) -> str:
    """The end of a layer's name that tells its kind, as PEFT's target_modules match it: `q_proj`, `attn.c_proj`."""
    *_, parent, own = name.split(".")
    return own if own in MODULE_BY_NAME else f"{parent}.{own}"


def parse_config(data: bytes, name: str = CONFIG) -> PeftConfig:
    """Reads adapter_config.json; `name` is told in errors. Raises InvalidRequest."""
    if len(data) > MOST_CONFIG_BYTES:
        limit = f"at most {MOST_CONFIG_BYTES}"
        raise InvalidRequest(f"has {len(data)} bytes", field=name, limit=limit)
    try:
        return PeftConfig.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidRequest(
            f"is not a PEFT configuration: {where}: {problem_of(first)}", field=name
        ) from error


def _assemble(tensors: Mapping[str, Tensor], scaling: Scaling) -> Lora:
    sides: dict[Place, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, side = _split_key(key)
        if (place := place_of(name)) is None:
            raise UnsupportedField(
                "is not a layer that an adapter can update here", field=f"adapter.{name}"
            )
        if tensor.dtype not in DTYPES or tensor.ndim != 2:
            raise InvalidRequest(
                f"is {tensor.dtype} of shape {list(tensor.shape)}",
                field=f"adapter.{key}",
                limit="a matrix of float32, float16 or bfloat16",
            )
        if side == "A" and len(tensor) != scaling.rank(name):
            raise InvalidRequest(
                f"has rank {len(tensor)}",
                field=f"adapter.{key}",
                limit=f"{scaling.rank(name)}, as adapter_config.json says",
            )
        scaled = tensor if side == "A" else _scaled(tensor, scaling.scale(name))
        if side in sides.setdefault(place, {}):
            raise InvalidRequest("names a layer for the second time", field=f"adapter.{key}")
        sides[place][side] = scaled
    for (layer, module), found in sides.items():
        if len(found) < 2:
            raise InvalidRequest(
                f"of layer {layer} {module.name.lower()} has only lora_{next(iter(found))}",
                field="adapter",
            )
    if not sides:
        raise InvalidRequest("has no LoRA weights", field="adapter")
    return Lora({place: Update(found["A"], found["B"]) for place, found in sides.items()})


def _split_key(key: str) -> tuple[str, str]:
    if len(key) > MOST_KEY_CHARACTERS:
        raise InvalidRequest(
            f"has a name of {len(key)} characters",
            field=f"adapter.{key[:80]}",
            limit=f"at most {MOST_KEY_CHARACTERS}",
        )
    if (found := _KEY.match(key)) is None:
        raise UnsupportedField(
            "is not the A or B of a linear layer; only plain LoRA weights are served",
            field=f"adapter.{key}",
        )
    return found["layer"].removeprefix(PREFIX), found["side"]


def _scaled(b: Tensor, scale: float) -> Tensor:
    """B times the scale, in float32 where half precision would round: a scale that is no power of two."""
    exact = math.frexp(scale)[0] == 0.5
    return b * scale if exact else b.float() * scale
