from __future__ import annotations

from typing import Any

from trtmesh.chassis.reflection import reflection_pool
from trtmesh.kserve import grpc_service_pb2
from trtmesh.v1 import engine_pb2, router_pb2


def test_pool_joins_files_with_their_imports() -> None:
    # Both files import generation.proto; the third is in a pool of its own.
    # types-protobuf has no types for lookups.
    pool: Any = reflection_pool(
        router_pb2.DESCRIPTOR, engine_pb2.DESCRIPTOR, grpc_service_pb2.DESCRIPTOR
    )
    for service in (
        *("trtmesh.v1.MeshService", "trtmesh.v1.EngineService", "inference.GRPCInferenceService"),
        *("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"),
    ):
        assert service.rpartition(".")[2] in pool.FindFileContainingSymbol(service).services_by_name
    assert pool.FindMessageTypeByName("inference.ModelConfig").fields_by_name["max_batch_size"]
