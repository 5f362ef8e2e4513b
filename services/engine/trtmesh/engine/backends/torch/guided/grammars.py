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
from math import inf
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
FREE_SECONDS, SECONDS_OF_TOKEN = 0.25, 0.002
"""Most CPU time to follow a guide. Schemas take microseconds a token; a grammar with many readings of a text takes more
with each token, in the steps of all sequences."""

FIRST_SECONDS = 0.001
"""Expected time of the first mask of a sequence: more than most take."""
NARROW, SAMPLES = 16, 256
"""A narrow mask has allowed tokens in less than one of so many bytes, of about so many that are looked at."""

Row = NDArray[np.uint8]
"""A bit per id, in ascending order from the lowest bit of each byte."""


class Matcher(Protocol):
    """A place in a grammar, after any number of tokens."""

    automaton: threading.Lock
    """Held during the work on one of the places in an automaton, which copies share."""

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
Compile = Callable[[GuidedDecoding, Check], Matcher]
"""Returns the place before the first token. Calls the check before each part of the work; an exception of the check
ends the work. Raises InvalidField for an unusable guide."""


@dataclass(slots=True)
class Grammar:
    """A compiled guide."""

    start: Matcher
    further: list[Matcher] = field(default_factory=list)
    """The same place in automata of their own: masks of one automaton are made one after another."""
    is_spoilt: bool = False
    """Whether an automaton is at the limit of size."""
    leases: list[PartLease] = field(default_factory=list)
    """Of the items with this grammar."""
    _begun: int = 0

    @property
    def is_used(self) -> bool:
        return any(each.holders for each in self.leases)

    def begin(self) -> Matcher:
        """A place before the first token, of each automaton in turn."""
        self._begun += 1
        turn = self._begun % (1 + len(self.further))
        return (self.further[turn - 1] if turn else self.start).copy()

    def automata(self, lease: PartLease, most: int) -> int:
        """How many automata its sequences need, with those of one more item. Its lease is held here too."""
        self.leases = [*(each for each in self.leases if each.holders), lease]
        return min(most, sum(each.holders for each in self.leases) - 1)


class Guide:
    """The generated tokens of a sequence in the grammar, and the next mask. A thread at a time."""

    def __init__(self, grammar: Grammar, prompt_tokens: int) -> None:
        self._grammar = grammar
        self._matcher = grammar.begin()
        self._prompt_tokens = self._next = prompt_tokens
        self._row: Row = np.zeros(self._matcher.mask_bytes, dtype=np.uint8)
        self._has_mask = False
        self._was_narrow = False
        """Whether the last mask allowed few tokens."""
        self._is_steady = True
        """Whether all masks after such took microseconds."""
        self.seconds = 0.0
        """CPU time so far."""
        self.last_seconds = FIRST_SECONDS
        """CPU time of the last mask, including the steps before the mask."""
        self.problem = ""
        """Why the grammar can be followed no further."""
        self.is_busy = False
        """Whether another thread makes the mask; meanwhile nothing else is asked of the guide."""
        self.sat_out = 0
        """Steps that the sequence sat out for the next mask."""

    def catch_up(self, tokens: SequenceOf[int]) -> None:
        """Takes in the tokens added since the last call."""
        if self._next < len(tokens):
            began = time.thread_time()
            self._follow(tokens, inf)
            self._count(began)

    def mask(self, end_ids: Iterable[int]) -> Row:
        """The bits of the tokens allowed next, of end ids only where the text may end; until the next mask."""
        if not self._has_mask:
            began = time.thread_time()
            self._make(end_ids)
            self._count(began)
        return self._row

    def forced(self, tokens: SequenceOf[int]) -> SequenceOf[int]:
        """The tokens of the next forced text; none if finding the text may take long."""
        if self.is_busy or self.problem or self.last_seconds > FIRST_SECONDS:
            return ()
        self.catch_up(tokens)
        began = time.thread_time()
        found = self._matcher.forced()
        self._count(began)
        return found

    @property
    def automaton(self) -> threading.Lock:
        return self._matcher.automaton

    def is_quick(self, tokens: SequenceOf[int]) -> bool:
        """Whether the next mask takes microseconds, as far as one can tell: one that takes long is expected within a
        text, where the mask before allowed many tokens."""
        return (
            self._was_narrow
            and self._is_steady
            and self._next + 1 == len(tokens)
            and not self.automaton.locked()
        )

    def has_mask(self, tokens: SequenceOf[int]) -> bool:
        """Whether the mask of the token after `tokens` is made."""
        return self._has_mask and self._next == len(tokens)

    def makes(self, tokens: SequenceOf[int], end_ids: Iterable[int], seconds: float) -> bool:
        """Returns whether the mask is made: not where the tokens added since the last call take more than `seconds`."""
        if self.has_mask(tokens):
            return True
        began, was_narrow = time.thread_time(), self._was_narrow
        is_made = self._follow(tokens, began + seconds)
        if is_made:
            self._make(end_ids)
        self.last_seconds = self._count(began)
        self._is_steady &= not was_narrow or self.last_seconds <= FIRST_SECONDS
        return is_made

    def _follow(self, tokens: SequenceOf[int], until: float) -> bool:
        while self._next < len(tokens):
            self._has_mask = False
            # Token by token: with many readings of the text, a token may take milliseconds.
            if not self._matcher.accept(tokens[self._next : self._next + 1]):
                self._fail(self._matcher.problem or "a generated token does not follow the grammar")
                self._next = len(tokens)
                break
            self._next += 1
            if self._next < len(tokens) and time.thread_time() > until:
                return False
        return True

    def _make(self, end_ids: Iterable[int]) -> None:
        row = self._row
        if problem := self.problem or self._matcher.fill(row):
            self._fail(problem)
        elif self._matcher.may_end:
            for token in end_ids:
                row[token >> 3] |= 1 << (token & 7)
        else:
            for token in end_ids:
                row[token >> 3] &= 0xFF ^ (1 << (token & 7))
        seen = row[:: max(1, len(row) // SAMPLES)]
        self._was_narrow = int(np.count_nonzero(seen)) * NARROW < len(seen)
        self._has_mask = True

    def _fail(self, problem: str) -> None:
        """From now on no token is allowed."""
        self.problem = self.problem or problem
        self._grammar.is_spoilt = True
        self._row[:] = 0

    def _count(self, began: float) -> float:
        """Returns the CPU time since `began`."""
        took = time.thread_time() - began
        self.seconds += took
        tokens = self._next - self._prompt_tokens
        if not self.problem and self.seconds > FREE_SECONDS + SECONDS_OF_TOKEN * tokens:
            spent = f"it took {self.seconds * 1000:.0f} ms for {tokens} tokens"
            self._fail(f"{spent}, and may take 2 ms for each")
        return took


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
        """`automata` are the most of a grammar; each is for a sequence until there are more."""
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
            for other in self._kept.values():
                if other is not grammar and not other.is_used:
                    other.further.clear()
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
