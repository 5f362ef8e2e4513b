"""Takes the content of an adapter apart, in either format."""

from __future__ import annotations

from collections.abc import Mapping

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.engine.adapters.arrays import parse_arrays
from trtmesh.engine.adapters.lora import Lora, Place, Target, fit
from trtmesh.engine.adapters.peft import parse_peft
from trtmesh.v1 import generation_pb2 as pb


def read_content(content: AdapterContent, targets: Mapping[Place, Target]) -> Lora:
    """The updates of the model's linear layers. Raises InvalidRequest or UnsupportedField with file or layer."""
    if content.format == pb.ADAPTER_FORMAT_PEFT:
        return fit(parse_peft(content), targets)
    return fit(parse_arrays(content, targets), targets)
