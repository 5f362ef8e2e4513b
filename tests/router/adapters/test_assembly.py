"""Limits of a content that arrives in parts."""

from __future__ import annotations

import pytest
from trtmesh.chassis.adapter_content import MOST_CONFIG_BYTES
from trtmesh.chassis.errors import InvalidField
from trtmesh.router.adapters.assembly import Assembly
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb


def first(config_bytes: int) -> admin_pb.UploadAdapterRequest:
    return admin_pb.UploadAdapterRequest(
        format=pb.ADAPTER_FORMAT_ARRAYS, config_bytes=config_bytes, weights_bytes=1
    )


def test_configuration_has_the_limit_of_all_contents() -> None:
    Assembly.of(first(MOST_CONFIG_BYTES))
    with pytest.raises(InvalidField) as refused:
        Assembly.of(first(MOST_CONFIG_BYTES + 1))
    assert refused.value.fields == ("config_bytes",)
