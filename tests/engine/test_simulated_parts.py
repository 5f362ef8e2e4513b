"""The pure parts of the simulated backend: hashes, blocks, tokens and endings."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.block_hashes import ROOT_HASH, chain, root_hash
from trtmesh.chassis.vocabulary import Sampling, Stopping
from trtmesh.engine.backends.simulated.block_pool import BlockPool
from trtmesh.engine.backends.simulated.endings import Ending, EndRule
from trtmesh.engine.backends.simulated.tokens import CHUNK, TokenSource, stream_key
from trtmesh.v1 import generation_pb2 as pb


class TestBlockHashes:
    def test_only_full_blocks_have_names(self) -> None:
        assert chain(ROOT_HASH, [1, 2, 3], 4) == []
        assert len(chain(ROOT_HASH, [1, 2, 3, 4, 5], 4)) == 1

    def test_a_name_covers_all_tokens_before(self) -> None:
        one, other = chain(ROOT_HASH, [1, 2, 3, 4], 2), chain(ROOT_HASH, [9, 2, 3, 4], 2)
        assert one[1] != other[1]
        assert chain(one[0], [3, 4], 2) == one[1:]

    def test_salts_separate(self) -> None:
        roots = {root_hash(None), root_hash(""), root_hash("a"), root_hash("b")}
        assert len(roots) == 4
        assert len({chain(root, [1, 2], 2)[0] for root in roots}) == 4


class TestBlockPool:
    def test_private_blocks_come_back(self) -> None:
        pool = BlockPool(4)
        assert pool.can_acquire([], 4)
        assert pool.acquire([], 4) == []
        assert not pool.can_acquire([], 1)
        pool.release([], 4)
        assert pool.free_blocks == 4

    def test_shared_blocks_are_kept_until_the_room_is_needed(self) -> None:
        pool = BlockPool(4)
        pool.acquire([], 3)
        assert pool.share([1, 2]) == [True, True]
        pool.release([1, 2], 1)
        assert (pool.used_blocks, pool.match([1, 2, 3])) == (0, 2)
        assert pool.acquire([], 3) == [2], "the child goes before its parent"
        assert pool.match([1, 2]) == 1

    def test_what_a_sequence_holds_is_not_evicted(self) -> None:
        pool = BlockPool(3)
        pool.acquire([], 1)
        pool.share([1])
        pool.release([1], 0)
        assert pool.acquire([1], 2) == []
        assert not pool.can_acquire([], 1)

    def test_an_equal_block_is_held_once(self) -> None:
        pool = BlockPool(4)
        pool.acquire([], 2)
        assert pool.share([1]) == [True]
        assert pool.share([1]) == [False]
        assert pool.used_blocks == 1
        pool.release([1], 0)
        assert pool.used_blocks == 1
        pool.release([1], 0)
        assert pool.used_blocks == 0

    @given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=60), st.randoms())
    def test_counts_hold_in_any_order(
        self, requests: list[tuple[int, int]], order: random.Random
    ) -> None:
        pool = BlockPool(12)
        held: list[tuple[list[int], int]] = []
        known: set[int] = set()
        for family, length in requests:
            hashes = [family * 100 + number for number in range(length)]
            shared = hashes[: pool.match(hashes)]
            assert known.issuperset(shared)
            private = length + 1 - len(shared)
            if pool.can_acquire(shared, private):
                evicted = pool.acquire(shared, private)
                assert known.issuperset(evicted)
                known.difference_update(evicted)
                fresh = hashes[len(shared) :]
                new = pool.share(fresh)
                known.update(h for h, is_new in zip(fresh, new, strict=True) if is_new)
                held.append((hashes, 1))
            elif held:
                pool.release(*held.pop(order.randrange(len(held))))
            assert 0 <= pool.free_blocks <= 12
            assert len(known) <= 12
        for holding in held:
            pool.release(*holding)
        assert pool.used_blocks == 0


class TestTokens:
    def test_ids_stay_in_their_range(self) -> None:
        tokens = TokenSource(10, 12, 2, 0.0).chunk(b"key", 0)
        assert len(tokens) == CHUNK
        assert set(tokens) == {10, 11, 12}

    def test_end_ids_come_at_their_rate(self) -> None:
        source = TokenSource(10, 12, 2, 0.25)
        tokens = [token for index in range(64) for token in source.chunk(b"key", index)]
        assert 0.2 < tokens.count(2) / len(tokens) < 0.3

    def test_tokens_are_the_same_on_every_machine(self) -> None:
        assert TokenSource(32, 126, 2, 0.0).chunk(b"key", 3)[:5] == [121, 90, 91, 98, 99]

    @pytest.mark.parametrize(
        "change",
        [
            {"seed": 2},
            {"temperature": 0.5},
            {"top_k": 7},
            {"top_p": 0.5},
            {"min_p": 0.5},
            {"repetition_penalty": 1.5},
            {"presence_penalty": 1.5},
            {"frequency_penalty": 1.5},
            {"no_repeat_ngram_size": 2},
        ],
    )
    def test_sampling_fields_change_a_sampled_stream(self, change: dict[str, Any]) -> None:
        sampling = Sampling(temperature=1.0, seed=1)
        changed = replace(sampling, **change)
        assert stream_key([1], sampling, 0, 0) != stream_key([1], changed, 0, 0)

    def test_places_change_a_sampled_stream_alone(self) -> None:
        sampled, greedy = Sampling(temperature=1.0, seed=1), Sampling(seed=1)
        assert stream_key([1], sampled, 0, 0) != stream_key([1], sampled, 0, 1)
        assert stream_key([1], sampled, 0, 0) != stream_key([1], sampled, 1, 0)
        assert stream_key([1], greedy, 0, 0) == stream_key([1], greedy, 1, 1)
        assert stream_key([1], greedy, 0, 0) == stream_key([1], replace(greedy, seed=2), 0, 0)
        assert stream_key([1], greedy, 0, 0) != stream_key([2], greedy, 0, 0)


class TestEndings:
    def rule(self, max_tokens: int = 100, **stopping: Any) -> EndRule:
        return EndRule(replace(Stopping(), **stopping), (2,), max_tokens)

    def test_length(self) -> None:
        assert self.rule(3).find([], [5, 5, 5, 5]) == Ending(3, pb.FINISH_REASON_LENGTH)
        assert self.rule(5).find([], [5, 5, 5, 5]) is None

    def test_end_id(self) -> None:
        assert self.rule().find([5], [6, 2, 2]) == Ending(3, pb.FINISH_REASON_END_ID, (2,))
        assert self.rule(end_id=6).find([], [2, 6]) == Ending(2, pb.FINISH_REASON_END_ID, (6,))
        assert self.rule(ignore_end_id=True).find([], [2]) is None

    def test_the_end_id_beats_the_length_at_the_same_token(self) -> None:
        ending = self.rule(2).find([], [5, 2])
        assert ending
        assert ending.reason == pb.FINISH_REASON_END_ID

    def test_a_stop_word_may_span_runs(self) -> None:
        rule = self.rule(stop_token_ids=((7, 8, 9),))
        assert rule.find([1, 7, 8], [9, 1]) == Ending(4, pb.FINISH_REASON_STOP_WORD, (7, 8, 9))
        assert rule.find([7, 8, 9], [1, 1]) is None, "what ended before does not end again"

    def test_nothing_but_the_length_ends_below_min_tokens(self) -> None:
        rule = self.rule(min_tokens=3, stop_token_ids=((7,),))
        assert rule.find([], [2, 7, 7]) is None
        assert rule.find([], [2, 7, 5, 7]) == Ending(4, pb.FINISH_REASON_STOP_WORD, (7,))

    def test_end_ids_are_not_generated_below_min_tokens(self) -> None:
        rule = self.rule(min_tokens=3)
        assert rule.without_early_ends(0, [2, 2, 2, 2], 5) == [5, 5, 5, 2]
        assert rule.without_early_ends(1, [2, 2, 2], 5) == [5, 5, 2]

    @given(
        st.lists(st.integers(1, 4), min_size=1, max_size=30),
        st.integers(0, 30),
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), max_size=3),
        st.integers(0, 10),
        st.integers(1, 40),
    )
    def test_it_does_not_matter_where_a_run_is_cut(
        self,
        tokens: list[int],
        cut: int,
        words: list[tuple[int, ...]],
        min_tokens: int,
        max_tokens: int,
    ) -> None:
        rule = self.rule(max_tokens, min_tokens=min_tokens, stop_token_ids=tuple(words))
        cut = min(cut, len(tokens))
        whole = rule.find([], tokens)
        first = rule.find([], tokens[:cut]) if cut else None
        in_runs = first or (rule.find(tokens[:cut], tokens[cut:]) if tokens[cut:] else None)
        assert in_runs == whole
