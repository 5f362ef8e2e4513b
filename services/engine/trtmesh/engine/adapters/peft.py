"""Reads and writes adapters as PEFT directories: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import InvalidRequest, UnsupportedField
from trtmesh.chassis.peft_adapter import CONFIG, PREFIX, WEIGHTS, PeftAdapter, read_adapter
from trtmesh.engine.adapters.lora import MODULE_BY_NAME, Lora, Place, Update, place_of
from trtmesh.engine.adapters.safetensors_file import read_tensors


def read_peft(directory: Path, most_bytes: int) -> Lora:
    """Reads a directory of at most `most_bytes`. Raises NotFound, or the errors of `parse_peft` with its path."""
    return parse_peft(AdapterContent.read(directory, most_bytes), f"{directory}/")


def parse_peft(content: AdapterContent, where: str = "") -> Lora:
    """Takes a content apart. Raises InvalidRequest or UnsupportedField with file, layer and reason; `where` precedes
    the names of files. Nothing is unpickled."""
    adapter = read_adapter(content, where)
    entries = {weight.key: weight.entry for weight in adapter.weights}
    return _assemble(adapter, read_tensors(content.weights, entries))


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


def _assemble(adapter: PeftAdapter, tensors: Mapping[str, Tensor]) -> Lora:
    sides: dict[Place, dict[str, Tensor]] = {}
    for weight in adapter.weights:
        if (place := place_of(weight.layer)) is None:
            raise UnsupportedField(
                "is not a layer that an adapter can update here", field=f"adapter.{weight.layer}"
            )
        found, tensor = sides.setdefault(place, {}), tensors[weight.key]
        if weight.side in found:
            raise InvalidRequest("names a layer for the second time", field=f"adapter.{weight.key}")
        is_a = weight.side == "A"
        found[weight.side] = (
            tensor if is_a else _scaled(tensor, adapter.scaling.scale(weight.layer))
        )
    return Lora({place: Update(found["A"], found["B"]) for place, found in sides.items()})


def _scaled(b: Tensor, scale: float) -> Tensor:
    """B times the scale, in float32 where half precision would round: a scale that is no power of two."""
    exact = math.frexp(scale)[0] == 0.5
    return b * scale if exact else b.float() * scale
