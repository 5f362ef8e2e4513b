"""Prometheus' text format as Triton writes it, which its users' scripts take apart with regular expressions: labels in
the order given, `le` behind them, and whole numbers without a decimal point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from trtmesh.router.doors.triton.models import MODEL_VERSION

Number = int | float


class Sample(NamedTuple):
    """One line: the family's name goes before `suffix`."""

    labels: Mapping[str, str]
    value: Number
    suffix: str = ""


def family(
    name: str,
    text: str,
    kind: Literal["counter", "gauge", "histogram"],
    samples: Iterable[Sample],
) -> str:
    """A family of metrics; '' where it has no samples."""
    lines = [
        f"{name}{suffix}{_labels(labels)} {number(value)}" for labels, value, suffix in samples
    ]
    if not lines:
        return ""
    return "\n".join((f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines, ""))


def labels_of(model: str, **more: str) -> dict[str, str]:
    """The labels of a model and others, in the order of their names."""
    return dict(sorted({"model": model, "version": MODEL_VERSION, **more}.items()))


def number(value: Number) -> str:
    """A number; a whole one without a decimal point."""
    return str(int(value)) if value == int(value) else repr(value)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
