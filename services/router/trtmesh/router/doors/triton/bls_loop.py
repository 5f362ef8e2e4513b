"""Upstream's loop of `tensorrt_llm_bls` over two models of the mesh: one drafts, the other verifies, round by round.

Each round continues the request as a client resumes it, so that text, words, penalties, log-probabilities and draws are
those of a single request. The output is the one without drafts; with `use_draft_logits` it has the same distribution. A
model for drafts that is slow, fails or is not there means no more drafts, and never an error.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import BackendFailed, InvalidField, TrtmeshError
from trtmesh.chassis.parsing import parse_config
from trtmesh.router.doors.generation import Caller, GenerationCall, RunningCall
from trtmesh.router.doors.triton.templates.outputs import SequenceOutput
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.item_events import combined
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.requests.requests import Requests
from trtmesh.router.streams.client_stream import Waiting, WaitingEvent, WaitingTokens
from trtmesh.router.values.request import GenerationRequest
from trtmesh.router.values.resumption import NOTHING, Received, ReceivedSequence
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

DRAFT_SECONDS = 5.0
"""Longest wait for the drafts of a round; then there are none for the rest of the request."""


class BlsLoop:
    """The rounds of a request. A stop ends it in a round, between two, and while it drafts."""

    def __init__(
        self,
        requests: Requests,
        metrics: RouterMetrics,
        request: GenerationRequest,
        draft_model: str,
        caller: Caller,
        call: GenerationCall,
        name: Callable[[], str],
        timed: Callable[[LiveRequest], AbstractContextManager[None]],
    ) -> None:
        """`name` gives the name of a verifying round, or ''; `timed` counts the time of one. Raises InvalidField."""
        self._requests, self._metrics, self._draft_model = requests, metrics, draft_model
        self._caller, self._call = caller, call
        self._name, self._timed = name, timed
        if request.default_seed is None:
            # Both models draw with one, in every round.
            request = replace(request, default_seed=secrets.randbits(64))
        self._request = request
        (self._item,) = request.items
        config = self._item.config
        if config.sequences > 1 or config.beam_search.beam_width > 1 or config.handoff is not None:
            raise InvalidField(
                "is for a single sequence, prompt and output together; leave it out, or beam_width,"
                " num_return_sequences and request_type",
                field="draft.num_draft_tokens",
            )
        assert config.draft
        self._length = config.draft.num_draft_tokens or 0
        self._with_logits = config.draft.use_draft_logits
        self._most = config.stopping.max_tokens or 0
        seconds = caller.remaining_seconds
        self._deadline = None if seconds is None else _now() + seconds
        self._emitted: list[int] = []
        self._asked = 0
        """Most tokens after the round: fewer if the context is full, which ends the request."""
        self._log_prob: float | None = None
        self._perf: list[pb.PerfMetrics] = []
        self._stopped = self._failed = False
        self._running: LiveRequest | None = None
        """The request of a round, or for its drafts."""
        self._entries = self._rounds()
        self.aclose = self._entries.aclose

    async def next_entries(self) -> Sequence[Waiting] | None:
        """Waits for news of the request; None at the end."""
        return await anext(self._entries, None)

    def stop(self, batch_indexes: Collection[int]) -> None:
        """Ends the request, whose only prompt is named or all are. A round that is over cannot stop: the next does."""
        self._stopped = True
        if self._running is not None:
            self._running.stop(batch_indexes)

    async def _rounds(self) -> AsyncGenerator[Sequence[Waiting]]:
        ends: list[WaitingEvent] = []
        while not self._is_over(ends):
            request = self._verifying(await self._drafts())
            ends = []
            async with self._open(self._call, request) as live:
                with self._stoppable(live), self._timed(live):
                    while (waiting := await live.client.next_entries()) is not None:
                        yield self._seen(waiting, ends)
        if ends:
            yield ends

    @contextmanager
    def _stoppable(self, live: LiveRequest) -> Iterator[None]:
        self._running = live
        if self._stopped:
            live.stop(())
        try:
            yield
        finally:
            self._running = None

    def _open(self, call: GenerationCall, request: GenerationRequest) -> RunningCall:
        """Runs a request after the tokens so far."""
        left = None if self._deadline is None else max(0.0, self._deadline - _now())
        received = NOTHING
        if self._emitted:
            sequence = ReceivedSequence(array("I", self._emitted), None, self._log_prob)
            received = Received({(0, 0): sequence})
        who, origin = self._caller.identity, self._caller.origin
        return RunningCall(call, self._requests.open(request, left, who, origin, received))

    def _seen(self, waiting: Sequence[Waiting], ends: list[WaitingEvent]) -> list[Waiting]:
        """The entries for the client; those of the round's end, which need not be the request's, go to `ends`."""
        told: list[Waiting] = []
        for entry in waiting:
            if isinstance(entry, WaitingTokens):
                self._emitted += entry.token_ids
            elif entry.event.WhichOneof("event") in ("sequence_finished", "item_finished"):
                ends.append(entry)
                continue
            elif entry.event.HasField("item_failed"):
                self._failed = True
            told.append(entry)
        return told

    def _is_over(self, ends: list[WaitingEvent]) -> bool:
        """Whether the request ends with these ends of a round, which then tell the metrics of all rounds."""
        events = [entry.event for entry in ends]
        finished = [each.item_finished for each in events if each.HasField("item_finished")]
        if not finished:
            # Of an item that failed, or none yet.
            return self._failed
        sequences = [
            each.sequence_finished for each in events if each.HasField("sequence_finished")
        ]
        if finished[0].HasField("perf_metrics"):
            self._perf.append(finished[0].perf_metrics)
        is_cut = finished[0].reason == pb.FINISH_REASON_LENGTH
        if is_cut and len(self._emitted) == self._asked < self._most:
            if sequences[0].HasField("cumulative_log_prob"):
                self._log_prob = sequences[0].cumulative_log_prob
            return False
        if whole := combined(self._perf):
            finished[0].perf_metrics.CopyFrom(whole)
            sequences[0].perf_metrics.CopyFrom(whole)
        return True

    async def _drafts(self) -> SequenceOutput:
        """Those of the next round; none where none are of use, or come."""
        drafts = SequenceOutput(0)
        count = min(self._length, self._most - len(self._emitted) - 1)
        if count < 1 or self._stopped:
            return drafts
        uncounted = copy(self._call)
        try:
            async with asyncio.timeout(DRAFT_SECONDS):
                async with self._open(uncounted, self._drafting(count)) as live:
                    with self._stoppable(live):
                        while (waiting := await live.client.next_entries()) is not None:
                            for entry in waiting:
                                self._take(entry, drafts)
            if self._with_logits and sum(
                each.shape[0] for each in drafts.logits
            ) != drafts.generated - len(self._emitted):
                raise BackendFailed("the logits of the drafts are not complete")
        except (TrtmeshError, TimeoutError) as error:
            self._length = 0
            self._metrics.bls_draft_failures += 1
            problem = error.message if isinstance(error, TrtmeshError) else "it is too slow"
            log.warning("a request goes on without drafts of %s: %s", self._draft_model, problem)
            return SequenceOutput(0)
        return drafts

    def _take(self, entry: Waiting, drafts: SequenceOutput) -> None:
        if isinstance(entry, WaitingTokens):
            drafts.add(entry)
        elif entry.event.HasField("item_failed"):
            raise from_proto(entry.event.item_failed.error)
        elif entry.event.HasField("item_finished"):
            self._stopped |= entry.event.item_finished.reason == pb.FINISH_REASON_STOPPED

    def _drafting(self, count: int) -> GenerationRequest:
        """Asks for drafts, by the rules of the choice of tokens alone."""
        message = self._continuing(len(self._emitted) + count)
        for group in ("lora", "prompt_tuning", "output"):
            message.ClearField(group)
        message.stopping.ClearField("stop_texts")
        message.stopping.ClearField("include_stop_text")
        message.output.stream = True
        message.output.text = False
        message.output.generation_logits = self._with_logits
        return self._asking(self._draft_model, secrets.token_hex(8), message)

    def _verifying(self, drafts: SequenceOutput) -> GenerationRequest:
        """Asks for the drafts that hold and a token more; for all tokens once there are no drafts."""
        self._asked = len(self._emitted) + len(drafts.token_ids) + 1 if self._length else self._most
        message = self._continuing(self._asked)
        if drafts.token_ids:
            message.draft.token_ids.extend([*self._emitted, *drafts.token_ids])
        if drafts.logits:
            first = drafts.logits[0]
            message.draft.logits.data_type = first.data_type
            message.draft.logits.shape.extend([len(drafts.token_ids), first.shape[-1]])
            message.draft.logits.data = b"".join(each.data for each in drafts.logits)
        return self._asking(self._request.model, self._name() or secrets.token_hex(8), message)

    def _continuing(self, most: int) -> pb.GenerationConfig:
        message = pb.GenerationConfig()
        message.CopyFrom(self._item.message)
        message.ClearField("draft")
        message.stopping.max_tokens = most
        # What is held until the end would come again in each round.
        message.output.stream = True
        return message

    def _asking(self, model: str, name: str, message: pb.GenerationConfig) -> GenerationRequest:
        item = replace(self._item, config=parse_config(message), message=message)
        return replace(self._request, request_id=name, model=model, items=(item,))


def _now() -> float:
    return asyncio.get_running_loop().time()
