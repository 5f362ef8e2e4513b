"""Prints the responses of Triton models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtmesh.cli.output import printable, put, say_error
from trtmesh.cli.triton.tensors import Tensor

SHOWN = 8
"""Elements shown of each end of a tensor."""
INDEXES = ("batch_index", "sequence_index")
TOKEN_AXIS = 2
"""Axis of outputs with an element for each token: [row, beam, token, ...]."""
OF_TOKENS = ("output_ids", "output_log_probs", "generation_logits")


@dataclass(slots=True)
class _Told:
    """The outputs so far of a row and sequence."""

    texts: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, outputs: Sequence[Tensor], *, accumulates: bool) -> str:
        """Adds a response; returns the new part of the first text."""
        fresh = ""
        for tensor in outputs:
            if tensor.name == "text_output":
                fresh = self._add_texts(tensor.elements, accumulates=accumulates)
            elif tensor.name not in INDEXES:
                self.tensors[tensor.name] = _joined(self.tensors.get(tensor.name), tensor)
        return fresh

    def _add_texts(self, texts: Sequence[str], *, accumulates: bool) -> str:
        """Replaces beams and accumulating texts; appends other texts."""
        before = self.texts[0] if self.texts else ""
        if len(texts) == 1 and not accumulates:
            self.texts = [before + texts[0]]
        else:
            self.texts = list(texts)
        return self.texts[0].removeprefix(before) if self.texts else ""


class TritonPrinter:
    """Prints a single text as it arrives, anything else at the end of its request, labelled by row and beam."""

    def __init__(self, prompts: Sequence[int], *, accumulates: bool, as_json: bool) -> None:
        """`prompts` has the number of prompts of each request."""
        self._prompts = prompts
        self._accumulates = accumulates
        self._as_json = as_json
        self._clean = printable if sys.stdout.isatty() else str
        self._live = sum(prompts) == 1
        self._line_open = False
        self._told: list[dict[tuple[int | None, int | None], _Told]] = [{} for _ in prompts]

    def show(self, index: int, outputs: Sequence[Tensor], *, final: bool) -> None:
        """Prints a response to a request, given by index."""
        if self._as_json:
            told = {
                t.name: {"datatype": t.data_type, "shape": list(t.shape), "data": t.nested()}
                for t in outputs
            }
            event = {"event": "response", "request": index, "final": final, "outputs": told}
            put(json.dumps(event, ensure_ascii=False))
            return
        key = _only(outputs, "batch_index", None), _only(outputs, "sequence_index", None)
        told_before = self._told[index].setdefault(key, _Told())
        fresh = told_before.add(outputs, accumulates=self._accumulates)
        if fresh and self._is_single(told_before, key[1]):
            put(self._clean(fresh), end="")
            self._line_open = True

    def end(self, index: int) -> None:
        """Prints the rest of a finished request."""
        for (row, sequence), told in self._told[index].items():
            self._end_line()
            if not self._is_single(told, sequence):
                self._put_texts(index, row, sequence, told.texts)
            for name, tensor in told.tensors.items():
                tag = "" if self._live else f"[{self._first(index) + (row or 0)}] "
                put(f"{tag}{name} {list(tensor.shape)}: {_abridged(tensor.elements)}")
        self._told[index].clear()

    def fail(self, index: int, message: str) -> None:
        """Prints a failed request."""
        self.end(index)
        if self._as_json:
            put(json.dumps({"event": "error", "request": index, "message": message}))
        tag = f"[{self._first(index)}] " if len(self._prompts) > 1 else ""
        say_error(tag + printable(message))

    def close(self) -> None:
        """Prints the outputs of unfinished requests."""
        for index in range(len(self._told)):
            self.end(index)

    def _put_texts(
        self, index: int, row: int | None, sequence: int | None, texts: Sequence[str]
    ) -> None:
        # A response without a row index has all rows, beam after beam.
        rows = self._prompts[index] if row is None else 1
        beams = max(1, len(texts) // rows)
        for place, text in enumerate(texts):
            tag = f"{self._first(index) + (row or 0) + place // beams}"
            tag += f".{place % beams}" if beams > 1 else ""
            tag += "" if sequence is None else f".{sequence}"
            put(f"[{tag}] {self._clean(text)}")

    def _first(self, index: int) -> int:
        """Index of a request's first prompt on the command line."""
        return sum(self._prompts[:index])

    def _is_single(self, told: _Told, sequence: int | None) -> bool:
        return self._live and sequence is None and len(told.texts) == 1

    def _end_line(self) -> None:
        if self._line_open:
            put("")
            self._line_open = False


def _joined(before: Tensor | None, tensor: Tensor) -> Tensor:
    """Appends the tokens of a single beam; replaces anything else."""
    if tensor.name == "sequence_length" and before is not None and len(tensor.elements) == 1:
        return Tensor(
            tensor.name, tensor.data_type, tensor.shape, [before.elements[0] + tensor.elements[0]]
        )
    single = tensor.name in OF_TOKENS and tensor.shape[:TOKEN_AXIS] == (1, 1)
    if before is None or not single:
        return tensor
    tokens = before.shape[TOKEN_AXIS] + tensor.shape[TOKEN_AXIS]
    shape = (1, 1, tokens, *tensor.shape[TOKEN_AXIS + 1 :])
    return Tensor(tensor.name, tensor.data_type, shape, [*before.elements, *tensor.elements])


def _only(outputs: Sequence[Tensor], name: str, default: Any) -> Any:
    """The only element of an output, or the default."""
    return next((tensor.elements[0] for tensor in outputs if tensor.name == name), default)


def _abridged(elements: Sequence[Any]) -> str:
    def shown(some: Sequence[Any]) -> str:
        return " ".join(f"{e:.6g}" if isinstance(e, float) else printable(str(e)) for e in some)

    if len(elements) <= 4 * SHOWN:
        return shown(elements)
    return f"{shown(elements[:SHOWN])} ... {shown(elements[-SHOWN:])}"
