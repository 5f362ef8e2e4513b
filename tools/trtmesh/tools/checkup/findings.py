"""What `trtmesh doctor` finds: where, what, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

SCHEMA_VERSION = 1
"""Of the JSON: a new field leaves it, another meaning raises it."""


class Severity(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"
    """Requests fail or are lost, or strangers have access."""
    WARNING = "warning"
    """It works, but slower, less safely, or not for long."""
    NOTE = "note"
    """Nothing to do unless it is a surprise."""


EXIT_STATUS = {Severity.ERROR: 6, Severity.WARNING: 5, Severity.NOTE: 0}


class Symptom(NamedTuple):
    """What a check found, by the name of its rule."""

    rule: str
    where: str
    what: str
    remedy: str = ""
    """In place of the rule's."""


class Diagnosis(NamedTuple):
    """A finding as it is told."""

    severity: Severity
    check: str
    where: str
    what: str
    remedy: str


def exit_status(findings: Iterable[Diagnosis]) -> int:
    """The status of the worst finding."""
    return max((EXIT_STATUS[finding.severity] for finding in findings), default=0)
