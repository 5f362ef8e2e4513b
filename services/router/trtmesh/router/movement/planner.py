"""Which streams should move, with their KV, and where. Pure functions over a snapshot of the fleet.

The cost of the fleet, by the rates that placement predicts with:

    sum over workers of  step(sequences, rank) * remaining tokens  +  sequences * pressure(used KV)

A move takes `tokens * transfer + handoff`, and pays if the fleet's cost falls by PAYS times as much. So streams leave
full pools, crowded workers and batches whose largest adapter is theirs alone; those of an adapter are weighed together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trtmesh.router.placement.load_guard import pressure_of
from trtmesh.router.placement.residency import AdapterKey
from trtmesh.router.placement.snapshot import KvFacts

PAYS = 2.0
"""Least gain of a move, as a multiple of its cost: predictions err."""
MOST_SOURCES = MOST_TARGETS = 4
"""Workers that are weighed as either side of a move, so that a plan takes milliseconds in any fleet."""
MOST_STREAMS = 32
"""Streams of a worker that are weighed, those with most to come."""
MOST_GROUP = 8
"""Most streams of an adapter that move together."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A running sequence of this router."""

    number: int
    """Names it within a plan."""
    worker: str
    """Address."""
    tokens: int
    """Prompt and generated tokens, whose KV moves."""
    remaining: int
    """Predicted tokens to come."""
    adapter: AdapterKey | None = None
    rank: int = 0
    most_tokens: int = 0
    """Tokens at which its worker ends it at the latest, prompt included."""
    may_move: bool = True
    """Whether it can leave with its KV, and did not lately."""


@dataclass(frozen=True, slots=True)
class Site:
    """A worker of a model."""

    address: str
    takes: bool
    """Whether it takes sequences of others."""
    sequences: int
    most_sequences: int
    used_blocks: int
    total_blocks: int
    tokens_per_block: int
    longest_sequence: int
    """Tokens at which it ends a sequence that is alone there."""
    base_seconds: float
    """Time of a step without sequences."""
    sequence_seconds: float
    """Further time of a step for each sequence."""
    rank_seconds: float
    """Further time of a step for each unit of the largest rank."""
    prefill_seconds: float
    transfer_seconds: float
    """Time to receive the KV of a token."""
    handoff_seconds: float
    kv: KvFacts | None = None
    held: frozenset[AdapterKey] = frozenset()

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block) if self.tokens_per_block else 0

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks

    def move_seconds(self, tokens: int) -> float:
        """Time of a move to here."""
        return tokens * self.transfer_seconds + self.handoff_seconds


@dataclass(frozen=True, slots=True)
class Move:
    """Streams that move together from one worker to another."""

    streams: tuple[Stream, ...]
    sender: str
    receiver: str
    cost_seconds: float
    gain_seconds: float
    why: str

    @property
    def pays(self) -> bool:
        return self.gain_seconds >= PAYS * self.cost_seconds


@dataclass(slots=True)
class _Crew:
    """A worker with its streams, as far as a plan has changed them."""

    site: Site
    streams: dict[int, Stream] = field(default_factory=dict)
    remaining: int = 0
    ranks: Counter[int] = field(default_factory=Counter)

    def add(self, streams: Iterable[Stream]) -> None:
        for each in streams:
            self.streams[each.number] = each
            self.remaining += each.remaining
            self.ranks[each.rank] += 1

    def cost(self, add: Sequence[Stream] = (), drop: Sequence[Stream] = ()) -> float:
        """The cost with some streams more, or fewer."""
        site, more = self.site, len(add) - len(drop)
        ranks = self.ranks
        if add or drop:
            ranks = ranks + Counter(s.rank for s in add)
            ranks.subtract(s.rank for s in drop)
        rank = max((rank for rank, count in ranks.items() if count > 0), default=0)
        sequences = max(0, site.sequences + more)
        remaining = self.remaining + _remaining(add) - _remaining(drop)
        step = site.base_seconds + sequences * site.sequence_seconds + rank * site.rank_seconds
        blocks = site.used_blocks + self.blocks(add) - self.blocks(drop)
        return step * remaining + sequences * pressure_of(max(0, blocks), site.total_blocks)

    def blocks(self, streams: Iterable[Stream]) -> int:
        return sum(self.site.blocks(each.tokens) for each in streams)

    def has_room(self, streams: Sequence[Stream]) -> bool:
        """Whether it takes streams, and what they have to come, without a queue."""
        site = self.site
        wanted = sum(site.blocks(each.tokens + each.remaining) for each in streams)
        return (
            site.takes
            and site.sequences + len(streams) <= site.most_sequences
            and wanted <= site.free_blocks
            and all(each.most_tokens <= site.longest_sequence for each in streams)
            and all(each.adapter is None or each.adapter in site.held for each in streams)
        )

    def take(self, streams: Sequence[Stream], sender: _Crew) -> None:
        """Carries out a move."""
        here, there = self.blocks(streams), sender.blocks(streams)
        for crew, count, blocks in ((self, 1, here), (sender, -1, -there)):
            crew.site = replace(
                crew.site,
                sequences=max(0, crew.site.sequences + count * len(streams)),
                used_blocks=max(0, crew.site.used_blocks + blocks),
            )
        for each in streams:
            del sender.streams[each.number]
            sender.remaining -= each.remaining
            sender.ranks[each.rank] -= 1
        # Once in a plan, whatever follows.
        self.add(replace(each, worker=self.site.address, may_move=False) for each in streams)


def _remaining(streams: Iterable[Stream]) -> int:
    return sum(each.remaining for each in streams)


