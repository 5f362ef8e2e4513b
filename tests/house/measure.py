"""Measures the house: how much there is to read, and how far a prompt goes.

    python tests/house/measure.py [--tree DIR] [--files] [--repeats N] [--without-way]

Prints the lines of each room (with those of code and of docstrings), the public class names that stand twice within a
service, the settings, and the files and entries of a native prompt of 3 new tokens, an `ensemble` stream and a step of
the torch engine. `--files` lists the files of both ways. `--tree` measures another tree with this environment.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import os
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_ENTERED = 12
"""Files that are shown with their entries."""


@dataclass(slots=True)
class Size:
    """Lines of a room."""

    lines: int = 0
    code: int = 0
    docstrings: int = 0

    def add(self, other: Size) -> None:
        self.lines += other.lines
        self.code += other.code
        self.docstrings += other.docstrings


def packages(root: Path) -> dict[str, Path]:
    """The packages of the product by name, without the generated ones."""
    folders = [*root.glob("services/*/trtmesh/*"), *root.glob("tools/trtmesh/*")]
    return {each.name: each for each in sorted(folders) if [*each.glob("*.py")]}


def size_of(source: str) -> Size:
    """Lines of a file: all, those with code, and those of docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent and token.type != tokenize.ENDMARKER:
            code.update(range(token.start[0], token.end[0] + 1))
    return Size(len(source.splitlines()), len(code - documented), len(documented))


def rooms(root: Path) -> dict[str, Size]:
    """Sizes by package and by the folders in it; files beside the folders count as the package's own."""
    found: defaultdict[str, Size] = defaultdict(Size)
    for name, package in packages(root).items():
        for file in package.rglob("*.py"):
            inner = file.relative_to(package).parts[:-1][:2]
            if name == "engine" and inner[:1] != ("backends",):
                inner = inner[:1]
            found["/".join([name, *inner])].add(size_of(file.read_text(encoding="utf-8")))
    return dict(sorted(found.items()))


def class_names_twice(root: Path) -> dict[str, dict[str, list[str]]]:
    """By package, the public classes of modules that share their name, with their files."""
    twice: dict[str, dict[str, list[str]]] = {}
    for name, package in packages(root).items():
        homes: defaultdict[str, list[str]] = defaultdict(list)
        for file in sorted(package.rglob("*.py")):
            for public in re.findall(r"(?m)^class ([A-Za-z]\w*)", file.read_text(encoding="utf-8")):
                homes[public].append(str(file.relative_to(package)))
        twice[name] = {each: files for each, files in homes.items() if len(files) > 1}
    return twice


def settings_of(root: Path) -> dict[str, int]:
    """Rows of docs/settings.md by section."""
    counts: dict[str, int] = {}
    section = ""
    for line in (root / "docs" / "settings.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip("`")
        elif section and re.match(r"\| `", line):
            counts[section] = counts.get(section, 0) + 1
    return counts


def static(root: Path) -> Iterator[str]:
    yield f"{'lines by room':40}{'lines':>8}{'code':>8}{'docs':>8}"
    whole, tools = Size(), Size()
    for room, size in rooms(root).items():
        whole.add(size)
        if room.split("/")[0] == "tools":
            tools.add(size)
        yield f"{room:40}{size.lines:8}{size.code:8}{size.docstrings:8}"
    yield f"{'all':40}{whole.lines:8}{whole.code:8}{whole.docstrings:8}"
    yield f"{'all without tools':40}{whole.lines - tools.lines:8}{whole.code - tools.code:8}"
    yield ""
    twice = class_names_twice(root)
    yield f"class names twice within a service: {sum(map(len, twice.values()))}"
    for package, names in twice.items():
        for name, files in sorted(names.items()):
            yield f"  {package}: {name} in {', '.join(files)}"
    yield ""
    settings = settings_of(root)
    yield f"settings: {sum(settings.values())} ({', '.join(f'{k} {v}' for k, v in settings.items())})"


def _ways(root: Path, repeats: int, *, files: bool) -> Iterator[str]:
    from house.way import TOKENS, Way, measure

    native, ensemble = asyncio.run(measure(root / "services", repeats))
    ways: Mapping[str, Way] = {"native prompt": native, "ensemble stream": ensemble}
    for name, way in ways.items():
        by_process = ", ".join(f"{each} {len(found)}" for each, found in way.loops.items())
        yield ""
        yield f"{name} of {TOKENS} tokens: {len(way.files)} files ({by_process})"
        router = way.loops["router"]
        yield f"  entries: router {sum(router.values())}, item.py {way.entries_of('requests/item.py')}"
        most = sorted(router.items(), key=lambda each: -each[1])
        own = [each for each in most if not each[0].startswith("chassis/")][:MOST_ENTERED]
        yield f"  router: {', '.join(f'{file} {count}' for file, count in own)}"
        if files:
            for process, found in way.loops.items():
                yield f"  {process}"
                yield from (f"    {count:4} {file}" for file, count in found.items())
    step = native.step
    yield ""
    yield f"a torch step: {len(step)} files, {sum(step.values())} entries"
    if files:
        yield from (f"    {count:4} {file}" for file, count in step.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="tree to measure")
    parser.add_argument("--files", action="store_true", help="list the files of both ways")
    parser.add_argument("--repeats", type=int, default=5, help="times that a request is sent")
    parser.add_argument("--without-way", action="store_true", help="start no processes")
    arguments = parser.parse_args()
    root: Path = arguments.tree.resolve()
    roots = [*map(str, (root / "protos", *sorted(root.glob("services/*")), root / "tools"))]
    path = os.pathsep.join([*roots, str(ROOT / "tests")])
    if os.environ.get("PYTHONPATH") != path:
        # The processes, and the stubs of this one, are those of the measured tree.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONPATH": path})
    for line in static(root):
        print(line)
    if not arguments.without_way:
        for line in _ways(root, arguments.repeats, files=arguments.files):
            print(line)


if __name__ == "__main__":
    main()
