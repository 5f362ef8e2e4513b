"""The opaque state of a handoff: written for a client, and read strictly."""

from __future__ import annotations

import random
from typing import Any

import pytest
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.handoff import identity
from trtmesh.router.values.handoff_state import (
    END,
    MAX_STATE_BYTES,
    PROTOCOL_VERSION,
    digest_of,
    read_state,
    write_state,
)
from trtmesh.v1 import kv_transfer_pb2 as pb

LEASE = "0123456789abcdef" * 2
DIGEST = digest_of([1, 2, 3], None)
DESCRIPTOR = pb.HandoffDescriptor(
    protocol_version=PROTOCOL_VERSION,
    compatibility_hash=b"h" * 16,
    lease_id=LEASE,
    worker="engine-0",
    address="10.0.0.1:9101",
    shape=pb.KvBlockShape(layers=2),
    shards=[pb.KvBlockShape(layers=2)],
    block_ids=[4, 5],
    computed_tokens=3,
    first_token_id=7,
    emitted_tokens=1,
    expires_in_ms=9000,
    transports=[pb.KvTransportOffer(transport=pb.KV_TRANSPORT_SHARED_MEMORY, state=b"secret")],
)
STATE = write_state(DESCRIPTOR, "engine-0", DIGEST)


def changed(**fields: object) -> bytes:
    state: Any = pb.HandoffDescriptor.FromString(STATE.removesuffix(END))
    for name, value in fields.items():
        if value is None:
            state.ClearField(name)
        else:
            setattr(state, name, value)
    return bytes(state.SerializeToString() + END)


def test_protocol_version_is_that_of_the_workers() -> None:
    assert PROTOCOL_VERSION == identity.PROTOCOL_VERSION


def test_state_names_the_lease_and_nothing_to_dial() -> None:
    assert b"secret" not in STATE
    assert b"10.0.0.1" not in STATE
    state = read_state(STATE)
    assert (state.has_kv, state.first_tokens) == (True, [7])
    assert (state.descriptor.lease_id, state.descriptor.worker) == (LEASE, "engine-0")
    assert list(state.descriptor.block_ids) == [4, 5]
    assert not state.descriptor.transports
    state.check(DIGEST)


def test_padding_of_a_batch_is_dropped() -> None:
    assert read_state(STATE + bytes(9)) == read_state(STATE)


def test_state_without_kv_has_no_lease() -> None:
    state = read_state(write_state(None, "engine-0", DIGEST))
    assert (state.has_kv, state.first_tokens) == (False, [])
    state.check(DIGEST)


def test_state_of_several_sequences_has_no_token() -> None:
    state = read_state(changed(first_token_id=None, emitted_tokens=None))
    assert (state.has_kv, state.first_tokens) == (True, [])


@pytest.mark.parametrize(
    ("token_ids", "adapter"),
    [([1, 2], None), ([1, 2, 4], None), ([1, 2, 3], Adapter(1, "", "v"))],
)
def test_state_of_another_prompt_is_refused(token_ids: list[int], adapter: Adapter | None) -> None:
    with pytest.raises(InvalidField) as caught:
        read_state(STATE).check(digest_of(token_ids, adapter))
    assert caught.value.field == "handoff.state"


def test_state_of_another_release_has_no_usable_kv() -> None:
    state = read_state(changed(protocol_version=PROTOCOL_VERSION + 1, lease_id="another form"))
    assert not state.has_kv


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1\2\3",
        STATE.removesuffix(END),
        STATE[:-8] + END,
        STATE.removesuffix(END) + b"\xfa\x7f\x01x" + END,
        changed(protocol_version=None),
        changed(lease_id="../../etc"),
        changed(lease_id=LEASE.upper()),
        changed(worker=""),
        changed(worker="w" * 300),
        changed(address="10.6.6.6:1"),
        changed(expires_in_ms=1),
        changed(backend_state=b"short"),
        changed(emitted_tokens=2),
        changed(first_token_id=None),
        changed(emitted_tokens=None),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidField) as caught:
        read_state(data)
    assert caught.value.field == "handoff.state"


def test_long_state_is_refused_unread() -> None:
    with pytest.raises(InvalidField) as caught:
        read_state(b"\0" * (MAX_STATE_BYTES + 1))
    assert caught.value.value == str(MAX_STATE_BYTES + 1)


def test_random_changes_are_read_or_refused() -> None:
    draw = random.Random(7)
    for _ in range(5000):
        data = bytearray(STATE)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            state = read_state(bytes(data))
        except InvalidField as error:
            assert error.field == "handoff.state"  # noqa: PT017 - either outcome is right
        else:
            assert not state.descriptor.address
            assert not state.descriptor.transports
