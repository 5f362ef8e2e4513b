"""Faults of a stack, as options spell them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.stack_processes import SERVICES

FORMS = "kill:engine@30s, freeze:engine@30s+2s, drain:engine@30s+5s or role:engine=decode@30s+5s"
KINDS = ("kill", "freeze", "drain", "role")
LENGTHS_S = {"freeze": 2.0, "drain": 5.0, "role": 5.0}
"""How long each lasts unless said."""

_SPELLED = re.compile(
    rf"({'|'.join(KINDS)}):([\w.-]+)(?:=(\w+))?@(\d+(?:\.\d+)?)s?(?:\+(\d+(?:\.\d+)?)s?)?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do to which part of a stack, when and how long."""

    kind: str
    target: str
    """A service, of which one is drawn, or the name of an engine."""
    at_s: float
    length_s: float = 0.0
    role: str = ""


def read_fault(text: str) -> Fault:
    """Raises SettingsError."""
    from trtmesh.client.admin import ROLES

    match = _SPELLED.fullmatch(text)
    if match is None:
        raise SettingsError(f"is {text!r} but must be like {FORMS}", setting="--disrupt")
    kind, target, role, at, length = match.groups()
    if (kind == "role") != bool(role) or (role and role not in ROLES):
        raise SettingsError(
            f"is {text!r}, but a role, and nothing else, has =ROLE, one of {', '.join(ROLES)}",
            setting="--disrupt",
        )
    if kind in ("drain", "role") and target in SERVICES and target != "engine":
        raise SettingsError(f"is {text!r}, but only engines have {kind}", setting="--disrupt")
    if kind == "kill" and length:
        raise SettingsError(
            f"is {text!r}, but what is killed comes back by itself; leave +{length} out",
            setting="--disrupt",
        )
    return Fault(kind, target, float(at), float(length or LENGTHS_S.get(kind, 0)), role or "")
