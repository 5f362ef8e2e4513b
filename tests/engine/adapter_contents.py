"""Contents of adapters for backends without weights, and the commands that deliver them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb


def content(seed: int = 0, rank: int = 8, size: int = 64) -> AdapterContent:
    """A PEFT content whose weights no backend can read."""
    config = json.dumps({"r": rank, "seed": seed}).encode()
    return AdapterContent(pb.ADAPTER_FORMAT_PEFT, config, bytes([seed % 256]) * size)


def identity(number: int, of: AdapterContent, name: str = "") -> Adapter:
    return Adapter(number, name, of.version)


def parts(
    number: int,
    of: AdapterContent,
    *,
    name: str = "",
    pinned: bool = False,
    size: int = 1 << 18,
    version: str | None = None,
) -> list[epb.EngineCommand]:
    """The commands that deliver a content in parts of `size` bytes."""
    return list(_parts(number, of, name, version or of.version, pinned=pinned, size=size))


def load(number: int, version: str, *, pinned: bool = False) -> epb.EngineCommand:
    """A load without content."""
    adapter = pb.LoraConfig(id=number, version=version)
    return epb.EngineCommand(load_adapter=epb.LoadAdapterCommand(adapter=adapter, pinned=pinned))


def unload(number: int, version: str = "", *, unpin: bool = False) -> epb.EngineCommand:
    return epb.EngineCommand(
        unload_adapter=epb.UnloadAdapterCommand(id=number, version=version, unpin=unpin)
    )


def _parts(
    number: int, of: AdapterContent, name: str, version: str, *, pinned: bool, size: int
) -> Iterator[epb.EngineCommand]:
    data = of.config + of.weights
    for offset in range(0, len(data), size):
        command = epb.LoadAdapterCommand(
            adapter=pb.LoraConfig(id=number, name=name, version=version),
            pinned=pinned,
            format=pb.AdapterFormat.ValueType(of.format),
            config_bytes=len(of.config),
            weights_bytes=len(of.weights),
            offset=offset,
            data=data[offset : offset + size],
        )
        yield epb.EngineCommand(load_adapter=command)
