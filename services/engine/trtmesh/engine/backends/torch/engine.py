"""The steps of a loaded model: schedule, launch, collect, advance. Everything runs on the engine's thread.

A device may compute a step during the reading of the previous step: further steps may be launched before the first is
collected. Rules for the caller and the device:

* Steps are collected in the order of their launches, and the device computes them in this order.
* A sequence is in flight from the launch of the next token, or of prompt logits, until the step is collected. Meanwhile
  the sequence is neither scheduled nor preempted, so the blocks and the row of the block table stay.
* A launch computes the other sequences, and further chunks of their prompts; but nothing where only a sequence in
  flight could give the missing room.
* A sequence in flight may be stopped or fail. The token is dropped, and the blocks are free for later steps at once.
* The tokens do not depend on the number of steps launched ahead.
* A sequence whose grammar takes longer than its step has sits out: it has no token with the step that computes it. Its
  last token counts as not computed, and the next step computes it again.
* Drafts are tokens to compute. They come with a step launched from known tokens, and are verified when it is collected:
  the model makes the ordinary choice at each position, and goes on to the next while the choice equals the draft.
* `launch_next` computes sequences in flight, with the tokens chosen by the device: one step further, and only without
  effects before the tokens are known. Where a choice depends on tokens before, such as under a grammar, those of the
  step are chosen while the device computes it: masks are begun once the step before was collected, and the choice is
  launched just before the step after it. A sequence ending with a token of the step before has a token dropped; KV is
  counted, and so published, when the token is known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from trtmesh.chassis.errors import BackendFailed, HandoffFailed, TrtmeshError
from trtmesh.chassis.logs import request_id_bound
from trtmesh.engine.backend import Deliver, SequenceEnd, StepOutput
from trtmesh.engine.backends.torch.beams.decoding import BeamDecoding
from trtmesh.engine.backends.torch.compute.device import Compute, Forward
from trtmesh.engine.backends.torch.decoding import (
    Choice,
    Decoding,
    PrefillDecoding,
    SampledDecoding,
)
from trtmesh.engine.backends.torch.drafts.drafting import Drafting, Speculation
from trtmesh.engine.backends.torch.guided.grammars import Grammar
from trtmesh.engine.backends.torch.memory.adapters import AdapterCache, LoadedAdapter
from trtmesh.engine.backends.torch.memory.shortage import LESS_STEP, shortage
from trtmesh.engine.backends.torch.model.prompt_tables import PromptTable
from trtmesh.engine.backends.torch.sampling.continuation import GivenDrafts
from trtmesh.engine.backends.torch.sampling.mask_time import Masks
from trtmesh.engine.backends.torch.sampling.readers import reader_for
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence
from trtmesh.engine.ledger import Ledger
from trtmesh.engine.scheduling.handoffs import BlockHandoffs, Sending
from trtmesh.engine.scheduling.leases import Outgoing
from trtmesh.engine.scheduling.scheduler import Scheduler
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from trtmesh.engine.backends.torch.sampling.choice import TokenChoice

log = logging.getLogger(__name__)

R = TypeVar("R")
Failure = tuple[Sequence, TrtmeshError]


@dataclass(slots=True)
class Launched:
    """A step under way on the device."""

    forwards: list[Forward] = field(default_factory=list)
    choices: list[tuple[list[Sequence], Choice]] = field(default_factory=list)
    """A choice per strategy, more after a fault."""
    failures: list[Failure] = field(default_factory=list)
    sat_out: dict[int, Sequence] = field(default_factory=dict)
    """Computed, but without a mask for the choice; by key."""
    sending: list[Sending[Sequence]] = field(default_factory=list)
    """The sequences of the step under handoff."""
    uncounted: list[Chunk] = field(default_factory=list)
    """Chunks of tokens unknown at the launch."""
    speculation: Speculation | None = None
    """The drafts of the step; None in an engine without drafts."""
    following: Launched | None = None
    """The step of `launch_next`."""
    is_open: bool = False
    """Whether its tokens are chosen once those before are known."""

    @property
    def awaited(self) -> Iterator[Sequence]:
        """The sequences in flight with this step."""
        for forward in self.forwards:
            yield from (chunk.sequence for chunk in forward.completing)
            yield from (chunk.sequence for chunk, _ in forward.given)
        yield from (sequence for sequence, _ in self.failures)


class Engine:
    """Owns the sequences. The blocks of a sequence are free before the end is delivered."""

    def __init__(
        self,
        compute: Compute,
        scheduler: Scheduler[Sequence],
        adapters: AdapterCache,
        handoffs: BlockHandoffs[Sequence],
        drafting: Drafting | None,
        masks: Masks,
    ) -> None:
        self.scheduler = scheduler
        self.deliver: Deliver | None = None
        """Takes news of handoffs during a step. Without `deliver`, the news come with the step."""
        self._handoffs = handoffs
        self._adapters = adapters
        self.step_count = 0
        self.generated_tokens = 0
        self.drafting = drafting
        self._compute = compute
        self._masks = masks
        self.close = masks.close
        self._broken: BackendFailed | None = None
        self._ledger = Ledger[Decoding[Any]]()
        # By the keys of the sequences.
        self._decodings: dict[int, Decoding[Any]] = {}

    @property
    def captured_steps(self) -> int:
        return self._compute.captured_steps

    def add(self, keys: SequenceOf[int], sequences: SequenceOf[Sequence]) -> None:
        """Takes an item. A sequence completed by another worker ends at once."""
        for decoding in _decodings(keys, sequences):
            for key in decoding.keys:
                self._ledger.add(key, decoding)
            for sequence in decoding.sequences:
                self._decodings[sequence.key] = decoding
                if sequence.generated_tokens or not sequence.receiver_lease:
                    # Otherwise the sender has delivered the details of the prompt.
                    sequence.reader = reader_for(sequence)
                if sequence.outgoing:
                    self._handoffs.outgoing[sequence.key] = sequence.outgoing
                if self.drafting and isinstance(decoding, SampledDecoding):
                    self.drafting.follow(sequence)
                self.scheduler.add(sequence, self.step_count)
            decoding.settle()
            if decoding.ends:
                self._end(decoding, decoding.ends)
        lease_id = sequences[0].receiver_lease
        if lease_id and not self._handoffs.expect(lease_id, sequences):
            self._lose_kv(sequences)

    def prepared(
        self,
        sequences: Iterable[Sequence],
        part: PromptTable | Grammar | GivenDrafts | TrtmeshError,
    ) -> None:
        """Gives the sequences of an item a part that they await, to start with the last, or ends all with an error."""
        for sequence in sequences:
            # Sequences of one decoding fail together.
            if not sequence.lives:
                continue
            if isinstance(part, TrtmeshError):
                self._fail(sequence, part)
                continue
            sequence.give_part(part)
            if not sequence.is_prepared:
                continue
            if not sequence.receiver_lease:
                self.scheduler.ready(sequence)
            elif sequence is self._handoffs.first_awaiting(sequence.receiver_lease):
                self._handoffs.report_awaiting(sequence)

    def lost_adapter(self, adapter: LoadedAdapter, error: TrtmeshError) -> None:
        """Ends the sequences waiting for an adapter after a failed copy to the device."""
        for sequence in self.scheduler.adapters.waiting_for(adapter):
            if sequence.lives:
                self._fail(sequence, error)
        self.scheduler.adapters.drop(adapter)

    def stop(self, keys: Iterable[int], reason: int) -> None:
        """Ends sequences, with a beam the whole search. Unknown and ended keys are ignored."""
        for key in keys:
            decoding = self._ledger.live.get(key)
            if decoding is None:
                continue
            if end := decoding.end_of(key, reason):
                self._ledger.end(end)
            else:
                decoding.deliver(self._ledger.output)
                self._end(decoding, decoding.broken_off(reason))

    def stop_all(self, reason: int) -> None:
        self.stop(list(self._ledger.live), reason)

    def fail_all(self, error: TrtmeshError) -> None:
        for sequence in self.scheduler.sequences:
            if sequence.lives:
                self._fail(sequence, error)

    def reserve(self, lease_id: str, tokens: int, block_hashes: SequenceOf[int]) -> None:
        """Reserves blocks. Another worker's KV may arrive in them at once, so all earlier writes end first."""
        self._handoffs.reserve(lease_id, tokens, block_hashes)
        self._compute.move(self.scheduler.pool.take_moves())
        self._compute.synchronize()

    def adopt(self, lease_id: str) -> None:
        self._handoffs.adopt(lease_id)

    def drop(self, lease_id: str) -> None:
        """Frees the blocks of a lease; sequences waiting for the KV fail."""
        self._lose_kv(self._handoffs.drop(lease_id))

    def _lose_kv(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            # Sequences of one decoding fail together.
            if sequence.lives:
                self._fail(sequence, HandoffFailed("the KV of the sequence will not come"))

    def hand_over(self, key: int, lease_id: str) -> None:
        """Hands a running sequence over after the next token."""
        decoding = self._ledger.live.get(key)
        if decoding is None:
            return
        sequence = decoding.sequences[0]
        if not isinstance(decoding, SampledDecoding) or sequence.outgoing or sequence.slot < 0:
            problem = "the sequence has no KV of its own to hand over"
            self._fail(sequence, HandoffFailed(problem))
            return
        sequence.outgoing = Outgoing(lease_id, len(sequence.tokens), is_pinned=False)
        self._handoffs.outgoing[key] = sequence.outgoing

    def leftover(self) -> StepOutput | None:
        """Ends, states of adapters and news of handoffs since the last step; None without any."""
        has_news = self._adapters.store.has_news or self._handoffs.news
        return self._output() if self._ledger.output.ends or has_news else None

    def launch(self) -> Launched:
        """Schedules a step for the device. Raises BackendFailed once the model was found broken."""
        if self._broken:
            raise self._broken
        step = Launched()
        chunks = self.scheduler.schedule()
        if self.drafting:
            step.speculation = self.drafting.extend(chunks, self.scheduler)
        self._compute.move(self.scheduler.pool.take_moves())
        self._begin_masks(chunks)
        self._compute_chunks(chunks, step)
        for sequence in step.awaited:
            sequence.in_flight = True
        return step

    def launch_next(self, step: Launched) -> Launched | None:
        """Launches the step after `step`, the last launched. Returns None where more than the tokens of `step` must be
        known."""
        if step.is_open:
            self._choose_open(step)
        plain = len(step.choices) == 1 and not (step.failures or step.sending)
        if not plain or self._broken or self._handoffs.outgoing or not self._compute.may_follow:
            return None
        sequences, _ = step.choices[0]
        if self.drafting and self.drafting.waits(sequences):
            return None
        chunks = self.scheduler.next_chunks(sequences, step.sat_out.values())
        again = sum(sequence.lives for sequence in step.sat_out.values())
        ahead = len(chunks) - again
        if not chunks or not all(map(self._compute.can_follow, chunks[ahead:])):
            return None
        self._compute.move(self.scheduler.pool.take_moves())
        try:
            forward = self._compute.follow(chunks, _rows_of(chunks[:ahead], sequences))
        except Exception:
            log.exception("a step could not be launched ahead; it is launched with known tokens")
            return None
        following = Launched(forwards=[forward], uncounted=chunks)
        if self.drafting:
            following.speculation = self.drafting.ahead(chunks)
        following.is_open = self._compute.awaits([chunk.sequence for chunk in chunks])
        if not following.is_open:
            self._choose(forward, following)
        step.following = following
        return following

    def collect(self, step: Launched) -> StepOutput:
        """Waits for a launched step, gives every sequence the next token, and ends complete sequences."""
        if step.is_open:
            self._choose_open(step)
        self.step_count += 1
        output = self._ledger.output
        self._count(step.uncounted, step)
        for sequence, error in step.failures:
            self._blame(sequence, error)
        if step.sending:
            self._compute.synchronize()
            self._handoffs.announce(step.sending)
        for forward in step.forwards:
            self._read(forward, output)
        if step.speculation and self.drafting:
            self.drafting.computed(step.speculation, step.sat_out)
        for sequences, choice in step.choices:
            self._advance(sequences, choice, output)
        if step.speculation and self.drafting:
            if step.speculation.chunks:
                self._verify(step, self.drafting, output)
            self.drafting.finished(step.speculation)
        for sequence in step.sat_out.values():
            sequence.in_flight = False
        if following := step.following:
            for sequence in following.awaited:
                sequence.in_flight = True
            if following.is_open:
                self._begin_masks(following.forwards[0].completing)
        return self._output()

    def _begin_masks(self, chunks: SequenceOf[Chunk]) -> None:
        """Begins to make the masks of a step's chunks, while the device computes it."""
        self._masks.begin_step()
        self._masks.begin(self._guided(chunk for chunk in chunks if chunk.completes))

    def _guided(self, chunks: Iterable[Chunk]) -> list[Sequence]:
        return [
            chunk.sequence
            for chunk in chunks
            if chunk.sequence.token_rules.guided and chunk.sequence.lives
        ]

    def _choose_open(self, step: Launched) -> None:
        """Chooses the tokens of a step launched ahead, as those before are known."""
        step.is_open = False
        self._choose(step.forwards[0], step)

    def _count(self, chunks: Iterable[Chunk], step: Launched) -> None:
        """Counts the KV of a step's chunks."""
        for chunk in chunks:
            if chunk.sequence.lives:
                sits_out = chunk.sequence.key in step.sat_out
                self.scheduler.computed(chunk, but_last=sits_out)

    def _verify(self, step: Launched, drafting: Drafting, output: StepOutput) -> None:
        """Goes on along the drafts that hold. Every sequence has the token before its drafts."""
        drafted = {
            each.chunk.sequence.key: each for forward in step.forwards for each in forward.drafted
        }
        assert step.speculation
        chunks = step.speculation.chunks
        more = StepOutput(self.step_count)
        failures: list[Failure] = []
        holding, position = chunks, 0
        while holding := [chunk for chunk in holding if self._holds(chunk, position)]:
            # Without a mask, drafts are verified no further.
            late = self._late_among(holding)
            holding = [chunk for chunk in holding if chunk.sequence.key not in late]
            for chunk in holding:
                drafting.accepted(chunk, position)

            def choose(part: SequenceOf[Chunk], position: int = position) -> TokenChoice:
                own = [drafted[chunk.sequence.key] for chunk in part]
                return self._compute.verify(own, position)

            what = "no token could be chosen"
            for part, choice in self._isolated(holding, choose, what, failures):
                self._advance([chunk.sequence for chunk in part], choice, more)
            position += 1
        if more.keys:
            output.extend(more)
        for chunk in chunks:
            if chunk.sequence.lives:
                self.scheduler.verified(chunk)
        for sequence, error in failures:
            self._blame(sequence, error)

    def _holds(self, chunk: Chunk, position: int) -> bool:
        """Whether the sequence goes on after the draft at `position`, now the last token."""
        return (
            position < len(chunk.drafts)
            and chunk.sequence.lives
            and len(chunk.sequence.tokens) == chunk.known_end + position + 1
            and chunk.sequence.tokens[-1] == chunk.drafts[position]
        )

    def _compute_chunks(self, chunks: list[Chunk], step: Launched) -> None:
        def compute(part: SequenceOf[Chunk]) -> Forward:
            if part is not chunks:
                # Drafts must not be the fault of an item.
                for chunk in part:
                    chunk.drop_drafts()
            if not self._handoffs.outgoing:
                return self._compute.forward(part)
            sending = self._handoffs.sending(part)
            forward = self._compute.forward(part, self._announcer(sending))
            step.sending += sending
            return forward

        for computed, forward in self._isolated(chunks, compute, "the model failed", step.failures):
            step.forwards.append(forward)
            # Before the next forward, which may overwrite these logits.
            self._choose(forward, step)
            self._count(computed, step)

    def _announcer(self, sending: SequenceOf[Sending[Sequence]]) -> Callable[[int], None] | None:
        """Announces the KV of layers while later layers are computed."""
        layers = 0

        def announce(layer: int) -> None:
            nonlocal layers
            # Models call their layers in order; the KV of others is announced after the step.
            if layer == layers:
                layers += 1
                self._handoffs.announce(sending, layers)
            if self._handoffs.news and self.deliver:
                news = self._handoffs.take_news()
                self.deliver(StepOutput(self.step_count, handoffs=news))

        return announce if sending else None

    def _choose(self, forward: Forward, step: Launched) -> None:
        # A token of the step before may have ended a sequence.
        chunks = [chunk for chunk in forward.completing if chunk.sequence.lives]
        if late := self._late_among(chunks):
            step.sat_out |= late
            self._masks.counts.late_masks += len(late)
            chunks = [chunk for chunk in chunks if chunk.sequence.key not in late]
        self._choose_rows(chunks, forward.rows_of, step)

    def _late_among(self, chunks: SequenceOf[Chunk]) -> dict[int, Sequence]:
        """The sequences without the mask of their next token, by key."""
        guided = self._guided(chunks)
        if not guided:
            return {}
        late = self._masks.late(guided, alone=len(guided) == len(chunks))
        return {sequence.key: sequence for sequence in guided if sequence.key in late}

    def _choose_rows(
        self,
        chunks: SequenceOf[Chunk],
        rows_of: Callable[[SequenceOf[Chunk]], Tensor],
        step: Launched,
    ) -> None:
        """Launches a choice for each strategy of `chunks`, from the rows of their logits."""
        by_strategy: dict[type[Decoding[Any]], list[Chunk]] = {}
        for chunk in chunks:
            strategy = type(self._decodings[chunk.sequence.key])
            by_strategy.setdefault(strategy, []).append(chunk)
        for strategy, own in by_strategy.items():

            def choose(part: SequenceOf[Chunk], strategy: type[Decoding[Any]] = strategy) -> Choice:
                sequences = [chunk.sequence for chunk in part]
                choice: Choice = strategy.choose(self._compute, sequences, rows_of(part))
                return choice

            what = "no token could be chosen"
            for part, choice in self._isolated(own, choose, what, step.failures):
                step.choices.append(([chunk.sequence for chunk in part], choice))

    def _isolated(
        self,
        chunks: SequenceOf[Chunk],
        compute: Callable[[SequenceOf[Chunk]], R],
        what: str,
        failures: list[Failure],
    ) -> Iterator[tuple[SequenceOf[Chunk], R]]:
        """Yields results by chunks. Failed chunks are tried again by halves, down to each alone. The rest is added to
        `failures`, and `what` describes the fault."""
        waiting = [chunks] if chunks else []
        while waiting:
            part = waiting.pop()
            try:
                result = compute(part)
            except Exception as error:
                # A single chunk has a second try too, with the memory released.
                if len(part) == 1 and part is not chunks:
                    failures.append((part[0].sequence, _error(part[0].sequence, what, error)))
                else:
                    log.exception("a step of %d sequences failed; trying it in parts", len(part))
                    middle = (len(part) + 1) // 2
                    waiting += [list(half) for half in (part[middle:], part[:middle]) if half]
            else:
                yield part, result
                continue
            # Not in the handler, where the exception still holds every tensor of the failed step.
            self._compute.release_memory()

    def _read(self, forward: Forward, output: StepOutput) -> None:
        """Reads the logits of submitted tokens."""
        for chunk, logits in forward.given:
            sequence, reader = chunk.sequence, chunk.sequence.reader
            sequence.in_flight = chunk.completes
            if reader is None or not sequence.lives:
                continue
            try:
                output.prompts += reader.read(logits)
            except Exception as error:  # noqa: BLE001 - it ends this item alone
                self._blame(sequence, _fault(sequence, "the prompt's logits cannot be read", error))
            if reader.next >= reader.end:
                sequence.reader = None

    def _advance(self, sequences: list[Sequence], choice: Choice, output: StepOutput) -> None:
        failures, now = choice.read(), time.time_ns()
        for row, sequence in enumerate(sequences):
            sequence.in_flight = False
            if not sequence.lives:
                continue
            if row in failures:
                self._blame(sequence, failures[row])
                continue
            decoding = self._decodings[sequence.key]
            try:
                self.generated_tokens += decoding.advance(sequence, choice, row, output, now)
            except Exception as error:  # noqa: BLE001 - it ends this item alone
                self._blame(sequence, _fault(sequence, "the item cannot continue", error))
                continue
            if decoding.forks:
                # Not guarded: half changed counts would spoil the pool for all.
                self.scheduler.reassign(decoding.forks)
                decoding.forks = ()
            if decoding.ends:
                self._end(decoding, decoding.ends)

    def _output(self) -> StepOutput:
        output = self._ledger.take(self.step_count)
        output.kv_events = self.scheduler.pool.take_events()
        if self._adapters.store.has_news:
            output.adapters = self._adapters.take_news()
        if self._handoffs.news:
            output.handoffs = self._handoffs.take_news()
        return output

    def _blame(self, sequence: Sequence, error: TrtmeshError) -> None:
        """Ends an item at fault. With a broken model the item stays, and the next launch raises."""
        if sequence.lives and not (isinstance(error, BackendFailed) and self._is_broken()):
            self._fail(sequence, error)

    def _is_broken(self) -> bool:
        """Tells a broken model from a bad item."""
        if self._broken is None:
            try:
                self._compute.check()
            except Exception as error:  # noqa: BLE001 - the next launch raises it
                self._broken = BackendFailed(
                    f"the model cannot compute a single token any more: {error}"
                )
        return self._broken is not None

    def _fail(self, sequence: Sequence, error: TrtmeshError) -> None:
        decoding = self._decodings[sequence.key]
        ends = decoding.broken_off(pb.FINISH_REASON_ERROR, error)
        self._end(decoding, ends, content_is_good=False)

    def _end(
        self,
        decoding: Decoding[Any],
        ends: SequenceOf[SequenceEnd],
        *,
        content_is_good: bool = True,
    ) -> None:
        with_kv = ends[0].reason == pb.FINISH_REASON_HANDOFF
        for sequence in decoding.sequences:
            del self._decodings[sequence.key]
            if self.drafting:
                self.drafting.forget(sequence)
            if sequence.outgoing:
                self._handoffs.leave(sequence, with_kv=with_kv)
            self.scheduler.remove(sequence, content_is_good=content_is_good)
        for end in ends:
            self._ledger.end(end)


def _decodings(keys: SequenceOf[int], sequences: SequenceOf[Sequence]) -> list[Decoding[Any]]:
    """The strategy of an item: `keys` come back, `sequences` are computed."""
    if sequences[0].outgoing and (len(keys) > 1 or sequences[0].config.beam_search.beam_width > 1):
        return [PrefillDecoding(keys, sequences)]
    if sequences[0].config.beam_search.beam_width > 1:
        return [BeamDecoding(keys, sequences)]
    return [SampledDecoding((sequence.key,), (sequence,)) for sequence in sequences]


def _rows_of(chunks: SequenceOf[Chunk], sequences: SequenceOf[Sequence]) -> SequenceOf[int]:
    """The places of the chunks' sequences among `sequences`, in whose order they are."""
    if len(chunks) == len(sequences):
        return range(len(sequences))
    rows = {sequence.key: row for row, sequence in enumerate(sequences)}
    return [rows[chunk.sequence.key] for chunk in chunks]


def _error(sequence: Sequence, what: str, error: Exception) -> TrtmeshError:
    return error if isinstance(error, HandoffFailed) else _fault(sequence, what, error)


def _fault(sequence: Sequence, what: str, error: Exception) -> BackendFailed:
    """Logs a fault; returns the error for the end of the item."""
    with request_id_bound(sequence.request_id):
        log.error("item %d: %s", sequence.batch_index, what, exc_info=error)
    if (lack := shortage(error)) is not None:
        return BackendFailed(
            f"{what} for lack of memory: {lack}; lower the size of engine.torch.kv_cache, {LESS_STEP}"
        )
    return BackendFailed(f"{what}: {error}")
