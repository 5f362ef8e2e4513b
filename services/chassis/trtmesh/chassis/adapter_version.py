"""The version of an adapter: a digest of its content, equal in routers and workers."""

from __future__ import annotations

from hashlib import blake2b

from trtmesh.chassis.vocabulary import Tensor

DIGEST_BYTES = 16


def version_of(weights: Tensor, config: Tensor) -> str:
    """The version of an adapter sent as TensorRT-LLM's arrays."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for tensor in (weights, config):
        digest.update(f"{tensor.data_type} {tensor.shape} ".encode())
        digest.update(tensor.data)
    return digest.hexdigest()
