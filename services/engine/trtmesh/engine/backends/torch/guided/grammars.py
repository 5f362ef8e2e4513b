"""Grammars of guided items: compiled once off the step loop, kept by digest, followed by each sequence separately.

The state of a guided sequence is the grammar and the generated tokens. So a guided sequence continues after a pause and
on another worker like any sequence: the grammar follows all tokens again, at about a microsecond each.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import ceil, inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from trtmesh.chassis.errors import InvalidField, QueueFull
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backends.torch.preparation import Done, PartLease, Preparation, Unwanted
from trtmesh.engine.guides import FIELD

THREADS = 2
"""Grammars compiled at once."""
MOST_COMPILE_SECONDS = 1.0
"""Most CPU time to compile a guide. The limits of the library bound each part of the work; most parts take far less."""
MOST_WAITING = 256
"""Most guided items in the worker, from the submission to the end; an item counts once, with any number of
sequences."""
MOST_KEPT = 32
"""Grammars kept after the last use; an automaton in use takes up to 32 MiB."""
SHARERS = 2
"""Sequences for each automaton of a grammar, up to the most automata: those that share one wait for each other."""

FREE_SECONDS, SECONDS_OF_TOKEN = 0.25, 0.002
"""Most CPU time to follow a guide. Schemas take microseconds a token; a grammar with many readings of a text takes more
with each token, in the steps of all sequences."""

FIRST_SECONDS = 0.001
"""Expected time of the first mask of a sequence: more than most take."""

TOGETHER_SECONDS = 0.0005
"""Expected time of masks filled together, and the most that one of these counts."""

Row = NDArray[np.uint8]
"""A bit per id, in ascending order from the lowest bit of each byte."""


class Matcher(Protocol):
    """A place in a grammar, after any number of tokens."""

    def copy(self) -> Matcher:
        """The same place, to go on from separately."""

    def accept(self, token_ids: SequenceOf[int]) -> int:
        """Follows tokens as far as the grammar allows. Returns how many."""

    @property
    def mask_bytes(self) -> int:
        """The size of a row."""

    def forced(self) -> SequenceOf[int]:
        """The tokens of the next forced text, as written by the tokenizer; other tokens may spell the same text."""

    def fill(self, row: Row) -> str:
        """Sets the bits of the ids allowed next, and clears all others, end ids included. Returns the problem."""

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete."""

    @property
    def problem(self) -> str:
        """Why the grammar cannot be followed any further, or ''."""


Check = Callable[[], None]
FillTogether = Callable[[SequenceOf[Matcher], Row], None]
"""Fills a row for each place, as `fill` does, several at a time: rows are [places, bytes]."""
Compile = Callable[[GuidedDecoding, Check], Matcher]
"""Returns the place before the first token. Calls the check before each part of the work; an exception of the check
ends the work. Raises InvalidField for an unusable guide."""


@dataclass(slots=True)
class Grammar:
    """A compiled guide."""

    start: Matcher
    further: list[Matcher] = field(default_factory=list)
    """The same place in automata of their own: masks of one automaton are filled one after another."""
    is_spoilt: bool = False
    """Whether an automaton is at the limit of size."""
    leases: list[PartLease] = field(default_factory=list)
    """Of the items with this grammar."""
    _begun: int = 0

    def begin(self) -> Matcher:
        """A place before the first token, of each automaton in turn."""
        self._begun += 1
        turn = self._begun % (1 + len(self.further))
        return (self.further[turn - 1] if turn else self.start).copy()

    def automata(self, lease: PartLease, most: int) -> int:
        """How many automata its sequences need, with those of one more item."""
        self.leases = [*(each for each in self.leases if each.holders), lease]
        return min(most, ceil(sum(each.holders for each in self.leases) / SHARERS))


