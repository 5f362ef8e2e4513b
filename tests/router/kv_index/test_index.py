"""The index against a plain model, and the bound of memory."""

from __future__ import annotations

import sys
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmesh.chassis.block_hashes import chain, root_hash
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig, KvCache, Lora
from trtmesh.router.kv_index import KvIndex, PromptBlocks, prefix_root
from trtmesh.router.kv_index.index import MOST_LEFT, MOST_RECENT, RECENT_SECONDS, RecentBlocks

WORKERS = "abcde"
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear", "forget", "expect"]),
        st.sampled_from(WORKERS),
        st.lists(st.integers(1, 12), max_size=6, unique=True),
        st.floats(0, 1.5),
    ),
    max_size=50,
)


@settings(deadline=None)
@given(ACTIONS)
def test_matches_equal_a_plain_model(
    actions: list[tuple[str, str, list[int], float]],
) -> None:
    index, told = KvIndex(10_000), defaultdict[str, set[int]](set)
    sure = defaultdict[str, dict[int, float]](dict)
    now = 0.0
    for action, worker, blocks, seconds in actions:
        now += seconds
        if action == "store":
            index.store(worker, blocks)
            told[worker] |= set(blocks)
        elif action == "remove":
            index.remove(worker, blocks)
            told[worker] -= set(blocks)
        elif action == "clear":
            index.clear(worker)
            told[worker].clear()
        elif action == "forget":
            index.forget(worker)
            told.pop(worker, None)
            sure.pop(worker, None)
        else:
            index.expect(worker, blocks, now)
            sure[worker] |= dict.fromkeys(blocks, now)
        assert len(index) == sum(map(len, told.values()))
        for block in range(1, 13):
            holders = {w for w in told if block in told[w]}
            expected = {w for w in WORKERS if now - sure[w].get(block, -9.0) <= RECENT_SECONDS}
            assert holders <= index.match([block], now).keys() <= holders | expected
        asked = list(range(1, 13))
        found = index.match(asked, now)
        for name in WORKERS:
            fresh = {b for b, at in sure[name].items() if now - at < RECENT_SECONDS / 2}
            alive = {b for b, at in sure[name].items() if now - at <= RECENT_SECONDS}
            least, most = depth(asked, told[name] | fresh), depth(asked, told[name] | alive)
            assert least <= found.get(name, 0) <= most
        assert all(found.values())


def depth(asked: list[int], known: set[int]) -> int:
    return next((n for n, block in enumerate(asked) if block not in known), len(asked))


def test_workers_drop_out_where_their_prefix_ends() -> None:
    index = KvIndex(1000)
    prompt = chain(0, list(range(160)), 16)
    index.store("long", prompt)
    index.store("short", prompt[:3])
    index.store("hole", [*prompt[:2], *prompt[3:]])
    index.store("other", chain(0, list(range(1, 161)), 16))
    assert index.match(prompt, 0.0) == {"long": 10, "short": 3, "hole": 2}
    assert index.match(prompt[:2], 0.0) == {"long": 2, "short": 2, "hole": 2}
    assert index.match([], 0.0) == {}


def test_eviction_bounds_memory_and_keeps_used_blocks() -> None:
    most = 5000
    index = KvIndex(most)
    hot = chain(root_hash("hot"), list(range(320)), 16)
    index.store("a", hot)
    largest = 0
    for number in range(2000):
        worker = WORKERS[number % len(WORKERS)]
        index.store(worker, chain(root_hash(str(number)), list(range(160)), 16))
        assert index.match(hot, 0.0) == {"a": 20}
        assert len(index) <= most
        largest = max(largest, index.approximate_bytes)
    assert len(index) > most - 100
    assert largest < 1000 * most
    for worker in WORKERS:
        index.forget(worker)
    assert len(index) == 0
    assert index.match(hot, 0.0) == {}


def test_returning_worker_starts_without_blocks() -> None:
    index = KvIndex(1000)
    for worker in WORKERS:
        index.store(worker, [1, 2])
        index.expect(worker, [3], 0.0)
    index.forget("b")
    index.store("new", [9])
    assert index.match([1, 2, 3], 0.1) == dict.fromkeys("acde", 3)
    assert index.match([9], 0.1) == {"new": 1}


