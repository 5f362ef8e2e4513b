"""Prints the responses of Triton models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtmesh.chassis.quoting import escaped
from trtmesh.cli.output import put, put_json, readable, say_error, shown
from trtmesh.tools.triton.results import Outputs, Place, Results
from trtmesh.tools.triton.tensors import Tensor

SHOWN = 8
"""Elements shown of each end of a tensor."""


class TritonPrinter:
    """Prints a single text as it arrives, anything else at the end of its request, labelled by row and beam."""

    def __init__(self, prompts: Sequence[int], results: Results, *, as_json: bool) -> None:
        """`prompts` has the number of prompts of each request."""
        self._prompts = prompts
        self._results = results
        self._as_json = as_json
        self._live = sum(prompts) == 1
        self._line_open = False
        self._unprinted = set(range(len(prompts)))

    def show(self, index: int, outputs: Sequence[Tensor], *, final: bool) -> None:
        """Prints a response to a request, given by index."""
        place, fresh = self._results.add(index, outputs)
        if self._as_json:
            self._put_json(index, outputs, final=final)
        elif fresh and self._is_single(place, self._results.of(index)[place]):
            put(shown(fresh), end="")
            self._line_open = True

    def _put_json(self, index: int, outputs: Sequence[Tensor], *, final: bool) -> None:
        described = {
            t.name: {"datatype": t.data_type, "shape": list(t.shape), "data": t.nested()}
            for t in outputs
        }
        put_json({"event": "response", "request": index, "final": final, "outputs": described})

    def end(self, index: int) -> None:
        """Prints the rest of a request, once."""
        if index in self._unprinted and not self._as_json:
            for place, outputs in self._results.of(index).items():
                self._put_rest(index, place, outputs)
        self._unprinted.discard(index)

    def _put_rest(self, index: int, place: Place, outputs: Outputs) -> None:
        self._end_line()
        if not self._is_single(place, outputs):
            self._put_texts(index, place, outputs.texts)
        for name, tensor in outputs.tensors.items():
            tag = "" if self._live else f"[{self._first(index) + (place[0] or 0)}] "
            put(f"{tag}{name} {list(tensor.shape)}: {_abridged(tensor.elements)}")

    def fail(self, index: int, message: str) -> None:
        """Prints an error of a request, after its output so far."""
        self._end_line()
        if self._as_json:
            put_json({"event": "error", "request": index, "message": message})
        tag = f"[{self._first(index)}] " if len(self._prompts) > 1 else ""
        say_error(tag + escaped(message))

    def close(self) -> None:
        """Prints the outputs of unfinished requests."""
        for index in sorted(self._unprinted):
            self.end(index)

    def _put_texts(self, index: int, place: Place, texts: Sequence[str]) -> None:
        row, sequence = place
        # A response without a row index has all rows, beam after beam.
        rows = self._prompts[index] if row is None else 1
        beams = max(1, len(texts) // rows)
        for at, text in enumerate(texts):
            tag = f"{self._first(index) + (row or 0) + at // beams}"
            tag += f".{at % beams}" if beams > 1 else ""
            tag += "" if sequence is None else f".{sequence}"
            put(f"[{tag}] {shown(text)}")

    def _first(self, index: int) -> int:
        """Index of a request's first prompt on the command line."""
        return sum(self._prompts[:index])

    def _is_single(self, place: Place, outputs: Outputs) -> bool:
        return self._live and place[1] is None and len(outputs.texts) == 1

    def _end_line(self) -> None:
        if self._line_open:
            put("")
            self._line_open = False


def _abridged(elements: Sequence[Any]) -> str:
    def listed(some: Sequence[Any]) -> str:
        return " ".join(f"{e:.6g}" if isinstance(e, float) else readable(str(e)) for e in some)

    if len(elements) <= 4 * SHOWN:
        return listed(elements)
    return f"{listed(elements[:SHOWN])} ... {listed(elements[-SHOWN:])}"
