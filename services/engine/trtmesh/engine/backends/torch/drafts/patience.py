"""A source of drafts on a separate thread: steps do not wait for a hanging source.

The queue of a single thread keeps the calls in order. A call beyond the time limit continues alone, and there are no
drafts until the end of the call.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from queue import SimpleQueue

from trtmesh.chassis.panics import is_failure
from trtmesh.engine.backends.torch.drafts.drafter import Drafter, Wish
from trtmesh.engine.backends.torch.sequence import Sequence

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0
"""Longest wait of a step for drafts."""

Call = Callable[[], object]
Answer = Future[SequenceOf[SequenceOf[int]]]


class PatientDrafter:
    """Implements Drafter by another."""

    is_free = False

    def __init__(self, drafter: Drafter, seconds: float = PATIENCE_SECONDS) -> None:
        self.drafter = drafter
        self._seconds = seconds
        self._calls = SimpleQueue[Call | None]()
        self._asked = Answer()
        self._asked.set_result(())
        self._known = set[int]()
        """Keys of the sequences followed by the drafter. A hanging drafter is told of no other ends."""
        self.seconds_apart = 0.0
        # The thread must not keep the drafter: the drafter's end is the thread's end.
        weakref.finalize(self, self._calls.put, None)
        threading.Thread(target=_run, args=(self._calls,), name="drafts", daemon=True).start()

    def propose(self, wishes: SequenceOf[Wish]) -> SequenceOf[SequenceOf[int]]:
        """Raises TimeoutError after the longest wait. Until the end of the call, nobody gets drafts."""
        if not self._asked.done():
            return [()] * len(wishes)
        self._known.update(sequence.key for sequence, _ in wishes)
        asked = self._asked = Answer()

        def answer() -> None:
            began = time.thread_time()
            try:
                found = self.drafter.propose(wishes)
            except BaseException as error:  # noqa: BLE001 - raised where the drafts are awaited
                asked.set_exception(error)
            else:
                self.seconds_apart += time.thread_time() - began
                asked.set_result(found)

        self._calls.put(answer)
        return asked.result(self._seconds)

    def forget(self, sequence: Sequence) -> None:
        if sequence.key in self._known:
            self._known.remove(sequence.key)
            drafter = self.drafter
            self._calls.put(lambda: drafter.forget(sequence))


def _run(calls: SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("the drafter failed at the end of a sequence")
        del call
