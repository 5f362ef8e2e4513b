"""Groups of options: a dataclass as a parameter of a command stands for an option per field. `PANEL`, a class variable,
is the panel of help of those of its options that name none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import Field, field, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

OPTION = "option"
"""Key of an option in the metadata of a field."""


def option(
    help_text: str, *flags: str, default: object = None, panel: str | None = None, **limits: Any
) -> Any:
    """Returns the field of a group for an option; without `flags`, the flag is named like the field."""
    shown = typer.Option(*flags, help=help_text, rich_help_panel=panel, **limits)
    return field(default=default, metadata={OPTION: shown})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a typer command of `command`, with the fields of all groups as options."""
    return with_options(command, inspect.signature(command, eval_str=True).parameters.values())


def with_options(
    command: Callable[..., None],
    parameters: Iterable[Parameter],
    like: Callable[..., Any] | None = None,
) -> Callable[..., None]:
    """Makes a typer command of `command` with these parameters, under the name and the documentation of `like`."""
    parameters = [*parameters]
    groups = {each.name: each.annotation for each in parameters if _is_group(each.annotation)}
    options = [option for each in parameters for option in _options(each)]

    def with_groups(**values: Any) -> None:
        built = {name: _built(group, values) for name, group in groups.items()}
        command(**values, **built)

    named = ("__name__", "__doc__", "__module__")
    functools.update_wrapper(with_groups, like or command, assigned=named)
    with_groups.__annotations__ = {each.name: each.annotation for each in options}
    with_groups.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # read by inspect.signature
    return with_groups


def _options(parameter: Parameter) -> Iterator[Parameter]:
    """Yields the parameter, or for a group the parameters of all fields, nested groups included."""
    if not _is_group(group := parameter.annotation):
        yield parameter.replace(kind=Parameter.KEYWORD_ONLY)
        return
    for each, kind in _fields(group):
        if shown := each.metadata.get(OPTION):
            shown.rich_help_panel = shown.rich_help_panel or getattr(group, "PANEL", None)
        annotation = Annotated[kind, shown] if shown else kind
        yield from _options(
            Parameter(
                each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=annotation
            )
        )


def _built(group: type[Any], values: MutableMapping[str, Any]) -> Any:
    """Builds a group from `values`, and removes the used values there."""
    return group(
        **{
            each.name: _built(kind, values) if _is_group(kind) else values.pop(each.name)
            for each, kind in _fields(group)
        }
    )


def _is_group(annotation: Any) -> bool:
    return is_dataclass(annotation)


def _fields(group: type[Any]) -> list[tuple[Field[Any], Any]]:
    types = get_type_hints(group, include_extras=True)
    return [(each, types[each.name]) for each in fields(group)]
