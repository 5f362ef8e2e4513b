"""Checks the content of an adapter without reading values."""

from __future__ import annotations

from trtmesh.chassis.adapter_content import AdapterContent, check_arrays
from trtmesh.chassis.peft_adapter import read_adapter
from trtmesh.v1 import generation_pb2 as pb


def check_content(content: AdapterContent, where: str = "") -> None:
    """Raises InvalidRequest or UnsupportedField with file or layer, and the reason, for files that are torn, disagree
    with each other, or are not a plain LoRA; `where` precedes the names of files."""
    if content.format == pb.ADAPTER_FORMAT_PEFT:
        read_adapter(content, where)
    else:
        check_arrays(content, where)
