"""A persistent map is a dict, and a change copies little of it."""

from __future__ import annotations

import random

from trtmesh.router.values.persistent_map import BUCKETS, PersistentMap


def test_changes_are_those_of_a_dict_and_leave_the_former_map() -> None:
    chance = random.Random(3)
    plain: dict[int, int] = {}
    known = PersistentMap(plain)
    for number in range(500):
        gone = [chance.randrange(400) for _ in range(chance.randrange(3))]
        added = {chance.randrange(400): number for _ in range(chance.randrange(3))}
        before, former = known, dict(plain)
        known = known.changed(gone, added)
        for key in gone:
            plain.pop(key, None)
        plain |= added
        assert [*known.items()] == [*plain.items()]
        assert len(known) == len(plain)
        assert sorted(known.unsorted()) == sorted(plain.values())
        assert [*before.items()] == [*former.items()]
        keys = former.keys() | plain.keys()
        changed = {key for key in keys if former.get(key) != plain.get(key)}
        assert {*before.difference(known)} == changed
    assert known.get(-1) is None
    assert known.get(-1, 5) == 5
    assert PersistentMap(plain) == known == plain


def test_a_change_copies_one_bucket_whatever_the_size() -> None:
    known = PersistentMap(dict.fromkeys(range(100000), ""))
    later = known.changed([1], {2: "two"})
    shared = sum(a is b for a, b in zip(known._buckets, later._buckets, strict=True))
    assert shared == BUCKETS - 2


def test_the_first_values_in_no_order_need_no_look_at_the_others() -> None:
    known = PersistentMap(dict.fromkeys(range(1000), ""))
    del known._buckets[1:]
    assert next(known.unsorted()) == ""
