"""Descriptors for gRPC reflection."""

from __future__ import annotations

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2


def reflection_pool(*files: FileDescriptor) -> DescriptorPool:
    """Copies files of any pools, with the files of every server, into a single pool."""
    pool = DescriptorPool()
    known: set[str] = set()
    for file in (*files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        _add(pool, file, known)
    return pool


def _add(pool: DescriptorPool, file: FileDescriptor, known: set[str]) -> None:
    if file.name in known:
        return
    known.add(file.name)
    for imported in file.dependencies:
        _add(pool, imported, known)
    pool.AddSerializedFile(file.serialized_pb)  # type: ignore[no-untyped-call]  # types-protobuf has no type
