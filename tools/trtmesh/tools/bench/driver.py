"""Sends the requests of a workload to a target, each at its time, and hands on the answers as they end."""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from trtmesh.chassis.errors import DeadlineExceeded, StreamIncomplete, TrtmeshError
from trtmesh.tools.bench.reception import Reception
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Plan
from trtmesh.tools.bench.targets.target import Target

MOST_OPEN = 16_384
"""Requests at a time in an open loop, so that memory is bounded; the next ones are sent late, as their lag says."""

NONSENSE = (AttributeError, LookupError, TypeError, ValueError, struct.error)
"""What reading an answer raises that does not keep its protocol: it ends that request, and not the run."""

Chain = Sequence[Plan]
"""The requests of a session in order, or a request outside one."""


def chains_of(plans: Iterable[Plan]) -> list[Chain]:
    """In the order of their first requests."""
    chains: dict[object, list[Plan]] = {}
    for number, plan in enumerate(plans):
        chains.setdefault(plan.session or number, []).append(plan)
    return [sorted(chain, key=lambda plan: plan.turn) for chain in chains.values()]


@dataclass(frozen=True, slots=True)
class Job:
    """What is sent: every chain, at most so many requests at a time. At the end of the duration the rest is
    cancelled."""

    chains: Sequence[Chain]
    most_open: int = MOST_OPEN
    duration_s: float | None = None
    timeout_s: float | None = None
    """Of a request."""
    keeps_text: bool = False


class Driver:
    """Sends a job over connections in turn. Times are seconds since `started`, by the event loop's clock; without it
    since it was made."""

    def __init__(
        self,
        targets: Sequence[Target],
        job: Job,
        on_answer: Callable[[Answer], object],
        started: float | None = None,
    ) -> None:
        self._targets = targets
        self._job = job
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time() if started is None else started
        self._computed_s = time.thread_time()
        self.sent = 0

    def clock(self) -> float:
        return self._loop.time() - self._started

    def busy(self) -> float:
        """Share of the time so far in which this thread computed."""
        return (time.thread_time() - self._computed_s) / max(self.clock(), 1e-9)

    async def send(self) -> None:
        """To cancel the task cancels the requests, with an answer each."""
        over_s, free = self._job.duration_s, asyncio.Semaphore(self._job.most_open)
        with suppress(TimeoutError):
            async with (
                asyncio.timeout_at(None if over_s is None else self._started + over_s),
                asyncio.TaskGroup() as group,
            ):
                for chain in self._job.chains:
                    await asyncio.sleep((chain[0].planned_s or 0.0) - self.clock())
                    await free.acquire()
                    task = group.create_task(self._converse(chain))
                    task.add_done_callback(lambda _: free.release())

    async def _converse(self, chain: Chain) -> None:
        """Sends the requests of a session one after the other, each with what was said before; a failed one ends it."""
        said: tuple[str, ...] = ()
        due_s = chain[0].planned_s
        for plan in chain:
            if plan.turn:
                await asyncio.sleep(plan.delay_s)
                (prompt,) = plan.prompts
                # What is sent in its place.
                plan = replace(plan, prompts=(replace(prompt, history=said),))  # noqa: PLW2901
            reception = await self._ask(plan, due_s)
            if not reception.is_ok:
                return
            due_s = None
            if plan.session:
                (prompt,) = plan.prompts
                said = (*prompt.history, prompt.text or "", reception.text())

    async def _ask(self, plan: Plan, due_s: float | None) -> Reception:
        target = self._targets[self.sent % len(self._targets)]
        self.sent += 1
        keeps, patience_s = self._job.keeps_text, self._job.timeout_s
        reception = Reception(plan, self.clock, uuid.uuid4().hex, due_s=due_s, keeps_text=keeps)
        try:
            async with asyncio.timeout(patience_s):
                await target.answer(plan, reception)
        except TrtmeshError as error:
            reception.fail_rest(error)
        except TimeoutError:
            late = f"there was no end within {patience_s:g} s (--timeout)"
            reception.fail_rest(DeadlineExceeded(late))
        except NONSENSE as error:
            why = f"the answer does not keep the protocol: {type(error).__name__}: {error}"
            reception.fail_rest(StreamIncomplete(why))
        except asyncio.CancelledError:
            reception.end_rest(AnswerOutcome.CANCELLED, "the run ended before")
            raise
        finally:
            for answer in reception.answers():
                self._on_answer(answer)
        return reception


async def answers_of(
    targets: Sequence[Target], job: Job, started: float | None = None
) -> list[Answer]:
    """In the order in which they ended."""
    answers: list[Answer] = []
    await Driver(targets, job, answers.append, started).send()
    return answers
