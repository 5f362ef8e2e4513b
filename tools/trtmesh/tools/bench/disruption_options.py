"""The options of disruptions, and the runs that they ask for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.option_groups import option
from trtmesh.tools.bench.record import Run
from trtmesh.tools.bench.stack_processes import SERVICES, stack_of
from trtmesh.tools.bench.targets.target import Url

if TYPE_CHECKING:
    from trtmesh.tools.bench.disruptions import Faults

PANEL = "Disruptions"

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


@dataclass(frozen=True, slots=True)
class DisruptionOptions:
    """Faults of a stack of this user on this machine."""

    disrupt: list[str] | None = option(
        f"Fault during the run: {FORMS}; router and tokenizer too. Repeatable. An undisturbed run of the same seed"
        " comes first, and the streams of both are compared.",
        panel=PANEL,
        metavar="FAULT",
    )
    stack: str | None = option(
        "Admin address of the stack, by default the one whose router TARGET is.", panel=PANEL
    )
    baseline: Path | None = option(
        "Record of the undisturbed run, in place of an own one.", panel=PANEL
    )

    def turns(self, url: Url, seed: int) -> Sequence[Faults | None]:
        """Of each run under a load its faults; None for the undisturbed one. Raises SettingsError."""
        if not self.disrupt:
            return [None]
        from trtmesh.tools.bench.disruptions import Faults

        faults = [read_fault(text) for text in self.disrupt]
        made = Faults(faults, stack_of(url.addresses[0], self.stack), seed)
        return [made] if self.baseline else [None, made]

    def undisturbed(self) -> Run | None:
        """The run of `--baseline`. Raises SettingsError, also for a wrong fault."""
        for text in self.disrupt or ():
            read_fault(text)
        for name, value in (("--baseline", self.baseline), ("--stack", self.stack)):
            if value and not self.disrupt:
                raise SettingsError("is for --disrupt", setting=name)
        if self.baseline is None:
            return None
        from trtmesh.tools.bench.run_file import read_runs

        return read_runs(self.baseline)[0]
