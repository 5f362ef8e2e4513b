"""Runs one benchmark by name: `make bench B=<name>` is `bench/<name>.py`; without a name lists them."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


def benchmarks() -> dict[str, Path]:
    """The benchmarks by name."""
    files = sorted(path for path in HERE.glob("*.py") if path != Path(__file__))
    return {path.stem: path for path in files if not path.stem.startswith("_")}


def summary(path: Path) -> str:
    """First line of the benchmark's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def main(argv: list[str]) -> int:
    known = benchmarks()
    if argv and argv[0] in known:
        os.execv(sys.executable, [sys.executable, str(known[argv[0]]), *argv[1:]])
    if argv:
        print(f"there is no benchmark {argv[0]!r}", file=sys.stderr)
    for name, path in known.items():
        print(f"make bench B={name:<16} {summary(path)}", file=sys.stderr if argv else sys.stdout)
    return 2 if argv else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
