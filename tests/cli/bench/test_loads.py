from __future__ import annotations

from itertools import islice, pairwise
from statistics import mean, stdev

import pytest
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.driver import chains_of
from trtmesh.tools.bench.loads import planned, read_ramp, times_of
from trtmesh.tools.bench.measuring import batched
from trtmesh.tools.bench.record import Load, Plan, Prompt

RATE = 8.0


def gaps(load: Load, count: int = 20_000, seed: int = 1) -> list[float]:
    return [b - a for a, b in pairwise(islice(times_of(load, seed), count))]


def plan(index: int, planned_s: float | None = None, session: str = "", turn: int = 0) -> Plan:
    return Plan((Prompt(index, f"p{index}"),), planned_s, session, turn)


def test_constant_rate_has_equal_gaps_from_the_start() -> None:
    assert [*islice(times_of(Load("constant", rate=RATE), 0), 3)] == [0, 1 / RATE, 2 / RATE]


@pytest.mark.parametrize(
    ("load", "variation"),
    [
        (Load("poisson", rate=RATE), 1.0),
        (Load("gamma", rate=RATE, shape={"burstiness": 0.25}), 2.0),
        (Load("gamma", rate=RATE, shape={"burstiness": 4.0}), 0.5),
    ],
)
def test_random_gaps_have_rate_and_variation(load: Load, variation: float) -> None:
    found = gaps(load)
    assert mean(found) == pytest.approx(1 / RATE, rel=0.05)
    assert stdev(found) / mean(found) == pytest.approx(variation, rel=0.05)
    assert found == gaps(load)
    assert found != gaps(load, seed=2)


@pytest.mark.parametrize("span", ["2..32", "32..2"])
def test_ramp_has_the_rate_of_its_time(span: str) -> None:
    load = read_ramp(f"{span}@60s")
    first, last = map(float, span.split(".."))
    times = [*islice(times_of(load, 0), 3000)]
    assert times[0] == 0

    def rate_at(at_s: float) -> float:
        return 10 / (times[next(i for i, t in enumerate(times) if t >= at_s) + 10] - at_s)

    # Over ten requests the rate changes a little more.
    assert rate_at(0) == pytest.approx(first, rel=0.5)
    assert rate_at(30) == pytest.approx((first + last) / 2, rel=0.1)
    assert times[-1] - times[-11] == pytest.approx(10 / last, rel=1e-6)
    assert all(a < b for a, b in pairwise(times))


def test_trace_keeps_its_times_at_its_speed() -> None:
    given = [plan(0, 0.0), plan(1, 3.0), plan(2, None, "s", 1)]
    timed = planned(given, Load("trace", shape={"speed": 2.0}), 0)
    assert [each.planned_s for each in timed] == [0.0, 1.5, 0.0]
    with pytest.raises(SettingsError, match="--as-recorded needs a workload with times"):
        planned([plan(0)], Load("trace", shape={"speed": 1.0}), 0)


def test_later_turns_take_no_time_of_the_load() -> None:
    given = [plan(0, session="s"), plan(1), plan(2, session="s", turn=1), plan(3)]
    timed = planned(given, Load("constant", rate=1.0), 0)
    assert [each.planned_s for each in timed] == [0.0, 1.0, None, 2.0]
    assert [[each.prompts[0].index for each in chain] for chain in chains_of(timed)] == [
        [0, 2], [1], [3]
    ]  # fmt: skip


def test_batches_leave_sessions_alone() -> None:
    given = [plan(0), plan(1, session="s"), plan(2), plan(3)]
    requests = [[prompt.index for prompt in each.prompts] for each in batched(given, 2)]
    assert requests == [[0, 2], [3], [1]]


@pytest.mark.parametrize("text", ["1..2", "0..2@3", "1..2@3:linear", "1..2..3@4"])
def test_other_ramps_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--ramp"):
        read_ramp(text)
