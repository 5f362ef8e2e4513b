"""Two runs of one workload: what is a difference, and what is noise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from cli.bench.runs import HEADER, answer, drawn
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.comparison import Comparison, Ratio, Verdict, compare
from trtmesh.tools.bench.record import AnswerOutcome, Header, Run

THRESHOLD = 0.05


def ratio(of: Comparison, name: str, statistic: str) -> Ratio:
    (found,) = (each for each in of.ratios if (each.name, each.statistic) == (name, statistic))
    return found


def test_a_planted_regression_of_ten_percent_is_found() -> None:
    seen = compare(drawn(1), drawn(2, slower=1.1), THRESHOLD)

    tpot = ratio(seen, "TPOT", "avg")
    assert seen.is_regression
    assert tpot.verdict is Verdict.REGRESSION
    assert tpot.ratio == pytest.approx(1.1, abs=0.03)
    assert tpot.interval
    assert tpot.interval.includes(1.1)
    assert ratio(seen, "output tokens", "avg").verdict is Verdict.REGRESSION


def test_an_improvement_is_no_regression() -> None:
    seen = compare(drawn(1, slower=1.1), drawn(2), THRESHOLD)

    assert not seen.is_regression
    assert ratio(seen, "TPOT", "avg").verdict is Verdict.BETTER


def test_a_difference_below_the_threshold_is_worse_but_no_regression() -> None:
    seen = compare(drawn(1, 1000), drawn(2, 1000, slower=1.1), 0.2)

    assert not seen.is_regression
    assert ratio(seen, "TPOT", "avg").verdict is Verdict.WORSE


def test_pairing_finds_what_the_spread_of_prompts_would_hide() -> None:
    """The prompts' own costs spread by a factor of four; answers of other prompts are no pairs."""
    a, b = drawn(1), drawn(2, slower=1.1)
    shuffled = replace(
        b, answers=tuple(replace(each, index=(each.index * 7) % 200) for each in b.answers)
    )

    paired = ratio(compare(a, b, THRESHOLD), "TPOT", "avg")
    mixed = ratio(compare(a, shuffled, THRESHOLD), "TPOT", "avg")

    assert paired.interval
    assert mixed.interval
    assert paired.interval.high - paired.interval.low < 0.6 * (
        mixed.interval.high - mixed.interval.low
    )


@pytest.mark.parametrize(("seeds", "most"), [(10, 1), pytest.param(24, 3, marks=pytest.mark.soak)])
def test_equal_servers_seldom_differ(seeds: int, most: int) -> None:
    """Anywhere in the table in one comparison of twenty, by design."""
    alarms: Counter[bool] = Counter()
    for seed in range(seeds):
        seen = compare(drawn(2 * seed, 120), drawn(2 * seed + 1, 120), 0.0)
        differ = {Verdict.BETTER, Verdict.WORSE, Verdict.REGRESSION}
        alarms[any(each.verdict in differ for each in seen.ratios)] += 1
    assert alarms[True] <= most


def test_a_run_is_equal_to_itself() -> None:
    seen = compare(drawn(1), drawn(1), 0.0)

    assert {each.ratio for each in seen.ratios} == {1.0}
    assert {each.verdict for each in seen.ratios} <= {Verdict.NOISE, Verdict.TOO_FEW}
    assert (seen.pairs, seen.compared, seen.identical) == (200, 200, 200)


def test_texts_that_changed_are_counted() -> None:
    run = drawn(1)
    first, second, *others = run.answers
    changed = replace(
        run,
        answers=(replace(first, text_sha256="other"), replace(second, ids_sha256="1 2"), *others),
    )

    seen = compare(run, changed, THRESHOLD)

    # Only one side has ids of the second: their texts decide.
    assert (seen.identical, seen.compared) == (199, 200)


def test_ids_decide_where_both_have_them() -> None:
    one = replace(drawn(1), answers=(answer(0, (1.0,), ids_sha256="a"),))
    other = replace(one, answers=(answer(0, (1.0,), ids_sha256="b"),))

    assert compare(one, other, THRESHOLD).identical == 0


def test_failures_are_a_regression_and_no_latency() -> None:
    run = drawn(1)
    broken = replace(
        run,
        answers=tuple(
            replace(each, outcome=AnswerOutcome.ERROR, arrivals_s=(1e9,), ended_s=each.ended_s)
            if each.index % 4 == 0
            else each
            for each in run.answers
        ),
    )

    seen = compare(run, broken, THRESHOLD)

    assert (seen.failed_a, seen.failed_b, seen.compared) == (0, 50, 150)
    assert ratio(seen, "answers ok", "avg").verdict is Verdict.REGRESSION
    assert ratio(seen, "answers ok", "avg").b == pytest.approx(75.0)
    assert ratio(seen, "E2E", "avg").ratio == 1.0
    assert ratio(seen, "output tokens", "avg").ratio == pytest.approx(0.75)


def test_prompts_of_one_run_alone_are_counted_apart() -> None:
    run = drawn(1)

    seen = compare(run, replace(run, answers=run.answers[20:]), THRESHOLD)

    assert (seen.pairs, seen.only_a, seen.only_b) == (180, 20, 0)


def test_a_prompt_that_is_sent_twice_has_two_pairs() -> None:
    twice = Run(HEADER, (answer(0, (1.0,)), answer(0, (3.0,), planned_s=2.0)))

    seen = compare(twice, twice, THRESHOLD)

    assert (seen.pairs, seen.identical) == (2, 2)


def test_few_answers_are_no_verdict() -> None:
    seen = compare(drawn(1, 8), drawn(2, 8, slower=3.0), THRESHOLD)

    assert {each.verdict for each in seen.ratios} == {Verdict.TOO_FEW}
    assert not seen.is_regression


@pytest.mark.parametrize(
    ("field", "header"),
    [("workload", replace(HEADER, workload="other")), ("seed", replace(HEADER, seed=8))],
)
def test_runs_of_different_workloads_are_refused(field: str, header: Header) -> None:
    run = drawn(1, 4)

    with pytest.raises(SettingsError, match=field):
        compare(run, replace(run, header=header), THRESHOLD)


def test_runs_without_a_common_prompt_are_refused() -> None:
    one, other = (Run(HEADER, (answer(index, (1.0,)),)) for index in (0, 1))

    with pytest.raises(SettingsError, match="no prompt in common"):
        compare(one, other, THRESHOLD)
