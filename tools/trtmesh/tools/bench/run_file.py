"""The file of runs: one after another, a JSON object a line.

A line of kind `run` begins a run, a line of kind `answer` follows for every item that was sent, in the order in which
they ended, and a line of kind `end` closes it. A run without that line was killed; its answers count. Lines of kind
`sample` have metrics of the server, if they were read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import IO, Literal, Self

import orjson
from pydantic import TypeAdapter, ValidationError
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.record import SCHEMA, Answer, Header, Line, MetricsSample, Run, RunEnd

MAX_LINE_BYTES = 1 << 28

_KINDS: Mapping[type[Line], str] = {
    Header: "run", Answer: "answer", MetricsSample: "sample", RunEnd: "end",
}  # fmt: skip
_READERS: Mapping[str, TypeAdapter[Line]] = {kind: TypeAdapter(of) for of, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class _Kind:
    kind: Literal["run", "answer", "sample", "end"]
    schema: int = SCHEMA


_KIND = TypeAdapter(_Kind)


def as_line(line: Line) -> bytes:
    fields = {name: getattr(line, name) for name in line.__dataclass_fields__}
    return orjson.dumps({"kind": _KINDS[type(line)], **fields}) + b"\n"


class RunFile:
    """Writes runs while they happen, a line at a time, so that a killed process leaves what it had."""

    def __init__(self, path: Path) -> None:
        self.problem = ""
        """Why the file ends before the runs."""
        self._path = path
        self._file: FileIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("wb", buffering=0)
        except OSError as error:
            raise SettingsError(f"{self._path} cannot be written: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def write(self, line: Line) -> None:
        """Where the disk is full, the run goes on without the file."""
        assert self._file, "used outside `with`"
        rest = b"" if self.problem else as_line(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.problem = f"{self._path} ends early, since it cannot be written: {error.strerror}"


def read_runs(path: Path) -> Sequence[Run]:
    """The runs of a file. Raises SettingsError with the line for what is no record."""
    try:
        with path.open("rb") as lines:
            return [*_runs(path, lines)]
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error


def _runs(path: Path, lines: IO[bytes]) -> Iterator[Run]:
    run: Run | None = None
    answers: list[Answer] = []
    samples: list[MetricsSample] = []

    def whole(run: Run) -> Run:
        return replace(run, answers=tuple(answers), samples=tuple(samples))

    for number, text in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), 1):
        if not text.endswith(b"\n"):
            # The process was killed in the middle of the line.
            break
        line = parse_line(f"{path}, line {number}", text)
        if isinstance(line, Header):
            if run:
                yield whole(run)
            run, answers, samples = Run(line, ()), [], []
        elif run is None:
            raise SettingsError(f"{path}, line {number}: no line of kind 'run' comes before it")
        elif isinstance(line, Answer):
            answers.append(line)
        elif isinstance(line, MetricsSample):
            samples.append(line)
        else:
            run = replace(run, end=line)
    if run is None:
        raise SettingsError(f"{path} has no run; write one with `trtmesh bench serve --record`")
    yield whole(run)


def parse_line(where: str, text: bytes) -> Line:
    """Raises SettingsError with the place."""
    try:
        # Read as JSON, where tuples are lists and outcomes are words.
        seen = _KIND.validate_json(text)
        if seen.schema > SCHEMA:
            raise SettingsError(
                f"{where}: schema {seen.schema} is newer than {SCHEMA}, the last that this release reads"
            )
        return _READERS[seen.kind].validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_name = ".".join(map(str, first["loc"])) or "the line"
        raise SettingsError(f"{where}: {field_name}: {first['msg']}") from error
