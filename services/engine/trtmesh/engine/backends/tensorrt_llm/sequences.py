"""The live items of a worker: the library's tokens of each sequence, and the part for output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trtmesh.chassis.errors import BackendFailed, HandoffFailed, TrtmeshError
from trtmesh.chassis.log_prob_sums import next_sum
from trtmesh.chassis.stopping import End, EndRule
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.engine.adapter_store import StoredAdapter
from trtmesh.engine.backend import (
    HandoffState,
    PromptDetails,
    SequenceEnd,
    SequenceStart,
    StepOutput,
    Submission,
    TokenDetails,
)
from trtmesh.engine.backends.tensorrt_llm.calls import Call, Reading
from trtmesh.engine.backends.tensorrt_llm.details import (
    log_prob_of,
    logits_of,
    metrics_of,
    prompt_details,
    top_of,
)
from trtmesh.engine.backends.tensorrt_llm.load import Counts
from trtmesh.engine.ledger import SequenceTimes
from trtmesh.v1 import generation_pb2 as pb

PROMPT_DONE = ("not_finished", "length")
"""The end of a prompt alone, to which the library gives a single token."""


@dataclass(eq=False, slots=True)
class LibrarySequence:
    """One sequence of an item. `tokens` begin with the prompt."""

    key: int
    index: int
    """Among the sequences of the item."""
    tokens: list[int]
    told: int
    """Length up to which the tokens are output."""
    read: int = 0
    """Tokens taken from the library's output: the library's own differences are stale for some sequences. A token
    handed over by another worker is the first."""
    rewritten: bool = False
    """Whether all tokens are told again, since the tokens of a beam may change."""
    log_prob_sum: float = 0.0
    details: TokenDetails | None = None
    """Details of the tokens not yet output."""
    measured: Any = None
    times: SequenceTimes = field(default_factory=SequenceTimes)


@dataclass(frozen=True, slots=True)
class Computed:
    """The slow results of a finished item."""

    prompt: PromptDetails | None = None
    generation_logits: Mapping[int, Tensor] = field(default_factory=dict)
    """By key."""


@dataclass(eq=False, slots=True)
class LiveItem:
    """An item in computation by the library."""

    item: Submission
    rule: EndRule
    call: Call
    adapter: StoredAdapter | None
    sequences: list[LibrarySequence]
    """The sequences without an end."""
    vocabulary_size: int
    counts: Counts
    """The worker's."""
    result: Any = None
    """The library's; the same object at every delivery."""
    reader: asyncio.Task[None] | None = None
    state_of: Callable[[Any], HandoffState] | None = None
    """Makes the state of an item with the prompt alone computed here. Raises HandoffFailed."""
    state: HandoffState | None = None
    started: bool = False
    cached_tokens: int = 0
    prompt: PromptDetails | None = None
    """Details of the prompt not yet output."""
    computed: Computed = field(default_factory=Computed)
    starts: list[int] = field(default_factory=list)
    """Keys with their first token, where metrics are asked for."""

    @property
    def pending_prompt_tokens(self) -> int:
        """Prompt tokens to compute before the first start; 0 afterwards."""
        return 0 if self.started else len(self.item.token_ids)

    @property
    def has_logits(self) -> bool:
        """Whether the end of the item needs the result of `compute`."""
        output = self.item.config.output
        return output.context_logits or output.prompt_log_probs or output.generation_logits

    def compute(self, outputs: list[Any], sequences: list[LibrarySequence]) -> Computed:
        """Computes the slow results, on a thread and without changing anything: sequences may be stopped meanwhile.
        Raises BackendFailed."""
        asked = self.item.config.output
        prompt = None
        if (asked.context_logits or asked.prompt_log_probs) and any(
            each.token_ids for each in outputs
        ):
            tokens = self.item.token_ids[: self.item.prompt_tokens]
            key, logits = sequences[0].key, self.result.context_logits
            prompt = prompt_details(key, logits, tokens, asked, self.vocabulary_size)
        tables = {}
        for sequence in sequences if asked.generation_logits else ():
            output = self._output_of(sequence, outputs)
            if output is not None and (count := self._count(sequence, output)):
                tables[sequence.key] = logits_of(
                    output.generation_logits,
                    count,
                    self.vocabulary_size,
                    asked.logits_data_type,
                    "generation_logits",
                )
        return Computed(prompt, tables)

    def _count(self, sequence: LibrarySequence, output: Any) -> int:
        """How many of the tokens are output, as in `_take`."""
        start = len(sequence.tokens)
        tokens = [*sequence.tokens, *output.token_ids[sequence.read :]]
        ended = self.rule.first_end(tokens, start) if len(tokens) > start else None
        return (ended[0] if ended else len(tokens)) - start

    def _output_of(self, sequence: LibrarySequence, outputs: list[Any]) -> Any:
        place = 0 if self.call.shares_output else sequence.index
        return outputs[place] if place < len(outputs) else None

    def advance(self, now_ns: int) -> list[tuple[LibrarySequence, End]]:
        """Takes a delivery of the library. Returns the sequences with an end. Raises BackendFailed."""
        result, outputs = self.result, list(self.result.outputs)
        if self.call.reading is Reading.WHOLE and not result.finished:
            return []
        if not self.started and any(each.token_ids for each in outputs):
            self._start(now_ns)
        ends = []
        for sequence in list(self.sequences):
            output = self._output_of(sequence, outputs)
            if output is not None and (end := self._take(sequence, output, now_ns)):
                ends.append((sequence, end))
        return ends

    def _start(self, now_ns: int) -> None:
        self.started = True
        self.cached_tokens = min(
            int(getattr(self.result, "cached_tokens", 0) or 0), len(self.item.token_ids)
        )
        self.counts.reused_prompt_tokens += self.cached_tokens
        self.counts.computed_prompt_tokens += len(self.item.token_ids) - self.cached_tokens
        if self.computed.prompt:
            # The sequence that it was computed for may have been stopped.
            self.prompt = replace(self.computed.prompt, key=self.sequences[0].key)
        for sequence in self.sequences:
            # An upper bound, unless the library measures.
            sequence.times.scheduled_ns = now_ns

    def _take(self, sequence: LibrarySequence, output: Any, now_ns: int) -> End | None:
        ids = output.token_ids
        sequence.measured = getattr(output, "request_perf_metrics", None) or sequence.measured
        if self.call.reading is Reading.BEAMS:
            return self._take_beam(sequence, output, now_ns)
        start = len(sequence.tokens)
        if self.item.handoff_state and ids and ids[0] != self.item.token_ids[-1]:
            raise HandoffFailed(
                f"the library continues with token {ids[0]}, not with the handed-over {self.item.token_ids[-1]}"
            )
        # The library cuts a stop word off tokens that it has delivered.
        new = ids[sequence.read :]
        if new:
            self._touch(sequence, now_ns)
            sequence.tokens += new
        end = None
        ended = self.rule.first_end(sequence.tokens, start) if new else None
        if ended:
            length, end = ended
            del sequence.tokens[length:]
        count = len(sequence.tokens) - start
        self._add_details(sequence, output, sequence.read, count)
        sequence.read += len(new)
        if end is None and self.state_of and output.finish_reason in PROMPT_DONE:
            return self._hand_over(output)
        return end or self._end_by_library(sequence, output)

    def _take_beam(self, sequence: LibrarySequence, output: Any, now_ns: int) -> End | None:
        prompt = sequence.tokens[: self.rule.prompt_tokens]
        tokens = [*prompt, *output.token_ids]
        if tokens != sequence.tokens:
            self._touch(sequence, now_ns)
            sequence.tokens, sequence.rewritten = tokens, True
            sequence.details = None
            if len(output.logprobs or ()) >= len(output.token_ids):
                self._add_details(sequence, output, 0, len(output.token_ids))
        if not (self.result.finished or output.finish_reason):
            return None
        if output.cumulative_logprob is not None:
            sequence.log_prob_sum = output.cumulative_logprob
        return self._end_by_library(sequence, output)

    def _touch(self, sequence: LibrarySequence, now_ns: int) -> None:
        times = sequence.times
        times.last_token_ns = now_ns
        if not times.first_token_ns:
            times.first_token_ns = now_ns
            if self.item.config.output.perf_metrics:
                self.starts.append(sequence.key)

    def _add_details(self, sequence: LibrarySequence, output: Any, first: int, count: int) -> None:
        asked = self.item.config.output
        if not count or not asked.per_token:
            return
        details = sequence.details = sequence.details or TokenDetails(sequence.key)
        ids = output.token_ids[first : first + count]
        if asked.log_probs or asked.top_log_probs:
            # Of a token that another worker chose there may be none.
            missing = len(output.token_ids) - len(output.logprobs or ())
            start = first - missing if self.item.handoff_state else first
            positions = (output.logprobs or [])[max(0, start) : start + count]
            if len(positions) < count:
                raise BackendFailed(
                    f"the library returned {count} tokens but {len(positions)} log-probabilities"
                )
            if asked.log_probs:
                for position, token in zip(positions, ids, strict=True):
                    log_prob = log_prob_of(position, token)
                    details.log_probs.append(log_prob)
                    sequence.log_prob_sum = next_sum(sequence.log_prob_sum, log_prob)
                details.cumulative_log_prob = sequence.log_prob_sum
            if asked.top_log_probs:
                details.top_log_probs += [top_of(each, asked.top_log_probs) for each in positions]
        if asked.generation_logits:
            details.generation_logits = self.computed.generation_logits[sequence.key]

    def _end_by_library(self, sequence: LibrarySequence, output: Any) -> End | None:
        """The end of a sequence by the library alone, against the rule."""
        match output.finish_reason:
            case None:
                return None
            case "length":
                return pb.FINISH_REASON_LENGTH, ()
            case "stop":
                return self._stop(sequence, output.stop_reason)
            case "cancelled" | "timeout":
                raise BackendFailed(
                    f"the library ended the sequence by itself ({output.finish_reason})"
                )
            case other:
                raise BackendFailed(f"the library ended the sequence as {other!r}")

    def _stop(self, sequence: LibrarySequence, reason: int | str | None) -> End:
        """The end by an end id, unnamed by the library, or by a word, named by the library."""
        last = sequence.tokens[-1]
        if reason is None or reason in self.rule.end_ids:
            return pb.FINISH_REASON_END_ID, (last,) if last in self.rule.end_ids else ()
        word = (reason,) if isinstance(reason, int) else tuple(map(int, str(reason).split()))
        found = tuple(sequence.tokens[-len(word) :]) == word
        return pb.FINISH_REASON_STOP_WORD, word if found else ()

    def _hand_over(self, output: Any) -> End:
        """The prompt is computed, and the KV waits for another worker."""
        assert self.state_of
        self.state = self.state_of(output.disaggregated_params)
        return pb.FINISH_REASON_HANDOFF, ()

    def end_of(
        self,
        sequence: LibrarySequence,
        reason: int,
        stop_token_ids: tuple[int, ...] = (),
        error: TrtmeshError | None = None,
    ) -> SequenceEnd:
        """The end of a sequence, after all output."""
        output = self.item.config.output
        return SequenceEnd(
            sequence.key,
            reason,
            self.item.prompt_tokens,
            min(self.cached_tokens, self.item.prompt_tokens),
            sequence.told - self.item.prompt_tokens,
            stop_token_ids=stop_token_ids,
            cumulative_log_prob=sequence.log_prob_sum if output.log_probs else None,
            error=error,
            perf_metrics=metrics_of(sequence.times, sequence.measured)
            if output.perf_metrics
            else None,
            queue_seconds=sequence.times.queue_seconds,
            handoff_state=self.state if reason == pb.FINISH_REASON_HANDOFF else None,
        )

    def tell(self, sequence: LibrarySequence, output: StepOutput) -> None:
        """Adds the news of a sequence to the output of a step."""
        if self.prompt:
            output.prompts.append(self.prompt)
            self.prompt = None
        if sequence.key in self.starts:
            self.starts.remove(sequence.key)
            metrics = metrics_of(sequence.times, sequence.measured)
            at_start = SequenceStart(sequence.key, metrics)
            output.starts.append(at_start)
        first = self.item.prompt_tokens if sequence.rewritten else sequence.told
        new = sequence.tokens[first:]
        if new:
            output.keys.append(sequence.key)
            output.token_offsets.append(first - self.item.prompt_tokens)
            output.token_counts.append(len(new))
            output.token_ids += new
        if sequence.details:
            output.details.append(sequence.details)
            sequence.details = None
        self.counts.generated_tokens += max(0, first + len(new) - sequence.told)
        sequence.told, sequence.rewritten = first + len(new), False


def sequences_of(item: Submission) -> list[LibrarySequence]:
    arrival = time.time_ns()
    return [
        LibrarySequence(
            key,
            index,
            list(item.token_ids),
            len(item.token_ids),
            read=1 if item.handoff_state else 0,
            times=SequenceTimes(arrival),
        )
        for index, key in enumerate(item.keys)
    ]
