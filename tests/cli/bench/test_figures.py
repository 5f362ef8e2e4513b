"""Figures of answers whose times are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cli.bench.runs import HEADER, answer, drawn
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.figures import Figures
from trtmesh.tools.bench.intervals import (
    STATISTICS,
    draws,
    interval,
    is_enough,
    weighted_statistics,
)
from trtmesh.tools.bench.measures import GAP, MEASURES, TTFT
from trtmesh.tools.bench.pools import PERCENTS, pool
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Run
from trtmesh.tools.bench.slo import Slo, goodput, is_good, parse_slos

EVEN = answer(0, (0.2, 0.3, 0.4, 0.5), planned_s=0.1, sent_s=0.15, ended_s=0.55)
LUMPY = answer(1, (1.0, 1.1, 2.6), tokens=(4, 1, 2), ended_s=2.6)
SHORT = answer(2, (0.3,), ended_s=0.3)
FAILED = answer(3, (9.0,), ended_s=9.0, outcome=AnswerOutcome.ERROR, error="broke")
REFUSED = answer(4, (), ended_s=0.1, outcome=AnswerOutcome.REFUSED)
CANCELLED = answer(5, (0.5,), ended_s=10.0, outcome=AnswerOutcome.CANCELLED)
ALL = (EVEN, LUMPY, SHORT, FAILED, REFUSED, CANCELLED)


def figures(*answers: Answer, slos: str = "") -> Figures:
    return Figures(Run(HEADER, answers), parse_slos([slos]))


def test_every_measure_has_the_value_of_its_definition() -> None:
    values = {each.tag: pool(each, ALL).values.tolist() for each in MEASURES}

    assert values == {
        "time_to_first_token": pytest.approx([100.0, 300.0, 1000.0]),
        "time_to_second_token": pytest.approx([100.0, 100.0]),
        "request_latency": pytest.approx([300.0, 400.0, 2600.0]),
        # (E2E - TTFT) / (tokens - 1): 300 / 3, 1600 / 6, none for one token.
        "time_per_output_token": pytest.approx([100.0, 1600 / 6]),
        # (E2E - TTFT) / (tokens - tokens of the first chunk): 300 / 3, 1600 / 3.
        "inter_token_latency": pytest.approx([100.0, 1600 / 3]),
        "inter_chunk_latency": pytest.approx([100.0, 100.0, 100.0, 100.0, 1500.0]),
        "longest_gap": pytest.approx([100.0, 1500.0]),
        "normalized_time_per_output_token": pytest.approx([100.0, 300.0, 2600 / 7]),
        "output_token_throughput_per_user": pytest.approx([3000 / 1600, 10.0]),
        "tokens_per_chunk": pytest.approx([1.0, 1.0, 7 / 3]),
        "input_sequence_length": [8.0, 8.0, 8.0],
        "output_sequence_length": [1.0, 4.0, 7.0],
    }


def test_rates_count_answers_that_are_ok_over_the_whole_run() -> None:
    seen = figures(*ALL)

    # From the first send, at 0, to the last end, at 10.
    assert seen.duration_s == pytest.approx(10.0)
    assert seen.request_throughput == pytest.approx(0.3)
    assert seen.output_token_throughput == pytest.approx(12 / 10)
    assert seen.users == pytest.approx((0.4 + 2.6 + 0.3 + 9.0 + 0.1 + 10.0) / 10)
    assert seen.lag_ms
    assert seen.lag_ms.max == pytest.approx(50.0)


def test_outcomes_are_conserved() -> None:
    assert figures(*ALL).counts == {
        AnswerOutcome.OK: 3,
        AnswerOutcome.ERROR: 1,
        AnswerOutcome.CANCELLED: 1,
        AnswerOutcome.REFUSED: 1,
    }


def test_tokens_that_no_server_counted_are_no_throughput() -> None:
    unknown = replace(EVEN, output_tokens=None, tokens=(0, 0, 0, 0))

    seen = figures(unknown, LUMPY)

    assert seen.output_token_throughput is None
    assert seen.distributions["time_per_output_token"].count == 1


def test_stalls_and_offsets_are_counted() -> None:
    seen = figures(replace(EVEN, lost=2, doubled=0), replace(LUMPY, lost=1, doubled=3)).exactness

    assert (seen.stalls, seen.stalled, seen.lost, seen.doubled) == (1, 1, 3, 3)


def test_a_protocol_without_offsets_says_nothing_of_losses() -> None:
    seen = figures(EVEN).exactness

    assert (seen.lost, seen.doubled) == (None, None)


def test_failed_answers_change_no_latency() -> None:
    assert figures(*ALL).distributions == figures(EVEN, LUMPY, SHORT).distributions


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_percentiles_are_numpys_linear_ones(values: list[float]) -> None:
    answers = [answer(number, (value,)) for number, value in enumerate(values)]

    seen = pool(TTFT, answers).distribution()

    expected = np.percentile(np.array(values) * 1000, PERCENTS, method="linear")
    assert seen
    assert list(seen.percentiles.values()) == pytest.approx(expected.tolist())
    assert seen.count == len(values)
    assert [seen.min, seen.max] == pytest.approx([1000 * min(values), 1000 * max(values)])
    assert seen.std == pytest.approx(float(np.std(np.array(values) * 1000)), abs=1e-6)


@given(st.data())
def test_a_draw_has_the_statistics_of_the_answers_it_repeats(data: st.DataObject) -> None:
    """Weighted percentiles against numpy's over values that are really repeated."""
    gaps = data.draw(
        st.lists(
            st.lists(st.floats(0.001, 10), min_size=0, max_size=5), min_size=1, max_size=8
        ).filter(any)
    )
    weights = data.draw(st.lists(st.integers(0, 4), min_size=len(gaps), max_size=len(gaps)))
    answers = [answer(n, np.cumsum([1.0, *own]).tolist()) for n, own in enumerate(gaps)]
    repeated = [
        gap
        for one, weight in zip(answers, weights, strict=True)
        for gap in np.diff(one.arrivals_s).tolist() * weight
    ]

    # Beside another round, which must not change it.
    both = np.array([weights, [1] * len(gaps)])
    seen = weighted_statistics(pool(GAP, answers), both)[0]

    if not repeated:
        assert np.isnan(seen).all()
        return
    ms = np.array(repeated) * 1000
    expected = [ms.mean(), *np.percentile(ms, [50, 90, 99])]
    assert seen.tolist() == pytest.approx([float(each) for each in expected])


