"""Requests that do not depend on the model and the way to ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

VOCABULARY, MODEL_LENGTH = 6144, 2048
TABLE_ROWS = 3

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A request without a model: prompts, and the options of each row under the names of `ensemble`."""

    seed: int
    number: int
    prompts: tuple[Prompt, ...]
    rows: tuple[Mapping[str, Any], ...]
    flags: tuple[str, ...]
    beam_width: int = 1
    sequences: int | None = None
    is_greedy: bool = True
    tables: tuple[int, ...] = ()
    """Seeds of the rows' prompt tables, of TABLE_ROWS rows each; empty without."""

    @property
    def is_text(self) -> bool:
        return isinstance(self.prompts[0], str)

    @property
    def has_beams(self) -> bool:
        return self.beam_width > 1

    @property
    def returned(self) -> int:
        """Sequences of a row."""
        return self.sequences or self.beam_width

    def alone(self, row: int) -> Case:
        """One of its rows."""
        tables = self.tables[row : row + 1]
        return replace(self, prompts=(self.prompts[row],), rows=(self.rows[row],), tables=tables)

    @property
    def spoilt(self) -> Case:
        """The case with a first row that must fail: before the engine or there, by the number."""
        prompt, row = self.prompts[0], dict(self.rows[0])
        match self.number % 3:
            case 0:
                row["max_tokens"] = 0
            case 1:
                prompt = (f"{prompt}x " if isinstance(prompt, str) else prompt) * MODEL_LENGTH
            case _ if "end_id" in row:
                row["end_id"] = VOCABULARY
            case _:
                row["max_tokens"] = -1
        return replace(
            self,
            prompts=(prompt, *self.prompts),
            rows=(row, *self.rows),
            tables=self.tables[:1] + self.tables,
        )

    def without(self, *options: str) -> Case:
        rows = [{k: v for k, v in row.items() if k not in options} for row in self.rows]
        return replace(self, rows=tuple(rows))
