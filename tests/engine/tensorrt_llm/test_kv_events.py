"""The library's changes of cached blocks get the names of the mesh, where these are known."""

from __future__ import annotations

from typing import Any

from engine.backend_lab import lab
from engine.tensorrt_llm.harness import PROMPT, backend, tokens, watch
from trtmesh.chassis.block_hashes import ROOT_HASH, chain, root_hash
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from trtmesh.engine.backends.tensorrt_llm.kv_events import PLAIN, LibraryBlocks

SIZE = 2
TOKENS = [1, 2, 3, 4, 5, 6]


def stored(number: int, parent: int | None, *blocks: tuple[int, list[int]], **more: Any) -> Any:
    described = [
        {"block_hash": name, "tokens": [{"token_id": each} for each in ids]} for name, ids in blocks
    ]
    data = {"type": "stored", "parent_hash": parent, "blocks": described}
    return {"event_id": number, "data": data, "window_size": 100, **more}


def removed(number: int, *hashes: int, **more: Any) -> Any:
    data = {"type": "removed", "block_hashes": list(hashes)}
    return {"event_id": number, "data": data, "window_size": 100, **more}


def names() -> LibraryBlocks:
    found = LibraryBlocks(SIZE)
    found.expect(TOKENS, PLAIN)
    return found


def test_a_chain_has_the_names_of_its_tokens() -> None:
    ours = chain(ROOT_HASH, TOKENS, SIZE)
    found = names()
    told = found.translate([stored(0, None, (70, [1, 2]), (71, [3, 4]))])
    assert told == [BlocksStored(ROOT_HASH, ours[:2], [1, 2, 3, 4])]
    told = found.translate([stored(1, 71, (72, [5, 6])), removed(2, 71, 72)])
    assert told == [BlocksStored(ours[1], ours[2:], [5, 6]), BlocksRemoved(ours[1:])]


def test_an_unfinished_block_is_told_once_it_is_full() -> None:
    ours = chain(ROOT_HASH, TOKENS, SIZE)
    found = names()
    told = found.translate([stored(0, None, (70, [1, 2]), (71, [3]))])
    assert told == [BlocksStored(ROOT_HASH, ours[:1], [1, 2])]
    assert found.translate([stored(1, 70, (72, [3, 4]))])[0] == BlocksStored(
        ours[0], ours[1:2], [3, 4]
    )


def test_blocks_behind_an_adapter_or_a_salt_have_another_parent() -> None:
    found = LibraryBlocks(SIZE)
    adapter = Adapter(7, "prose", "a")
    root = root_hash(adapter=adapter)
    found.expect(TOKENS, (root, adapter))
    told = found.translate([stored(0, None, (70, [1, 2]))])
    assert told == [BlocksStored(root, chain(root, TOKENS, SIZE)[:1], [1, 2], adapter)]


def test_equal_beginnings_with_different_parents_are_told_to_nobody() -> None:
    found = names()
    found.expect(TOKENS, (root_hash("salt"), None))
    assert found.translate([stored(0, None, (70, [1, 2])), stored(1, 70, (71, [3, 4]))]) == []
    assert found.translate([removed(2, 70, 71)]) == []


def test_lost_events_clear_what_was_told() -> None:
    found = names()
    found.translate([stored(0, None, (70, [1, 2]))])
    told = found.translate([stored(5, None, (70, [1, 2]))])
    assert told[0] == BlocksCleared()
    assert isinstance(told[1], BlocksStored)


def test_a_block_leaves_with_its_last_copy() -> None:
    """With attention data parallelism every rank has blocks of its own."""
    ours = chain(ROOT_HASH, TOKENS, SIZE)
    found = names()
    told: list[KvEvent] = []
    for rank in (0, 1):
        told += found.translate([stored(0, None, (70, [1, 2]), attention_dp_rank=rank)])
    assert told == [BlocksStored(ROOT_HASH, ours[:1], [1, 2])]
    assert found.translate([removed(1, 70, attention_dp_rank=0)]) == []
    assert found.translate([removed(1, 70, attention_dp_rank=1)]) == [BlocksRemoved(ours[:1])]


def test_only_the_widest_window_counts() -> None:
    found = names()
    assert found.translate([stored(0, None, (70, [1, 2]))])
    assert found.translate([stored(1, None, (70, [1, 2]), window_size=10)]) == []


async def test_a_worker_tells_what_the_library_caches(release: str) -> None:
    async with lab(backend(options={"kv_cache_config": {"tokens_per_block": 4}})) as on:
        events: list[KvEvent] = []
        watch(on, lambda step: events.extend(step.kv_events))
        await tokens(on, max_tokens=2)
        await on._until(lambda: bool(events))
        assert events == [BlocksStored(ROOT_HASH, chain(ROOT_HASH, PROMPT, 4), PROMPT[:8])]
        await tokens(on, max_tokens=2)
        assert on.backend.stats().reused_prompt_tokens == 8
        assert on.backend.stats().computed_prompt_tokens == len(PROMPT) + 1
