"""Commands whose help costs little: plain text by panels. To import rich and draw with it takes as long as all else,
and pydantic a quarter of the rest, so both are avoided."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

TYPERS_OWN = ("help", "install_completion", "show_completion")
"""Flags that typer adds, without a default: to make a bool of None it imports pydantic."""


def _with_defaults(params: list[Any]) -> list[Any]:
    for each in params:
        if each.name in TYPERS_OWN and each.default is None:
            each.default = False
    return params


def _write(formatter: Any, rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Writes rows, each under its panel, in the order of the first rows."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for panel, row in rows:
        panels.setdefault(panel, []).append(row)
    for panel, own in panels.items():
        with formatter.section(panel):
            formatter.write_dl(own)


class PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _with_defaults(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments first, then what has no panel."""
        rows = []
        for each in self.get_params(ctx):
            usual = "Arguments" if each.param_type_name == "argument" else "Options"
            if row := each.get_help_record(ctx):
                rows.append((getattr(each, "rich_help_panel", None) or usual, row))
        order = ("Arguments", "Options")
        rows.sort(key=lambda row: order.index(row[0]) if row[0] in order else len(order))
        _write(formatter, rows)


class PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _with_defaults(super().get_params(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each with the first paragraph of its help."""
        found: list[Any] = [each for each in self.commands.values() if not each.hidden]
        _write(
            formatter,
            (
                (each.rich_help_panel or "Commands", (each.name, each.help.split("\n\n")[0]))
                for each in found
            ),
        )


class CommandGroup(typer.Typer):
    """A group of such commands, to which functions are added."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": PlainGroup, "rich_markup_mode": None, **options})

    def command(
        self, name: str | None = None, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, **{"cls": PlainCommand, **options})
