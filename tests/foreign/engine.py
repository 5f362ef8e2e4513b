"""A stand-in for a production engine behind its contract: steps, a prefix cache with events, and a load record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from foreign.language import END_ID, next_token, other_token

BLOCK = 32


@dataclass
class Wanted:
    """One sequence as a contract asks for it."""

    call_id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None
    """None is greedy."""
    banned: frozenset[int] = frozenset()


@dataclass
class Delta:
    token_ids: list[int]
    cached_tokens: int
    reason: str = ""
    matched: int | None = None
    """An end id leaves it unset, as in vLLM."""


@dataclass
class Running:
    wanted: Wanted
    tokens: list[int]
    cached_tokens: int = 0
    deltas: asyncio.Queue[Delta] = field(default_factory=asyncio.Queue)
    stored: int = 0
    """Blocks that are in the cache."""


@dataclass(frozen=True)
class Stored:
    parent: int | None
    block: int
    token_ids: tuple[int, ...]


def block_hash(parent: int | None, token_ids: Sequence[int]) -> int:
    """The engine's own names of blocks, as signed numbers."""
    content = repr((parent, tuple(token_ids))).encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)


class StandInEngine:
    """Computes one token of every running sequence a step."""

    def __init__(self, step_seconds: float, max_running: int = 16) -> None:
        self.frozen = False
        self.keeps_ends = False
        """Whether the engine freezes between the last token of a sequence and the word that it was the last."""
        self.aborted: list[str] = []
        self.max_running = max_running
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.cache: dict[int, tuple[int, ...]] = {}
        self.total_blocks = 4096
        self.subscribers: set[asyncio.Queue[Stored]] = set()
        self._step_seconds = step_seconds
        self._work = asyncio.Event()
        self._loop = asyncio.create_task(self._step_for_ever())

    async def close(self) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)

    @property
    def used_share(self) -> float:
        blocks = sum(len(each.tokens) // BLOCK + 1 for each in self.running)
        return blocks / self.total_blocks

    async def generate(self, wanted: Wanted) -> AsyncIterator[Delta]:
        """The tokens of a sequence; leaving early ends it."""
        sequence = Running(wanted, list(wanted.prompt))
        self.waiting.append(sequence)
        self._work.set()
        try:
            while True:
                delta = await sequence.deltas.get()
                if delta.reason and self.keeps_ends:
                    yield replace(delta, reason="", matched=None)
                    await asyncio.Event().wait()
                yield delta
                if delta.reason:
                    return
        finally:
            self._forget(sequence)

    def abort(self, call_id: str) -> None:
        """Ends a sequence at once; a frozen engine hears nothing."""
        self.aborted.append(call_id)
        if self.frozen:
            return
        for sequence in [*self.running, *self.waiting]:
            if sequence.wanted.call_id == call_id:
                self._forget(sequence)
                sequence.deltas.put_nowait(Delta([], sequence.cached_tokens, "abort"))

    def _forget(self, sequence: Running) -> None:
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    async def _step_for_ever(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self._step_seconds)
            if not self.frozen:
                self._step()
            if not (self.running or self.waiting):
                self._work.clear()

    def _step(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting.pop(0)
            sequence.cached_tokens = self._cached_tokens(sequence.wanted.prompt)
            self.running.append(sequence)
        for sequence in [*self.running]:
            delta = self._advance(sequence)
            self._store(sequence)
            if delta.reason:
                self._forget(sequence)
            sequence.deltas.put_nowait(delta)

    def _advance(self, sequence: Running) -> Delta:
        wanted, tokens = sequence.wanted, sequence.tokens
        token = next_token(tokens, wanted.seed)
        stops = wanted.stop_ids | {END_ID}
        too_early = len(tokens) - len(wanted.prompt) < wanted.min_tokens and token in stops
        if too_early or token in wanted.banned:
            token = other_token(tokens)
        tokens.append(token)
        delta = Delta([token], sequence.cached_tokens)
        if token in wanted.stop_ids:
            delta.reason, delta.matched = "stop", token
        elif token == END_ID and not wanted.ignore_eos:
            delta.reason = "stop"
        elif len(tokens) - len(wanted.prompt) >= wanted.max_tokens:
            delta.reason = "length"
        return delta

    def _cached_tokens(self, prompt: Sequence[int]) -> int:
        parent, cached = None, 0
        for start in range(0, len(prompt) - BLOCK, BLOCK):
            parent = block_hash(parent, prompt[start : start + BLOCK])
            if parent not in self.cache:
                break
            cached += BLOCK
        return cached

    def _store(self, sequence: Running) -> None:
        """Full blocks enter the cache, generated tokens included."""
        parent: int | None = None
        for start in range(0, len(sequence.tokens) - BLOCK + 1, BLOCK):
            content = tuple(sequence.tokens[start : start + BLOCK])
            block = block_hash(parent, content)
            if start // BLOCK >= sequence.stored and block not in self.cache:
                self.cache[block] = content
                for subscriber in self.subscribers:
                    subscriber.put_nowait(Stored(parent, block, content))
            parent = block
        sequence.stored = len(sequence.tokens) // BLOCK
