"""The command line of a benchmark, the parameters of its `main`, and what it prints."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import uvloop


def run_bench(main: Callable[..., Any]) -> None:
    """Runs it with the options of the command line; what it returns is the last line, as JSON."""
    found = main(**options_of(main))
    print(json.dumps(uvloop.run(found) if inspect.iscoroutine(found) else found))


def tell(what: str, figures: object) -> None:
    """Says on standard error what was found so far."""
    print(f"{what}: {json.dumps(figures)}", file=sys.stderr, flush=True)


def options_of(main: Callable[..., object], given: Sequence[str] | None = None) -> dict[str, Any]:
    """An option for each parameter: a tuple takes several values, `Annotated` or a `Literal` has the choices, bool is a
    flag."""
    parser = argparse.ArgumentParser(description=inspect.getmodule(main).__doc__)
    for name, each in inspect.signature(main, eval_str=True).parameters.items():
        kind, choices = each.annotation, None
        if get_origin(kind) is Annotated:
            kind, choices = get_args(kind)
        flag, needed = f"--{name.replace('_', '-')}", each.default is each.empty
        if kind is bool:
            parser.add_argument(flag, action="store_true")
            continue
        of_value = next(iter(get_args(kind)), kind)
        if get_origin(of_value) is Literal:
            of_value, choices = str, get_args(of_value)
        parser.add_argument(
            flag,
            type=of_value,
            nargs="*" if get_origin(kind) is tuple else None,
            choices=choices and [*choices],
            default=None if needed else each.default,
            required=needed,
        )
    return vars(parser.parse_args(given))
