"""Streams of a disturbed run beside those of the undisturbed one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Disruption, Header, Load, Run, RunEnd
from trtmesh.tools.bench.survival import shown, survival

HEADER = Header("grpc://x:1", "native", Load("closed", concurrency=1), "100 tokens", seed=3)
KILL = Disruption("kill", "engine-0", 2.0, 3.0)


def answer(index: int, *arrivals_s: float, sha: str = "same") -> Answer:
    return Answer(
        index,
        0,
        f"r{index}",
        0.0,
        0.0,
        arrivals_s[-1] if arrivals_s else 9.0,
        AnswerOutcome.OK,
        arrivals_s=arrivals_s,
        text_sha256=sha,
        lost=0,
        doubled=0,
    )


def run_of(
    *answers: Answer, header: Header = HEADER, disruptions: tuple[Disruption, ...] = ()
) -> Run:
    return Run(header, answers, RunEnd(9.0, disruptions=disruptions))


WHOLE = run_of(*(answer(number, 1.0, 1.1) for number in range(5)))


def test_bytes_errors_and_absent_answers_are_told_apart() -> None:
    broken = replace(answer(1, 1.0, 1.1), outcome=AnswerOutcome.ERROR, error="lost")
    ours = replace(answer(2, 1.0), outcome=AnswerOutcome.CANCELLED)
    other_ids = replace(answer(3, 1.0, 1.1), ids_sha256="a")
    known_ids = replace(WHOLE.answers[3], ids_sha256="b")
    before = replace(WHOLE, answers=(*WHOLE.answers[:3], known_ids, WHOLE.answers[4]))
    run = run_of(answer(0, 1.0, 1.1), broken, ours, other_ids, answer(4, 1.0, sha="x"))
    found = survival(run, before)
    assert (found.compared, found.different) == (4, [1, 3, 4])
    assert "identical to the undisturbed run: 1 of 4 streams (25.00 %)" in shown(found)
    # Ids of one side alone say nothing.
    assert survival(run, WHOLE).different == [1, 4]


def test_silences_are_those_from_the_first_disruption_on() -> None:
    over = answer(0, 0.1, 1.9)
    crossing = answer(1, 1.0, 1.5, 2.5, 2.6)
    later = answer(2, 3.0, 3.25)
    broken = replace(answer(3, 2.2), ended_s=6.2, outcome=AnswerOutcome.ERROR)
    found = survival(run_of(over, crossing, later, broken, disruptions=(KILL,)), WHOLE)
    assert sorted(found.silences_ms) == pytest.approx([250.0, 1000.0, 4000.0])
    assert shown(found)[0] == "kill engine-0 at 2.0 s, over at 3.0 s"
    # By linear interpolation.
    told = "longest silence of 3 streams: p50 1000 ms, p99 3940 ms, max 4000 ms"
    assert told in shown(found)


def test_offsets_are_summed_where_there_are_any() -> None:
    found = survival(
        run_of(replace(answer(0, 1.0), lost=2), replace(answer(1, 1.0), doubled=3)), WHOLE
    )
    assert (found.offsets.lost, found.offsets.doubled) == (2, 3)
    without = survival(run_of(replace(answer(0, 1.0), lost=None, doubled=None)), WHOLE)
    assert (without.offsets.lost, without.offsets.doubled) == (None, None)
    assert "tokens lost: the protocol has no offsets" in shown(without)
