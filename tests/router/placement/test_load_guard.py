"""The load guard counts each item once, in any order of events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmesh.chassis.errors import (
    BackendFailed,
    InvalidField,
    QueueFull,
    TrtmeshError,
    WorkerLost,
)
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement import AdapterNeed, Residency
from trtmesh.router.placement.load_guard import (
    FIRST_REST_SECONDS,
    LONGEST_REST_SECONDS,
    Booking,
    Breaker,
    LoadGuard,
    Reservation,
)
from trtmesh.router.placement.rates import (
    FALLBACK_HANDOFF_SECONDS,
    MOST_HANDOFF_SECONDS,
    MOST_RATE,
    Line,
    Rates,
    Report,
    Typical,
    typical_of,
)
from trtmesh.router.placement.residency import NO_ADAPTERS, Use


def guard() -> LoadGuard:
    return LoadGuard(lambda: None)


def learn_between(rates: Rates, before: Report, after: Report) -> None:
    """Rates from two reports, the first at the end of a step."""
    earlier = before._replace(at=2 * before.at - after.at, step_count=before.step_count - 1)
    rates.break_off()
    rates.learn(earlier, before)
    rates.learn(before, after)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["book", "assign", "token", "leave", "release", "report", "lose"]),
        st.integers(0, 50),
        st.integers(1, 4),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(ACTIONS)
def test_load_is_bookings_plus_reported_excess(
    actions: list[tuple[str, int, int]],
) -> None:
    tested = guard()
    booked: list[Booking] = []
    handles: dict[int, Booking] = {}
    foreign = foreign_tokens = 0
    for now, (action, number, count) in enumerate(actions):
        undispatched = [b for b in booked if b.sequences and b not in handles.values()]
        handle = [*handles][number % len(handles)] if handles else None
        if action == "book":
            booked.append(tested.book(number, count, now))
        elif action == "assign" and undispatched:
            fresh = range(1000 * now, 1000 * now + undispatched[0].sequences)
            tested.assign(fresh, undispatched[0], now)
            handles.update(dict.fromkeys(fresh, undispatched[0]))
        elif action == "token" and handle is not None:
            handles[handle].started(now)
            handles[handle].started(now)
        elif action == "leave" and handle is not None:
            tested.leave(handle, now)
            tested.leave(handle, now)
            handles.pop(handle)
        elif action == "release" and undispatched:
            undispatched[0].release(now)
            undispatched[0].release(now)
        elif action == "report":
            tested.take_report(
                Report(now, running_sequences=number, pending_prompt_tokens=number * 7)
            )
            foreign = max(0, number - sum(b.sequences for b in booked))
            waiting = sum(b.prompt_tokens for b in booked if b.waiting)
            foreign_tokens = max(0, number * 7 - waiting)
        elif action == "lose":
            tested.lose(now, WorkerLost("gone"))
            handles.clear()
            foreign = foreign_tokens = 0
        waiting = sum(b.prompt_tokens for b in booked if b.waiting)
        assert tested.bookings == sum(b.sequences > 0 for b in booked)
        assert tested.booked_sequences == sum(b.sequences for b in booked)
        assert tested.booked_prompt_tokens == waiting
        assert tested.sequences == tested.booked_sequences + foreign
        assert tested.pending_prompt_tokens == waiting + foreign_tokens
        assert tested.decoding_sequences == tested.sequences - sum(
            b.sequences for b in booked if b.waiting
        )
        assert set(tested.awaiting) <= set(handles)


def test_dispatch_counts_at_once_and_only_once() -> None:
    tested = guard()
    booking = tested.book(100, 1, 0.0)
    assert (tested.sequences, tested.pending_prompt_tokens) == (1, 100)
    tested.take_report(Report(1.0))
    assert (tested.sequences, tested.pending_prompt_tokens) == (1, 100)
    tested.take_report(Report(2.0, waiting_sequences=1, pending_prompt_tokens=100))
    assert (tested.sequences, tested.pending_prompt_tokens) == (1, 100)
    tested.take_report(Report(3.0, running_sequences=4, pending_prompt_tokens=150))
    assert (tested.sequences, tested.pending_prompt_tokens) == (4, 150)
    booking.started(3.0)
    booking.release(4.0)
    assert (tested.sequences, tested.pending_prompt_tokens) == (3, 50)


def test_rates_are_learned_from_reports() -> None:
    rates = Rates()
    before = Report(0.0, step_count=0, running_sequences=1, pending_prompt_tokens=9000)
    for second in range(1, 30):
        after = Report(
            float(second),
            # Idle half of the time.
            busy_seconds=second / 2,
            step_count=second * 10,
            running_sequences=1,
            pending_prompt_tokens=9000,
            computed_prompt_tokens=second * 500,
        )
        rates.learn(before, after)
        before = after
    assert rates.prefill_rate.value == pytest.approx(1000)
    assert rates.sums is None


def test_reports_without_busy_time_teach_nothing() -> None:
    rates = Rates()
    for number in range(1, 9):
        rates.learn(
            Report(number, step_count=number, running_sequences=1),
            Report(number + 1, step_count=number + 1, running_sequences=1),
        )
    assert rates.sums is None


def test_step_time_is_learned_as_a_line_over_the_batch() -> None:
    rates = Rates()
    step, now = 0, 0.0
    for number in range(200):
        running = 1 + number % 32
        before = Report(now, now, step, running)
        now += 10 * (0.010 + 0.0005 * running)
        step += 10
        learn_between(rates, before, Report(now, now, step, running))
    for running in (1, 16, 64):
        typical = typical_of([rates, Rates()], None)
        assert typical.step_seconds(running) == pytest.approx(0.010 + 0.0005 * running, rel=0.02)


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(1, 20)), min_size=1))
def test_idle_time_does_not_count_as_slow_steps(
    reports: list[tuple[float, int]],
) -> None:
    # Short requests between two reports, idle most of the time.
    rates, before = Rates(), Report(0.0, running_sequences=1)
    for idle_seconds, steps in reports:
        after = Report(
            before.at + idle_seconds + 0.02 * steps,
            before.busy_seconds + 0.02 * steps,
            before.step_count + steps,
            running_sequences=1,
        )
        rates.learn(before, after)
        before = after
    assert typical_of([rates], None).step_seconds(1) == pytest.approx(0.02)


def test_steps_longer_than_the_report_interval_count_whole() -> None:
    decode, prefill = Rates(), Rates()
    for rates, chunk in ((decode, 0), (prefill, 512)):
        reports = [
            Report(
                number / 10,
                number / 10,
                number // 5,
                running_sequences=1,
                pending_prompt_tokens=chunk,
                computed_prompt_tokens=number // 5 * chunk,
            )
            for number in range(50)
        ]
        for before, after in pairwise(reports):
            rates.learn(before, after)
    assert typical_of([decode], None).step_seconds(1) == pytest.approx(0.5)
    assert prefill.prefill_rate.value == pytest.approx(1024)


def test_step_without_a_reported_begin_teaches_nothing() -> None:
    reports = [
        Report(
            number / 10,
            number / 10,
            # The first step ends after the first report; most of the fourth is not seen.
            (number + 9) // 10,
            waiting_sequences=1,
            pending_prompt_tokens=9,
            computed_prompt_tokens=(number + 9) // 10 * 8192,
        )
        for number in (*range(31), *range(39, 60))
    ]
    rates = Rates()
    for before, after in pairwise(reports):
        rates.learn(before, after)
        assert rates.prefill_rate.value in (None, pytest.approx(8192))
    assert rates.prefill_rate.value is not None


def test_short_freeze_does_not_set_the_step_time() -> None:
    rates = Rates()
    steps = [*range(0, 51, 5), *[50] * 20, 51]
    reports = [Report(n / 10, n / 10, count, running_sequences=1) for n, count in enumerate(steps)]
    for before, after in pairwise(reports):
        rates.learn(before, after)
    assert typical_of([rates], None).step_seconds(1) < 0.04


def test_cancelled_sequence_is_not_confused_with_a_later_one() -> None:
    rates = Rates()
    reports = [
        Report(0.0, 0.0, 9, running_sequences=64),
        Report(0.1, 0.1, 10, running_sequences=64),
        *(Report(number / 10, 0.15, 10) for number in range(2, 40)),
        Report(4.0, 0.2, 11, running_sequences=1),
        Report(4.1, 0.3, 13, running_sequences=1),
    ]
    for before, after in pairwise(reports):
        rates.learn(before, after)
    assert rates.sums is not None
    assert rates.sums[:2] == pytest.approx((1, 0.05))


def test_single_sequences_teach_no_slope() -> None:
    rates, before = Rates(), Report(0.0, running_sequences=1)
    for running, step_seconds in ((1, 0.02), (1, 0.019), (2, 0.04), (1, 0.021)) * 5:
        after = Report(
            before.at + 1, before.busy_seconds + step_seconds, before.step_count + 1, running
        )
        rates.learn(before, after)
        before = after
    typical = typical_of([rates], None)
    assert typical.step_seconds(2) == pytest.approx(typical.step_seconds(1), rel=0.25)


def test_difference_from_the_fleet_fades_without_new_samples() -> None:
    slow, others = Rates(), [Rates() for _ in range(3)]
    for rates, step_seconds in ((slow, 0.1), *((each, 0.01) for each in others)):
        busy = Report(1.0, busy_seconds=10 * step_seconds, step_count=10, running_sequences=4)
        learn_between(rates, Report(1.0 - 10 * step_seconds, running_sequences=4), busy)
        rates.learn_first_token(1000, 100 * step_seconds)
    typical = typical_of([slow, *others], None)
    assert slow.relative_step(typical) > 2
    assert slow.relative_prefill(typical) > 2
    seen = [(slow.relative_step(typical), slow.relative_prefill(typical))]
    for second in range(1, 40):
        slow.learn(Report(float(second), step_count=10), Report(second + 1.0, step_count=10))
        seen.append((slow.relative_step(typical), slow.relative_prefill(typical)))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == (1.0, 1.0)


def test_frozen_interval_teaches_nothing() -> None:
    rates = Rates()
    at, steps = 0.0, 0

    def report(seconds: float) -> None:
        nonlocal at, steps
        before = Report(at, at, steps, running_sequences=4)
        at, steps = at + seconds, steps + 10
        rates.learn(before, Report(at, at, steps, running_sequences=4))

    for _ in range(10):
        report(0.1)
    report(2.0)
    report(0.1)
    report(0.1)
    assert rates.sums is not None
    assert rates.sums[1] == pytest.approx(0.01)
    for _ in range(100):
        report(2.0)
    assert rates.sums[1] == pytest.approx(0.2), "a pace that stays is the usual one"


def test_prompt_on_an_idle_worker_teaches_the_prefill_rate() -> None:
    tested = guard()
    short = tested.book(10, 1, 0.0)
    short.started(5.0)
    short.release(5.0)
    assert tested.rates.prefill_rate.value is None
    long = tested.book(1000, 1, 10.0)
    behind = tested.book(1000, 1, 10.0)
    long.started(12.0)
    behind.started(14.0)
    assert tested.rates.prefill_rate.value == pytest.approx(500)


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [(0.0, MOST_RATE), (0.001, 2e6), (0.1, 20_000), (0.16, 12_500), (1.1, 1000)],
)
def test_step_takes_at_most_half_of_the_time_to_first_token(seconds: float, rate: float) -> None:
    rates = Rates()
    learn_between(
        rates,
        Report(1.0, running_sequences=1),
        Report(2.0, busy_seconds=1.0, step_count=10, running_sequences=1),
    )
    rates.learn_first_token(1000, seconds)
    assert rates.prefill_rate.value == pytest.approx(rate)


def test_outlier_does_not_change_the_typical_rate() -> None:
    rates = [Rates() for _ in range(5)]
    for each, rate in zip(rates, (900, 1000, 1000, 1100, MOST_RATE), strict=True):
        each.prefill_rate.add(rate)
    typical = typical_of(rates, None)
    assert typical.prefill_rate == 1000
    assert [each.relative_prefill(typical) for each in rates[:4]] == [1.0] * 4


def test_first_report_of_a_stream_is_not_compared() -> None:
    tested = guard()
    for _ in range(2):
        # The clock of the event loop counts from the start of the machine.
        for number in range(1, 4):
            at = 1e6 + number / 10
            tested.take_report(Report(at, number / 10, number, running_sequences=1))
        assert tested.rates.sums is not None
        held_up = Report(at + 5.0, 5.0, 4, running_sequences=1)
        tested.take_report(held_up)
        assert tested.rates.sums[1] == pytest.approx(0.1), "the pace of reports was not known"
        tested.lose(at, None)
        tested.rates = Rates()


def test_step_without_a_reported_end_teaches_nothing() -> None:
    tested = guard()
    for at, steps in ((0.9, 9), (1.0, 10), (1.1, 10)):
        tested.take_report(Report(at, at, steps, running_sequences=1))
    tested.lose(1.2, None)
    for number in range(3):
        at = 5 + number / 10
        tested.take_report(Report(at, 50 + number / 10, 11 + number, running_sequences=1))
    assert tested.rates.sums is not None
    assert tested.rates.sums[1] == pytest.approx(0.1)


def test_new_process_at_an_address_resets_the_rates() -> None:
    tested = guard()
    tested.rates.prefill_rate.add(100)
    tested.take_report(Report(1.0, step_count=50))
    assert tested.rates.prefill_rate.value == 100
    tested.take_report(Report(2.0, step_count=3))
    assert tested.rates.prefill_rate.value is None
    # A restarted worker reports on a new stream.
    tested.rates.prefill_rate.add(100)
    tested.lose(3.0, None)
    tested.take_report(Report(4.0, step_count=2))
    assert tested.rates.prefill_rate.value is None


def test_waiting_is_for_prompts_and_for_places_in_the_batch() -> None:
    typical = Typical(prefill_rate=1000, step=Line(0.01, 0.0, 1.0), new_tokens=100)
    tested = guard()
    tested.book(500, 1, 0.0)
    assert tested.figures(typical, 4, 0, 0.0)["wait_seconds"] == pytest.approx(0.5)
    for _ in range(4):
        tested.book(0, 1, 0.0)
    # Two beyond the batch of four; each waits for a quarter of 100 tokens of 10 ms.
    waits = tested.figures(typical, 4, 0, 0.0)["wait_seconds"]
    assert waits == pytest.approx(0.5 + 2 / 4)


def test_noise_does_not_separate_equal_workers() -> None:
    def prefill_seconds(guard: LoadGuard, typical: Typical) -> float:
        seconds: float = guard.figures(typical, 0, 0, 0.0)["prefill_seconds"]
        return seconds

    guards = [guard() for _ in range(4)]
    for number, each in enumerate(guards[:3]):
        each.rates.prefill_rate.add(1000 + 50 * number)
    typical = typical_of([each.rates for each in guards], None)
    assert {prefill_seconds(each, typical) for each in guards} == {typical.prefill_seconds}
    guards[3].rates.prefill_rate.add(4000)
    assert prefill_seconds(guards[3], typical) == pytest.approx(1 / 4000)
    # One known rate must not attract all items while the fleet's is unknown.
    assert prefill_seconds(guards[3], Typical()) == Typical().prefill_seconds


def test_slow_start_ends() -> None:
    tested = guard()
    tested.joined(100.0)
    assert [tested.warmth(now) for now in (100.0, 105.0, 110.0, 500.0)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("error", "opens"),
    [
        (WorkerLost("x"), True),
        (BackendFailed("x"), True),
        (InvalidField("x"), False),
        (QueueFull("x"), False),
        (None, False),
    ],
)
def test_only_faults_before_the_first_token_open_the_breaker(
    error: TrtmeshError | None, opens: bool
) -> None:
    for first_token in (False, True):
        tested = guard()
        for now in range(10):
            booking = tested.book(1, 1, float(now))
            if first_token:
                booking.started(float(now))
            booking.release(float(now), error)
        assert tested.breaker.is_open(9.1) is (opens and not first_token)


def test_breaker_doubles_the_rest_and_admits_one_probe() -> None:
    breaker = Breaker()
    now = 0.0
    for _ in range(3):
        assert not breaker.is_open(now)
        now += 1
        breaker.failed(now, WorkerLost("x"))
    rest = FIRST_REST_SECONDS
    for _ in range(8):
        assert breaker.is_open(now + rest - 0.01)
        now += rest
        assert not breaker.is_open(now)
        breaker.dispatched(now)
        assert breaker.is_open(now), "a second item went along with the probe"
        breaker.failed(now, WorkerLost("x"))
        rest = min(rest * 2, LONGEST_REST_SECONDS)
    breaker.dispatched(now + rest)
    breaker.succeeded()
    assert not breaker.is_open(now)


def test_rest_of_the_breaker_is_bounded() -> None:
    breaker = Breaker()
    for now in range(2000):
        breaker.failed(float(now), WorkerLost("x"))
    assert breaker.is_open(1999 + LONGEST_REST_SECONDS - 0.01)
    assert not breaker.is_open(1999 + LONGEST_REST_SECONDS)


def test_lost_stream_is_one_fault_for_all_items() -> None:
    breaker = Breaker()
    for item in range(50):
        breaker.failed(1.0 + item / 1000, WorkerLost("x"))
    assert not breaker.is_open(1.1)


def test_back_pressure_is_not_a_success() -> None:
    """A 4xx or a full queue between two faults must not close the breaker's count."""
    tested = guard()
    for now in range(3):
        tested.book(1, 1, float(now)).release(float(now), WorkerLost("x"))
        tested.book(1, 1, float(now)).release(float(now), QueueFull("x"))
    assert tested.breaker.is_open(3.0)