def _crews(sites: Sequence[Site], streams: Iterable[Stream]) -> dict[str, _Crew]:
    crews = {site.address: _Crew(site) for site in sites}
    for stream in streams:
        if stream.worker in crews:
            crews[stream.worker].add((stream,))
    return crews


def _fits(sender: Site, receiver: Site) -> bool:
    ours, theirs = sender.kv, receiver.kv
    return ours is not None and theirs is not None and sender is not receiver and ours.fits(theirs)


def evened(sites: Sequence[Site], streams: Iterable[Stream], most: int) -> list[Move]:
    """At most so many moves that lower the cost of the fleet, the best first."""
    crews, moves = _crews(sites, streams), list[Move]()
    while len(moves) < most:
        best = max(_weighed(crews), key=_profit, default=None)
        if best is None:
            break
        moves.append(best)
        crews[best.receiver].take(best.streams, crews[best.sender])
    return moves


def _profit(move: Move) -> float:
    return move.gain_seconds - move.cost_seconds


def _weighed(crews: Mapping[str, _Crew]) -> Iterator[Move]:
    """Every move between the dearest and the cheapest workers that pays."""
    by_cost = sorted(crews.values(), key=lambda crew: crew.cost())
    for sender in by_cost[::-1][:MOST_SOURCES]:
        for receiver in by_cost[:MOST_TARGETS]:
            if _fits(sender.site, receiver.site):
                yield from filter(lambda move: move.pays, _between(sender, receiver))


def _between(sender: _Crew, receiver: _Crew) -> Iterator[Move]:
    before, step = sender.cost() + receiver.cost(), sender.site.base_seconds
    for streams, why in _candidates(sender):
        stay = max(each.remaining for each in streams) * step
        longest = max(receiver.site.move_seconds(each.tokens) for each in streams)
        # What ends soon is not worth a move, however full the pool.
        if stay > PAYS * longest and receiver.has_room(streams):
            after = sender.cost(drop=streams) + receiver.cost(add=streams)
            yield _move(streams, sender.site, receiver.site, before - after, why)


def _candidates(crew: _Crew) -> Iterator[tuple[tuple[Stream, ...], str]]:
    movable = [each for each in crew.streams.values() if each.may_move]
    for each in sorted(movable, key=lambda each: -each.remaining)[:MOST_STREAMS]:
        yield (each,), "evens out load and KV"
    by_adapter: dict[AdapterKey, list[Stream]] = {}
    for each in crew.streams.values():
        if each.adapter is not None:
            by_adapter.setdefault(each.adapter, []).append(each)
    for group in by_adapter.values():
        if 1 < len(group) <= MOST_GROUP and all(each.may_move for each in group):
            yield tuple(group), "gathers the sequences of an adapter"


def _move(streams: Sequence[Stream], sender: Site, receiver: Site, gain: float, why: str) -> Move:
    cost = sum(receiver.move_seconds(each.tokens) for each in streams)
    return Move(tuple(streams), sender.address, receiver.address, cost, gain, why)


def roomy(
    sites: Sequence[Site], streams: Sequence[Stream], tokens: int, only: str = ""
) -> list[Move]:
    """The cheapest moves after which a worker, or the `only` one, has free blocks for a prompt of so many tokens; none
    if one has, or if it would wait no longer than the moves take."""
    hosts = [s for s in sites if s.takes and s.tokens_per_block and only in ("", s.address)]
    if any(site.blocks(tokens) <= site.free_blocks for site in hosts):
        return []
    plans = [_room_at(host, sites, streams, tokens) for host in hosts]
    return min((p for p in plans if p), key=lambda p: sum(m.cost_seconds for m in p), default=[])


def _room_at(
    host: Site, sites: Sequence[Site], streams: Sequence[Stream], tokens: int
) -> list[Move]:
    crews, moves = _crews(sites, streams), list[Move]()
    home, lacking = crews[host.address], host.blocks(tokens) - host.free_blocks
    gain = _wait_seconds(home, lacking)
    movable = [each for each in home.streams.values() if each.may_move]
    for each in sorted(movable, key=lambda each: -each.tokens):
        able = [c for c in crews.values() if _fits(host, c.site) and c.has_room((each,))]
        if not able:
            continue
        receiver = min(able, key=lambda crew: crew.site.used_blocks / crew.site.total_blocks)
        moves.append(_move((each,), host, receiver.site, gain, f"makes room for {tokens} tokens"))
        receiver.take((each,), home)
        lacking -= host.blocks(each.tokens)
        if lacking <= 0:
            break
    pays = gain >= PAYS * sum(move.cost_seconds for move in moves)
    return moves if lacking <= 0 and pays else []


def _wait_seconds(crew: _Crew, lacking: int) -> float:
    """Time until streams that end leave so many blocks free."""
    site, ends = crew.site, 0
    step = site.base_seconds + site.sequences * site.sequence_seconds
    for each in sorted(crew.streams.values(), key=lambda each: each.remaining):
        ends, lacking = each.remaining, lacking - site.blocks(each.tokens)
        if lacking <= 0:
            break
    return step * ends


def emptied(site: Site, streams: Iterable[Stream], seconds: float, receiver: Site) -> list[Stream]:
    """The streams that a worker should hand over before it is gone in so many seconds, what pays most first: those that
    will not end by themselves, by the computation that a moved KV saves for each second of its transfer."""
    step = site.base_seconds + site.sequences * site.sequence_seconds
    lasting = [each for each in streams if each.remaining * step >= seconds]

    def worth(stream: Stream) -> float:
        saved = stream.tokens * receiver.prefill_seconds
        return saved / max(receiver.move_seconds(stream.tokens), 1e-9)

    return sorted(lasting, key=lambda each: -worth(each))
