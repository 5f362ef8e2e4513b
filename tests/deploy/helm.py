"""Helm in a process of its own, as its library is Go's: a forked worker of the tests would lack its threads, and hang.

`python helm.py` answers the calls of its standard input on standard output, each a line of JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


class HelmError(Exception):
    """Helm refuses."""


class HelmValuesError(HelmError):
    """Values that the chart's schema forbids."""


def render(chart: Path, values: Mapping[str, Any], name: str, namespace: str) -> dict[str, str]:
    """The files of a release by path."""
    return dict(_ask("render", str(chart), values, name, namespace))


def lint(chart: Path, values: Mapping[str, Any], kube_version: str) -> dict[str, Any]:
    return dict(_ask("lint", str(chart), values, kube_version))


def files(chart: Path) -> Sequence[str]:
    """Names of the files that a package has."""
    return list(_ask("files", str(chart)))


def metadata(chart: Path) -> dict[str, Any]:
    return dict(_ask("metadata", str(chart)))


def _ask(call: str, *arguments: Any) -> Any:
    process = _process(os.getpid())
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps([call, *arguments]) + "\n")
    process.stdin.flush()
    kind, answer = json.loads(process.stdout.readline())
    if kind == "answer":
        return answer
    raise (HelmValuesError if kind == "HelmValuesError" else HelmError)(answer)


@cache
def _process(asking: int) -> subprocess.Popen[str]:
    """The process of the one that asks, for a fork takes none along."""
    command = [sys.executable, __file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, asking, process)
    return process


def _end(asking: int, process: subprocess.Popen[str]) -> None:
    """Ends the process of this one; a fork has the other's too."""
    if os.getpid() == asking:
        with process:
            process.kill()


def main() -> None:
    import helm_python

    def rendered(chart: str, values: Any, name: str, namespace: str) -> Any:
        return loaded(chart).render(values, name=name, namespace=namespace)

    def linted(chart: str, values: Any, kube_version: str) -> Any:
        return helm_python.lint(chart, values, strict=True, kube_version=kube_version)

    loaded = cache(helm_python.Chart.load)
    calls: dict[str, Callable[..., Any]] = {
        "render": rendered,
        "lint": linted,
        "files": lambda chart: [file["name"] for file in loaded(chart).files],
        "metadata": lambda chart: loaded(chart).metadata,
    }
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        try:
            told = "answer", calls[call](*arguments)
        except helm_python.HelmError as error:
            told = type(error).__name__, str(error)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
