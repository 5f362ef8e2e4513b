"""The adapters of a torch worker: prefetched ones that are broken, and refused pins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent, number_of
from trtmesh.chassis.errors import (
    AdapterNotFound,
    AdaptersFull,
    InvalidField,
    InvalidRequest,
    TrtmeshError,
)
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.adapter_store import StoreLimits
from trtmesh.engine.adapters.lora import Lora, Module, Place, Target, Update
from trtmesh.engine.adapters.peft import write_peft
from trtmesh.engine.backend import AdapterLoad, HeldAdapter
from trtmesh.engine.backends.torch.memory.adapters import (
    AdapterCache,
    AdapterTargets,
    LoadedAdapter,
    Slots,
)
from trtmesh.engine.scheduling.adapter_slots import AdapterSlots
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

HIDDEN, RANK = 4, 2
PLACE: Place = (0, Module.ATTN_Q)
CONFIG = FILE_NAMES[pb.ADAPTER_FORMAT_PEFT].config


class EngineThread:
    """Acts at once, on slots of its own."""

    def __init__(self, cache: AdapterCache) -> None:
        self._slots: Slots = AdapterSlots(0, cache, lambda _: None)

    def run(self, act: Callable[[Slots], object]) -> None:
        act(self._slots)

    def lost(self, adapter: LoadedAdapter, error: TrtmeshError) -> None:
        raise AssertionError(error)


@pytest.fixture
def cache() -> Iterator[AdapterCache]:
    targets = AdapterTargets({PLACE: Target(HIDDEN, (HIDDEN,))}, torch.float32, 8, 1 << 20)
    made = AdapterCache(targets, StoreLimits(1 << 20, slots=1), None)
    made.connect(EngineThread(made))
    yield made
    made.close()


def write(directory: Path, **changes: Any) -> None:
    """Writes an adapter with changes of its configuration."""
    update = Update(torch.ones(RANK, HIDDEN), torch.ones(HIDDEN, RANK))
    names = {PLACE: "model.layers.0.self_attn.q_proj"}
    write_peft(Lora({PLACE: update}), directory, "base", names)
    config = json.loads((directory / CONFIG).read_text()) | changes
    (directory / CONFIG).write_text(json.dumps(config))


def by_name(states: list[HeldAdapter]) -> dict[str, HeldAdapter]:
    return {each.adapter.name: each for each in states}


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 0},
        {"r": -1, "use_rslora": True},
        {"rank_pattern": {"(": 1}},
        {"alpha_pattern": {"([a-z_.0-9]+)+X": 1}},
    ],
    ids=["no_rank", "negative_rank", "no_expression", "endless_expression"],
)
def test_broken_prefetched_adapter_is_reported_and_others_load(
    cache: AdapterCache, changes: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "a", **changes)
    write(tmp_path / "b")
    cache.prefetch(sorted(tmp_path.iterdir()))
    states = by_name(cache.states)
    broken = states["a"]
    assert isinstance(broken.error, TrtmeshError)
    assert not broken.error.row.is_fault
    assert broken.place == epb.ADAPTER_PLACE_ABSENT
    assert (states["b"].error, states["b"].rank) == (None, RANK)


def test_prefetch_survives_a_defect_of_the_loader(
    cache: AdapterCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "a")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("trtmesh.engine.backends.torch.memory.adapters.read_content", fail)
    cache.prefetch(sorted(tmp_path.iterdir()))
    (state,) = cache.states
    assert state.error is not None
    assert state.error.row.is_fault


def test_prefetched_number_above_64_bits_is_refused_by_name(
    cache: AdapterCache, tmp_path: Path
) -> None:
    large, largest = str(2**64), str(2**64 - 1)
    write(tmp_path / large)
    write(tmp_path / largest)
    cache.prefetch(sorted(tmp_path.iterdir()))
    states = by_name(cache.states)
    error = states[large].error
    assert isinstance(error, InvalidField)
    assert error.value == large
    assert states[large].adapter == Adapter(number_of(large), large)
    assert states[largest].adapter.id == 2**64 - 1
    assert states[largest].error is None


def test_refused_pin_is_reported_with_the_place_in_memory(
    cache: AdapterCache, tmp_path: Path
) -> None:
    for number in (1, 2):
        write(tmp_path / str(number), lora_alpha=number)
    cache.prefetch(sorted(tmp_path.iterdir()))
    versions = {each.adapter.id: each.adapter.version for each in cache.states}
    cache._load(AdapterLoad(Adapter(1, "1", versions[1]), None, pinned=True))
    cache.take_news()
    cache._load(AdapterLoad(Adapter(2, "2", versions[2]), None, pinned=True))
    (refused,) = cache.take_news()
    assert isinstance(refused.error, AdaptersFull)
    assert (refused.place, refused.pinned) == (epb.ADAPTER_PLACE_HOST, False)
    assert refused.rank == RANK


def test_unreadable_delivered_adapter_is_absent(cache: AdapterCache, tmp_path: Path) -> None:
    write(tmp_path / "a", r=0)
    content = AdapterContent.read(tmp_path / "a", 1 << 20)
    cache._load(AdapterLoad(Adapter(1, "a", content.version), content))
    (refused,) = cache.take_news()
    assert isinstance(refused.error, InvalidRequest)
    assert refused.error.field == CONFIG
    assert refused.place == epb.ADAPTER_PLACE_ABSENT


def test_load_without_content_of_an_unknown_version_is_absent(cache: AdapterCache) -> None:
    cache._load(AdapterLoad(Adapter(4, version="v"), None))
    (refused,) = cache.take_news()
    assert isinstance(refused.error, AdapterNotFound)
    assert (refused.error.fields, refused.error.value) == (("adapter.id",), "4")
    assert refused.place == epb.ADAPTER_PLACE_ABSENT
