"""From the events of a request to responses: decides when to respond and marks the last response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from trtmesh.chassis.errors import DeadlineExceeded, InvalidRequest, TrtmeshError, Unsupported
from trtmesh.chassis.forwarding import Sink
from trtmesh.router.doors.triton.quoted import Quoted
from trtmesh.router.doors.triton.templates.outputs import (
    TEXT_OUTPUT,
    Block,
    OutputBuilder,
    RowOutput,
    SequenceOutput,
)
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.doors.triton.tensors import Output, text_data
from trtmesh.router.streams.client_stream import Waiting, WaitingTokens
from trtmesh.router.values.request import GenerationRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


class Answer(NamedTuple):
    """A response; `only_end` marks a mere end of the request."""

    outputs: Sequence[Output] = ()
    error: TrtmeshError | None = None
    final: bool = False
    only_end: bool = False


class OnlyResponse(Sink[Answer]):
    """Takes the answers of a call that has a single response, and raises the error of any other."""

    def __init__(self) -> None:
        self.outputs: Sequence[Output] | None = None

    def write_now(self, message: Answer) -> bool:
        return False

    async def write(self, message: Answer) -> None:
        if message.error is not None:
            raise message.error
        if message.only_end == (self.outputs is None):
            raise Quoted(
                "generate expects model to produce exactly 1 response, use generate stream for model that generates"
                " various number of responses",
                InvalidRequest(),
            )
        if not message.only_end:
            self.outputs = message.outputs


ItemError = Callable[[router_pb.ItemFailed], TrtmeshError]
"""Makes the error of a failed item."""


def cut_off_error(reasons: Iterable[int]) -> TrtmeshError | None:
    """Returns the error of an item by the finish reasons of the sequences, None for natural ends.

    The client still reads, so a worker cancelled the item at the deadline of the call. No output of these models has a
    word for a deadline, and a truncated text must not look complete.
    """
    if pb.FINISH_REASON_CANCELLED not in reasons:
        return None
    return DeadlineExceeded("the deadline of the call passed before the request was complete")


class Answers:
    """Collects the events of a request and makes responses."""

    def __init__(
        self,
        call: Call,
        request: GenerationRequest,
        builder: OutputBuilder,
        item_error: ItemError,
        *,
        with_prompts: bool,
    ) -> None:
        self._call = call
        self._item_error = item_error
        self._builder = builder
        self.rows = [RowOutput(index, []) for index in range(request.size)]
        for item in request.items:
            sequences = [SequenceOutput(index) for index in range(item.config.sequences)]
            self.rows[item.batch_index].sequences = sequences
        first = request.items[0].config
        self._beams = first.beam_search.beam_width > 1
        if call.streaming and call.model.accumulate_tokens and self._beams:
            raise Quoted(
                "Accumulation of tokens is only implemented for beam width = 1", Unsupported()
            )
        self._with_prompt = {
            item.batch_index
            for item in request.items
            if with_prompts and not item.config.output.exclude_prompt
        }
        """Rows whose text begins with the prompt."""
        self._cumulative = self._beams or call.model.accumulate_tokens
        self._touched: dict[int, TrtmeshError | None] = {}
        self._over: set[int] = set()
        self._newly_over: set[int] = set()
        self.error: TrtmeshError | None = None
        """Error of the first failed row."""

    @property
    def all_over(self) -> bool:
        return len(self._over) == len(self.rows)

    def see(self, waiting: Sequence[Waiting]) -> None:
        for entry in waiting:
            if isinstance(entry, WaitingTokens):
                index = entry.batch_index
                self.rows[index].sequences[entry.sequence_index].add(entry)
                self._touched.setdefault(index, None)
            else:
                self._see_other(entry.event)

    def _see_other(self, event: router_pb.GenerateEvent) -> None:
        row = self.rows[event.batch_index]
        match event.WhichOneof("event"):
            case "item_started":
                row.prompt_tokens = event.item_started.prompt_tokens
                row.prompt_ids = list(event.item_started.prompt_token_ids)
            case "prompt_details":
                if event.prompt_details.HasField("context_logits"):
                    row.context_logits.append(event.prompt_details.context_logits)
            case "sequence_started":
                metrics = event.sequence_started.perf_metrics
                row.sequences[event.sequence_index].perf_metrics = metrics
            case "sequence_finished":
                finished = event.sequence_finished
                sequence = row.sequences[event.sequence_index]
                sequence.handoff_state = finished.handoff_state
                sequence.finish_reason = finished.reason
                if finished.HasField("stop_text"):
                    sequence.stop_text = finished.stop_text
                if finished.HasField("cumulative_log_prob"):
                    sequence.cumulative_log_prob = finished.cumulative_log_prob
                if finished.HasField("perf_metrics"):
                    sequence.perf_metrics = finished.perf_metrics
                    # The end needs a response even without new tokens.
                    sequence.fresh = True
                    self._touched.setdefault(row.index, None)
            case "item_finished":
                if event.item_finished.HasField("perf_metrics"):
                    row.perf_metrics = event.item_finished.perf_metrics
                ends = [sequence.finish_reason for sequence in row.sequences]
                self._end(row, cut_off_error((event.item_finished.reason, *ends)))
            case "item_failed":
                self._end(row, self._item_error(event.item_failed))

    def _end(self, row: RowOutput, error: TrtmeshError | None) -> None:
        error = error and error.of_item(row.index)
        self._touched[row.index] = error
        self.error = self.error or error
        self._over.add(row.index)
        self._newly_over.add(row.index)

    def texts_to_complete(self) -> list[tuple[RowOutput, SequenceOutput]]:
        """Finished sequences still without their prompt's text, with their rows."""
        rows = [
            self.rows[index]
            for index in self._newly_over & self._with_prompt
            if self._touched[index] is None
        ]
        return [(row, sequence) for row in rows for sequence in row.sequences]

    def take(self) -> list[Answer]:
        """The responses due now; the last of the request is final."""
        if not self._call.decoupled:
            return self._stacked()
        answers: list[Answer] = []
        for index, error in self._touched.items():
            if self._call.streaming:
                answers += self._tell_fresh(self.rows[index])
            elif index in self._newly_over and error is None:
                answers += self._tell_whole(self.rows[index])
            if error is not None:
                answers.append(Answer(error=error))
        self._touched.clear()
        self._newly_over.clear()
        if self.all_over:
            answers = self._marked(answers)
        return answers

    def _marked(self, answers: list[Answer]) -> list[Answer]:
        """The last answers, the last of them marked final."""
        if self._call.model.template.final_alone:
            return [*answers, Answer(final=True, only_end=True)]
        if not answers:
            # No news, but clients without empty responses must see the end.
            row = next(row for row in reversed(self.rows) if row.sequences)
            answers = [self._answer([(row, row.sequences if self._beams else row.sequences[-1:])])]
        *others, last = answers
        return [*others, Answer(last.outputs, last.error, final=True)]

    def _stacked(self) -> list[Answer]:
        """A response of all rows, when all are over."""
        # Rows with complete texts wait for the others.
        self._newly_over.clear()
        if not self.all_over:
            return []
        errors = [error for error in self._touched.values() if error is not None]
        if errors:
            return [Answer(error=errors[0], final=True)]
        block = [(row, row.sequences) for row in self.rows]
        return [Answer(self._builder.build(block), final=True)]

    def _tell_whole(self, row: RowOutput) -> list[Answer]:
        """A whole row at its end: beams together, other sequences apart."""
        if self._beams:
            return [self._answer([(row, row.sequences)])]
        return [self._answer([(row, [sequence])]) for sequence in row.sequences]

    def _tell_fresh(self, row: RowOutput) -> list[Answer]:
        """The news of a row, or all beams, because any beam may be rewritten."""
        fresh = [sequence for sequence in row.sequences if sequence.fresh]
        if fresh and self._beams:
            answers = [self._answer([(row, row.sequences)])]
        else:
            answers = [self._answer([(row, [sequence])]) for sequence in fresh]
        for sequence in fresh:
            sequence.fresh = False
            if not self._cumulative:
                sequence.clear()
        return answers

    def _answer(self, block: Block) -> Answer:
        return Answer(self._builder.build(block))


