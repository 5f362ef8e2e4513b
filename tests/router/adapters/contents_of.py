"""Small contents of adapters."""

from __future__ import annotations

import json
from pathlib import Path

from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent
from trtmesh.router.adapters.registry import Version
from trtmesh.v1 import generation_pb2 as pb


def content(values: bytes = b"weights", rank: int = 8) -> AdapterContent:
    """A small adapter in PEFT's format, whose first weights are `values`."""
    config = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}).encode()
    return AdapterContent(pb.ADAPTER_FORMAT_PEFT, config, weights(values, rank))


def weights(values: bytes, rank: int) -> bytes:
    """A safetensors file of one layer."""
    inputs = -(-len(values) // (2 * rank)) or 1
    sizes = {"A": 2 * rank * inputs, "B": 2 * rank}
    shapes, header, end = {"A": [rank, inputs], "B": [1, rank]}, {}, 0
    for side, size in sizes.items():
        header[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"] = {
            "dtype": "F16",
            "shape": shapes[side],
            "data_offsets": [end, end + size],
        }
        end += size
    told = json.dumps(header).encode()
    return len(told).to_bytes(8, "little") + told + values.ljust(end, b"\0")


def version_of(content: AdapterContent, source: str = "") -> Version:
    return Version.of(content.version, content, source)


def write(directory: Path, content: AdapterContent) -> None:
    """Writes the files of an adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    names = FILE_NAMES[content.format]
    (directory / names.config).write_bytes(content.config)
    (directory / names.weights).write_bytes(content.weights)
