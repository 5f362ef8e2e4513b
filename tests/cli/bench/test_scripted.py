"""Each protocol against servers that answer by script: every measure is the truth, every fault has its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random

import pytest
from cli.bench.scripted_servers import (
    PROTOCOLS,
    UNCOUNTED,
    Chunk,
    Fault,
    Play,
    Script,
    Scripts,
    serving,
)
from cli.bench.virtual import SeenTarget, Travelling, run
from trtmesh.tools.bench.driver import Driver, Job, answers_of, chains_of
from trtmesh.tools.bench.loads import planned
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Load, Plan, Prompt
from trtmesh.tools.bench.slo import is_good, parse_slos
from trtmesh.tools.bench.targets.opening import opened
from trtmesh.tools.bench.targets.target import Connecting

EXACT_S = 2e-6
"""Times are kept in microseconds."""

CLOSED = Load("closed", concurrency=4)
CONNECTING = "connects"
"""No prompt: no time passes while the target is asked what it serves."""


def script_of(prompt: str) -> Script:
    """Times of its own for each prompt: a first token after 50 to 500 ms, then gaps of 1 to 90 ms, one of 1.5 s."""
    draw = Random(prompt)
    at_s, offset, chunks = draw.uniform(0.05, 0.5), 0, []
    for number in range(draw.randint(3, 9)):
        ids = tuple(draw.randrange(1000) for _ in range(draw.randint(1, 3)))
        chunks.append(Chunk(at_s, f" {number} {prompt}", ids, offset))
        at_s += 1.5 if number == 1 else draw.uniform(0.001, 0.09)
        offset += len(ids)
    return Script(chunks, at_s)


def prompts(count: int) -> Sequence[Plan]:
    return [Plan((Prompt(number, f"prompt {number}", max_tokens=64),)) for number in range(count)]


def measured(
    protocol: str,
    scripts: Scripts,
    plans: Sequence[Plan],
    load: Load = CLOSED,
    *,
    duration_s: float | None = None,
    timeout_s: float | None = None,
) -> dict[int, Answer]:
    answers: list[Answer] = []

    async def main(travelling: Travelling) -> None:
        travelling.begin(CONNECTING)
        async with (
            serving(protocol, Play(scripts, travelling)) as url,
            opened(Connecting(url, model="ensemble"), 1) as targets,
        ):
            travelling.end(CONNECTING)
            seen = [SeenTarget(target, travelling) for target in targets]
            timed = chains_of(planned(plans, load, 0))
            job = Job(timed, load.concurrency or 1000, duration_s, timeout_s)
            await Driver(seen, job, answers.append).send()

    run(main)
    found = {answer.index: answer for answer in answers}
    assert len(found) == len(answers)
    return found


@pytest.mark.parametrize("concurrency", [1, 16, 128])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_time_is_the_truth(protocol: str, concurrency: int) -> None:
    plans = prompts(max(12, concurrency + 8))
    answers = measured(protocol, script_of, plans, Load("closed", concurrency=concurrency))
    assert len(answers) == len(plans)
    for index, answer in answers.items():
        script = script_of(f"prompt {index}")
        assert answer.ok, answer
        seen = [at_s - answer.sent_s for at_s in answer.arrivals_s]
        assert seen == pytest.approx([chunk.at_s for chunk in script.chunks], abs=EXACT_S)
        assert answer.ended_s - answer.sent_s == pytest.approx(script.ends_s, abs=EXACT_S)
        assert answer.planned_s == answer.sent_s
        assert answer.output_tokens == script.tokens
        text = "".join(chunk.text for chunk in script.chunks)
        assert answer.text_sha256 == sha256(text.encode()).hexdigest()
        if protocol == "grpc":
            assert answer.tokens == tuple(len(chunk.ids) for chunk in script.chunks)
            assert (answer.lost, answer.doubled, answer.prompt_tokens) == (0, 0, 3)
            assert answer.worker == "engine-0"
        else:
            assert (answer.lost, answer.doubled, answer.ids_sha256) == (None, None, None)
    most = max(
        sum(a.sent_s <= at < a.ended_s for a in answers.values())
        for at in [a.sent_s for a in answers.values()]
    )
    assert most == concurrency


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_latency_of_an_open_loop_counts_from_the_planned_time(protocol: str) -> None:
    plans = prompts(20)
    # One at a time cannot keep up with 10 requests a second, so that most are sent late.
    load = Load("constant", rate=10.0, concurrency=1)
    answers = measured(protocol, script_of, plans, load)
    free_s = 0.0
    for index in range(20):
        answer = answers[index]
        assert answer.planned_s == pytest.approx(index / 10, abs=EXACT_S)
        assert answer.sent_s == pytest.approx(max(free_s, index / 10), abs=1e-5)
        assert answer.lag_s == pytest.approx(answer.sent_s - index / 10, abs=EXACT_S)
        free_s = answer.ended_s


OUTCOMES = {
    Fault.NONE: AnswerOutcome.OK,
    Fault.ERROR: AnswerOutcome.ERROR,
    Fault.BREAK: AnswerOutcome.ERROR,
    Fault.NO_END: AnswerOutcome.ERROR,
    Fault.HANG: AnswerOutcome.ERROR,
    Fault.REFUSE: AnswerOutcome.REFUSED,
    Fault.LIMIT: AnswerOutcome.REFUSED,
    Fault.CANCELLED: AnswerOutcome.CANCELLED,
    Fault.NONSENSE: AnswerOutcome.ERROR,
    Fault.TOO_MUCH: AnswerOutcome.ERROR,
}
UNABLE = {
    # A stream of generate_stream has no mark of its end but the end itself.
    "triton+http": (Fault.NO_END, Fault.CANCELLED, Fault.TOO_MUCH),
    # Its streams do not say why they ended.
    "triton": (Fault.CANCELLED,),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_fault_has_its_outcome(protocol: str) -> None:
    faults = [fault for fault in [*Fault] * 3 if fault not in UNABLE.get(protocol, ())]

    def faulty(prompt: str) -> Script:
        index = int(prompt.split()[1])
        script = replace(script_of(prompt), fault=faults[index])
        refused = faults[index] in (Fault.REFUSE, Fault.LIMIT)
        return replace(script, chunks=()) if refused else script

    answers = measured(protocol, faulty, prompts(len(faults)), timeout_s=100.0)
    assert len(answers) == len(faults)
    for index, fault in enumerate(faults):
        answer, script = answers[index], faulty(f"prompt {index}")
        assert answer.outcome is OUTCOMES[fault], (fault, answer)
        assert len(answer.arrivals_s) == len(script.chunks), (fault, answer)
        assert bool(answer.error) is (fault is not Fault.NONE)
        if fault is Fault.HANG:
            assert "--timeout" in answer.error
            assert answer.ended_s - answer.sent_s == pytest.approx(100.0, abs=1e-3)
        if fault is Fault.ERROR:
            assert "out of luck" in answer.error
        if fault is Fault.REFUSE:
            assert "maximum queue size" in answer.error
        if fault is Fault.LIMIT:
            assert "too often" in answer.error
        if fault is Fault.NONSENSE:
            assert "does not keep the protocol" in answer.error
        if fault is Fault.TOO_MUCH:
            assert "after the end" in answer.error


def test_answer_whose_tokens_nobody_counts_is_ok_without_them() -> None:
    (answer,) = measured("openai", script_of, [Plan((Prompt(0, f"{UNCOUNTED} prompt"),))]).values()
    assert answer.ok
    assert (answer.prompt_tokens, answer.output_tokens) == (None, None)
    # Which is no time between tokens, and so none in time.
    assert [is_good(answer, parse_slos([slo])) for slo in ("tpot:1e6", "itl:1e6", "gap:1e6")] == [
        False,
        False,
        True,
    ]


def test_offsets_and_usage_show_lost_and_doubled_tokens() -> None:
    def lying(prompt: str) -> Script:
        script = script_of(prompt)
        first, second, *rest = script.chunks
        match prompt:
            case "prompt 0":
                # Three tokens are skipped, and all later offsets are as if they had come.
                later = [replace(each, offset=each.offset + 3) for each in (second, *rest)]
                return replace(script, chunks=(first, *later), told_tokens=script.tokens + 3)
            case "prompt 1":
                return replace(
                    script, chunks=(first, second, second, *rest), told_tokens=script.tokens
                )
            case "prompt 2":
                return replace(script, told_tokens=script.tokens + 2)
        return script

    answers = measured("grpc", lying, prompts(4))
    twice = len(lying("prompt 1").chunks[1].ids)
    defects = [(answers[index].lost, answers[index].doubled) for index in range(4)]
    assert defects == [(3, 0), (0, twice), (2, 0), (0, 0)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_end_of_the_duration_cancels_what_is_left(protocol: str) -> None:
    def endless(prompt: str) -> Script:
        return replace(script_of(prompt), fault=Fault.HANG)

    answers = measured(protocol, endless, prompts(9), duration_s=20.0)
    assert len(answers) == 4
    for index, answer in answers.items():
        assert answer.outcome is AnswerOutcome.CANCELLED
        assert answer.ended_s == pytest.approx(20.0, abs=1e-3)
        assert len(answer.arrivals_s) == len(script_of(f"prompt {index}").chunks)


def test_server_that_left_fails_every_request() -> None:
    async def main(travelling: Travelling) -> list[Answer]:
        async with serving("grpc", Play(script_of, travelling)) as url:
            pass
        async with opened(Connecting(url), 1) as targets:
            seen = [SeenTarget(each, travelling) for each in targets]
            return await answers_of(seen, Job(chains_of(prompts(6)), 2))

    answers = run(main)
    assert [answer.outcome for answer in answers] == [AnswerOutcome.ERROR] * 6
    assert all("127.0.0.1" in answer.error for answer in answers)


def test_turns_of_a_session_follow_each_other_with_what_was_said() -> None:
    asked: list[str] = []

    def script(prompt: str) -> Script:
        asked.append(prompt)
        return Script([Chunk(0.25, f"<{len(prompt)}>", (1,), 0)], 0.5)

    plans = [
        Plan((Prompt(turn, f"turn {turn}"),), session="a", turn=turn, delay_s=2.0 * bool(turn))
        for turn in range(3)
    ]
    answers = measured("grpc", script, plans)
    assert asked == ["turn 0", "turn 0<6>turn 1", "turn 0<6>turn 1<15>turn 2"]
    assert [answers[turn].sent_s for turn in range(3)] == pytest.approx([0, 2.5, 5.0], abs=1e-5)


def test_failed_turn_ends_its_session() -> None:
    def script(prompt: str) -> Script:
        return replace(script_of(prompt), fault=Fault.ERROR)

    plans = [Plan((Prompt(turn, f"turn {turn}"),), session="a", turn=turn) for turn in range(3)]
    assert [*measured("grpc", script, plans)] == [0]


async def test_cancelled_sending_has_an_answer_for_each_request() -> None:
    travelling, answers = Travelling(), list[Answer]()
    async with (
        serving("grpc", Play(lambda _: Script((), 1e6, Fault.HANG), travelling)) as url,
        opened(Connecting(url), 1) as targets,
    ):
        driver = Driver(targets, Job(chains_of(prompts(5)), 3), answers.append)
        sending = asyncio.create_task(driver.send())
        while driver.sent < 3:  # noqa: ASYNC110 - it is counted, not told
            await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert [answer.outcome for answer in answers] == [AnswerOutcome.CANCELLED] * 3