def test_adapter_in_use_counts_from_its_booking_until_the_last_sequence_leaves() -> None:
    guard = LoadGuard(lambda: None)
    small, large = (AdapterNeed(Adapter(n, "", "v1"), rank=n * 8) for n in (1, 2))
    bookings = [guard.book(10, 2, 0.0, small), guard.book(10, 1, 0.0, large)]
    assert guard.adapters.in_use == {(1, "v1"): Use(2, 8), (2, "v1"): Use(1, 16)}
    assert guard.adapters.rank == 16
    bookings[1].release(1.0)
    bookings[0].leave(1.0)
    assert guard.adapters.in_use == {(1, "v1"): Use(1, 8)}
    assert guard.adapters.rank == 8
    bookings[0].release(2.0)
    bookings[0].release(3.0)
    assert guard.adapters == NO_ADAPTERS


def test_lost_worker_holds_no_adapter() -> None:
    guard = LoadGuard(lambda: None)
    guard.adapters_moved({(1, "v1"): Residency(Adapter(1, "", "v1"))}, 0.0)
    guard.take_report(Report(0.0, adapter_slots=(4, 3, 1)))
    assert (guard.adapters.slots, guard.adapters.free_slots) == (4, 3)
    guard.assign([7], guard.book(10, 1, 0.0, AdapterNeed(Adapter(1, "", "v1"))), 0.0)
    guard.lose(1.0, None)
    assert guard.adapters == NO_ADAPTERS


