"""Tracks the load of a worker: the last report plus everything dispatched since.

Every dispatch is booked first, to count in the next placement even before the next report, and released exactly once.
Reported load beyond the bookings belongs to other routers:

    load = bookings now + max(0, reported - bookings at the report)

so an item counts once, whether or not in the report.

A breaker takes a worker out of placement after repeated faults. Only faults before an item's first token count; errors
of the caller and back-pressure count neither as fault nor as success. If all breakers are open, placement ignores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.router.placement.rates import Rates, Report, Typical
from trtmesh.router.placement.residency import (
    NO_ADAPTERS,
    AdapterKey,
    AdapterNeed,
    Place,
    Residency,
)

BreakerState: TypeAlias = Literal["closed", "open", "half_open"]

FAULTS_TO_OPEN = 3
FIRST_REST_SECONDS = 5.0
LONGEST_REST_SECONDS = 60.0
MOST_DOUBLINGS = 10

INCIDENT_SECONDS = 0.1
"""Faults within this time count once, as after the loss of a stream with many items."""


class Breaker:
    """A circuit breaker: three successive faults open the breaker for 5 s, doubled by each further fault up to 60 s.
    A half-open breaker admits a single item at a time, and a first token closes it. Times are seconds of any clock."""

    def __init__(self) -> None:
        self.faults = 0
        """Successive faults."""
        self._last_error = ""
        self._last_fault = float("-inf")
        self._open_until = float("-inf")
        self._probing = False

    @property
    def closed(self) -> bool:
        return self.faults < FAULTS_TO_OPEN

    @property
    def problem(self) -> str:
        """The cause of an open breaker, or ''."""
        return "" if self.closed else f"{self.faults} faults in a row, the last: {self._last_error}"

    def state(self, now: float) -> BreakerState:
        if self.closed:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def is_open(self, now: float) -> bool:
        """Whether the worker rests or has a probe already."""
        return self.faults >= FAULTS_TO_OPEN and (now < self._open_until or self._probing)

    def dispatched(self, now: float) -> None:
        """An item was dispatched; in the half-open state as the probe."""
        if self.faults >= FAULTS_TO_OPEN and now >= self._open_until:
            self._probing = True

    def succeeded(self) -> None:
        """A first token arrived."""
        self.faults = 0
        self._probing = False
        self._open_until = float("-inf")

    def ended_neutrally(self) -> None:
        """An item ended without a first token and without a fault."""
        self._probing = False

    def failed(self, now: float, error: TrtmeshError) -> None:
        """An item met a fault before the first token."""
        if now - self._last_fault < INCIDENT_SECONDS:
            self._last_fault = now
            return
        self._last_fault = now
        self.faults += 1
        self._last_error = error.message
        self._probing = False
        if not self.closed:
            # Capped, or the power would overflow.
            doublings = min(self.faults - FAULTS_TO_OPEN, MOST_DOUBLINGS)
            self._open_until = now + min(FIRST_REST_SECONDS * 2.0**doublings, LONGEST_REST_SECONDS)


SLOW_START_SECONDS = 10.0
"""How long a new worker counts with part of the fleet's mean load; the part shrinks."""

PRESSURE_SECONDS, MOST_PRESSURE = 0.15, 0.99
"""Penalty of k / (1 - k) for a share k of used KV blocks, as in SMG's expected wait."""


def pressure_of(used_blocks: int, total_blocks: int) -> float:
    """The penalty of a worker for each further sequence."""
    used = min(used_blocks / total_blocks, MOST_PRESSURE) if total_blocks else 0.0
    return PRESSURE_SECONDS * used / (1.0 - used)


_NO_REPORT = Report(0.0)


@dataclass(frozen=True, slots=True)
class Reservation:
    """KV that comes from another worker."""

    tokens: int = 0
    """Tokens to be transferred."""
    blocks: int = 0
    """KV blocks of the sequence."""


NOTHING = Reservation()


