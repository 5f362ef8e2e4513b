"""Permits live exactly as long as items; the queue is fair within a priority."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmesh.chassis.errors import InvalidField, QueueFull, QueueTimeout
from trtmesh.router.admission import Admission, AdmissionLimits, Permit


def admission(
    running: int = 2, queued: int = 3, items: int = 100, seconds: float = 60.0
) -> Admission:
    return Admission(
        AdmissionLimits(
            max_items=items,
            max_running_items=running,
            max_queued_items=queued,
            queue_seconds=seconds,
        )
    )


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.sampled_from(["come", "come", "come", "end", "cancel", "expire", "age"]),
            st.integers(0, 30),
            st.integers(-2, 2),
        ),
        max_size=60,
    ),
)
def test_queue_is_fair_within_a_priority(running: int, actions: list[tuple[str, int, int]]) -> None:
    asyncio.run(compare(running, actions))


async def compare(running: int, actions: list[tuple[str, int, int]]) -> None:
    """Against a model: a list of running items, and a list sorted by priority and arrival, after half of the longest
    wait by arrival alone."""
    tested = admission(running, queued=1000)
    loop, passed = asyncio.get_running_loop(), 0.0
    time = loop.time
    # Advances the clock of this loop alone.
    loop.time = lambda: time() + passed  # type: ignore[method-assign]
    tasks: dict[Permit, asyncio.Task[None]] = {}
    should_run: list[Permit] = []
    should_wait: list[tuple[int, int, Permit, float]] = []

    async def wait(permit: Permit, priority: int) -> None:
        try:
            await permit.admitted(priority)
        except QueueTimeout:
            permit.give_back()

    def refill() -> None:
        should_wait.sort(
            key=lambda entry: (
                passed - entry[3] < 30,
                entry[0] * (passed - entry[3] < 30),
                entry[1],
            )
        )
        while should_wait and len(should_run) < running:
            should_run.append(should_wait.pop(0)[2])

    for number, (action, pick, priority) in enumerate(actions):
        everyone = [*should_run, *(entry[2] for entry in should_wait)]
        if action == "come":
            (permit,) = tested.admit("m", 1)
            tasks[permit] = asyncio.create_task(wait(permit, priority))
            should_wait.append((-priority, number, permit, passed))
        elif action == "end" and should_run:
            permit = should_run.pop(pick % len(should_run))
            permit.give_back()
            permit.give_back()
        elif action == "cancel" and everyone:
            permit = everyone[pick % len(everyone)]
            tasks[permit].cancel()
            permit.give_back()
            should_run = [p for p in should_run if p is not permit]
            should_wait = [entry for entry in should_wait if entry[2] is not permit]
        elif action == "expire":
            passed += 61.0
            should_wait.clear()
        elif action == "age":
            passed += 31.0
            should_wait = [entry for entry in should_wait if passed - entry[3] < 60]
        refill()
        for _ in range(3):
            await asyncio.sleep(0)
        assert [p for p in tasks if p.valid and p.running] == sorted(
            should_run, key=list(tasks).index
        )
        assert tested.live_items == len(should_run) + len(should_wait)
        assert tested.queued_items == len(should_wait)
        # The queue keeps at most as many finished items as waiting ones.
        entries = [len(queue._waiting) for queue in tested._queues.values()]
        assert sum(entries) <= 2 * len(should_wait)
        entries = [len(queue._by_arrival) for queue in tested._queues.values()]
        assert sum(entries) <= 2 * len(should_wait)
    for permit, task in tasks.items():
        task.cancel()
        permit.give_back()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert (tested.live_items, tested.queued_items) == (0, 0)


async def test_full_queue_refuses_the_whole_request_with_a_hint() -> None:
    tested = admission(running=2, queued=3)
    permits = tested.admit("m", 5)
    with pytest.raises(QueueFull) as refused:
        tested.admit("m", 1)
    assert refused.value.limit == "at most 3"
    assert refused.value.retry_after_ms
    assert len(tested.admit("other", 5)) == 5
    permits[0].give_back()
    with pytest.raises(QueueFull):
        tested.admit("m", 2)
    assert len(tested.admit("m", 1)) == 1


async def test_item_runs_amid_a_flood_of_higher_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, passed = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed)
    tested = admission(running=1, queued=1000, seconds=120.0)
    (running,) = tested.admit("m", 1)
    await running.admitted(0)
    (low,) = tested.admit("m", 1)
    waiting = asyncio.create_task(low.admitted(0))
    await asyncio.sleep(0)
    while not low.running:
        (high,) = tested.admit("m", 1)
        next_one = asyncio.create_task(high.admitted(1000))
        await asyncio.sleep(0)
        running.give_back()
        passed += 5.0
        await asyncio.sleep(0)
        # A low one that timed out stays behind for ever.
        assert not waiting.done() or low.running
        running = high
        if low.running:
            next_one.cancel()
    await waiting


async def test_all_models_together_are_bounded_too() -> None:
    tested = admission(running=50, queued=50, items=6)
    tested.admit("m", 4)
    with pytest.raises(QueueFull) as refused:
        tested.admit("other", 3)
    assert refused.value.limit == "at most 6"
    assert tested.live_items == 4


@pytest.mark.parametrize("limits", [{"running": 2, "queued": 3}, {"items": 5}])
async def test_request_beyond_the_limits_is_not_retryable(limits: dict[str, int]) -> None:
    tested = admission(**({"running": 50, "queued": 50} | limits))
    with pytest.raises(InvalidField) as refused:
        tested.admit("m", 6)
    error = refused.value
    assert (error.field, error.value, error.limit) == ("items", "6", "at most 5")
    assert error.retry_after_ms is None
    assert len(tested.admit("m", 5)) == 5


async def test_replacing_call_inherits_the_running_places() -> None:
    tested = admission(running=2, queued=1, items=3)
    former = tested.admit("m", 3)
    for permit in former[:2]:
        await permit.admitted(0)
    with pytest.raises(QueueFull):
        tested.admit("m", 3)
    assert [permit.running for permit in former] == [True, True, False]
    latter = tested.admit("m", 3, former)
    waiting = asyncio.create_task(latter[2].admitted(0))
    for permit in latter[:2]:
        await permit.admitted(0)
    for permit in former:
        permit.give_back()
    await asyncio.sleep(0)
    assert [permit.running for permit in latter] == [True, True, False]
    assert (tested.live_items, tested.queued_items) == (3, 1)
    latter[0].give_back()
    await waiting
    for permit in latter:
        permit.give_back()
    assert (tested.live_items, tested.queued_items) == (0, 0)


async def test_waiting_ends() -> None:
    tested = admission(running=1, seconds=0.01)
    first, second, third = tested.admit("m", 3)
    await first.admitted(0)
    with pytest.raises(QueueTimeout) as refused:
        await second.admitted(0)
    assert refused.value.limit == "0.01"
    assert tested.live_items == 3
    first.give_back()
    second.give_back()
    await third.admitted(0)
    third.give_back()
    assert tested.live_items == 0


async def test_retry_hint_follows_the_pace_of_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = admission(running=1, queued=1)
    now = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    for _ in range(3):
        (permit,) = tested.admit("m", 1)
        await permit.admitted(0)
        now += 0.002
        permit.give_back()
    tested.admit("m", 2)
    with pytest.raises(QueueFull) as refused:
        tested.admit("m", 1)
    assert refused.value.retry_after_ms == 100, "items end every few ms: the shortest hint"