class PlainText:
    """The responses of Answers at less cost, for a single sequence with new text as the only output: the most common
    request."""

    def __init__(self, item_error: ItemError, *, final_alone: bool) -> None:
        self._item_error = item_error
        self._final_alone = final_alone
        self._texts: list[str] = []
        self._fresh = False
        self._over = False
        self.error: TrtmeshError | None = None
        """Error of the row."""

    def see(self, waiting: Sequence[Waiting]) -> None:
        for entry in waiting:
            if isinstance(entry, WaitingTokens):
                self._texts += entry.texts
                self._fresh = True
            else:
                event = entry.event
                if event.HasField("item_finished"):
                    self._end(cut_off_error((event.item_finished.reason,)))
                elif event.HasField("item_failed"):
                    self._end(self._item_error(event.item_failed))

    def _end(self, error: TrtmeshError | None) -> None:
        self._over = True
        self.error = error and error.of_item(0)

    def texts_to_complete(self) -> Sequence[tuple[RowOutput, SequenceOutput]]:
        """None: streams leave the prompt out."""
        return ()

    def take(self) -> list[Answer]:
        """The responses due now; the last of the request is final."""
        if not self._over:
            return [Answer(self._text())] if self._fresh else []
        answers: list[Answer] = []
        error, ends = self.error, not self._final_alone
        if self._fresh or (ends and error is None):
            answers.append(Answer(self._text(), final=ends and error is None))
        if error is not None:
            answers.append(Answer(error=error, final=ends))
        if not ends:
            answers.append(Answer(final=True, only_end=True))
        return answers

    def _text(self) -> list[Output]:
        texts, self._texts, self._fresh = self._texts, [], False
        text = texts[0] if len(texts) == 1 else "".join(texts)
        return [Output(TEXT_OUTPUT, "BYTES", (1,), text_data((text,)))]
