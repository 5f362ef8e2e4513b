"""Faults of a stack, as options spell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.option_groups import option

SERVICES = ("engine", "router", "tokenizer")
FORMS = "kill:engine@30s, freeze:engine@30s+2s, drain:engine@30s+5s or role:engine=decode@30s+5s"
LENGTHS_S = {"kill": 0.0, "freeze": 2.0, "drain": 5.0, "role": 5.0}
"""How long each lasts unless said."""

_SPELLED = re.compile(
    rf"({'|'.join(LENGTHS_S)}):([\w.-]+)(?:=(\w+))?@(\d+(?:\.\d+)?)s?(?:\+(\d+(?:\.\d+)?)s?)?"
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
    wrong = ""
    if (kind == "role") != bool(role) or (role and role not in ROLES):
        wrong = f"a role, and nothing else, has =ROLE, one of {', '.join(ROLES)}"
    elif kind in ("drain", "role") and target in SERVICES and target != "engine":
        wrong = f"only engines have {kind}"
    elif kind == "kill" and length:
        wrong = f"what is killed comes back by itself; leave +{length} out"
    if wrong:
        raise SettingsError(f"is {text!r}, but {wrong}", setting="--disrupt")
    return Fault(kind, target, float(at), float(length or LENGTHS_S[kind]), role or "")


@dataclass(frozen=True, slots=True)
class DisruptionOptions:
    """Faults of a stack of this user on this machine."""

    PANEL: ClassVar = "Disruptions"

    disrupt: list[str] | None = option(
        f"Fault during the run: {FORMS}; router and tokenizer too. Repeatable. An undisturbed run of the same seed"
        " comes first, and the streams of both are compared.",
        metavar="FAULT",
    )
    stack: str | None = option(
        "Admin address of the stack, by default the one whose router TARGET is."
    )

    def faults(self) -> Sequence[Fault]:
        """Raises SettingsError."""
        if self.stack and not self.disrupt:
            raise SettingsError("is for --disrupt", setting="--stack")
        return [read_fault(text) for text in self.disrupt or ()]
