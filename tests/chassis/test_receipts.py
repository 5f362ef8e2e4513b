"""Digests, marks and signatures of receipts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import examples
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.receipts import MODULUS, MOST_MARKS, Key, first_difference, of_sequence
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2 as receipt_pb

LENGTH = pb.FINISH_REASON_LENGTH


@settings(max_examples=examples(60, soak=2000))
@given(st.data(), st.lists(st.integers(0, 200_000), min_size=1, max_size=700))
def test_difference_is_placed_between_two_marks(data: st.DataObject, ids: list[int]) -> None:
    kept = of_sequence(ids, LENGTH)
    assert len(kept.marks) <= MOST_MARKS
    assert first_difference(kept, ids) is None
    at = data.draw(st.integers(0, len(ids) - 1))
    others = [*ids[:at], (ids[at] + 1) % 200_001, *ids[at + 1 :]]
    where = first_difference(kept, others)
    assert where is not None
    # A mark is that of another id in one case of 251; here no later token differs, and would tell.
    seen = (others[at] - ids[at]) % MODULUS or at >= len(kept.marks) * kept.tokens_per_mark
    assert not seen or at in where


def test_one_offset_is_told_of_a_short_sequence() -> None:
    ids = [*range(100, 100 + MOST_MARKS)]
    kept = of_sequence(ids, LENGTH)
    for at in range(MOST_MARKS):
        assert first_difference(kept, [*ids[:at], 7, *ids[at + 1 :]]) == range(at, at + 1)


@pytest.mark.parametrize("length", [1, 128, 129, 500])
def test_missing_and_further_tokens_differ(length: int) -> None:
    ids = [*range(length)]
    kept = of_sequence(ids, LENGTH)
    for others in (ids[:-1], [*ids, 7], []):
        where = first_difference(kept, others)
        assert where is not None
        assert min(length, len(others)) in where


def test_receipt_of_a_sequence_is_small() -> None:
    for length in (1, 100, 100_000):
        assert of_sequence([*range(length)], LENGTH).ByteSize() <= 80


def test_signature_vouches_for_the_receipt_of_its_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sixteen bytes or more\n")
    key, other = Key.read(file, "x"), Key(b"another key of more than 16")
    signed = receipt_pb.SignedReceipt(receipt=b"what was", key_id=key.id)
    signed.signature = key.sign(signed.receipt)
    assert key.signed(signed)
    assert not other.signed(signed)
    assert key.id != other.id
    signed.receipt = b"what was not"
    assert not key.signed(signed)


def test_unusable_key_names_the_setting(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("short \n")
    with pytest.raises(SettingsError, match="a key of 5 bytes but must name one of 16 to 4096"):
        Key.read(short, "router.receipts.key_file")
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        Key.read(tmp_path / "none", "router.receipts.key_file")
