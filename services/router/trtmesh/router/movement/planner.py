"""Which streams should move, with their KV, and where. Pure functions over a snapshot of the fleet.

The cost of the fleet, by the rates that placement predicts with:

    sum over workers of  step(sequences, rank) * remaining tokens  +  sequences * pressure(used KV)

A move takes `tokens * transfer + handoff`, and pays if the fleet's cost falls by PAYS times as much. So streams leave
full pools, crowded workers and batches whose largest adapter is theirs alone; those of an adapter are weighed together.
The streams of an item move together or not at all: they share the KV of their prompt, which one of them neither frees
nor finds elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trtmesh.router.placement.load_guard import pressure_of
from trtmesh.router.placement.residency import AdapterKey
from trtmesh.router.placement.snapshot import KvFacts

PAYS = 2.0
"""Least gain of a move, as a multiple of its cost: predictions err."""
MOST_SOURCES = MOST_TARGETS = 4
"""Workers that are weighed as either side of a move, so that a move is found as fast in any fleet."""
MOST_ALONE, MOST_GROUPS = 8, 4
"""Items of a worker that are weighed alone, those with most to come, and adapters, those of the largest rank."""
MOST_GROUP = 8
"""Most streams of an adapter that move together."""
MOST_LEAVING = 64
"""Most items that leave a worker for a prompt."""


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
    item: int | None = None
    """Equal for the streams of an item with several."""
    shared_tokens: int = 0
    """Leading tokens whose KV these have together."""
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
    kind: Mapping[str, str] = field(default_factory=dict)
    """Equal for workers whose tokens are equal."""
    held: Container[AdapterKey] = frozenset()
    stands_for: int = 1
    """Sequences of the worker that each of its streams here stands for: of many there is a sample."""

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block) if self.tokens_per_block else 0

    def own_blocks(self, tokens: int, shared: int) -> int:
        """Blocks for so many tokens beside those of the leading ones that others have."""
        return self.blocks(tokens) - (shared // self.tokens_per_block if shared else 0)

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks

    def move_seconds(self, tokens: int) -> float:
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
    alone: list[tuple[Stream, ...]] = field(default_factory=list)
    """The streams of each item that may move, those with most to come first."""
    groups: list[tuple[Stream, ...]] = field(default_factory=list)
    """All streams of an adapter that may move, those of the largest rank first."""

    def add(self, streams: Iterable[Stream], stands_for: int = 1) -> None:
        for each in streams:
            self.streams[each.number] = each
            self.remaining += each.remaining * stands_for
            self.ranks[each.rank] += stands_for

    def order(self) -> None:
        """Orders what may move."""
        by_item: dict[int, list[Stream]] = {}
        by_adapter: dict[AdapterKey, list[Stream]] = {}
        for each in self.streams.values():
            # A sample has not all streams of an item, nor of an adapter.
            if each.item is not None and self.site.stands_for == 1:
                by_item.setdefault(each.item, []).append(each)
            if each.adapter is not None and self.site.stands_for == 1:
                by_adapter.setdefault(each.adapter, []).append(each)
        single = [(each,) for each in self.streams.values() if each.item is None]
        items = [*single, *map(tuple, by_item.values())]
        movable = [item for item in items if all(each.may_move for each in item)]
        self.alone = sorted(movable, key=lambda item: -_remaining(item))
        whole = [
            tuple(group)
            for group in by_adapter.values()
            if 1 < len(group) <= MOST_GROUP and all(each.may_move for each in group)
        ]
        self.groups = sorted(whole, key=lambda group: -group[0].rank)

    def cost(self, add: Sequence[Stream] = (), drop: Sequence[Stream] = ()) -> float:
        """The cost with some streams more, or fewer."""
        site, more = self.site, len(add) - len(drop)
        ranks = self.ranks - Counter(s.rank for s in drop) if drop else self.ranks
        rank = max((*ranks, *(s.rank for s in add)), default=0)
        sequences = max(0, site.sequences + more)
        remaining = self.remaining + _remaining(add) - _remaining(drop)
        step = site.base_seconds + sequences * site.sequence_seconds + rank * site.rank_seconds
        blocks = site.used_blocks + self.blocks(add) - self.blocks(drop)
        return step * remaining + sequences * pressure_of(max(0, blocks), site.total_blocks)

    def blocks(self, streams: Iterable[Stream]) -> int:
        own = self.site.own_blocks
        return sum(own(each.tokens, shared) for each, shared in _with_shared(streams))

    def has_room(self, streams: Sequence[Stream]) -> bool:
        """Whether it takes streams, and what they have to come, without a queue."""
        site = self.site
        wanted = sum(
            site.own_blocks(each.tokens + each.remaining, shared)
            for each, shared in _with_shared(streams)
        )
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
        sender.ranks -= Counter(each.rank for each in streams)
        sender.alone = [each for each in sender.alone if each[0].number in sender.streams]
        sender.groups = [g for g in sender.groups if all(s.number in sender.streams for s in g)]
        # Once in a plan, whatever follows.
        self.add(replace(each, worker=self.site.address, may_move=False) for each in streams)


def _remaining(streams: Iterable[Stream]) -> int:
    return sum(each.remaining for each in streams)


def _with_shared(streams: Iterable[Stream]) -> Iterator[tuple[Stream, int]]:
    """Each stream with its leading tokens whose KV an earlier one has."""
    seen = set[int]()
    for each in streams:
        yield each, each.shared_tokens if each.item in seen else 0
        if each.item is not None:
            seen.add(each.item)


def _crews(sites: Sequence[Site], streams: Iterable[Stream]) -> dict[str, _Crew]:
    crews = {site.address: _Crew(site) for site in sites}
    for stream in streams:
        if stream.worker in crews:
            crew = crews[stream.worker]
            crew.add((stream,), crew.site.stands_for)
    for crew in crews.values():
        crew.order()
    return crews


def _fits(sender: Site, receiver: Site) -> bool:
    ours, theirs = sender.kv, receiver.kv
    if ours is None or theirs is None or sender is receiver:
        return False
    return sender.kind == receiver.kind and ours.fits(theirs)


def evened(sites: Sequence[Site], streams: Iterable[Stream], most: int) -> Iterator[Move]:
    """At most so many moves that lower the cost of the fleet, the best first."""
    crews = _crews(sites, streams)
    while most and (best := max(_weighed(crews), key=_profit, default=None)):
        yield best
        most -= 1
        crews[best.receiver].take(best.streams, crews[best.sender])


def _profit(move: Move) -> float:
    return move.gain_seconds - move.cost_seconds


def _weighed(crews: Mapping[str, _Crew]) -> Iterator[Move]:
    """Every move between the dearest and the cheapest workers that pays."""
    costs = {address: crew.cost() for address, crew in crews.items()}
    by_cost = sorted(crews.values(), key=lambda crew: costs[crew.site.address])
    for sender in by_cost[::-1][:MOST_SOURCES]:
        receivers = [each for each in by_cost[:MOST_TARGETS] if _fits(sender.site, each.site)]
        alone = [(each, "evens out load and KV") for each in sender.alone[:MOST_ALONE]]
        gathered = "gathers the sequences of an adapter"
        for streams, why in [*alone, *((each, gathered) for each in sender.groups[:MOST_GROUPS])]:
            able = [each for each in receivers if _stays(streams, sender, each)]
            saved = costs[sender.site.address] - sender.cost(drop=streams) if able else 0.0
            for receiver in able:
                spent = receiver.cost(add=streams) - costs[receiver.site.address]
                move = _move(streams, sender.site, receiver.site, saved - spent, why)
                if move.pays:
                    yield move


def _stays(streams: Sequence[Stream], sender: _Crew, receiver: _Crew) -> bool:
    """Whether there is room, and what comes then takes longer than the move: what ends soon is not worth one, however
    full the pool."""
    stay = max(each.remaining for each in streams) * sender.site.base_seconds
    longest = max(each.tokens for each in streams)
    return stay > PAYS * receiver.site.move_seconds(longest) and receiver.has_room(streams)


def _move(streams: Sequence[Stream], sender: Site, receiver: Site, gain: float, why: str) -> Move:
    own = (each.tokens - shared for each, shared in _with_shared(streams))
    cost = sum(map(receiver.move_seconds, own))
    return Move(tuple(streams), sender.address, receiver.address, cost, gain, why)


def roomy(
    sites: Sequence[Site], streams: Sequence[Stream], tokens: int, only: str = ""
) -> list[Move]:
    """The cheapest moves after which a worker, or the `only` one, has free blocks for a prompt of so many tokens; none
    if one has, or if it would wait no longer than the moves take."""
    hosts = [s for s in sites if s.takes and s.tokens_per_block and only in ("", s.address)]
    if any(site.blocks(tokens) <= site.free_blocks for site in hosts):
        return []
    hosts.sort(key=lambda site: site.blocks(tokens) - site.free_blocks)
    plans = [_room_at(host, sites, streams, tokens) for host in hosts[:MOST_TARGETS]]
    return min((p for p in plans if p), key=lambda p: sum(m.cost_seconds for m in p), default=[])


def _room_at(
    host: Site, sites: Sequence[Site], streams: Sequence[Stream], tokens: int
) -> list[Move]:
    own = [each for each in streams if each.worker == host.address]
    crews, moves = _crews(sites, own), list[Move]()
    home, lacking = crews[host.address], host.blocks(tokens) - host.free_blocks
    gain = _wait_seconds(home, lacking)
    others = [each for each in crews.values() if each.site.takes and _fits(host, each.site)]
    others.sort(key=lambda crew: -crew.site.free_blocks)
    for item in sorted(home.alone, key=lambda item: -home.blocks(item))[:MOST_LEAVING]:
        able = [crew for crew in others[:MOST_TARGETS] if crew.has_room(item)]
        if not able:
            continue
        receiver = max(able, key=lambda crew: crew.site.free_blocks)
        moves.append(_move(item, host, receiver.site, gain, f"makes room for {tokens} tokens"))
        lacking -= home.blocks(item)
        receiver.take(item, home)
        if lacking <= 0:
            break
    pays = gain >= PAYS * sum(move.cost_seconds for move in moves)
    return moves if lacking <= 0 and pays else []


def _wait_seconds(crew: _Crew, lacking: int) -> float:
    """Time until streams that end leave so many blocks free."""
    site, ends = crew.site, 0
    step = site.base_seconds + site.sequences * site.sequence_seconds
    by_end = sorted(crew.streams.values(), key=lambda each: each.remaining)
    for each, shared in _with_shared(by_end):
        ends = each.remaining
        lacking -= site.own_blocks(each.tokens, shared) * site.stands_for
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
