from __future__ import annotations

import sys

import numpy as np
import pytest
from engine.handoff.transports.kv_peer import memory_of, shard_of
from trtmesh.chassis.errors import SettingsError
from trtmesh.engine.handoff.settings import HandoffSettings
from trtmesh.engine.handoff.transports import nixl_agents
from trtmesh.engine.handoff.transports.choice import KNOWN, open_transports
from trtmesh.engine.kv_memory import HostKvMemory, HostMemory
from trtmesh.v1 import kv_transfer_pb2 as pb


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl_agents._api.cache_clear()
    for package in nixl_agents._PACKAGES:
        monkeypatch.setitem(sys.modules, f"{package}._api", None)


async def test_default_leaves_out_what_the_system_lacks(without_nixl: None) -> None:
    found = open_transports(HandoffSettings(), memory_of(1, 8), KNOWN)
    assert list(found) == [pb.KV_TRANSPORT_SHARED_MEMORY, pb.KV_TRANSPORT_GRPC]
    for transport in filter(None, found.values()):
        await transport.close()


async def test_named_transport_without_its_package_is_an_error(without_nixl: None) -> None:
    settings = HandoffSettings(transports=("nixl", "grpc"))
    with pytest.raises(SettingsError, match="nixl-cu12"):
        open_transports(settings, memory_of(1, 8), KNOWN)


async def test_named_transport_without_its_memory_is_an_error() -> None:
    private = HostMemory(np.zeros((1, 8), dtype=np.uint8))
    with pytest.raises(SettingsError, match="shared_memory"):
        open_transports(
            HandoffSettings(transports=("shared_memory",)),
            HostKvMemory([shard_of(8)], [private]),
            KNOWN,
        )