@dataclass(slots=True, eq=False)
class Booking:
    """Load of an item's sequences on a worker, from before the dispatch until the last sequence leaves."""

    _guard: LoadGuard
    prompt_tokens: int
    sequences: int
    _booked_at: float
    _idle_before: bool
    adapter: AdapterNeed | None = None
    reservation: Reservation = NOTHING
    """Counts until the first token."""
    _waiting: bool = True
    when_computed: list[Callable[[], None]] = field(default_factory=list)
    """Called once the prompt is computed, or cannot be computed here any more."""

    @property
    def waiting(self) -> bool:
        """Whether the prompt is not computed yet."""
        return self._waiting and self.sequences > 0

    @property
    def computed(self) -> bool:
        """Whether the first token arrived."""
        return not self._waiting

    def started(self, now: float) -> None:
        """Counts the prompt as computed at the first token. Later calls do nothing."""
        if self._waiting and self.sequences:
            self._waiting = False
            seconds = now - self._booked_at if self._idle_before else None
            self._guard._on_started(self, seconds)
            if self._guard.on_first_token is not None:
                self._guard.on_first_token(self.prompt_tokens, now - self._booked_at)
            if self.when_computed:
                self._tell_computed()

    def submitted(self, now: float) -> None:
        """The worker gets the sequences: what came before, as the load of an adapter, is not the prompt's time."""
        if self.waiting:
            self._booked_at = now
            self._idle_before = self._guard.sequences <= self.sequences

    def leave(self, now: float, error: TrtmeshError | None = None) -> None:
        """Releases a sequence that ended or moved, because of `error` if given."""
        if self.sequences:
            waiting = self._waiting
            self.sequences -= 1
            last = not self.sequences
            self._guard._on_left(self, waiting=waiting, last=last)
            if waiting:
                self._guard._on_ended_early(error, now)
            if last and self.when_computed:
                self._tell_computed()

    def _tell_computed(self) -> None:
        told, self.when_computed = self.when_computed, []
        for tell in told:
            tell()

    def release(self, now: float, error: TrtmeshError | None = None) -> None:
        """Releases all remaining sequences. Later calls do nothing."""
        while self.sequences:
            self.leave(now, error)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load of an adapter in progress: the place before, and the loads up to and including this load."""

    origin: Place | None
    begun_at: float
    queue: int


class LoadGuard:
    """The load of a worker. All times are seconds of the same clock."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._report = _NO_REPORT
        self._steps = 0
        """Steps of the last reporting process, on any stream."""
        self._joined_at = float("-inf")
        self._foreign_sequences = 0
        self._foreign_prompt_tokens = 0
        self._by_handle: dict[int, Booking] = {}
        self.awaiting: dict[int, Booking] = {}
        """Bookings by handle before the handle's first token; read for every token."""
        self.booked_sequences = 0
        self.booked_prompt_tokens = 0
        self._waiting_sequences = 0
        """Booked sequences whose prompt is not computed yet."""
        self._booked_tokens = 0
        """Tokens to be transferred for this router."""
        self._foreign_tokens = 0
        self._booked_blocks = 0
        self._foreign_blocks = 0
        self.bookings = 0
        self.adapters = NO_ADAPTERS
        self._loads: dict[AdapterKey, _Load] = {}
        self.rates = Rates()
        self.breaker = Breaker()
        self.on_first_token: Callable[[int, float], None] | None = None
        """Takes the tokens of each prompt, and the seconds from the dispatch to the first token."""

    def assign(self, handles: Iterable[int], booking: Booking, now: float) -> None:
        """Records the handles of a booking's sequences at their submit."""
        booking.submitted(now)
        for handle in handles:
            self._by_handle[handle] = self.awaiting[handle] = booking

    def leave(self, handle: int, now: float, error: TrtmeshError | None = None) -> None:
        """The sequence of a handle ended or moved; unknown handles are ignored."""
        self.awaiting.pop(handle, None)
        if (booking := self._by_handle.pop(handle, None)) is not None:
            booking.leave(now, error)

    def lose(self, now: float, error: TrtmeshError | None) -> None:
        """Releases all sequences of a lost stream and forgets the load of other routers. `error` blames the worker."""
        self._report = _NO_REPORT
        self.rates.break_off()
        self._foreign_sequences = self._foreign_prompt_tokens = 0
        self._foreign_tokens = self._foreign_blocks = 0
        self.adapters = self.adapters.lost()
        self._loads.clear()
        for handle in [*self._by_handle]:
            self.leave(handle, now, error)
        self._on_change()

    @property
    def sequences(self) -> int:
        """Running and waiting sequences."""
        return self.booked_sequences + self._foreign_sequences

    @property
    def decoding_sequences(self) -> int:
        """Sequences after their prompt; those of other routers count as such."""
        return self.sequences - self._waiting_sequences

    @property
    def pending_prompt_tokens(self) -> int:
        """Prompt tokens queued before another prompt."""
        return self.booked_prompt_tokens + self._foreign_prompt_tokens

    @property
    def receiving_tokens(self) -> int:
        """Tokens whose KV is to come from other workers."""
        return self._booked_tokens + self._foreign_tokens

    def book(
        self,
        prompt_tokens: int,
        sequences: int,
        now: float,
        adapter: AdapterNeed | None = None,
        reservation: Reservation = NOTHING,
    ) -> Booking:
        """Books an item with `prompt_tokens` to compute."""
        idle = not self.sequences
        booking = Booking(self, prompt_tokens, sequences, now, idle, adapter, reservation)
        if adapter:
            self._use(adapter, sequences, now)
        self.bookings += 1
        self.booked_sequences += sequences
        self.booked_prompt_tokens += prompt_tokens
        self._waiting_sequences += sequences
        self._booked_tokens += reservation.tokens
        self._booked_blocks += reservation.blocks
        self.breaker.dispatched(now)
        self._on_change()
        return booking

    def joined(self, now: float) -> None:
        """Begins the slow start of a ready worker."""
        self._joined_at = now
        self._on_change()

    def take_report(self, report: Report) -> None:
        if report.step_count < self._steps:
            # A new process may have other rates.
            self.rates = Rates()
        elif self._report is not _NO_REPORT:
            self.rates.learn(self._report, report, self.adapters.rank)
        self._report, self._steps = report, report.step_count
        self.adapters = self.adapters.reported(*report.adapter_slots)
        sequences = report.sequences + report.receiving_sequences
        self._foreign_sequences = max(0, sequences - self.booked_sequences)
        self._foreign_tokens = max(0, report.receiving_tokens - self._booked_tokens)
        self._foreign_prompt_tokens = max(
            0, report.pending_prompt_tokens - self.booked_prompt_tokens
        )
        self._foreign_blocks = max(0, report.used_blocks - self._booked_blocks)
        self._on_change()

    def adapters_moved(self, changes: Mapping[AdapterKey, Residency | None], now: float) -> None:
        """The worker reported changed places of adapters, None for an adapter no longer in memory."""
        for key, residency in changes.items():
            load = self._loads.get(key)
            if load and residency and residency.place is not load.origin:
                seconds = (now - load.begun_at) / load.queue
                self.rates.learn_load(seconds, delivered=load.origin is None)
                del self._loads[key]
        self.adapters = self.adapters.moved(changes)
        self._on_change()

    def _use(self, adapter: AdapterNeed, sequences: int, now: float) -> None:
        """Counts sequences with an adapter, and the start of the load if this is the first."""
        origin = self.adapters.place(adapter)
        if adapter.key not in self.adapters.in_use and origin is not Place.DEVICE:
            queue = 1 if origin else 1 + self.adapters.deliveries
            self._loads[adapter.key] = _Load(origin, now, queue)
        self.adapters = self.adapters.used(adapter, sequences)
        if adapter.key not in self.adapters.in_use:
            self._loads.pop(adapter.key, None)

    def figures(
        self, typical: Typical, max_batch_size: int, kv_token_bytes: int, now: float
    ) -> dict[str, Any]:
        """The fields of a worker's snapshot known to this guard, in one call: a placement reads every worker."""
        rates, sequences = self.rates, self.booked_sequences + self._foreign_sequences
        prefill_seconds = typical.prefill_seconds * rates.relative_prefill(typical)
        step_seconds = typical.step_seconds(sequences + 1, self.adapters.rank)
        step_seconds *= rates.relative_step(typical)
        # Until another prompt starts: the queued prompts, and the end of sequences beyond the batch size.
        wait = (self.booked_prompt_tokens + self._foreign_prompt_tokens) * prefill_seconds
        excess = sequences + 1 - max_batch_size
        if max_batch_size and excess > 0:
            wait += excess / max_batch_size * typical.new_tokens * step_seconds
        return {
            "adapters": self.adapters,
            "sequences": sequences,
            "wait_seconds": wait,
            "prefill_seconds": prefill_seconds,
            "step_seconds": step_seconds,
            "tokens_per_step": rates.tokens_per_step,
            "pressure_seconds": pressure_of(self.used_blocks, self._report.total_blocks),
            "warmth": self.warmth(now),
            "breaker_open": self.breaker.is_open(now),
            "decoding_sequences": sequences - self._waiting_sequences,
            "transfer_seconds": kv_token_bytes and kv_token_bytes * self.byte_seconds(typical),
            "receiving_tokens": self._booked_tokens + self._foreign_tokens,
        }

    def warmth(self, now: float) -> float:
        return min(1.0, max(0.0, (now - self._joined_at) / SLOW_START_SECONDS))

    def byte_seconds(self, typical: Typical) -> float:
        """Predicted time to receive a byte of KV."""
        return 1.0 / (self.rates.transfer_rate or typical.transfer_rate)

    @property
    def used_blocks(self) -> int:
        """Blocks in use, of all routers, and those booked for KV to come."""
        return self._foreign_blocks + self._booked_blocks

    def _on_started(self, booking: Booking, seconds: float | None) -> None:
        self._computed(booking)
        self._waiting_sequences -= booking.sequences
        if seconds is not None:
            self.rates.learn_first_token(booking.prompt_tokens, seconds)
        self.breaker.succeeded()
        self._on_change()

    def _on_left(self, booking: Booking, *, waiting: bool, last: bool) -> None:
        if booking.adapter:
            self._use(booking.adapter, -1, 0.0)
        self.bookings -= last
        self.booked_sequences -= 1
        self._waiting_sequences -= waiting
        if waiting and last:
            self._computed(booking)
        self._on_change()

    def _computed(self, booking: Booking) -> None:
        """No prompt of a booking is to be computed any more; reports show its blocks."""
        self.booked_prompt_tokens -= booking.prompt_tokens
        self._booked_tokens -= booking.reservation.tokens
        self._booked_blocks -= booking.reservation.blocks

    def _on_ended_early(self, error: TrtmeshError | None, now: float) -> None:
        if error is not None and error.row.is_fault:
            self.breaker.failed(now, error)
        else:
            self.breaker.ended_neutrally()
