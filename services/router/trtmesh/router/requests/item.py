"""One item, from admission to its terminal event. This file tells the story; every verb is a method below.

* A permit, taken when its request came, is held for exactly as long as the item lives.
* Every item ends in one terminal event, whatever happens to its siblings.
* When a tokenizer finds a stop text, the worker is told to stop.
* A worker that is lost or full costs an item nothing but time: whatever was generated goes along to the next one.
* Whoever stops waiting for an item stops its sequences, so that the worker computes nothing that nobody reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import NoWorker, TrtmeshError
from trtmesh.chassis.logs import request_id_bound
from trtmesh.router.admission import Permit
from trtmesh.router.fleet.fleet import Placed
from trtmesh.router.requests.attempts import too_many_losses
from trtmesh.router.requests.dispatch import dispatch
from trtmesh.router.requests.encoding import NOT_ENCODED, encode_item
from trtmesh.router.requests.item_events import ItemEvents
from trtmesh.router.requests.opening import open_sequences
from trtmesh.router.requests.search import Search
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.values.request import ItemRequest
from trtmesh.router.values.resumption import NOTHING, Received
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from trtmesh.router.requests.live_request import LiveRequest


class ItemRun:
    """One live item."""

    def __init__(
        self, live: LiveRequest, item: ItemRequest, permit: Permit, received: Received = NOTHING
    ) -> None:
        self._permit = permit
        self._live = live
        self._events = ItemEvents(item, live)
        self._mesh = live.mesh
        self._item = item
        self._received = received
        self._stop_asked = False
        self._over = False
        self._encoded = NOT_ENCODED
        self._runs: list[SequenceRun] = []
        self._search = Search(live.mesh.fleet, live.mesh.retry, item, live.request_id, live.model)
        self._error: TrtmeshError | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.encode_seconds = 0.0
        self.queue_seconds: float | None = None
        """From its request's arrival to its first dispatch, encoding included; None before."""
        self.stage = "admit"
        self.worker = ""

    async def live(self) -> None:
        """Admit → encode → meet siblings → place and generate, on as many workers as it takes → finish."""
        self._task = asyncio.current_task()
        with request_id_bound(self._live.request_id):
            try:
                if self._stop_asked:
                    raise asyncio.CancelledError
                await self._permit.admitted(self._item.config.priority)
                await self._encode()
                await self._meet_siblings()
                self._go_on_behind_received()
                while not self._settled:
                    await self._wait_for_client()
                    await self._place()
                    await self._generate()
                self._finish()
            except TrtmeshError as error:
                self._events.failed(error, self.usage())
            except asyncio.CancelledError:
                self._cancelled()
            except Exception as error:  # noqa: BLE001 - a defect that one item meets ends that item alone, visibly
                self._events.broke(error, self.usage())
            finally:
                self._abandon()

    def stop(self) -> bool:
        """Ends the item early; whatever was generated is delivered. False when it is over."""
        if self._over:
            return False
        self._stop_asked = True
        if self._task is None:
            # Its first step sees what was asked.
            return True
        if self._runs:
            for run in self._runs:
                run.stop(pb.FINISH_REASON_STOPPED)
        else:
            self._task.cancel()
        return True

    @property
    def batch_index(self) -> int:
        return self._item.batch_index

    @property
    def sequences(self) -> Sequence[SequenceRun]:
        """Its sequences; none before a worker took it."""
        return self._runs

    @property
    def prompt_tokens(self) -> int:
        return len(self._encoded.token_ids)

    @property
    def generated_tokens(self) -> int:
        return sum(len(run.token_ids) for run in self._runs)

    def usage(self) -> pb.Usage:
        """What it consumed so far."""
        cached = [run.end.cached_prompt_tokens for run in self._runs if run.end is not None]
        return pb.Usage(
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=max(cached, default=0),
            generated_tokens=self.generated_tokens,
        )

    async def _encode(self) -> None:
        self.stage = "encode"
        # What no worker can do costs no tokenizer anything.
        self._mesh.fleet.check_fields(self._live.model, self._item.worker_fields)
        began = self._live.age_seconds()
        self._encoded = await encode_item(
            self._item, self._mesh.tokenizers, self._live.model, self._live.request_id
        )
        self.encode_seconds = self._live.age_seconds() - began
        if not self._received.has(self.batch_index):
            self._live.spend(self.prompt_tokens)

    def _go_on_behind_received(self) -> None:
        """Opens the sequences of an item that began on another router; others are opened when they are placed."""
        if self._received.has(self.batch_index):
            self._open_sequences()

    @property
    def _settled(self) -> bool:
        return bool(self._runs) and all(run.over for run in self._runs)

    @property
    def _waiting(self) -> list[SequenceRun]:
        """Sequences that no worker has."""
        return [run for run in self._runs if run.waits_for_worker]

    @property
    def _needs_worker(self) -> bool:
        return not self._runs or bool(self._waiting)

    async def _meet_siblings(self) -> None:
        """Lets the first of the items that begin alike compute what they share before the others go."""
        self.stage = "place"
        await self._search.meet_siblings(self._live.siblings, self._encoded)

    async def _wait_for_client(self) -> None:
        """Returns when the client has read enough for the item to go on; nothing of it is on a worker until then."""
        while self._live.pace.paused and not self._settled and self._error is None:
            self.stage = "paused"
            self._news.clear()
            await self._news.wait()

    def on_pace(self) -> None:
        """The client is slow: takes the sequences off their workers, save beams, which would begin again. Or it has
        read, and they go on."""
        if self._over or self._stop_asked:
            return
        if self._live.pace.paused and self._item.config.beam_search.beam_width == 1:
            held = [run for run in self._runs if run.assignment is not None]
            for run in held:
                run.release()
            self._mesh.metrics.moved["paused"] += len(held)
        self._news.set()

    async def _place(self) -> None:
        """Dispatches what no worker has, and waits for a worker where none takes it; not for a client that is slow, and
        not once a sequence failed."""
        while self._needs_worker and self._error is None and not self._live.pace.paused:
            self.stage = "place"
            self._news.clear()
            try:
                placed = self._search.place(self._encoded, self._runs)
            except NoWorker as error:
                generated = bool(self.generated_tokens)
                final = await self._search.wait(error, self._news, generated=generated)
                if final is not None:
                    self._give_up(final)
            else:
                with placed:
                    self._dispatch(placed)
                    self._search.dispatched(placed)

    def move(self, runs: Sequence[SequenceRun], address: str, error: TrtmeshError) -> bool:
        """Takes sequences away from a worker that is suspected of being dead, or shall be, if another one takes them.

        They stay where none does: the worker may be well, and whatever it still generates is wanted.
        """
        if self._stop_asked or self._over:
            return False
        if not self._search.leave(self._encoded, self._runs, address, error):
            return False
        for run in runs:
            run.release(error)
        self._events.moved(len(runs), error)
        self._news.set()
        return True

    def _give_up(self, error: TrtmeshError) -> None:
        """No worker takes the item: it ends behind what was generated."""
        if not self._runs:
            raise error
        for run in self._waiting:
            run.give_up(error)

    async def _generate(self) -> None:
        """Waits until all sequences are over, one failed, or one needs another worker. Tokens flow beside this."""
        self.stage = "generate"
        while not self._settled and not self._needs_worker and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error

    def _dispatch(self, placed: Placed) -> None:
        """Gives the worker what no worker has."""
        worker, first = placed.worker, not self._search.began
        if first:
            if not self._runs:
                self._open_sequences()
            self._search.begin_on(worker)
        self.worker = worker.name
        seed = dispatch(placed, self._live, self._item, self._encoded, self._waiting)
        if first:
            self.queue_seconds = self._live.age_seconds()
            self._events.started(worker.name, seed, self._encoded.token_ids, self.queue_seconds)

    def _open_sequences(self) -> None:
        self._runs = open_sequences(self._live, self._item, self._received.sequences, owner=self)

    def on_settled(self, run: SequenceRun) -> None:
        """A sequence is over: tells the client, and wakes the item when it was the last or it failed."""
        if run.error is None:
            self._events.sequence_finished(run)
        else:
            self._error = run.error
        if self._error is not None or self._settled:
            self._news.set()

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        """A worker does not go on with a sequence: another one shall, unless too many were lost with this item."""
        if self._stop_asked:
            run.stop(pb.FINISH_REASON_STOPPED)
        elif not self._search.attempts.note(address, error, self.generated_tokens):
            run.give_up(too_many_losses(self._search.attempts.fruitless, error))
        else:
            self._events.lost(error)
            self._news.set()

    def _finish(self) -> None:
        self._events.finished(self._runs, self.usage())
        tokens = self.generated_tokens / len(self._runs)
        self._mesh.fleet.learn_new_tokens(self._live.model, tokens)

    def _cancelled(self) -> None:
        """Cancelled by `stop` before it was dispatched, or because the client is gone."""
        reason = pb.FINISH_REASON_STOPPED if self._stop_asked else pb.FINISH_REASON_CANCELLED
        if self._stop_asked and not self._runs:
            # What its client has of it from another router ends there.
            self._go_on_behind_received()
        self._events.cut_off(self._runs, reason, self.usage())

    def dissolve(self) -> None:
        """The item is over and nobody asks for it any more."""
        self._runs = []
        # Where it was raised it holds the frames, and they the item.
        self._error = None
        self._task = None

    def _abandon(self) -> None:
        """Stops whatever still runs; nothing to do for an item that came to its end."""
        for run in self._runs:
            run.abandon(pb.FINISH_REASON_CANCELLED)
        self._search.close(
            self._mesh.recorder,
            self._live.arrival_time,
            self._encoded,
            self.generated_tokens,
            self._events.error,
        )
        self._over = True
        self.stage = "over"
        self._live.on_item_over()
