"""Bounds the time for masks in a step.

A mask takes microseconds, but under a grammar with many readings of a text up to some 35 ms. A row without its mask
sits out: it has no token with this step, and the next step computes it again.

`MaskTime` makes masks on the engine's thread, those expected to take least first, for `STEP_SECONDS` a step. Each step
without a mask that took longer than expected makes that of the row that sat out most steps, however long it takes. So
others wait in a step for its time and that of one such mask. `MaskThreads` makes them while a device computes the
step, those that may take long on threads: such a mask delays no row but its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from trtmesh.engine.backends.torch.guided.grammars import Guide, GuideCounts

if TYPE_CHECKING:
    from trtmesh.engine.backends.torch.sampling.continuation import Continuation

STEP_SECONDS = 0.01
"""CPU time for the masks of a step, and the longest wait for those of threads."""
LONG_SECONDS = STEP_SECONDS / 2
"""Masks of a guide whose last took longer are not awaited beside others."""
MOST_OF_STEP, GAP_OF_STEP, LEAST_GAP = 1 / 2, 1 / 10, 1e-4
"""The wait for masks of threads, as a share of the step before, and that for the next one of them, which is at least
LEAST_GAP: most masks come at once, and the choice must be launched before the device has the logits."""


def may_be_late(sequence: Continuation) -> bool:
    """Whether the next mask is under way or expected to take long, so that drafts would wait for theirs in vain."""
    guide = sequence.guide
    return guide is not None and (guide.is_busy or guide.last_seconds > LONG_SECONDS)


class Masks(Protocol):
    """Makes the masks of guided sequences."""

    counts: GuideCounts

    def begin_step(self) -> None:
        """Masks from now on are those of another step."""

    def begin(self, guided: Iterable[Continuation]) -> None:
        """Begins to make the masks of the next tokens, if that needs no time of the caller."""

    def late(self, guided: Iterable[Continuation], *, alone: bool = True) -> set[int]:
        """The keys of the sequences without the mask of the next token. Sequences `alone` in their step have one at
        least."""

    def close(self) -> None:
        """Ends the threads, once no more masks are wanted."""


class MaskTime:
    """Implements Masks on the engine's thread."""

    def __init__(self, counts: GuideCounts) -> None:
        self.counts = counts
        self._seconds_left = 0.0
        """CPU time left in this step."""

    def begin_step(self) -> None:
        self._seconds_left = STEP_SECONDS

    def begin(self, guided: Iterable[Continuation]) -> None:
        """Nothing runs beside the caller."""

    def late(self, guided: Iterable[Continuation], *, alone: bool = True) -> set[int]:
        jobs = sorted(map(_Job, guided), key=lambda job: job.guide.last_seconds)
        late = [
            job
            for job in jobs
            if job.guide.last_seconds > self._seconds_left or not self._makes(job)
        ]
        if late and self._seconds_left > 0:
            longest = max(late, key=lambda job: job.guide.sat_out)
            if self._makes(longest):
                late.remove(longest)
        for job in late:
            job.guide.sat_out += 1
        return {job.sequence.key for job in late}

    def close(self) -> None:
        """There are no threads."""

    def _makes(self, job: _Job) -> bool:
        is_made = True
        # The choice meets an error again, and ends this item alone.
        with suppress(Exception):
            is_made = job.goes_on()
        self._seconds_left -= job.count(self.counts)
        if is_made:
            job.guide.sat_out = 0
        return is_made


