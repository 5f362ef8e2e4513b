"""The lines of a file of API keys, and the secrecy of its errors."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from trtmesh.router.callers.key_file import BadKeyFile, ListedKey, digest_of, new_key, read_keys

SECRET = "trtmesh_c0ffee-and-more="
DIGEST = digest_of(SECRET).hex()


def test_line_and_key_are_the_same() -> None:
    expires = datetime(2031, 1, 31, 12, tzinfo=UTC)
    key = ListedKey("alice", digest_of(SECRET), {"max_items": "8", "burst_items": "9"}, expires)
    assert str(key) == (
        f"alice sha256:{DIGEST} max_items=8 burst_items=9 expires=2031-01-31T12:00:00Z"
    )
    assert read_keys(f"# ours\n\n{key}  # until 2031\n") == [key]
    assert SECRET not in repr(key)
    assert DIGEST not in repr(key)


def test_time_without_a_zone_is_utc() -> None:
    (key,) = read_keys(f"alice sha256:{DIGEST} expires=2031-01-31")
    assert key.expires == datetime(2031, 1, 31, tzinfo=UTC)
    assert key.is_expired(datetime(2031, 1, 31, tzinfo=UTC))
    assert not key.is_expired(datetime(2031, 1, 30, 23, 59, tzinfo=UTC))


def test_name_may_have_several_keys_with_the_same_limits() -> None:
    second = digest_of("another").hex()
    text = (
        f"alice sha256:{DIGEST} max_items=1\nalice sha256:{second} max_items=1 expires=2031-01-31"
    )
    assert [key.name for key in read_keys(text)] == ["alice", "alice"]
    with pytest.raises(BadKeyFile, match="line 2 has other limits than line 1 for alice"):
        read_keys(text.replace("max_items=1 e", "max_items=2 e"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (SECRET, "must begin with a name"),
        (f"{SECRET[:-1]} sha256:{DIGEST}", "begins with a key in place of a name"),
        ("alice", "must have `sha256:` and 64"),
        (f"alice {SECRET}", "must have `sha256:` and 64"),
        (f"alice:{SECRET}", "must begin with a name"),
        (f"{'a' * 65} sha256:{DIGEST}", "must begin with a name"),
        (f"anonymous sha256:{DIGEST}", "has the name anonymous"),
        (f"alice sha256:{DIGEST} {SECRET}", "has a word 3 that is not LIMIT=VALUE; limits are tok"),
        (f"alice sha256:{DIGEST} max_items=1 max_items=1", "sets a limit twice"),
        (f"alice sha256:{DIGEST} max_items=0", "has a wrong max_items: it must be at least 1"),
        (f"alice sha256:{DIGEST} max_items={SECRET}", "has a wrong max_items: it must be a whole"),
        (f"alice sha256:{DIGEST} expires={SECRET}", "has a wrong expires: it must be a date"),
        (f"bob sha256:{DIGEST}\nalice sha256:{DIGEST}", "has the key of line 2; a key stands once"),
    ],
)
def test_error_names_the_line_and_no_word_of_it(line: str, problem: str) -> None:
    with pytest.raises(BadKeyFile) as refused:
        read_keys(f"# a comment\n{line}\n")
    number = 3 if "\n" in line else 2
    assert str(refused.value).startswith(f"line {number} {problem}")
    assert SECRET not in str(refused.value)
    assert DIGEST not in str(refused.value)


def test_new_keys_are_long_and_differ() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("trtmesh_") and len(key) == 51 for key in keys)
