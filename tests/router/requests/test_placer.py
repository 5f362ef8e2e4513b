"""The limits on an item's attempts."""

from __future__ import annotations

from trtmesh.chassis.errors import AdapterNotFound, Draining, NoWorker, QueueFull, WorkerLost
from trtmesh.router.requests.placer import Attempts, unplaceable

LOST = WorkerLost("gone", worker="w")


def test_losses_in_a_row_end_the_attempts() -> None:
    attempts = Attempts(3)
    assert attempts.note("a", LOST, 0)
    assert attempts.note("b", LOST, 0)
    assert not attempts.note("c", LOST, 0)


def test_progress_between_losses_resets_the_attempts() -> None:
    attempts = Attempts(2)
    for round_number in range(1, 9):
        assert attempts.note(f"w{round_number}", LOST, round_number)
    assert not attempts.note("x", LOST, 8)


def test_worker_with_several_sequences_counts_once() -> None:
    attempts = Attempts(2)
    assert all(attempts.note("a", LOST, 0) for _ in range(4))
    assert attempts.fruitless == 1
    attempts.forgive()
    assert not attempts.note("a", LOST, 0)


def test_back_pressure_uses_no_attempt() -> None:
    attempts = Attempts(1)
    for address in "abc":
        assert attempts.note(address, Draining("draining"), 0)
    assert attempts.latest(QueueFull) is None
    assert attempts.note("b", QueueFull("full"), 0)
    assert attempts.latest(QueueFull) is not None
    assert attempts.loss is None
    assert set(attempts.failures) == set("abc")
    attempts.forgive()
    assert attempts.latest(QueueFull) is None


def test_move_forgives_earlier_failures() -> None:
    attempts = Attempts(3)
    assert attempts.note("a", LOST, 0)
    for address in ("b", "a", "b"):
        failures = attempts.moved_from(address, LOST, 0)
        assert set(failures) == {address}
        attempts.move(failures, 0)


def test_moves_without_a_token_are_limited() -> None:
    attempts = Attempts(2)
    for address in "aba":
        attempts.move(attempts.moved_from(address, LOST, 0), 0)
    assert set(attempts.failures) == {"a", "b"}
    assert set(attempts.moved_from("c", LOST, 0)) == {"a", "b", "c"}
    assert set(attempts.moved_from("c", LOST, 1)) == {"c"}


def test_item_whose_adapter_is_nowhere_any_more_gets_the_error_of_the_worker() -> None:
    evicted = AdapterNotFound("is 7", field="lora.id", value="7")
    assert unplaceable(evicted, NoWorker("no worker is ready")) is evicted
