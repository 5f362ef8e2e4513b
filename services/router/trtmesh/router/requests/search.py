"""An item's search for a worker: who was tried, who fits what it began with, where its siblings are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import NoWorker, TrtmeshError
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.router.fleet.fleet import Fleet, Identity, ItemToPlace, Placed
from trtmesh.router.replay import RecordedItem, Recorder
from trtmesh.router.requests.attempts import Attempts, Failures, nobody_goes_on
from trtmesh.router.requests.encoding import EncodedItem
from trtmesh.router.requests.siblings import Seat, Siblings
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.values.request import ItemRequest

if TYPE_CHECKING:
    from trtmesh.router.fleet.worker import Worker
    from trtmesh.router.requests.live_request import Retry

REPEAT_SECONDS = 0.1
"""Pause before the workers that did not take an item are asked again."""


class Search:
    """Where one item may go next, and how long it waits for that."""

    def __init__(
        self, fleet: Fleet, retry: Retry, item: ItemRequest, request_id: str, model: str
    ) -> None:
        self._fleet = fleet
        self._recovery_seconds = retry.recovery_seconds
        self._item = item
        self._request_id = request_id
        self._model = model
        self._seat: Seat | None = None
        self._identity: Identity | None = None
        self._deadline: float | None = None
        self.attempts = Attempts(retry.most_attempts)
        self._first: Placed | None = None

    @property
    def began(self) -> bool:
        """Whether a worker took the item."""
        return self._identity is not None

    async def meet_siblings(self, siblings: Siblings, encoded: EncodedItem) -> None:
        """Lets the first of the items that begin alike compute what they share before the others go."""
        self._seat = self._fleet.seat(siblings, self._model, encoded.blocks)
        if self._seat is not None:
            await self._seat.wait()

    def place(self, encoded: EncodedItem, runs: Sequence[SequenceRun]) -> Placed:
        """A place for what no worker has. Raises NoWorker or UnsupportedField."""
        placed = self._fleet.place(self._to_place(encoded, runs, self.attempts.failures))
        self._deadline = None
        self._first = self._first or placed
        return placed

    def leave(
        self, encoded: EncodedItem, runs: Sequence[SequenceRun], address: str, error: TrtmeshError
    ) -> bool:
        """Leaves out the worker at `address` because of `error`, if another one would take the item now."""
        tokens = sum(len(run.token_ids) for run in runs)
        failures = self.attempts.moved_from(address, error, tokens)
        if not self._fleet.has_place(self._to_place(encoded, runs, failures)):
            return False
        self.attempts.move(failures, tokens)
        return True

    def dispatched(self, placed: Placed) -> None:
        """The item is on its way to a worker."""
        if self._seat is not None:
            self._seat.dispatched(placed.worker.address, placed.booking)

    def begin_on(self, worker: Worker) -> None:
        """From now on only workers that go on as this one does may have the item."""
        self._identity = Identity.of(worker)

    async def wait(
        self, error: NoWorker, news: asyncio.Event, *, generated: bool
    ) -> TrtmeshError | None:
        """Returns when it is worth trying again, or at `news` of the item; with an error when it is not."""
        now = asyncio.get_running_loop().time()
        self._deadline = self._deadline or now + self._recovery_seconds
        seconds_left = self._deadline - now
        full = self.attempts.full
        if full is not None and not generated:
            # The client hears it at once and may go to another mesh.
            return full
        if seconds_left <= 0 or not self._fleet.hopeful:
            return nobody_goes_on(self.attempts.loss, error)
        left_out = bool(self.attempts.failures)
        self.attempts.forgive()
        pause = min(seconds_left, REPEAT_SECONDS) if left_out else seconds_left
        await until_first_ends(self._fleet.change(pause), news.wait())
        return None

    def close(
        self,
        recorder: Recorder | None,
        arrival_time: float,
        encoded: EncodedItem,
        new_tokens: int,
        error: str,
    ) -> None:
        """The item is over, failed by `error` or not: nobody waits for it any more, and that it came and where it went
        first is recorded where that is wanted."""
        if self._seat is not None:
            self._seat.close()
        if recorder is not None:
            prompt_tokens = len(encoded.token_ids) or self._item.told_prompt_tokens
            seen = RecordedItem(
                request_id=self._request_id,
                batch_index=self._item.batch_index,
                model=self._model,
                arrival_time=arrival_time,
                error=error,
                prompt_tokens=prompt_tokens,
            )
            recorder.note(self._placed_record(seen, encoded, new_tokens))

    def _placed_record(
        self, seen: RecordedItem, encoded: EncodedItem, new_tokens: int
    ) -> RecordedItem:
        if self._first is None:
            return seen
        block_tokens = self._first.worker.engine.tokens_per_block
        return replace(
            seen,
            prompt_tokens=self._first.record.decision.query.prompt_tokens,
            new_tokens=new_tokens,
            first=self._first.record,
            block_tokens=block_tokens or 1,
            hashes=encoded.blocks.hashes(block_tokens),
        )

    def _to_place(
        self,
        encoded: EncodedItem,
        runs: Sequence[SequenceRun],
        failures: Failures,
    ) -> ItemToPlace:
        exclude = {address: error.message for address, error in failures.items()}
        if self._identity is not None:
            for address in self._fleet.others_than(self._identity):
                exclude[address] = "its model or tokenizer is not the one that the item began with"
        waiting = [run for run in runs if run.waits_for_worker]
        generated = max((run.token_ids for run in waiting), key=len, default=[])
        return ItemToPlace(
            request_id=self._request_id,
            batch_index=self._item.batch_index,
            model=self._model,
            fields=self._item.worker_fields,
            prompt_tokens=len(encoded.token_ids) + len(generated),
            blocks=encoded.blocks,
            sequences=len(waiting) or self._item.config.sequences,
            max_tokens=self._item.config.stopping.max_tokens,
            exclude=exclude,
            avoid=self._seat.avoid if self._seat else frozenset(),
            prefer=self._seat.prefer if self._seat else "",
            cause="migration" if generated else "retry" if runs else "first",
        )
