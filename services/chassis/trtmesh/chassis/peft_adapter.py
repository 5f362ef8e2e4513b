"""Checks the files of a PEFT adapter without the values: adapter_config.json and the header of the weights.

A router does so before a version gets requests, and a worker before reading the values.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from trtmesh.chassis.adapter_content import (
    FILE_NAMES,
    MOST_CONFIG_BYTES,
    AdapterContent,
    check_arrays,
)
from trtmesh.chassis.errors import InvalidRequest, UnsupportedField
from trtmesh.chassis.layer_patterns import LayerPatterns
from trtmesh.chassis.safetensors_header import Entry, read_entries
from trtmesh.chassis.validation import problem_of
from trtmesh.v1 import generation_pb2 as pb

CONFIG, WEIGHTS = FILE_NAMES[pb.ADAPTER_FORMAT_PEFT]
PREFIX = "base_model.model."
MOST_TENSORS = 4096
MOST_KEY_CHARACTERS = 256

Rank = Annotated[int, Field(ge=1, lt=2**31)]
Alpha = Annotated[float, Field(ge=-(2**31), le=2**31)]

_KEY = re.compile(r"^(?P<layer>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight$")
_FLOATS = ("F32", "F16", "BF16")


class PeftConfig(BaseModel):
    """The fields of adapter_config.json that affect the result of an adapter."""

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
        """Raises UnsupportedField unless the adapter is a plain LoRA."""
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
        """Raises UnsupportedField for unsupported patterns."""
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


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix of the weights file."""

    key: str
    layer: str
    """Name of the linear layer in transformers."""
    side: str
    """"A" or "B"."""
    entry: Entry


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A plain LoRA with consistent files."""

    scaling: Scaling
    weights: tuple[Weight, ...]


def read_adapter(content: AdapterContent, where: str = "") -> PeftAdapter:
    """Reads configuration and header. Raises InvalidRequest or UnsupportedField with file or layer, and the reason;
    `where` precedes the names of files."""
    config = parse_config(content.config, where + CONFIG)
    config.check()
    scaling = Scaling(config)
    entries = read_entries(content.weights, where + WEIGHTS)
    if len(entries) > MOST_TENSORS:
        limit = f"at most {MOST_TENSORS}"
        raise InvalidRequest(f"has {len(entries)} tensors", field=where + WEIGHTS, limit=limit)
    weights = tuple(_weight(key, entry, scaling) for key, entry in entries.items())
    _check_pairs(weights)
    return PeftAdapter(scaling, weights)


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


def _weight(key: str, entry: Entry, scaling: Scaling) -> Weight:
    """Raises InvalidRequest or UnsupportedField unless the tensor is half of an update of the configured rank."""
    layer, side = _split_key(key)
    if entry.dtype not in _FLOATS or len(entry.shape) != 2:
        raise InvalidRequest(
            f"is {entry.dtype} of shape {list(entry.shape)}",
            field=f"adapter.{key}",
            limit="a matrix of float32, float16 or bfloat16",
        )
    rank = entry.shape[0 if side == "A" else 1]
    if rank != scaling.rank(layer):
        raise InvalidRequest(
            f"has rank {rank}, but {CONFIG} says {scaling.rank(layer)}",
            field=f"adapter.{key}",
            value=str(rank),
            limit=f"{scaling.rank(layer)}, as {CONFIG} says",
        )
    return Weight(key, layer, side, entry)


def _check_pairs(weights: tuple[Weight, ...]) -> None:
    """Raises InvalidRequest unless every layer has A and B once."""
    sides: defaultdict[str, list[str]] = defaultdict(list)
    for weight in weights:
        sides[weight.layer].append(weight.side)
    for layer, found in sides.items():
        if sorted(found) != ["A", "B"]:
            given = " and ".join(f"lora_{side}" for side in sorted(found))
            raise InvalidRequest(
                f"has {given}, but must have lora_A and lora_B once", field=f"adapter.{layer}"
            )
    if not sides:
        raise InvalidRequest("has no LoRA weights", field="adapter")


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


def check_content(content: AdapterContent, where: str = "") -> None:
    """Raises InvalidRequest or UnsupportedField with file or layer, and the reason, for files that are torn, disagree
    with each other, or are not a plain LoRA; `where` precedes the names of files."""
    if content.format == pb.ADAPTER_FORMAT_PEFT:
        read_adapter(content, where)
    else:
        check_arrays(content, where)
