"""The answers of `/v1/responses`: items, and their stream of events."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from trtmesh.router.doors.openai.answer import Consumption, Frame, Gathered, Piece, Wanted
from trtmesh.router.doors.openai.answer_parts import (
    AnswerPart,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from trtmesh.router.doors.openai.log_probs import TokenTexts, chat_shape

Event = dict[str, Any]
"""An event without a number."""


@dataclass(slots=True)
class _Open:
    """An incomplete item."""

    index: int
    item: dict[str, Any]
    part: str = ""
    """Kind of the only part, or '' for a call."""
    texts: list[str] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        place = {"item_id": self.item["id"], "output_index": self.index}
        return place | {"content_index": 0} if self.part else place

    @property
    def name(self) -> str:
        """The word for this item in the types of events."""
        return self.part or "function_call_arguments"

    def content(self) -> dict[str, Any]:
        """Returns the part with the text so far."""
        content: dict[str, Any] = {"type": self.part, "text": "".join(self.texts)}
        if self.part == "output_text":
            content |= {"annotations": [], "logprobs": self.log_probs}
        return content


class Items:
    """The items of an answer, as the model says them."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: _Open | None = None

    def say(self, said: AnswerPart, log_probs: Sequence[Any] = ()) -> Iterator[Event]:
        match said:
            case Content(text):
                yield from self._text("output_text", text, log_probs)
            case Reasoning(text):
                yield from self._text("reasoning_text", text, ())
            case CallBegun(_, name, call_id):
                yield from self.close("completed")
                call = {"type": "function_call", "id": _new_id("fc"), "call_id": call_id}
                yield from self._begin(call | {"name": name, "arguments": ""}, "")
            case CallArguments(_, text):
                yield from self._delta(text, ())
            case CallEnded():
                yield from self.close("completed")

    def _text(self, part: str, text: str, log_probs: Sequence[Any]) -> Iterator[Event]:
        if self._open is None or self._open.part != part:
            yield from self.close("completed")
            begun: dict[str, Any] = {"type": "reasoning", "id": _new_id("rs"), "summary": []}
            if part == "output_text":
                begun = {"type": "message", "id": _new_id("msg"), "role": "assistant"}
            yield from self._begin(begun | {"content": []}, part)
        yield from self._delta(text, log_probs)

    def _begin(self, item: dict[str, Any], part: str) -> Iterator[Event]:
        opened = self._open = _Open(len(self.output), item | {"status": "in_progress"}, part)
        self.output.append(opened.item)
        yield {
            "type": "response.output_item.added",
            "output_index": opened.index,
            "item": {**opened.item},
        }
        if part:
            event = {"type": "response.content_part.added", **opened.place}
            yield event | {"part": opened.content()}

    def _delta(self, text: str, log_probs: Sequence[Any]) -> Iterator[Event]:
        opened = self._open
        assert opened is not None
        opened.texts.append(text)
        opened.log_probs += log_probs
        event = {"type": f"response.{opened.name}.delta", **opened.place, "delta": text}
        yield event | ({"logprobs": log_probs} if opened.part == "output_text" else {})

    def close(self, status: str) -> Iterator[Event]:
        """The events at the end of the open item, if any."""
        if (opened := self._open) is None:
            return
        self._open = None
        opened.item["status"] = status
        if opened.part:
            content = opened.content()
            opened.item["content"] = [content]
            told = {key: value for key, value in content.items() if key in ("text", "logprobs")}
        else:
            opened.item["arguments"] = "".join(opened.texts)
            told = {key: opened.item[key] for key in ("name", "arguments")}
        yield {"type": f"response.{opened.name}.done", **opened.place, **told}
        if opened.part:
            yield {"type": "response.content_part.done", **opened.place, "part": content}
        yield {
            "type": "response.output_item.done",
            "output_index": opened.index,
            "item": opened.item,
        }


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


class ItemAnswer:
    """Writes an answer, whole or as a stream."""

    def __init__(self, wanted: Wanted, frame: Frame) -> None:
        self._wanted, self._frame = wanted, frame
        self._items = Items()
        self._finish_reason: str | None = None
        self._texts = TokenTexts(wanted.tokens_as_ids)
        self._is_plain = wanted.reading is None
        self._waiting: list[Any] = []
        self._number = 0
        """Of the next event."""

    def whole(self, gathered: Gathered) -> bytes:
        for piece in gathered.pieces:
            deque(self._take(piece, gathered.bytes_of), 0)
        deque(self._end(), 0)
        return orjson.dumps(self._response(self._status, gathered.usage))

    def _take(self, piece: Piece, bytes_of: Mapping[int, bytes]) -> Iterator[Event]:
        self._finish_reason = piece.finish_reason or self._finish_reason
        log_probs: list[Any] = []
        if piece.scored:
            self._texts.bytes_of = bytes_of
            log_probs = chat_shape(piece.scored, self._texts)["content"]
        # Log-probabilities wait until the parser knows the part of the text.
        self._waiting += log_probs
        said = [Content(piece.text)] if piece.text or self._is_plain else piece.said
        for each in said:
            if not isinstance(each, Content) or each.text or self._waiting:
                yield from self._items.say(each, self._waiting)
                self._waiting = []

    def _end(self) -> Iterator[Event]:
        if not self._items.output:
            # An empty answer has an empty message.
            yield from self._items.say(Content(""))
        cut = self._finish_reason == "length"
        yield from self._items.close("incomplete" if cut else "completed")

    def _response(
        self, status: str, usage: Consumption | None = None, error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the response so far."""
        is_cut = status == "incomplete"
        told = {
            "id": self._frame.id,
            "object": "response",
            "created_at": self._frame.created,
            "model": self._frame.model,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.output,
            **self._wanted.echo,
        }
        if status == "completed":
            told["completed_at"] = int(time.time())
        return told if usage is None else told | {"usage": _told(usage)}

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def text(self, choice: int, text: str) -> bytes:
        return self.of(Piece(choice, text), {})

    def of(self, piece: Piece, bytes_of: Mapping[int, bytes]) -> bytes:
        return self._begun() + self._written(self._take(piece, bytes_of))

    def end(self, usage: Consumption) -> bytes:
        events = self._begun() + self._written(self._end())
        response = self._response(self._status, usage)
        return events + self._event({"type": f"response.{self._status}", "response": response})

    def failed(self, errors: Sequence[Mapping[str, Any]]) -> bytes:
        events = self._begun() + self._written(self._items.close("incomplete"))
        for error in errors:
            told = {"code": "server_error", "message": error["message"]}
            response = self._response("failed", error=told)
            events += self._event({"type": "response.failed", "response": response})
            # OpenAI's clients raise an exception for this event.
            about = {key: error[key] for key in ("code", "message", "param")}
            events += self._event({"type": "error", **about})
        return events

    def _begun(self) -> bytes:
        """The events before all others."""
        if self._number:
            return b""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._written({"type": kind, "response": response} for kind in kinds)

    def _written(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: Event) -> bytes:
        told = orjson.dumps(event | {"sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), told)


def _told(usage: Consumption) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.generated,
    }
