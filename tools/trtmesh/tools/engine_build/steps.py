"""A step of a build: one command with one output."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PARTIAL = ".partial-"
"""Starts the name of an output in the making."""


class Content(Enum):
    """What an output must hold."""

    MODEL = "model"
    """config.json, and weights in safetensors or pickles, every shard of an index."""
    QUANTIZED = "quantized model"
    """The same, with the description of the quantization."""
    CHECKPOINT = "checkpoint"
    """config.json and the weights of each rank."""
    ENGINE = "engine"
    """config.json and the engine of each rank."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command. It gets a temporary directory for its output, which is renamed when whole."""

    name: str
    """`convert llama-3-8b/bf16-tp2-pp1`."""
    before: tuple[str, ...]
    """The command up to the directory of the output."""
    after: tuple[str, ...]
    """The command behind it."""
    output: Path
    content: Content
    ranks: int
    size: int
    """Expected size of the output in bytes."""
    source: Path | None = None
    """Directory that it reads; None for a download."""
    needs: Step | None = None
    """The step that makes `source`; None if the plan names it."""

    def command(self, output: Path | None = None) -> list[str]:
        return [*self.before, str(output or self.output), *self.after]

    @property
    def partial(self) -> Path:
        return self.output.with_name(f"{PARTIAL}{self.output.name}")

    @property
    def slug(self) -> str:
        """Names the log."""
        return self.name.replace(" ", "-").replace("/", "-")
