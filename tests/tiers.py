"""The fast tier: tests without processes and models. `make check` runs them as `pytest -m fast`.

A test is fast unless the test code that it reaches (its own, its fixtures', its parameters', and the helpers that these
name) names something of SLOW, or the test has a marker of NOT_FAST. A fast test that starts a process fails.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import pytest

TESTS = str(Path(__file__).parent)

SLOW = {
    # Start processes.
    *("subprocess", "multiprocessing", "create_subprocess_exec", "create_subprocess_shell"),
    # Load models.
    *("TorchBackend", "load_engine", "AutoModelForCausalLM"),
    # Imports PyTorch.
    "AutoTokenizer",
}

NOT_FAST = ("slow", "soak")
"""Markers."""

LEFT_OUT = Path(TESTS, "left_out.txt")
"""Files and folders, one a line."""

WAITING = ("chaos", "router", "e2e", "chassis")
"""Folders whose tests wait more than they compute, those with the longest files first. Router's wait without a process
too."""

PLAIN = {dict, MappingProxyType}

STARTS_OF_PROCESSES = {"subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system"}
"""Audit events raised before a process starts."""


@cache
def left_out() -> frozenset[Path]:
    """Files and folders that `make check` leaves out."""
    lines = LEFT_OUT.read_text(encoding="utf-8").splitlines()
    return frozenset(Path(TESTS, line) for line in lines if line and not line.startswith("#"))


def is_left_out(path: Path) -> bool:
    return not left_out().isdisjoint({path, *path.parents})


def is_fast(test: pytest.Function) -> bool:
    """Whether a test belongs to the fast tier."""
    if any(map(test.get_closest_marker, NOT_FAST)):
        return False
    fixtures = [
        each.func for all_of in test._fixtureinfo.name2fixturedefs.values() for each in all_of
    ]
    parameters = test.callspec.params.values() if hasattr(test, "callspec") else ()
    functions = [each for each in (test.function, *fixtures, *parameters) if callable(each)]
    return not any(map(reaches_slow, functions))


_reaches_nothing_slow = dict[int, object]()
"""Objects by `id`, from which nothing of SLOW is reached; tests share most of their helpers."""


def turns_of(files: Sequence[Path], slow: Container[Path]) -> dict[Path, float]:
    """The turn of each file in a run, ahead of higher ones. Files that wait and files that compute alternate from the
    first to the last, so that no core is idle; small files fill the time until the last long one ends."""
    long = [each for each in files if each in slow or _folder(each) == "router"]
    waiting = [each for each in long if _folder(each) in WAITING]
    waiting.sort(key=lambda each: (WAITING.index(_folder(each)), each not in slow))
    computing = [each for each in long if _folder(each) not in WAITING]
    turns = dict.fromkeys(files, 1.0)
    for lane in (waiting, computing):
        turns.update({each: place / len(lane) for place, each in enumerate(lane)})
    return turns


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0]


@cache
def reaches_slow(root: object) -> bool:
    """Whether a function, or code reached from there in the tests, names something of SLOW."""
    waiting, seen = [root], dict[int, object]()
    while waiting:
        found = inspect.unwrap(each) if callable(each := waiting.pop()) else each
        if id(found) not in seen and id(found) not in _reaches_nothing_slow:
            seen[id(found)] = found
            names = _names(found)
            if names & SLOW:
                return True
            waiting += _named(found, names)
    _reaches_nothing_slow.update(seen)
    return False


def _names(found: object) -> set[str]:
    """The names in a function of the tests and in nested functions."""
    names = set[str]()
    codes = [found.__code__] if isinstance(found, FunctionType) and _in_tests(found) else []
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return names


def _named(found: object, names: set[str]) -> Iterable[Any]:
    """Objects behind a function's names, in its module and in the named modules; the parts of a class or a
    collection."""
    match found:
        case FunctionType():
            known = [found.__globals__[name] for name in names & found.__globals__.keys()]
            modules = [each for each in known if isinstance(each, ModuleType)]
            parts = [
                vars(module)[name] for module in modules for name in names & vars(module).keys()
            ]
            return [*known, *parts, *(cell.cell_contents for cell in found.__closure__ or ())]
        case type() if _in_tests(found):
            return [*vars(found).values(), *found.__mro__]
        case property():
            return [found.fget]
        case staticmethod() | classmethod():
            return [found.__func__]
        # Mappings of libraries import what they hold.
        case dict() | MappingProxyType() if type(found) in PLAIN:
            return found.values()
        case list() | tuple() | set() | frozenset():
            return found
    return ()


def _in_tests(found: FunctionType | type) -> bool:
    file = getattr(sys.modules.get(found.__module__), "__file__", None) or ""
    return file.startswith(TESTS)


class ProcessGuard:
    """Makes every start of a process fail inside the block."""

    def __init__(self) -> None:
        self._is_on = False
        sys.addaudithook(self._see)

    def _see(self, event: str, _arguments: object) -> None:
        if self._is_on and event in STARTS_OF_PROCESSES:
            raise RuntimeError(
                f"{event} in a test of the fast tier (see tests/tiers.py): mark it slow"
            )

    @contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
