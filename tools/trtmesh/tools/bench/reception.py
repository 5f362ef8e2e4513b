"""What arrives of one request while it arrives, and the answers that it adds up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from trtmesh.chassis.errors import (
    Cancelled,
    Draining,
    Exhausted,
    QueueFull,
    QueueTimeout,
    SlowClient,
    TrtmeshError,
)
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Plan

NO_ROOM = (QueueFull, QueueTimeout, Draining, Exhausted)

CANCELLED_REASONS = frozenset({"cancelled", "stopped"})


@dataclass(slots=True)
class _Sequence:
    """Hashes of one sequence, and its next offset."""

    text: Any = field(default_factory=sha256)
    ids: Any = field(default_factory=sha256)
    next_offset: int = 0


@dataclass(slots=True)
class _Item:
    arrivals_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    has_ids: bool = False
    lost: int | None = None
    doubled: int | None = None
    ended_s: float | None = None
    outcome: AnswerOutcome = AnswerOutcome.ERROR
    error: str = ""
    finish_reason: str = ""
    worker: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def digest(self, kind: str) -> str:
        """Of the only sequence, or of the digests of several."""
        digests = [getattr(each, kind).hexdigest() for _, each in sorted(self.sequences.items())]
        return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


class Reception:
    """Is told by a target what arrives, and notes when. Each item ends once: by `finish`, `fail` or `end_rest`."""

    def __init__(
        self,
        plan: Plan,
        clock: Callable[[], float],
        request_id: str,
        *,
        due_s: float | None = None,
        keeps_text: bool = False,
    ) -> None:
        self.request_id = request_id
        self._plan = plan
        self._clock = clock
        self._keeps_text = keeps_text or bool(plan.session)
        self._items = [_Item() for _ in plan.prompts]
        self._due_s = due_s
        self._sent_s = clock()

    def sent(self) -> None:
        """The request is made, and goes out now."""
        self._sent_s = self._clock()

    def chunk(
        self,
        batch_index: int,
        text: str,
        *,
        ids: Sequence[int] = (),
        tokens: int = 0,
        offset: int | None = None,
        sequence_index: int = 0,
    ) -> None:
        """Content came: new text, new ids, or `tokens` of them where the protocol has only their number."""
        count = len(ids) or tokens
        if not (text or count):
            return
        item, content = self._items[batch_index], text.encode("utf-8", "surrogatepass")
        if item.ended_s is not None:
            item.outcome, item.error = AnswerOutcome.ERROR, "content came after the end of the item"
            return
        item.arrivals_s.append(self._clock())
        item.tokens.append(count)
        sequence = item.sequences.get(sequence_index)
        if sequence is None:
            sequence = item.sequences[sequence_index] = _Sequence()
        sequence.text.update(content)
        if ids:
            item.has_ids = True
            sequence.ids.update((" ".join(map(str, ids)) + " ").encode())
        if offset is not None:
            item.lost = (item.lost or 0) + max(0, offset - sequence.next_offset)
            item.doubled = (item.doubled or 0) + max(0, min(sequence.next_offset - offset, count))
            sequence.next_offset = max(sequence.next_offset, offset + count)
        if self._keeps_text:
            item.texts.append(text)

    def placed(self, batch_index: int, worker: str, prompt_tokens: int) -> None:
        item = self._items[batch_index]
        item.worker, item.prompt_tokens = worker, prompt_tokens

    def usage(self, batch_index: int, prompt_tokens: Any, output_tokens: Any) -> None:
        """What the server says it used. Tokens that it counts and never sent are lost. Raises ValueError."""
        for count in (prompt_tokens, output_tokens):
            if count is not None and not (isinstance(count, int) and count >= 0):
                raise ValueError(f"the server counts {count!r} tokens")
        item = self._items[batch_index]
        if prompt_tokens is not None:
            item.prompt_tokens = prompt_tokens
        item.output_tokens = output_tokens
        if item.lost is not None and output_tokens is not None:
            received = sum(each.next_offset for each in item.sequences.values())
            item.lost += max(0, output_tokens - received)

    def finish(self, batch_index: int, reason: str) -> None:
        over = reason.lower() in CANCELLED_REASONS
        outcome = AnswerOutcome.CANCELLED if over else AnswerOutcome.OK
        error = f"the server ended it as {reason}" if over else ""
        self._end(self._items[batch_index], outcome, error)
        self._items[batch_index].finish_reason = reason

    def fail(self, batch_index: int, error: TrtmeshError) -> None:
        item = self._items[batch_index]
        self._end(item, _outcome_of(error, began=bool(item.arrivals_s)), f"{error.reason}: {error}")

    def end_rest(self, outcome: AnswerOutcome, why: str) -> None:
        """Ends all items that have not ended."""
        for item in self._items:
            self._end(item, outcome, why)

    def fail_rest(self, error: TrtmeshError) -> None:
        for batch_index in range(len(self._items)):
            self.fail(batch_index, error)

    def text(self, batch_index: int = 0) -> str:
        """The answer so far, of a session or where texts are kept."""
        return "".join(self._items[batch_index].texts)

    @property
    def is_ok(self) -> bool:
        return all(item.outcome is AnswerOutcome.OK for item in self._items)

    def answers(self) -> Iterable[Answer]:
        """The answers, once all items have ended."""
        self.end_rest(AnswerOutcome.ERROR, "the stream ended without the end of the item")
        return map(self._answer, range(len(self._items)))

    def _end(self, item: _Item, outcome: AnswerOutcome, error: str) -> None:
        if item.ended_s is None:
            item.ended_s, item.outcome, item.error = self._clock(), outcome, error

    def _answer(self, batch_index: int) -> Answer:
        plan, item = self._plan, self._items[batch_index]
        assert item.ended_s is not None
        counted = sum(item.tokens) if all(item.tokens) else None
        return Answer(
            index=plan.prompts[batch_index].index,
            batch_index=batch_index,
            request_id=self.request_id,
            planned_s=_microseconds(self._sent_s if self._due_s is None else self._due_s),
            sent_s=_microseconds(self._sent_s),
            ended_s=_microseconds(item.ended_s),
            outcome=item.outcome,
            error=item.error,
            finish_reason=item.finish_reason,
            arrivals_s=tuple(map(_microseconds, item.arrivals_s)),
            tokens=tuple(item.tokens),
            prompt_tokens=item.prompt_tokens,
            output_tokens=counted if item.output_tokens is None else item.output_tokens,
            text_sha256=item.digest("text"),
            ids_sha256=item.digest("ids") if item.has_ids else None,
            lost=item.lost,
            doubled=item.doubled,
            worker=item.worker,
            session=plan.session,
            turn=plan.turn,
            text=self.text(batch_index) if self._keeps_text else None,
        )


def _microseconds(seconds: float) -> float:
    return round(seconds, 6)


def _outcome_of(error: TrtmeshError, *, began: bool) -> AnswerOutcome:
    if isinstance(error, Cancelled):
        return AnswerOutcome.CANCELLED
    if isinstance(error, NO_ROOM) and not isinstance(error, SlowClient) and not began:
        return AnswerOutcome.REFUSED
    return AnswerOutcome.ERROR
