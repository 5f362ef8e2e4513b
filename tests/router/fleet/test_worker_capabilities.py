"""A worker's description and adapter states as values of the router."""

from __future__ import annotations

import sys
from typing import Literal

import pytest
from trtmesh.chassis.fingerprint import ANY_TOKENIZER
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.fleet.worker_capabilities import (
    WorkerCapabilities,
    changes_of,
    cuts_short,
    role_of,
    tokenizer_mismatch,
)
from trtmesh.router.placement import Place, Residency, Role
from trtmesh.router.placement.residency import NO_ADAPTERS
from trtmesh.v1 import engine_pb2 as pb
from trtmesh.v1 import generation_pb2 as gen_pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb


@pytest.mark.parametrize(
    ("most", "former", "tokens", "cuts"),
    [
        (800, 1000, 900, True),
        (800, 1000, 800, False),
        # Where the former one ends it as early.
        (800, 800, sys.maxsize, False),
        (799, 800, sys.maxsize, True),
    ],
)
def test_shorter_worker_cuts_a_sequence(most: int, former: int, tokens: int, cuts: bool) -> None:
    assert cuts_short(most, former, tokens) is cuts


@pytest.mark.parametrize(
    ("configured", "reported", "role"),
    [
        (pb.WORKER_ROLE_UNSPECIFIED, pb.WORKER_ROLE_UNSPECIFIED, Role.MIXED),
        (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_UNSPECIFIED, Role.PREFILL),
        (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE, Role.DECODE),
        (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_MIXED, Role.MIXED),
    ],
)
def test_reported_role_replaces_the_configured_one(
    configured: pb.WorkerRole.ValueType, reported: pb.WorkerRole.ValueType, role: Role
) -> None:
    assert role_of(pb.GetEngineResponse(role=configured), pb.Load(role=reported)) is role


def test_capabilities_are_read_from_the_description() -> None:
    engine = pb.GetEngineResponse(resumes_exactly=True)
    assert WorkerCapabilities.of(engine).is_exact
    assert not WorkerCapabilities.of(pb.GetEngineResponse()).is_exact


def test_kv_of_a_token_is_that_of_all_pools() -> None:
    half = kv_pb.KvBlockShape(data_type=gen_pb.DATA_TYPE_BF16, layers=3, kv_heads=2, head_dim=8)
    engine = pb.GetEngineResponse(
        kv_shapes=[half, half],
        kv_compatibility_hash=b"kv",
        kv_transports=[kv_pb.KV_TRANSPORT_GRPC],
    )
    kv = WorkerCapabilities.of(engine).kv
    assert kv is not None
    assert kv.token_bytes == 2 * (2 * 3 * 2 * 8 * 2)


def engine_with_kv(max_quarantined_blocks: int = 0) -> pb.GetEngineResponse:
    return pb.GetEngineResponse(
        kv_shapes=[kv_pb.KvBlockShape()],
        kv_compatibility_hash=b"kv",
        kv_transports=[kv_pb.KV_TRANSPORT_GRPC],
        max_quarantined_blocks=max_quarantined_blocks,
    )


@pytest.mark.parametrize("absent", ["kv_shapes", "kv_compatibility_hash", "kv_transports"])
def test_worker_without_handoffs_has_no_kv_facts(
    absent: Literal["kv_shapes", "kv_compatibility_hash", "kv_transports"],
) -> None:
    engine = engine_with_kv()
    assert WorkerCapabilities.of(engine).kv is not None
    engine.ClearField(absent)
    assert WorkerCapabilities.of(engine).kv is None


def test_worker_with_a_handoff_kind_needs_no_shapes_and_has_no_leases() -> None:
    engine = engine_with_kv()
    assert WorkerCapabilities.of(engine).has_leases
    engine.ClearField("kv_shapes")
    engine.handoff_kind = "vllm-nixl"
    able = WorkerCapabilities.of(engine)
    assert able.kv is not None
    assert able.kv.state_kind == "vllm-nixl"
    assert not able.has_leases


@pytest.mark.parametrize(("quarantined", "refuses"), [(5, False), (6, True)])
def test_worker_refuses_handoffs_at_its_own_limit_of_quarantine(
    quarantined: int, refuses: bool
) -> None:
    able = WorkerCapabilities.of(engine_with_kv(max_quarantined_blocks=5))
    assert able.refuses_handoffs(pb.Load(quarantined_blocks=quarantined)) is refuses


@pytest.mark.parametrize(
    ("per_item", "batch", "sequences", "beams"),
    [(8, 4, 8, 4), (4, 8, 4, 4), (0, 4, sys.maxsize, 4), (0, 0, sys.maxsize, sys.maxsize)],
)
def test_beams_of_an_item_are_computed_in_one_batch(
    per_item: int, batch: int, sequences: int, beams: int
) -> None:
    able = WorkerCapabilities.of(
        pb.GetEngineResponse(max_sequences_per_item=per_item, max_batch_size=batch)
    )
    assert (able.max_sequences, able.max_beams) == (sequences, beams)


@pytest.mark.parametrize(
    ("own", "mesh", "fits"),
    [
        ("t1", "t1", True),
        ("t2", "t1", False),
        ("", "t1", False),
        (ANY_TOKENIZER, "t1", True),
        ("t1", "", True),
        ("", "", True),
    ],
)
def test_tokenizer_of_a_worker_must_be_known_and_equal(own: str, mesh: str, fits: bool) -> None:
    engine = pb.GetEngineResponse(tokenizer_fingerprint=own)
    assert (tokenizer_mismatch(engine, mesh) == "") == fits


def state(number: int, version: str, place: pb.AdapterPlace.ValueType) -> pb.AdapterState:
    return pb.AdapterState(id=number, name=f"a{number}", version=version, place=place)


def test_adapter_states_add_and_remove_held_versions() -> None:
    device, host, absent = (
        pb.ADAPTER_PLACE_DEVICE,
        pb.ADAPTER_PLACE_HOST,
        pb.ADAPTER_PLACE_ABSENT,
    )
    adapters = NO_ADAPTERS.moved(changes_of([state(1, "v1", device), state(2, "v1", host)]))
    first = Residency(Adapter(1, "a1", "v1"), Place.DEVICE)
    second = Residency(Adapter(2, "a2", "v1"), Place.HOST)
    assert adapters.held == {(1, "v1"): first, (2, "v1"): second}
    adapters = adapters.moved(changes_of([state(1, "v2", host), state(2, "v1", absent)]))
    # Running items keep their version, so a worker may hold several.
    second = Residency(Adapter(1, "a1", "v2"), Place.HOST)
    assert adapters.held == {(1, "v1"): first, (1, "v2"): second}
    assert adapters.named == {1: ((1, "v1"), (1, "v2")), "a1": ((1, "v1"), (1, "v2"))}


def test_refused_pin_leaves_the_adapter_resident() -> None:
    state = pb.AdapterState(id=1, name="a", version="v", place=pb.ADAPTER_PLACE_HOST, rank=8)
    adapters = NO_ADAPTERS.moved(changes_of([state]))
    state.error.message = "pinned adapters take the slots"
    assert adapters.moved(changes_of([state])) == adapters
    assert adapters.held[1, "v"].place is Place.HOST
