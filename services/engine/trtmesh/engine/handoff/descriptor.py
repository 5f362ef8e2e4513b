"""The descriptor of a sender's KV: written by the sender, and checked by the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.chassis.parsing import ELEMENT_BYTES
from trtmesh.engine.handoff.identity import PROTOCOL_VERSION
from trtmesh.engine.kv_memory import Shard
from trtmesh.v1 import generation_pb2
from trtmesh.v1 import kv_transfer_pb2 as pb

MAX_DESCRIPTOR_BYTES = 2**20
MAX_SHARDS = 256
MAX_OFFERS = 16

_LAYOUT = pb.KV_LAYOUT_LAYERS_KV_HEADS_TOKENS_DIM


class Incompatible(Exception):
    """This worker cannot use a descriptor's KV; the text completes "the KV ..."."""


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """A sender's KV, as stated by the descriptor."""

    lease_id: str
    address: str
    worker: str
    shards: Sequence[Shard]
    blocks: Sequence[int]
    """Numbers in the sender's pool, by position; 0 is the null block, at leading positions only."""
    hash: bytes
    offers: Sequence[tuple[pb.KvTransport.ValueType, bytes]]


def shape_of(shard: Shard) -> pb.KvBlockShape:
    return pb.KvBlockShape(
        layout=_LAYOUT,
        data_type=generation_pb2.DataType.ValueType(shard.data_type),
        first_layer=shard.layers.start,
        layers=len(shard.layers),
        first_kv_head=shard.kv_heads.start,
        kv_heads=len(shard.kv_heads),
        tokens_per_block=shard.tokens_per_block,
        head_dim=shard.head_dim,
    )


def parse(descriptor: pb.HandoffDescriptor, own_hash: bytes) -> RemoteKv:
    """Checks version and hash before anything else. Raises Incompatible."""
    if descriptor.protocol_version != PROTOCOL_VERSION:
        raise Incompatible(
            f"follows version {descriptor.protocol_version} of the handoff protocol, not {PROTOCOL_VERSION}"
        )
    if descriptor.compatibility_hash != own_hash:
        raise Incompatible("is that of another model, tokenizer or adapter")
    if descriptor.ByteSize() > MAX_DESCRIPTOR_BYTES:
        raise Incompatible(
            f"has a descriptor of {descriptor.ByteSize()} bytes, but at most {MAX_DESCRIPTOR_BYTES} are read"
        )
    shapes = descriptor.shards or [descriptor.shape]
    if len(shapes) > MAX_SHARDS or len(descriptor.transports) > MAX_OFFERS:
        raise Incompatible(
            f"has {len(shapes)} shards and {len(descriptor.transports)} transports, but at most {MAX_SHARDS} and"
            f" {MAX_OFFERS} are read"
        )
    blocks = tuple(descriptor.block_ids)
    # A client may have changed the numbers: a block wrongly taken for null keeps the content of an earlier owner.
    if not any(blocks) or not all(blocks[blocks.count(0) :]):
        raise Incompatible("has no blocks, or null blocks after others")
    return RemoteKv(
        lease_id=descriptor.lease_id,
        address=descriptor.address,
        worker=descriptor.worker,
        shards=[_shard_of(shape) for shape in shapes],
        blocks=blocks,
        hash=descriptor.compatibility_hash,
        offers=[(offer.transport, offer.state) for offer in descriptor.transports],
    )


def _shard_of(shape: pb.KvBlockShape) -> Shard:
    element_bytes = ELEMENT_BYTES.get(shape.data_type)
    sizes = (shape.layers, shape.kv_heads, shape.tokens_per_block, shape.head_dim)
    if shape.layout != _LAYOUT or element_bytes is None or not all(0 < n <= 2**16 for n in sizes):
        raise Incompatible("has blocks of an unknown shape")
    return Shard(
        layers=range(shape.first_layer, shape.first_layer + shape.layers),
        kv_heads=range(shape.first_kv_head, shape.first_kv_head + shape.kv_heads),
        tokens_per_block=shape.tokens_per_block,
        head_dim=shape.head_dim,
        data_type=shape.data_type,
        element_bytes=element_bytes,
    )
