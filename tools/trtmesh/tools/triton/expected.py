"""Compares the outputs of a run with a file, and writes such a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from pathlib import Path

import typer
from trtmesh.chassis.quoting import escaped
from trtmesh.tools.triton.requests import Prompt
from trtmesh.tools.triton.results import Output
from trtmesh.tools.triton.values import read_json, read_rows

SHOWN = 120
"""Longest shown output, in characters."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected outputs, one a sequence or one a prompt."""

    outputs: Sequence[Output]
    least_match: float
    """Least share of equal tokens or characters, position by position."""

    @classmethod
    def read(cls, file: Path, least_match: float) -> Expected:
        """From .csv with a row of token ids each, or .json with texts or lists of ids. Raises BadParameter."""
        if file.suffix == ".csv":
            return cls(read_rows(file), least_match)
        if file.suffix != ".json":
            raise typer.BadParameter(f"{str(file)!r} must be a file .csv or .json")
        read = read_json(file)
        outputs = [read] if isinstance(read, str) else read
        if not (isinstance(outputs, list) and all(isinstance(o, str | list) for o in outputs)):
            raise typer.BadParameter(f"{str(file)!r} must have a list of texts or of token ids")
        return cls(outputs, least_match)

    def differences(self, prompts: Sequence[Prompt], outputs: Sequence[Output]) -> list[str]:
        """A sentence for each output below the least match; none if all are as expected."""
        sequences, rest = divmod(len(outputs), len(prompts))
        count = len(self.outputs)
        if not sequences or rest or count not in (len(outputs), len(prompts)):
            return [f"{count} outputs are expected, but {len(outputs)} came"]
        shared = len(outputs) // count
        found = []
        for index, output in enumerate(outputs):
            expected, prompt = self.outputs[index // shared], prompts[index // sequences]
            match = match_of(prompt, expected, output)
            if match < self.least_match:
                found.append(
                    f"output {index} matches by {match:.4g}, less than {self.least_match:g}:"
                    f" expected {_shown(expected)}, got {_shown(output)}"
                )
        return found


def match_of(prompt: Prompt, expected: Output, output: Output) -> float:
    """The share of equal tokens or characters; either side may begin with the prompt."""
    if isinstance(expected, str) != isinstance(output, str):
        return 0.0
    pairs = [(list(expected), list(output))]
    if isinstance(prompt, str) == isinstance(output, str):
        head = list(prompt)
        pairs += [([*head, *expected], list(output)), (list(expected), [*head, *output])]
    return max(_share(one, other) for one, other in pairs)


def _share(one: Sequence[object], other: Sequence[object]) -> float:
    longest = max(len(one), len(other))
    return sum(map(eq, one, other)) / longest if longest else 1.0


def _shown(output: Output) -> str:
    text = escaped(repr(output))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def write_outputs(file: Path, outputs: Sequence[Output]) -> None:
    """Writes token ids as .csv, or anything as .json. Raises BadParameter."""
    if file.suffix == ".csv":
        if any(isinstance(output, str) for output in outputs):
            raise typer.BadParameter(f"{str(file)!r}: texts are saved as .json")
        text = "".join(",".join(map(str, output)) + "\n" for output in outputs)
    else:
        text = json.dumps(outputs, ensure_ascii=False, indent=1) + "\n"
    file.write_text(text, encoding="utf-8")