def test_transfer_rate_rises_at_once_and_falls_slowly() -> None:
    rates, before, seen = Rates(), Report(0.0), []
    for second, moved in enumerate((1000, 4000, 1000, 1000), 1):
        after = Report(
            float(second),
            received_bytes=before.received_bytes + moved,
            receiving_seconds=before.receiving_seconds + 1.0,
        )
        rates.learn(before, after)
        rates.learn(after, after._replace(at=second + 0.5))
        seen.append(rates.transfer_rate or 0.0)
        before = after
    first, risen, *fallen = seen
    assert (first, risen) == (1000, 4000)
    assert fallen == sorted(fallen, reverse=True)
    assert 3000 < fallen[-1] < 4000
    assert typical_of([rates, Rates()], None).transfer_rate == fallen[-1]


def test_handoff_time_is_learned_without_the_step_and_fades() -> None:
    rates = Rates()
    assert rates.handoff_seconds is None
    assert typical_of([rates], None).handoff_seconds == FALLBACK_HANDOFF_SECONDS
    learn_between(
        rates,
        Report(1.0, running_sequences=1),
        Report(2.0, busy_seconds=1.0, step_count=10, running_sequences=1),
    )
    rates.learn_handoff(0.3)
    assert typical_of([rates], None).handoff_seconds == pytest.approx(0.2)
    for second in range(2, 60):
        rates.learn(Report(float(second), step_count=10), Report(second + 1.0, step_count=10))
    assert rates.handoff_seconds == pytest.approx(FALLBACK_HANDOFF_SECONDS, rel=0.01)
    rates.learn_handoff(60.0)
    assert rates.handoff_seconds is not None
    assert rates.handoff_seconds < MOST_HANDOFF_SECONDS, "a late transfer counts elsewhere"


