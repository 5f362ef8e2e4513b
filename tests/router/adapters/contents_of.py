"""Small contents of adapters."""

from __future__ import annotations

import json
from pathlib import Path

from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent
from trtmesh.router.adapters.registry import Version
from trtmesh.v1 import generation_pb2 as pb


def content(weights: bytes = b"weights", rank: int = 8) -> AdapterContent:
    """A content in PEFT's format; nothing in a router reads the weights."""
    config = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}).encode()
    return AdapterContent(pb.ADAPTER_FORMAT_PEFT, config, weights)


def version_of(content: AdapterContent, source: str = "") -> Version:
    return Version.of(content.version, content, source)


def write(directory: Path, content: AdapterContent) -> None:
    """Writes the files of an adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    names = FILE_NAMES[content.format]
    (directory / names.config).write_bytes(content.config)
    (directory / names.weights).write_bytes(content.weights)
