"""When a sequence is late, which workers may compute a second copy of it, and what copies may cost: no clock, no I/O.

A worker sends one message a step, so the gaps between its steps are those of all its running sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from trtmesh.router.fleet.worker_capabilities import unlike

KEPT, RECENT = 512, 32
"""Gaps, waits for first tokens, or wastes that are remembered; the latest of them by which a worker is slow."""
LEAST_SEEN = 20
"""Fewest of them by which anything is late."""

STEP_FACTOR, LEAST_STEP_MARGIN, MOST_STEP_MARGIN = 3.0, 0.06, 1.0
"""A step is late beyond so many times the 99th percentile of the gaps, within these seconds."""
FIRST_FACTOR, LEAST_FIRST_MARGIN = 2.0, 0.06
"""A first token is late beyond so many times the 95th percentile of the waits that no prediction explained. The
percentile is low, so that a worker that stalls for a tenth of the time makes no wait usual."""
SLOW_FACTOR = 2.5
"""A worker is slow if its usual gap is so many times that of its peers. Hardware is not reported: other
hardware looks slow as well."""

MOST_USED = 0.9
"""Share of used KV blocks from which a worker takes no copies: they would push out the prefixes of others."""
MOST_WAIT_SECONDS = 0.1
"""Longest predicted wait of a copy before it starts."""


class Cause(Enum):
    """Why a second copy starts."""

    STALL = "stall"
    """The worker's next step is late."""
    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    """The first token is late: the item waits in a queue, or its worker does nothing."""
    SLOW = "slow"
    """The worker takes longer for a step than its peers: the sequence leaves it before it fails."""


class Obstacle(Enum):
    """Why no second copy starts, the least hopeless first: a word, and the reason without what differs."""

    BUDGET = "budget", "copies took their share of the tokens already"
    BUSY = "busy", "it has a queue or a full batch"
    KV_FULL = "kv_full", f"more than {MOST_USED:.0%} of its KV blocks are in use"
    LATE = "late", "it is late itself"
    UNREADY = "unready", "it takes no items"
    NOT_EXACT = "not_exact", "its tokens depend on the batch: neither batch_invariant nor float32"
    OTHER_KIND = "other_kind", "it is not exact with the first worker"
    ALONE = "alone", "there is no other worker"
    ITEM = "item", ""

    def __init__(self, word: str, text: str) -> None:
        self.word, self.text = word, text


class Seen:
    """The latest of some times in seconds, or numbers of tokens."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=KEPT)

    def add(self, value: float) -> None:
        self._latest.append(value)

    def __len__(self) -> int:
        return len(self._latest)

    def quantile(self, share: float) -> float | None:
        """None before enough was seen."""
        if len(self._latest) < LEAST_SEEN:
            return None
        return sorted(self._latest)[int(share * len(self._latest))]

    def usual(self) -> float | None:
        """The median of the latest; None before enough was seen."""
        latest = [*self._latest][-RECENT:]
        return median(latest) if len(latest) == RECENT else None


@dataclass(frozen=True, slots=True)
class StepPace:
    """How a worker steps, as learned."""

    usual: float | None = None
    longest: float | None = None
    """The 99th percentile of the gaps."""


def step_margin(own: StepPace, peers: Iterable[StepPace]) -> float | None:
    """Seconds after a step at which the next one is late; None before anything is learned. The fleet counts where it is
    less regular than the worker, and for one that is new."""
    others = [pace.longest for pace in peers if pace.longest is not None]
    known = [own.longest] if own.longest is not None else []
    known += [median(others)] if others else []
    if not known:
        return None
    return min(max(STEP_FACTOR * max(known), LEAST_STEP_MARGIN), MOST_STEP_MARGIN)


def is_slow(own: StepPace, peers: Iterable[StepPace]) -> bool:
    """Whether a worker's steps take far longer than those of its peers."""
    others = [pace.usual for pace in peers if pace.usual is not None]
    return bool(others) and own.usual is not None and own.usual > SLOW_FACTOR * median(others)


