"""Following a worker's events, and restarting from a snapshot."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from trtmesh.router.kv_index import KvFeed, KvIndex
from trtmesh.v1 import engine_pb2 as pb


class Source:
    """A worker's cache with events, some of them lost."""

    def __init__(self, feed: KvFeed) -> None:
        self.feed = feed
        self.epoch = 7
        self.blocks: set[int] = set()
        self.sequence = 0

    def change(self, stored: list[int], removed: list[int], *, lost: bool = False) -> None:
        events = [
            pb.KvEvent(removed=pb.KvBlocksRemoved(block_hashes=removed)),
            pb.KvEvent(stored=pb.KvBlocksStored(block_hashes=stored)),
        ]
        self.blocks = (self.blocks - set(removed)) | set(stored)
        message = pb.KvEvents(epoch=self.epoch, first_sequence=self.sequence, events=events)
        self.sequence += len(events)
        if not lost:
            self.feed.apply(message)

    def snapshot(self) -> None:
        stored = pb.KvEvent(stored=pb.KvBlocksStored(block_hashes=sorted(self.blocks)))
        self.feed.apply(
            pb.KvEvents(
                epoch=self.epoch, first_sequence=self.sequence, events=[stored], snapshot=True
            )
        )


def followed() -> tuple[KvIndex, Source, list[bool]]:
    index, asked = KvIndex(1000), list[bool]()
    feed = KvFeed(index, "w", lambda: asked.append(True))
    source = Source(feed)
    feed.opened()
    return index, source, asked


def held(index: KvIndex) -> set[int]:
    return {block for block in range(1, 40) if "w" in index.match([block], 0.0)}


def test_new_stream_starts_with_a_snapshot() -> None:
    index, source, asked = followed()
    source.change([1, 2], [])
    assert not held(index)
    assert len(asked) == 1
    source.snapshot()
    source.change([3], [1])
    assert held(index) == {2, 3}
    assert len(asked) == 1


def test_gap_requests_one_snapshot_and_keeps_known_blocks() -> None:
    index, source, asked = followed()
    source.snapshot()
    source.change([1, 2], [])
    source.change([3], [1], lost=True)
    source.change([4], [])
    source.change([5], [])
    assert held(index) == {1, 2}
    assert len(asked) == 2
    source.snapshot()
    assert held(index) == {2, 3, 4, 5}


def test_new_epoch_clears_all_blocks() -> None:
    index, source, asked = followed()
    source.snapshot()
    source.change([1, 2], [])
    source.epoch, source.sequence, source.blocks = 8, 0, set()
    source.change([9], [])
    assert not held(index)
    source.snapshot()
    assert held(index) == {9}
    assert len(asked) == 2


def test_events_covered_by_the_snapshot_are_skipped() -> None:
    index, source, _ = followed()
    source.change([1], [])
    source.change([], [1])
    late = pb.KvEvents(
        epoch=7,
        first_sequence=0,
        events=[pb.KvEvent(stored=pb.KvBlocksStored(block_hashes=[1]))] * 2,
    )
    source.snapshot()
    source.feed.apply(late)
    source.change([2], [])
    assert held(index) == {2}


def test_lost_worker_is_forgotten() -> None:
    index, source, _ = followed()
    source.snapshot()
    source.change([1], [])
    source.feed.lost()
    assert len(index) == 0
    source.change([2], [])
    assert len(index) == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 39), max_size=4),
            st.lists(st.integers(1, 39), max_size=4),
            st.sampled_from(["told", "told", "told", "lost", "restart"]),
        ),
        max_size=40,
    )
)
def test_two_routers_agree_despite_different_losses(
    changes: list[tuple[list[int], list[int], str]],
) -> None:
    index, source, asked = followed()
    source.snapshot()
    answered = len(asked)
    for stored, removed, fate in changes:
        if fate == "restart":
            source.epoch, source.sequence, source.blocks = source.epoch + 1, 0, set()
        source.change(stored, removed, lost=fate == "lost")
        if len(asked) > answered:
            answered = len(asked)
            source.snapshot()
    source.change([], [])
    if len(asked) > answered:
        source.snapshot()
    other = KvIndex(1000)
    late = KvFeed(other, "w", lambda: None)
    source.feed = late
    late.opened()
    source.snapshot()
    assert held(index) == held(other) == source.blocks