class MaskThreads:
    """Implements Masks. Masks that take microseconds are made by the engine's thread, as it would take longer to wake
    another. Masks expected to take long have threads of their own, so that they delay no others however many they
    are."""

    def __init__(self, counts: GuideCounts, threads: int) -> None:
        self.counts = counts
        self._step = 0
        self._step_seconds = self._began = self._deadline = 0.0
        self._made = threading.Condition()
        # Guarded by `_made`.
        self._open = 0
        """Masks begun in this step, not expected to take long and not yet made."""
        self._any_will_do = False
        self._quick = _Threads("masks", threads, self._make)
        self._slow = _Threads("long-masks", max(1, threads // 4), self._make)

    def begin_step(self) -> None:
        now = time.perf_counter()
        self._step_seconds, self._began = min(now - self._began, STEP_SECONDS / MOST_OF_STEP), now
        with self._made:
            self._step += 1
            self._open = 0

    def begin(self, guided: Iterable[Continuation]) -> None:
        mine, others = list[_Job](), list[_Job]()
        for sequence in guided:
            guide, tokens = _guide(sequence), sequence.tokens
            if not guide.is_busy and not guide.has_mask(tokens):
                (mine if guide.is_quick(tokens) else others).append(_Job(sequence))
        # The masks of an automaton are made one after another.
        automata = {id(job.guide.automaton) for job in mine}
        self._leave([job for job in others if id(job.guide.automaton) not in automata])
        for job in mine:
            self._make(job)
        self._leave([job for job in others if id(job.guide.automaton) in automata])

    def _leave(self, jobs: Sequence[_Job]) -> None:
        if not jobs:
            return
        for job in jobs:
            job.guide.is_busy = True
        slow = [job for job in jobs if job.guide.last_seconds > LONG_SECONDS]
        quick = [job for job in jobs if job.guide.last_seconds <= LONG_SECONDS]
        with self._made:
            self._open += len(quick)
        for job in quick:
            job.step = self._step
        self._deadline = time.perf_counter() + MOST_OF_STEP * self._step_seconds
        self._quick.begin(quick)
        self._slow.begin(slow)

    def late(self, guided: Iterable[Continuation], *, alone: bool = True) -> set[int]:
        guided = list(guided)
        self.begin(guided)
        guides = {each.key: guide for each in guided if (guide := _guide(each)).is_busy}
        if not guides:
            return set()
        alone = alone and len(guides) == len(guided)
        with self._made:
            before = 0
            while self._open not in (0, before) and time.perf_counter() < self._deadline:
                before = self._open
                self._made.wait(max(LEAST_GAP, GAP_OF_STEP * self._step_seconds))
            self._any_will_do = alone
            while alone and all(guide.is_busy for guide in guides.values()):
                self._made.wait()
            self._any_will_do = False
        return {key for key, guide in guides.items() if guide.is_busy}

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    def _make(self, job: _Job) -> None:
        # The choice meets an error again, or a panic of the library, and ends this item alone.
        with suppress(BaseException):
            # An ended sequence has no history.
            while job.sequence.history and not job.goes_on():
                pass
        with self._made:
            job.count(self.counts)
            job.guide.is_busy = False
            self._open -= job.step == self._step
            if self._any_will_do or not self._open:
                self._made.notify()


class _Threads:
    """Threads that do jobs, first come, first served."""

    def __init__(self, name: str, count: int, do: Callable[[_Job], None]) -> None:
        self._do = do
        self._jobs = deque[_Job]()
        self._wake = SimpleQueue[int]()
        """A 1 for each thread that is needed; 0 ends a thread."""
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, jobs: Sequence[_Job]) -> None:
        self._jobs.extend(jobs)
        for _ in range(min(len(jobs), len(self._threads))):
            self._wake.put(1)

    def close(self) -> None:
        for _ in self._threads:
            self._wake.put(0)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while self._wake.get():
            with suppress(IndexError):
                while True:
                    self._do(self._jobs.popleft())


class _Job:
    """The mask of a sequence's next token."""

    def __init__(self, sequence: Continuation) -> None:
        self.sequence, self.guide = sequence, _guide(sequence)
        self.step = 0
        """The step that awaits the mask; 0 for none."""
        self._seconds, self._problem = self.guide.seconds, self.guide.problem

    def goes_on(self) -> bool:
        """Works for up to STEP_SECONDS before the mask, and on the mask. Returns whether it is made."""
        sequence = self.sequence
        return self.guide.makes(sequence.tokens, sequence.rule.end_ids, STEP_SECONDS)

    def count(self, counts: GuideCounts) -> float:
        """Counts the work. Returns the CPU time since the last call."""
        guide = self.guide
        took = guide.seconds - self._seconds
        counts.mask_seconds += took
        counts.not_followed += bool(guide.problem) and not self._problem
        self._seconds, self._problem = guide.seconds, guide.problem
        return took


def _guide(sequence: Continuation) -> Guide:
    guide = sequence.guide
    assert guide
    return guide