def test_prefill_worker_teaches_the_prefill_rate_alone() -> None:
    """Its sequences leave with their first token, so no step is without a prompt."""
    rates, decode = Rates(), Rates()
    for number in range(1, 30):
        before, after = (
            Report(
                float(at),
                busy_seconds=float(at),
                step_count=at * 4,
                running_sequences=1,
                pending_prompt_tokens=5000,
                computed_prompt_tokens=at * 2000,
            )
            for at in (number, number + 1)
        )
        rates.learn(before, after)
        # Sequences that came with their KV.
        before, after = (
            Report(float(at), busy_seconds=float(at), step_count=at * 50, running_sequences=8)
            for at in (number, number + 1)
        )
        decode.learn(before, after)
    typical = typical_of([rates, decode], None)
    assert typical.prefill_rate == pytest.approx(2000)
    assert typical.step_seconds(8) == pytest.approx(0.02)
    assert (rates.sums, decode.prefill_rate.value) == (None, None)
    assert rates.relative_step(typical) == decode.relative_prefill(typical) == 1.0


def test_last_tokens_of_received_prompts_teach_no_prefill_rate() -> None:
    """A decode worker computes one token of each prompt that came with KV, beside the steps of its sequences."""
    rates = Rates()
    reports = [
        Report(
            float(at),
            busy_seconds=float(at),
            step_count=at * 50,
            running_sequences=16,
            pending_prompt_tokens=3000,
            computed_prompt_tokens=at * 30,
        )
        for at in range(30)
    ]
    for before, after in pairwise(reports):
        rates.learn(before, after)
    assert rates.prefill_rate.value is None