def test_draws_are_of_requests_and_repeatable() -> None:
    requests = ["a", "a", "b", "c", "c", "c"]

    (first,), (again,) = ([each.tolist() for each in draws(requests)] for _ in range(2))

    assert first == again
    for weights in first:
        assert weights[0] == weights[1]
        assert weights[3] == weights[4] == weights[5]
        assert weights[0] + weights[2] + weights[3] == 3
    assert len({tuple(each) for each in first}) > 5


def test_an_interval_of_a_mean_holds_the_truth_as_often_as_it_says() -> None:
    """Of 200 samples of a known distribution: 95 % of them, give or take three deviations."""
    random = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        sample = random.exponential(0.1, 80)
        found = pool(TTFT, [answer(n, (value,)) for n, value in enumerate(sample.tolist())])
        (weights,) = draws(range(80))
        within = interval(weighted_statistics(found, weights)[:, 0])
        assert within
        hits += within.includes(100.0)
    assert 175 <= hits <= 199


def test_a_percentile_needs_answers_beyond_it() -> None:
    few, many = (pool(TTFT, drawn(1, count).answers) for count in (30, 1001))

    assert [is_enough(few, each) for each in STATISTICS] == [True, True, False, False]
    assert all(is_enough(many, each) for each in STATISTICS)
    # All gaps beyond the 99th percentile may be of one bad answer.
    bad = answer(0, np.cumsum([1.0] + [5.0] * 99).tolist())
    even = [answer(n, np.cumsum([1.0] + [0.1] * 99).tolist()) for n in range(1, 100)]
    assert not is_enough(pool(GAP, [bad, *even]), "p99")


@pytest.mark.parametrize(
    ("slos", "good"),
    [
        ("ttft:100.1", {0}),
        ("ttft:99", set()),
        ("ttft:1000.1", {0, 1, 2}),
        ("tpot:100.1", {0, 2}),
        ("itl:500", {0, 2}),
        ("gap:1000", {0, 2}),
        ("e2e:400.1", {0, 2}),
        ("e2e:400.1 ttft:300.1", {0, 2}),
        ("e2e:400.1 ttft:200", {0}),
    ],
)
def test_an_answer_is_good_if_it_meets_every_slo(slos: str, good: set[int]) -> None:
    limits = parse_slos([slos])

    assert {each.index for each in ALL if is_good(each, limits)} == good


def test_goodput_counts_failures_but_not_what_was_cancelled() -> None:
    seen = goodput(ALL, parse_slos(["ttft:1001", "gap:1000"]))

    assert (seen.good, seen.counted) == (2, 5)
    assert seen.attainment == pytest.approx(0.4)
    assert seen.per_s == pytest.approx(0.2)


def test_an_answer_without_a_token_meets_no_limit_of_the_first() -> None:
    empty = answer(0, ())

    assert not is_good(empty, [Slo("ttft", 1e9)])
    assert not is_good(empty, [Slo("tpot", 1e9)])
    assert is_good(empty, [Slo("e2e", 1e9)])


@pytest.mark.parametrize("text", ["ttft", "first:20", "ttft:0", "ttft:nan", "e2e:inf", "tpot:x"])
def test_what_is_no_slo_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=text.split(":", maxsplit=1)[0]):
        parse_slos([text])


def test_slos_stand_in_one_text_or_several() -> None:
    together = parse_slos(["ttft:200 tpot:30"])

    assert together == parse_slos(["ttft:200", "tpot:30"])
    assert together == (Slo("ttft", 200.0), Slo("tpot", 30.0))
