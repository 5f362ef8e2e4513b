"""Printers of the streams of several prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, ClassVar, Self

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.quoting import escaped
from trtmesh.cli.output import put, put_json, readable, say, shown
from trtmesh.client import Event, ItemFailed, ItemFinished, SequenceFinished, Tokens, Usage
from trtmesh.client.results import Results


class Printer(AbstractContextManager["Printer"]):
    """Prints events. A context manager: the exit prints held-back text."""

    redraws: ClassVar[bool] = False
    """Whether shown text can be replaced."""

    def __init__(self) -> None:
        self._log_probs: defaultdict[int, list[float]] = defaultdict(list)
        """Log-probabilities of the ended sequences of each item, if requested."""

    @abstractmethod
    def show(self, event: Event) -> None: ...

    def _note(self, event: Event) -> None:
        if isinstance(event, SequenceFinished) and event.cumulative_log_prob is not None:
            self._log_probs[event.batch_index].append(event.cumulative_log_prob)

    def _summary(self, event: ItemFinished | ItemFailed) -> str:
        return summary(event, self._log_probs.pop(event.batch_index, ()))


class JsonLines(Printer):
    """Prints a JSON object per event."""

    redraws = True

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        put_json(as_json(event))


class RawText(Printer):
    """Prints the bare text of a single sequence without delay."""

    def __init__(self) -> None:
        super().__init__()
        self._began = False

    def __exit__(self, *_: object) -> None:
        if self._began:
            put("")

    def show(self, event: Event) -> None:
        self._began = True
        self._note(event)
        if isinstance(event, Tokens):
            put(shown(event.text), end="")
        elif isinstance(event, ItemFinished | ItemFailed):
            say(f"\n{self._summary(event)}")


class TaggedLines(Printer):
    """Prints the lines of several sequences after tags, each line once complete: no line is folded."""

    def __init__(self, tag: Callable[[int, int], str]) -> None:
        super().__init__()
        self._tag = tag
        self._held: defaultdict[str, list[str]] = defaultdict(list)

    def __exit__(self, *_: object) -> None:
        for tag in list(self._held):
            self._flush(tag)

    def show(self, event: Event) -> None:
        self._note(event)
        tag = self._tag(event.batch_index, event.sequence_index)
        if isinstance(event, Tokens):
            first, *others = event.text.split("\n")
            self._held[tag].append(first)
            for line in others:
                self._print(tag)
                self._held[tag].append(line)
        elif isinstance(event, SequenceFinished | ItemFailed):
            self._flush(tag)
        if isinstance(event, ItemFinished | ItemFailed):
            say(f"[{event.batch_index}] {self._summary(event)}")

    def _flush(self, tag: str) -> None:
        if any(self._held[tag]):
            self._print(tag)

    def _print(self, tag: str) -> None:
        put(f"{tag} {shown(''.join(self._held.pop(tag)))}")


class LiveRegions(Printer):
    """Redraws a region per sequence in place; the whole texts stay at the end."""

    redraws = True

    def __init__(self, tag: Callable[[int, int], str], items: int, console: Console) -> None:
        super().__init__()
        self._tag = tag
        self._console = console
        self._results = Results(items)
        self._ended: dict[int, str] = {}
        self._live = Live(console=console, transient=True, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._console.print(self._draw())

    def show(self, event: Event) -> None:
        self._note(event)
        self._results.add(event)
        if isinstance(event, ItemFinished | ItemFailed):
            self._ended[event.batch_index] = self._summary(event)

    def _draw(self) -> Group:
        parts = []
        for item in self._results.items:
            for index, sequence in enumerate(item.sequences):
                tag = (f"{self._tag(item.batch_index, index)} ", "bold cyan")
                parts.append(Text.assemble(tag, readable(sequence.text)))
            if end := self._ended.get(item.batch_index):
                parts.append(Text(f"[{item.batch_index}] {end}", style="dim"))
        return Group(*parts)


def choose_printer(*, as_json_lines: bool, items: int, sequences: int, console: Console) -> Printer:
    """Chooses the printer by the kind of standard output and the number of sequences."""

    def tag(batch_index: int, sequence_index: int) -> str:
        return f"[{batch_index}.{sequence_index}]" if sequences > 1 else f"[{batch_index}]"

    if as_json_lines:
        return JsonLines()
    if items * sequences == 1:
        return RawText()
    if console.is_terminal:
        return LiveRegions(tag, items, console)
    return TaggedLines(tag)


def summary(event: ItemFinished | ItemFailed, log_probs: Sequence[float] = ()) -> str:
    """Summarises the end of an item, with the log-probabilities of the sequences."""
    if isinstance(event, ItemFailed):
        return f"failed: {event.error.reason}: {escaped(str(event.error))}"
    usage = event.usage
    tokens = f"{usage.prompt_tokens} prompt tokens, {usage.generated_tokens} new"
    sums = ", ".join(f"{value:.4f}" for value in log_probs)
    return f"ended: {event.reason}, {tokens}" + (f", log-probability {sums}" if sums else "")


def as_json(event: Event) -> dict[str, object]:
    """Returns the event as a JSON object: the kind, then the fields."""
    kind = "".join(f"_{char.lower()}" if char.isupper() else char for char in type(event).__name__)
    return {"event": kind.lstrip("_")} | {
        field.name: _json_value(getattr(event, field.name)) for field in fields(event)
    }


def _json_value(value: Any) -> object:
    match value:
        case Message():
            return MessageToDict(value, preserving_proto_field_name=True)
        case TrtmeshError():
            parts = {"reason": value.reason, "message": value.message, "worker": value.worker}
            return parts | {"retry_after_ms": value.retry_after_ms}
        case Usage():
            return {field.name: getattr(value, field.name) for field in fields(value)}
        case _:
            return value
