"""The linear layers of a model that an adapter can update."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from trtmesh.engine.adapters.lora import Module, Place, Target, place_of


def lora_targets(model: PreTrainedModel) -> dict[Place, Target]:
    """The targets of a model of transformers whose layers are its own."""
    config: Any = model.config.get_text_config()
    targets = {}
    for name, layer in model.named_modules():
        if type(layer) not in (nn.Linear, Conv1D) or (place := place_of(name)) is None:
            continue
        inputs, outputs = layer.weight.shape if type(layer) is Conv1D else layer.weight.shape[::-1]
        targets[place] = Target(inputs, _parts(place[1], outputs, config))
    return targets


def _parts(module: Module, outputs: int, config: Any) -> tuple[int, ...]:
    if module is Module.MLP_GATE_UP:
        return outputs // 2, outputs // 2
    if module is not Module.ATTN_QKV:
        return (outputs,)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = outputs // (heads + 2 * kv_heads)
    return heads * size, kv_heads * size, kv_heads * size