@pytest.mark.parametrize("seconds", [0.1, 2.6, 4.9, 5.1, 60.0])
def test_expectations_of_a_worker_that_left_are_nobody_elses(seconds: float) -> None:
    index = KvIndex(1000)
    for name in ("stays", "leaves"):
        index.store(name, [1])
        index.expect(name, [3], 0.0)
    index.forget("leaves")
    for number in range(4):
        index.store(f"new {number}", [9])
        index.expect(f"new {number}", [4], seconds)
    assert set(index.match([3], seconds)) <= {"stays"}
    assert set(index.match([4], seconds)) == {f"new {number}" for number in range(4)}


def test_workers_that_come_and_go_in_an_idle_router_take_no_more_bits() -> None:
    index = KvIndex(1000)
    index.store("stays", [1])
    index.expect("stays", [1], 0.0)
    for number in range(10 * MOST_LEFT):
        index.store(f"{number}", [1])
        index.forget(f"{number}")
    index.store("new", [1])
    assert index.match([1], 0.0) == {"stays": 1, "new": 1}
    assert max(index._addresses) <= MOST_LEFT + 1


def test_memory_grows_with_the_number_of_workers() -> None:
    few, many = KvIndex(), KvIndex()
    for number in range(1000):
        few.store("one", [number])
        many.store(f"{number}", [number])
    bits = sum(map(sys.getsizeof, many._blocks.values()))
    assert bits > 3 * sum(map(sys.getsizeof, few._blocks.values()))
    assert many.approximate_bytes >= bits + sys.getsizeof(many._blocks)


def test_loss_of_a_worker_looks_at_no_block_of_others() -> None:
    """A rack's workers are lost at once, while the router has 100,000 expected blocks."""
    index = KvIndex()
    index.store("lost", [1])
    for number in range(1000):
        index.expect(f"{number}", range(100 * number, 100 * number + 100), 1.0)
    looked = 0

    class Counted(dict[int, int]):
        def items(self) -> Any:
            nonlocal looked
            looked += len(self)
            return super().items()

    recent = index._recent
    recent._young, recent._old = Counted(recent._young), Counted(recent._old)
    index.forget("lost")
    assert looked == 0


def test_expectations_are_bounded_and_end() -> None:
    recent = RecentBlocks()
    generator = Random(0)
    for _ in range(3000):
        recent.add(1, [generator.getrandbits(63) for _ in range(100)], 1.0)
        assert sum(map(len, recent.at(1.0))) <= MOST_RECENT
    assert not any(recent.at(1.0 + RECENT_SECONDS))


def test_salt_and_adapter_version_name_blocks_apart() -> None:
    plain = prefix_root(GenerationConfig())
    lora, salted = GenerationConfig(lora=Lora(id=1)), KvCache(salt="s")
    others = [
        prefix_root(GenerationConfig(kv_cache=salted)),
        prefix_root(lora, Adapter(1)),
        prefix_root(lora, Adapter(1, version="v1")),
        prefix_root(lora, Adapter(1, version="v2")),
        prefix_root(GenerationConfig(lora=Lora(id=2)), Adapter(2)),
        prefix_root(GenerationConfig(lora=Lora(id=1), kv_cache=salted), Adapter(1)),
    ]
    assert len({plain, *others}) == 7
    assert prefix_root(lora, Adapter(1, "renamed")) == prefix_root(lora, Adapter(1))
    assert prefix_root(lora) is None
    assert prefix_root(GenerationConfig(kv_cache=KvCache(reuse=False))) is None
    beyond = frozenset({"prompt_tuning.extra_ids"})
    assert prefix_root(GenerationConfig(fields_set=beyond)) is None
    assert PromptBlocks(None, [1] * 64).hashes(16) == []
    assert PromptBlocks(plain, [1] * 64).hashes(16) == chain(0, [1] * 64, 16)
