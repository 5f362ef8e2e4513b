"""The outputs of requests, joined from their responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtmesh.tools.triton.tensors import Tensor

INDEXES = ("batch_index", "sequence_index")
TOKEN_AXIS = 2
"""Axis of outputs with an element for each token: [row, beam, token, ...]."""
OF_TOKENS = ("output_ids", "output_log_probs", "generation_logits")

Place = tuple[int | None, int | None]
"""Row and sequence of a response; None where it has all rows, or the only sequence."""

Output = str | list[int]
"""A generated sequence: text or token ids."""


@dataclass(slots=True)
class Outputs:
    """The outputs so far of a place."""

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

    def sequences(self) -> list[Output]:
        """The texts, or the ids without padding; rows and beams in order."""
        ids, lengths = self.tensors.get("output_ids"), self.tensors.get("sequence_length")
        if ids is None:
            return [*self.texts]
        width = ids.shape[TOKEN_AXIS]
        count = len(ids.elements) // width if width else 0
        ends = lengths.elements if lengths else [width] * count
        return [
            list(ids.elements[width * at : width * at + end]) for at, end in enumerate(ends[:count])
        ]


class Results:
    """The outputs of the requests by place."""

    def __init__(self, requests: int, *, accumulates: bool) -> None:
        self._accumulates = accumulates
        self._outputs: list[dict[Place, Outputs]] = [{} for _ in range(requests)]

    def add(self, index: int, outputs: Sequence[Tensor]) -> tuple[Place, str]:
        """Adds a response to a request; returns its place and the new part of its first text."""
        place = _only(outputs, "batch_index"), _only(outputs, "sequence_index")
        joined = self._outputs[index].setdefault(place, Outputs())
        return place, joined.add(outputs, accumulates=self._accumulates)

    def of(self, index: int) -> Mapping[Place, Outputs]:
        return self._outputs[index]

    def sequences(self) -> Iterator[Output]:
        """Yields the sequences of all requests, rows and sequences in order."""
        for places in self._outputs:
            for place in sorted(places, key=lambda place: (place[0] or 0, place[1] or 0)):
                yield from places[place].sequences()


def _joined(before: Tensor | None, tensor: Tensor) -> Tensor:
    """Appends the tokens of a single beam; replaces anything else."""
    if tensor.name == "sequence_length" and before is not None and len(tensor.elements) == 1:
        total = before.elements[0] + tensor.elements[0]
        return Tensor(tensor.name, tensor.data_type, tensor.shape, [total])
    single = tensor.name in OF_TOKENS and tensor.shape[:TOKEN_AXIS] == (1, 1)
    if before is None or not single:
        return tensor
    tokens = before.shape[TOKEN_AXIS] + tensor.shape[TOKEN_AXIS]
    shape = (1, 1, tokens, *tensor.shape[TOKEN_AXIS + 1 :])
    return Tensor(tensor.name, tensor.data_type, shape, [*before.elements, *tensor.elements])


def _only(outputs: Sequence[Tensor], name: str) -> Any:
    """The only element of an output, or None."""
    return next((tensor.elements[0] for tensor in outputs if tensor.name == name), None)
