"""Collect the corpora of the demo adapters: unit tests, and functions that end with their docstring.

Writes a folder per adapter with `train.jsonl` and `heldout.jsonl` (see corpus.py), and
`ADAPTERS.json`.  The licence and text rules are those of the demo model; test files, left out
there, are what `unit-tests` is made of.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from corpus import Source, is_heldout, visiting_order, write_manifest
from corpus import sources as all_sources
from filters import LineIndex, clean, path_allowed, text_allowed

MAX_SOURCE_BYTES = 3_000_000
SHORTEST_LINES, LONGEST_LINES = 6, 60
"""Lines of a docstring."""
_TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")
_VENDORED = re.compile(r"vendor|third_?party|externals?|/data/|_generated", re.IGNORECASE)


def unit_tests(name: str, text: str) -> Iterator[str]:
    """A test file, whole."""
    if _TEST_FILE.search(name) and not _VENDORED.search(name) and "def test_" in text:
        yield text


def docstrings(name: str, text: str) -> Iterator[str]:
    """The file's functions with a docstring of several sentences, each up to its docstring."""
    if not path_allowed(name):
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        is_docstring = (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        )
        last = first.end_lineno or first.lineno
        if is_docstring and SHORTEST_LINES <= last - first.lineno <= LONGEST_LINES:
            yield textwrap.dedent("\n".join(lines[node.lineno - 1 : last])) + "\n"


ADAPTERS: dict[str, Callable[[str, str], Iterator[str]]] = {
    "unit-tests": unit_tests,
    "docstrings": docstrings,
}


def texts(
    adapter: str, source: Source, files: Iterable[tuple[str, Path]], seen: LineIndex
) -> Iterator[str]:
    """The kept texts of one source, counted into it."""
    for name, path in visiting_order(files):
        if source.bytes >= MAX_SOURCE_BYTES:
            return
        if path.suffix != ".py" or path.stat().st_size > 1_000_000:
            continue
        try:
            text = clean(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if not text_allowed(text, "code"):
            continue
        for part in ADAPTERS[adapter](name, text):
            if not seen.is_duplicate(part):
                source.files += 1
                source.bytes += len(part.encode())
                source.digest.update(part.encode())
                yield part


def collect(adapter: str, sites: list[Path], out: Path) -> list[dict[str, object]]:
    """Writes the adapter's two splits; returns its sources for the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    seen, records = LineIndex(), list[dict[str, object]]()
    with (out / "train.jsonl").open("w") as train, (out / "heldout.jsonl").open("w") as held:
        for source, candidates in all_sources(sites, None):
            files = list(candidates)
            if source.name == "cpython-stdlib":
                files = [(name, path) for name, path in files if "site-packages" not in name]
            for text in texts(adapter, source, files, seen):
                heldout = is_heldout(text)
                source.heldout_files += heldout
                line = json.dumps({"source": source.name, "stage": 1, "text": text})
                (held if heldout else train).write(line + "\n")
            if source.files:
                records.append({"adapter": adapter, **source.record()})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, required=True, nargs="+", help="site-packages folders")
    parser.add_argument("--out", type=Path, required=True, help="folder for a folder per adapter")
    parser.add_argument("--manifest", type=Path, default=Path(__file__).with_name("ADAPTERS.json"))
    args = parser.parse_args()
    records = [
        record for adapter in ADAPTERS for record in collect(adapter, args.site, args.out / adapter)
    ]
    sizes = {
        adapter: sum(int(str(r["bytes"])) for r in records if r["adapter"] == adapter)
        for adapter in ADAPTERS
    }
    write_manifest(args.manifest, {"bytes": sizes}, records)
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
