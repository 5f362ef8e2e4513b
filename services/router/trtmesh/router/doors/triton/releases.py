"""Releases of TensorRT-LLM's Triton models, with the declaration of each tensor.

A history is text of the form `v0.5 UINT32 -1 required; v0.7 INT32 required; 2025-05 absent`: at each release that
changes a declaration its data type, its dims (left out: one value) and whether the tensor is required. A first entry
without a release holds for all. `own` stands for the newest release: no template of Triton's has the tensor, but
models of this server declare it. A tensor that is `undeclared` is accepted only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from trtmesh.router.doors.triton.settings import NEWEST_RELEASE, Release

RELEASES: tuple[Release, ...] = get_args(Release)
FOREVER = len(RELEASES)
ONE = (1,)
"""Dims of a single value."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A tensor in the configurations of the releases `since` up to, without, `until`: indexes of RELEASES."""

    since: int
    until: int
    data_types: tuple[str, ...]
    """The declared type, then others that are accepted."""
    dims: tuple[int, ...]
    required: bool

    def covers(self, release: int) -> bool:
        return self.since <= release < self.until


@dataclass(frozen=True, slots=True)
class History:
    """The declarations of a tensor, oldest first."""

    text: str
    declarations: tuple[Declaration, ...]
    required: bool
    """Whether every release requires it."""

    @classmethod
    def parse(cls, text: str) -> History:
        """Parses a history; `text` is part of the code."""
        entries = [entry.split() for entry in text.split(";")]
        if entries[0][0] not in ("own", "undeclared") and not _is_release(entries[0][0]):
            entries[0].insert(0, RELEASES[0])
        starts = [_index(words[0]) for words in entries]
        ends = [*starts[1:], FOREVER]
        present = [
            _declaration(words[1:], since, until)
            for words, since, until in zip(entries, starts, ends, strict=True)
            if words[1] != "absent"
        ]
        required = len(present) == len(entries) and all(each.required for each in present)
        return cls(text, tuple(present), required)

    def at(self, release: Release) -> Declaration | None:
        """The declaration of a release, None without one."""
        index = RELEASES.index(release)
        return next((each for each in self.declarations if each.covers(index)), None)

    @property
    def newest(self) -> Declaration:
        return self.declarations[-1]

    @property
    def data_types(self) -> tuple[str, ...]:
        """All accepted types, the newest first."""
        types = [name for each in reversed(self.declarations) for name in each.data_types]
        return tuple(dict.fromkeys(types))

    @property
    def former_dims(self) -> tuple[tuple[int, ...], ...]:
        """Other accepted dims. A single value stays one, although old releases declared any number."""
        if self.newest.dims == ONE:
            return ()
        former = dict.fromkeys(each.dims for each in self.declarations[:-1])
        return tuple(dims for dims in former if dims != self.newest.dims)


def _declaration(words: list[str], since: int, until: int) -> Declaration:
    """From words such as `INT32 2,-1 required`."""
    types, *rest = words
    required = rest[-1:] == ["required"]
    dims = tuple(int(extent) for extent in rest[0].split(",")) if len(rest) > required else ONE
    return Declaration(since, until, tuple(types.split("/")), dims, required)


def _is_release(word: str) -> bool:
    return word in RELEASES or f"{word}.0" in RELEASES


def _index(word: str) -> int:
    """The index of a release such as `v0.5`, short for v0.5.0."""
    if word == "undeclared":
        return FOREVER
    known: Sequence[str] = RELEASES
    name = NEWEST_RELEASE if word == "own" else word
    return known.index(name if name in known else f"{name}.0")