def test_prompt_time_counts_from_the_submit() -> None:
    """A reservation elsewhere, or the load of an adapter, comes before."""
    tested = guard()
    booking = tested.book(1000, 1, 0.0)
    tested.assign([1], booking, 4.0)
    booking.started(5.0)
    assert tested.rates.prefill_rate.value == pytest.approx(1000)


def test_transfers_of_other_routers_count_beside_the_own() -> None:
    tested = guard()
    booking = tested.book(0, 1, 0.0, reservation=Reservation(1000, 40))
    tested.take_report(Report(1.0, receiving_sequences=3, receiving_tokens=5000))
    assert (tested.receiving_tokens, tested.sequences) == (5000, 3)
    booking.started(2.0)
    booking.release(3.0)
    assert (tested.receiving_tokens, tested.sequences) == (4000, 2)
    tested.take_report(Report(4.0))
    assert (tested.receiving_tokens, tested.sequences) == (0, 0)
    tested.take_report(Report(5.0, receiving_sequences=3, receiving_tokens=5000))
    tested.lose(6.0, None)
    assert (tested.receiving_tokens, tested.sequences) == (0, 0)


def test_continued_sequence_teaches_no_prefill_rate() -> None:
    tested = guard()
    booking = tested.book(0, 1, 0.0, reservation=Reservation(1000, 40))
    assert (tested.receiving_tokens, tested.decoding_sequences, tested.sequences) == (1000, 0, 1)
    tested.assign([1], booking, 4.0)
    booking.started(5.0)
    assert tested.rates.prefill_rate.value is None
    assert (tested.receiving_tokens, tested.decoding_sequences) == (0, 1)
    booking.release(6.0)
    assert (tested.receiving_tokens, tested.decoding_sequences) == (0, 0)
