"""Commands whose modules are imported when they run, print their help or are completed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import typer
from trtmesh.cli.interrupts import ending_at_once
from trtmesh.cli.plain_help import CommandGroup, PlainCommand, PlainGroup
from typer.core import TyperCommand
from typer.main import get_group


class LazyCommand(TyperCommand):
    """Stands for a command or a group in the help of its group, until it is used."""

    def __init__(
        self,
        source: str,
        help_text: str,
        panel: str | None = None,
        kind: type[TyperCommand] = PlainCommand,
    ) -> None:
        """Takes a function or a `typer.Typer` as module:name, and the first paragraph of its help."""
        self.module, self._attribute = source.split(":")
        self._kind = kind
        name = self._attribute.replace("_", "-")
        super().__init__(name, help=help_text, rich_help_panel=panel)

    def load(self) -> Any:
        # Up to half a second.
        with ending_at_once():
            found = getattr(import_module(self.module), self._attribute)
        alone = CommandGroup()
        if isinstance(found, typer.Typer):
            alone.add_typer(found)
        else:
            alone.command(cls=self._kind)(found)
        (command,) = get_group(alone).commands.values()
        return command

    def make_context(self, *args: Any, **named: Any) -> Any:
        return self.load().make_context(*args, **named)


class LazyGroup(PlainGroup):
    """A group with `lazy` commands after its other ones."""

    lazy: ClassVar[tuple[LazyCommand, ...]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for command in self.lazy:
            self.add_command(command)