class Guide:
    """The generated tokens of a sequence in the grammar, and the next mask."""

    def __init__(self, grammar: Grammar, prompt_tokens: int) -> None:
        self._grammar = grammar
        self._matcher = grammar.begin()
        self._prompt_tokens = self._next = prompt_tokens
        self._mask: Row | None = None
        self.seconds = 0.0
        """CPU time so far."""
        self.last_seconds = FIRST_SECONDS
        """CPU time of the last mask, including the steps before the mask."""
        self.problem = ""
        """Why the grammar can be followed no further."""

    def catch_up(self, tokens: SequenceOf[int]) -> None:
        """Takes in the tokens added since the last call."""
        self._follow(tokens, inf)

    def place(self, tokens: SequenceOf[int], seconds: float) -> Matcher | None:
        """Returns the place after the tokens, for a mask filled by others. Returns None if the mask exists, or if the
        tokens added since the last call take more than `seconds`."""
        if not self._follow(tokens, seconds) or self._mask is not None or self.problem:
            return None
        return self._matcher

    def take(self, row: Row, end_ids: Iterable[int], seconds: float) -> None:
        """Takes the row filled by others in so many seconds, together with the rows of other guides."""
        self.last_seconds = seconds
        # A slow guide must not be blamed on all.
        self.seconds += min(seconds, TOGETHER_SECONDS)
        self._mask = self._ended(row, end_ids)

    def mask(self, end_ids: Iterable[int]) -> Row:
        """The bits of the tokens allowed next; of end ids only where the text may end."""
        if self._mask is None:
            self._mask = self._made(end_ids)
        return self._mask

    def forced(self, tokens: SequenceOf[int]) -> SequenceOf[int]:
        """The tokens of the next forced text; none if finding the text may take long."""
        if self.problem or self.last_seconds > FIRST_SECONDS:
            return ()
        self.catch_up(tokens)
        began = time.thread_time()
        found = self._matcher.forced()
        self._count(began)
        return found

    def makes(self, tokens: SequenceOf[int], end_ids: Iterable[int], seconds: float) -> bool:
        """Returns whether the mask is made: not where the tokens added since the last call take more than `seconds`."""
        if self._next == len(tokens) and self._mask is not None:
            return True
        began = self.seconds
        is_made = self._follow(tokens, seconds)
        if is_made:
            self.mask(end_ids)
        self.last_seconds = self.seconds - began
        return is_made

    def _follow(self, tokens: SequenceOf[int], seconds: float) -> bool:
        """Returns whether all tokens were followed."""
        if self._next == len(tokens):
            return True
        began = time.thread_time()
        while self._next < len(tokens):
            self._mask = None
            # Token by token: with many readings of the text, a token may take milliseconds.
            if not self._matcher.accept(tokens[self._next : self._next + 1]):
                refused = self._matcher.problem or "a generated token does not follow the grammar"
                self.problem = self.problem or refused
                self._next = len(tokens)
                break
            self._next += 1
            if self._next < len(tokens) and time.thread_time() > began + seconds:
                break
        self._count(began)
        return self._next == len(tokens)

    def _made(self, end_ids: Iterable[int]) -> Row:
        row = np.zeros(self._matcher.mask_bytes, dtype=np.uint8)
        began = time.thread_time()
        self.problem = self.problem or self._matcher.fill(row)
        self._count(began)
        return self._ended(row, end_ids)

    def _ended(self, row: Row, end_ids: Iterable[int]) -> Row:
        """The row with the bits of the end ids."""
        self.problem = self.problem or self._matcher.problem
        if self.problem:
            self._grammar.is_spoilt = True
            row[:] = 0
            return row
        may_end = self._matcher.may_end
        for token in end_ids:
            bit = 1 << (token & 7)
            if may_end:
                row[token >> 3] |= bit
            else:
                row[token >> 3] &= 0xFF ^ bit
        return row

    def _count(self, began: float) -> None:
        self.seconds += time.thread_time() - began
        tokens = self._next - self._prompt_tokens
        if not self.problem and self.seconds > FREE_SECONDS + SECONDS_OF_TOKEN * tokens:
            took = f"it took {self.seconds * 1000:.0f} ms for {tokens} tokens"
            self.problem = f"{took}, and may take 2 ms for each"
            self._mask = None


@dataclass(slots=True)
class GuideCounts:
    """Counters; they only grow."""

    compiled: int = 0
    kept: int = 0
    """Items with a grammar kept from earlier items."""
    compile_seconds: float = 0.0
    """CPU time, also of masks."""
    mask_seconds: float = 0.0
    late_masks: int = 0
    """Steps sat out by sequences."""
    not_compiled: int = 0
    not_followed: int = 0
    queue_full: int = 0


class Grammars:
    """Compiles the guides of items on separate threads, and keeps the last grammars."""

    def __init__(self, compile_guide: Compile, automata: int = 1) -> None:
        """`automata` are the most of a grammar: as many as there are threads to fill masks."""
        self._compile_guide = compile_guide
        self._automata = automata
        self.counts = GuideCounts()
        self._preparation = Preparation("grammars", MOST_WAITING, THREADS)
        self.close = self._preparation.close
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()

    def compile(
        self,
        request_id: str,
        asked: GuidedDecoding,
        holders: int,
        done: Done,
    ) -> PartLease:
        """Queues a guide; `holders` sequences will hold the grammar. Raises QueueFull."""
        make = partial(self._grammar, asked)
        what = "grammar could not be compiled"
        lease = self._preparation.begin(request_id, what, make, 1, holders, done)
        if lease is None:
            self.counts.queue_full += 1
            raise QueueFull.of(
                MOST_WAITING,
                f"{MOST_WAITING} items with a guide, the most that it takes, are in the worker",
            )
        return lease

    def _grammar(self, asked: GuidedDecoding, lease: PartLease) -> Grammar:
        """Raises InvalidField, or Unwanted once no sequence waits for the grammar."""
        name = digest_of(asked)
        with self._lock:
            grammar = self._kept.get(name)
        is_kept = grammar is not None and not grammar.is_spoilt
        if grammar is None or not is_kept:
            grammar = Grammar(self._compiled(asked, lease))
        with self._lock:
            self.counts.kept += is_kept
            self._kept[name] = grammar
            self._kept.move_to_end(name)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            missing = grammar.automata(lease, self._automata) - 1 - len(grammar.further)
        for _ in range(missing):
            grammar.further.append(self._compiled(asked, lease))
        return grammar

    def _compiled(self, asked: GuidedDecoding, lease: PartLease) -> Matcher:
        began, start = time.thread_time(), None

        def check() -> None:
            lease.check()
            if time.thread_time() - began > MOST_COMPILE_SECONDS:
                limit = f"takes more than {MOST_COMPILE_SECONDS:.0f} s of CPU time to compile"
                raise InvalidField(limit, field=FIELD)

        refused = 1
        try:
            start = self._compile_guide(asked, check)
        except Unwanted:
            refused = 0
            raise
        finally:
            with self._lock:
                self.counts.compile_seconds += time.thread_time() - began
                self.counts.compiled += start is not None
                self.counts.not_compiled += refused if start is None else 0
        return start


def digest_of(asked: GuidedDecoding) -> bytes:
    """Names a grammar."""
    text = f"{asked.guide_type} {asked.max_whitespace} {asked.guide or ''}"
    return blake2b(text.encode(), digest_size=16).digest()
