"""One sequence on a foreign engine: the request, the tokens, and the end.

Our own counts and reasons are used where possible: some messages of engines hold the last tokens only, and an end id
and a stop id look alike there. The EndRule judges every token as on any other backend.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from trtmesh.chassis.errors import BackendFailed, HandoffFailed, TrtmeshError, WorkerLost
from trtmesh.chassis.stopping import End, EndRule
from trtmesh.engine.backend import (
    MAX_STATE_BYTES,
    HandoffState,
    PromptDetails,
    SequenceEnd,
    StepOutput,
    Submission,
    TokenDetails,
)
from trtmesh.engine.backends.foreign.contract import Ask, News
from trtmesh.engine.backends.foreign.sampling import bad_ids_of, bias_of, seed_of
from trtmesh.engine.guides import plain
from trtmesh.engine.ledger import SequenceTimes
from trtmesh.v1 import generation_pb2 as pb


@dataclass(slots=True)
class Figures:
    """Counters of all sequences."""

    computed_prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    generated_tokens: int = 0
    pending_prompt_tokens: int = 0
    """Tokens of prompts without a first token."""


class ForeignSequence:
    def __init__(
        self,
        item: Submission,
        index: int,
        rule: EndRule,
        call_id: str,
        figures: Figures,
        state_seconds: float,
    ) -> None:
        """`state_seconds` is how long the engine keeps KV for another."""
        self.key = item.keys[index]
        self.rule = rule
        self.item = item
        self.call_id = call_id
        self.tokens = list(item.token_ids)
        """Prompt and generated tokens."""
        self.found: tuple[int, tuple[int, ...]] | None = (
            rule.end_after(self.tokens) if item.emitted_tokens else None
        )
        """The sequence's end, once known."""
        self.aborted = False
        """Whether the engine was told to end the sequence."""
        self._started = False
        self.times = SequenceTimes()
        self._index = item.sequence_index + index
        self._output = item.config.output
        self._figures = figures
        self._state_seconds = state_seconds
        self._cached_tokens = 0
        self._cumulative: float | None = (
            0.0 if self._output.log_probs and not item.emitted_tokens else None
        )
        self._stop_ids = self._stop_ids_of(item)
        self._state: HandoffState | None = None
        self._expected = item.token_ids[-1] if item.handoff_state else None
        """The last token of the sender. The engine must choose this token again before anything new."""
        self._pending_tokens = 0 if item.handoff_state else len(item.token_ids)
        figures.pending_prompt_tokens += self._pending_tokens

    @property
    def over(self) -> bool:
        """Whether no further token counts."""
        return self.found is not None

    @property
    def needs_abort(self) -> bool:
        """Whether the engine does not end the sequence itself."""
        return self.found is not None and not (
            self.found[0] in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_END_ID)
            or (len(self.found[1]) == 1 and self.found[1][0] in self._stop_ids)
        )

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.item.prompt_tokens

    @property
    def awaits_state(self) -> bool:
        """Whether the KV of a sender has not proved usable yet."""
        return self._expected is not None

    def ask(self, asks_transfer: str) -> Ask:
        """The call for the rest of the sequence; with `asks_transfer`, the engine hands the sequence over."""
        item, stopping = self.item, self.item.config.stopping
        # The engine alone knows its end ids where it does not tell them.
        model_end_ids = not (self.rule.end_ids or stopping.ignore_end_id)
        bans = model_end_ids or bool(self.rule.end_ids)
        again = self.awaits_state
        prompt = item.token_ids[:-1] if again else item.token_ids
        max_tokens = 1 if item.sender_lease_id else self.rule.limit - len(prompt)
        least = stopping.min_tokens - item.emitted_tokens + again
        return Ask(
            call_id=self.call_id,
            token_ids=prompt,
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, max(0, least)) if bans else 0,
            ignored_prompt=item.config.sampling.ignored_prompt(item.prompt_tokens),
            stop_ids=tuple(sorted(self._stop_ids)),
            model_end_ids=model_end_ids,
            sampling=item.config.sampling,
            seed=seed_of(item, self._index),
            bias=bias_of(item.config),
            bad_ids=bad_ids_of(item.config),
            output=self._output,
            guided=item.config.guided_decoding and plain(item.config.guided_decoding),
            transfer=asks_transfer if item.sender_lease_id else item.handoff_state.decode(),
        )

    def take(self, news: News, output: StepOutput) -> None:
        """Adds new tokens to `output`, and finds the end. Raises the engine's error."""
        tokens = list(news.token_ids)
        if news.all_token_ids is not None:
            here = len(self.tokens) - len(self.item.token_ids)
            tokens = list(news.all_token_ids[here:])
            news.log_probs = news.log_probs[here:]
            news.top_log_probs = news.top_log_probs[here:]
        if tokens and self._expected is not None:
            self._check_first(tokens, news)
        if tokens:
            self._add(tokens, news, output)
        if news.reason and self.found is None:
            self.found = self._end_told(news)

    def stopped(self, reason: int) -> None:
        """A stop command ends the sequence."""
        self.found = reason, ()

    def end(self, error: TrtmeshError | None = None) -> SequenceEnd:
        """The end, with an error unless the end is known."""
        self._leave_queue()
        reason, stop_ids = self.found or (pb.FINISH_REASON_ERROR, ())
        return SequenceEnd(
            key=self.key,
            reason=reason,
            prompt_tokens=self.item.prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
            generated_tokens=self.generated,
            stop_token_ids=stop_ids,
            cumulative_log_prob=self._cumulative,
            error=None if self.found else error,
            handoff_state=self._state,
            queue_seconds=self.times.queue_seconds,
        )

    def _stop_ids_of(self, item: Submission) -> frozenset[int]:
        """Single ids for the engine to end the sequence."""
        words = item.config.stopping.stop_token_ids
        # Before `min_tokens` the engine bans these ids, where it should only pass over them.
        single = () if item.config.stopping.min_tokens else words
        return self.rule.end_ids | {word[0] for word in single if len(word) == 1}

    def _add(self, tokens: list[int], news: News, output: StepOutput) -> None:
        self._check_log_probs(len(tokens), news)
        if not self._started:
            self._start(news, output)
        before = len(self.tokens)
        self.tokens += tokens
        found = self.rule.first_end(self.tokens, before)
        if found:
            del self.tokens[found[0] :]
            self.found = found[1]
        self._deliver(before, len(self.tokens) - before, news, output)

    def _check_first(self, tokens: list[int], news: News) -> None:
        """Drops the token delivered by the sender already. Raises HandoffFailed for another token."""
        first = tokens.pop(0)
        if first != self._expected:
            raise HandoffFailed(
                f"the engine chose token {first} after the handed-over KV, the sender {self._expected}"
            )
        self._expected = None
        news.log_probs, news.top_log_probs = news.log_probs[1:], news.top_log_probs[1:]

    def _check_log_probs(self, tokens: int, news: News) -> None:
        """Raises BackendFailed unless each token has all requested data: no token may take the data of another."""
        asked = self._output
        for wanted, told in (
            (asked.log_probs, len(news.log_probs)),
            (asked.top_log_probs, len(news.top_log_probs)),
        ):
            if wanted and told != tokens:
                raise BackendFailed(f"the engine sent {told} log-probabilities for {tokens} tokens")

    def _leave_queue(self) -> None:
        if not self._started:
            self._started = True
            self._figures.pending_prompt_tokens -= self._pending_tokens

    def _start(self, news: News, output: StepOutput) -> None:
        self._leave_queue()
        self.times.scheduled_ns = time.time_ns()
        prompt_tokens = self.item.prompt_tokens
        self._cached_tokens = min(news.cached_tokens, prompt_tokens)
        self._figures.reused_prompt_tokens += self._cached_tokens
        self._figures.computed_prompt_tokens += max(0, self._pending_tokens - self._cached_tokens)
        first = self._index == self.item.sequence_index and not self.item.emitted_tokens
        if self._output.prompt_log_probs and first:
            tops = news.prompt_top_log_probs if self._output.top_log_probs else []
            told = news.prompt_log_probs[: prompt_tokens - 1], tops[: prompt_tokens - 1]
            output.prompts.append(PromptDetails(self.key, 0, *told))

    def _deliver(self, before: int, kept: int, news: News, output: StepOutput) -> None:
        self._figures.generated_tokens += kept
        output.keys.append(self.key)
        output.token_offsets.append(before - self.item.prompt_tokens)
        output.token_counts.append(kept)
        output.token_ids += self.tokens[before:]
        if not self._output.per_token:
            return
        details = TokenDetails(self.key)
        if self._output.log_probs:
            details.log_probs = news.log_probs[:kept]
            if self._cumulative is not None:
                self._cumulative += sum(details.log_probs)
                details.cumulative_log_prob = self._cumulative
        if self._output.top_log_probs:
            details.top_log_probs = news.top_log_probs[:kept]
        output.details.append(details)

    def _end_told(self, news: News) -> End:
        """The end known to the engine alone. Raises the engine's error."""
        if self.item.sender_lease_id and news.reason == "length":
            self._state = self._state_of(news)
            return pb.FINISH_REASON_HANDOFF, ()
        match news.reason:
            case "length":
                return pb.FINISH_REASON_LENGTH, ()
            case "stop" | "stop_word" if news.matched_id is not None:
                return pb.FINISH_REASON_STOP_WORD, (news.matched_id,)
            case "stop" | "stop_word":
                # An end id leaves no mark but the last token.
                return pb.FINISH_REASON_END_ID, tuple(self.tokens[-1:]) if self.generated else ()
            case _ if self.awaits_state:
                raise HandoffFailed(f"the engine did not take the KV: {news.reason}")
            case "abort":
                raise WorkerLost("the engine aborted the sequence")
            case reason:
                raise BackendFailed(f"the engine ended the sequence with the reason {reason!r}")

    def _state_of(self, news: News) -> HandoffState:
        content = news.transfer.encode()
        if not 0 < len(content) <= MAX_STATE_BYTES:
            raise HandoffFailed(
                f"the engine handed over a state of {len(content)} bytes, but one has from 1 to {MAX_STATE_BYTES}"
            )
        return HandoffState(content, self._state_seconds)
