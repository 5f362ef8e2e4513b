"""The file of API keys: a line per key with a name, the digest of the key, and limits.

    alice   sha256:2bd806c9...   tokens_per_second=500 max_items=8 expires=2027-01-31

The file has no key. Errors name a line, and never repeat a word of it: it may be a key in the wrong place.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from itertools import groupby
from operator import attrgetter

from pydantic import ValidationError
from trtmesh.chassis.metrics import OTHER
from trtmesh.chassis.validation import problem_of
from trtmesh.router.callers.identity import ANONYMOUS
from trtmesh.router.callers.limits import RateLimit
from trtmesh.router.metrics import UNLISTED

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = (ANONYMOUS, UNLISTED, OTHER)
"""Values that the label of callers has for others."""
DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
EXPIRES = "expires"
LIMITS = tuple(RateLimit.model_fields)

KEY_START = "trtmesh_"
"""Lets scanners for leaked secrets recognise a key."""


class BadKeyFile(ValueError):
    """A line of the file is wrong."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line} {problem}")


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key, known by the digest. Several keys may have the same name, such as a key and the successor."""

    name: str
    digest: bytes = field(repr=False)
    limits: Mapping[str, str] = field(default_factory=dict)
    """Values of RateLimit as written; the others are the router's."""
    expires: datetime | None = None
    line: int = field(default=0, compare=False)

    @property
    def short_digest(self) -> str:
        """Tells apart the keys of a name."""
        return self.digest.hex()[:12]

    def is_expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires

    def __str__(self) -> str:
        """The line of the file."""
        words = [self.name, f"sha256:{self.digest.hex()}"]
        words += [f"{name}={value}" for name, value in self.limits.items()]
        if self.expires is not None:
            words.append(f"{EXPIRES}={self.expires.isoformat().replace('+00:00', 'Z')}")
        return " ".join(words)


def new_key() -> str:
    """A random key of 256 bits."""
    return KEY_START + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """The digest of a key. Random keys need no slow hash."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(text: str) -> Sequence[ListedKey]:
    """The keys of a file. Raises BadKeyFile."""
    keys = list(_read(text))
    lines: dict[bytes, int] = {}
    for key in keys:
        if (line := lines.setdefault(key.digest, key.line)) != key.line:
            raise BadKeyFile(key.line, f"has the key of line {line}; a key stands once")
    by_name = attrgetter("name")
    for name, group in groupby(sorted(keys, key=by_name), by_name):
        first, *more = group
        for key in more:
            if key.limits != first.limits:
                raise BadKeyFile(
                    key.line,
                    f"has other limits than line {first.line} for {name}; keys of a name share their limits",
                )
    return keys


def _read(text: str) -> Iterator[ListedKey]:
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            yield _read_line(number, words)


def _read_line(line: int, words: Sequence[str]) -> ListedKey:
    name, *rest = words
    check_name(line, name)
    digest = DIGEST.fullmatch(rest[0]) if rest else None
    if digest is None:
        raise BadKeyFile(
            line,
            "must have `sha256:` and 64 hexadecimal digits as its second word, the digest of a key;"
            " `trtmesh keys add` writes such a line",
        )
    values = dict(_read_value(line, place, word) for place, word in enumerate(rest[1:], 3))
    if len(values) < len(rest) - 1:
        raise BadKeyFile(line, "sets a limit twice")
    expires = _read_expires(line, values.pop(EXPIRES)) if EXPIRES in values else None
    check_limits(line, values)
    return ListedKey(name, bytes.fromhex(digest[1]), values, expires, line)


def check_name(line: int, name: str) -> None:
    """Raises BadKeyFile unless a key may have the name."""
    if not NAME.fullmatch(name):
        raise BadKeyFile(
            line, "must begin with a name of 1 to 64 letters, digits, dots, hyphens or underscores"
        )
    if name.startswith(KEY_START):
        raise BadKeyFile(line, "begins with a key in place of a name; names stand in logs")
    if name in RESERVED:
        raise BadKeyFile(line, f"has the name {name}, which means callers without a key of a file")


def check_limits(line: int, values: Mapping[str, str]) -> RateLimit:
    """Raises BadKeyFile for a limit outside its range."""
    try:
        return RateLimit.model_validate(values)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise BadKeyFile(line, f"has a wrong {first['loc'][0]}: it {problem_of(first)}") from None


def _read_value(line: int, place: int, word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or name not in (*LIMITS, EXPIRES):
        known = ", ".join((*LIMITS, EXPIRES))
        raise BadKeyFile(line, f"has a word {place} that is not LIMIT=VALUE; limits are {known}")
    return name, value


def _read_expires(line: int, value: str) -> datetime:
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise BadKeyFile(
            line, "has a wrong expires: it must be a date or a time such as 2027-01-31T12:00:00Z"
        ) from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