def first_margin(waits: Seen) -> float | None:
    """Seconds beyond the prediction at which a first token is late; None before anything is learned."""
    usual = waits.quantile(0.95)
    return None if usual is None else max(FIRST_FACTOR * usual, LEAST_FIRST_MARGIN)


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker as one that may compute copies."""

    address: str
    kind: Mapping[str, str]
    """Equal for workers whose tokens are equal."""
    is_exact: bool
    is_ready: bool
    is_late: bool
    sequences: int
    most_running: int
    """Size of the batch; 0 for not known."""
    waiting: int
    wait_seconds: float
    used_share: float


def obstacle(first: Peer, other: Peer) -> Obstacle | None:
    """Why `other` may not compute a copy of a sequence of `first`, or None."""
    if other.address == first.address:
        return Obstacle.ALONE
    if other.kind != first.kind:
        return Obstacle.OTHER_KIND
    if not (first.is_exact and other.is_exact):
        return Obstacle.NOT_EXACT
    if not other.is_ready:
        return Obstacle.UNREADY
    if other.is_late:
        return Obstacle.LATE
    if other.used_share > MOST_USED:
        return Obstacle.KV_FULL
    # What was submitted during a step waits for its end: that is no queue.
    full = other.sequences >= other.most_running if other.most_running else bool(other.waiting)
    if full or other.wait_seconds > MOST_WAIT_SECONDS:
        return Obstacle.BUSY
    return None


def obstacles(first: Peer, peers: Sequence[Peer]) -> Mapping[str, Obstacle]:
    """The peers that may not compute a copy of a sequence of `first`, by address."""
    found = ((peer.address, obstacle(first, peer)) for peer in peers)
    return {address: why for address, why in found if why is not None}


def text(why: Obstacle, first: Peer, other: Peer) -> str:
    """The reason of a worker's exclusion."""
    different = unlike(first.kind, other.kind) if why is Obstacle.OTHER_KIND else ""
    return f"{why.text}: another {different}" if different else why.text


def least(found: Iterable[Obstacle]) -> Obstacle:
    """The least hopeless obstacle: what would have to change."""
    order = [*Obstacle]
    return min(found, key=order.index, default=Obstacle.ALONE)


def copy_price(tokens: int, prefill_seconds: float, step_seconds: float, running: int) -> float:
    """What a copy of `tokens` tokens costs before its first own token, in generated tokens: their time over that of a
    token of a batch of `running` sequences."""
    return min(float(tokens), tokens * prefill_seconds * max(1, running) / max(step_seconds, 1e-6))


class Budget:
    """A token bucket, filled by a share of the tokens delivered. Each copy reserves what copies usually waste, and is
    stopped where it needs more than is left. What is on its way then may overdraw it, and is paid before the next
    copy."""

    FIRST, MOST = 64.0, 4096.0
    """Tokens at the start, and at most: the copies of one stall of a full worker."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.tokens = self.FIRST
        self.reserved = 0.0

    def earn(self, delivered: int) -> None:
        self.tokens = min(self.tokens + self._share * delivered, self.MOST)

    def spend(self, tokens: float) -> None:
        self.tokens -= tokens

    @property
    def free(self) -> float:
        return self.tokens - self.reserved

    def reserve(self, tokens: float) -> Allowance:
        self.reserved += tokens
        return Allowance(self, tokens)


@dataclass(slots=True)
class Allowance:
    """What is left of the reserve of a copy."""

    _budget: Budget
    _left: float

    def spend(self, tokens: float) -> None:
        self._return(min(self._left, tokens))
        self._budget.spend(tokens)

    def covers(self, tokens: float) -> bool:
        """Whether the copy may waste so many more tokens."""
        return self._left + max(0.0, self._budget.free) >= tokens

    def end(self) -> None:
        """The copy wastes nothing any more."""
        self._return(self._left)

    def _return(self, tokens: float) -> None:
        self._left -= tokens
        self._budget.reserved -= tokens


class Wastes:
    """What copies wasted, by their cause: those of slow workers run longer side by side."""

    FIRST, MOST = 8.0, 512.0
    """Expected tokens before enough was seen, and at most: more could never be saved up."""

    def __init__(self) -> None:
        self._seen = {cause: Seen() for cause in Cause}

    def add(self, cause: Cause, tokens: int) -> None:
        self._seen[cause].add(tokens)

    def expected(self, cause: Cause) -> float:
        """More than nine of ten copies wasted lately."""
        usual = self._seen[cause].quantile(0.9)
        return self.FIRST if usual is None else min(usual, self.MOST)
