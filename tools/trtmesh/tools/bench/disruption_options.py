"""The options of disruptions, and the runs that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.option_groups import option
from trtmesh.tools.bench.faults import FORMS, read_fault
from trtmesh.tools.bench.record import Run
from trtmesh.tools.bench.stack_processes import stack_of
from trtmesh.tools.bench.targets.target import Url

if TYPE_CHECKING:
    from trtmesh.tools.bench.disruptions import Faults

PANEL = "Disruptions"


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
