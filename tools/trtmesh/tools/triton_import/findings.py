"""The outcome of each value of a repository, and the draft of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from trtmesh.chassis.device_names import DeviceName


class Outcome(Enum):
    """The fate of a value."""

    CARRIED = "carried over"
    REPLACED = "replaced"
    """Replaced by something better, or no longer needed."""
    UNSUPPORTED = "unsupported"
    UNSET = "unset"
    """Empty, or a `${...}` without a value."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One value of one model."""

    model: str
    what: str
    value: str
    outcome: Outcome
    text: str
    """The new setting, the replacement, or the reason."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A value under examination, with its place."""

    model: str
    what: str
    value: str
    weights: Path = Path()
    """Directory of the Hugging Face model that serves it, for parameters and arguments."""


@dataclass(slots=True)
class Draft:
    """The configuration so far, and the findings."""

    sections: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    _owners: dict[str, str] = field(default_factory=dict)

    def carry(self, subject: Subject, path: Sequence[str], value: Any) -> None:
        """Sets the value's counterpart here, unless another model already set it differently."""
        name = ".".join(path)
        known = self.get(path)
        if known is not None and known != value:
            self.refuse(
                subject,
                f"{name} is {known!r} for model '{self._owners[name]}', and all engines of a stack share it",
            )
            return
        self.put(path, value)
        self._owners.setdefault(name, subject.model)
        self._add(subject, Outcome.CARRIED, f"{name}: {value}")

    def imply(self, subject: Subject, path: Sequence[str], value: Any) -> None:
        """Sets a setting that the value needs, unless it is set, without a finding."""
        if self.get(path) is None:
            self.put(path, value)
            self._owners.setdefault(".".join(path), subject.model)

    def count(self, subject: Subject, text: str) -> None:
        """Reports a value carried over without a setting."""
        self._add(subject, Outcome.CARRIED, text)

    def replace(self, subject: Subject, text: str) -> None:
        self._add(subject, Outcome.REPLACED, text)

    def refuse(self, subject: Subject, reason: str) -> None:
        self._add(subject, Outcome.UNSUPPORTED, reason)

    def leave(self, subject: Subject, text: str = "the default holds") -> None:
        self._add(subject, Outcome.UNSET, text)

    def put(self, path: Sequence[str], value: Any) -> None:
        """Sets a setting without a finding."""
        node = self.sections
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value

    @property
    def runs_on_gpus(self) -> bool:
        """Whether every engine has a GPU."""
        if self.get(("mesh", "backend")) == "tensorrt_llm":
            return True
        if device := self.get(("engine", "torch", "device")):
            return DeviceName(device).is_gpu
        mesh = self.sections.get("mesh", {})
        devices = mesh.get("devices", {})
        given = mesh["model"]
        models = [given] if isinstance(given, str) else given
        return all(Path(each).name in devices for each in models)

    def get(self, path: Sequence[str]) -> Any:
        """The value of a setting, or None."""
        node: Any = self.sections
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def _add(self, subject: Subject, outcome: Outcome, text: str) -> None:
        self.findings.append(Finding(subject.model, subject.what, subject.value, outcome, text))
