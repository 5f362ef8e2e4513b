"""Writes the tables of Triton's tensors into the contract's page, from the table in code. With --check, fails if they
are out of date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trtmesh.router.doors.triton.templates.catalogue import TEMPLATES
from trtmesh.router.doors.triton.templates.tensor_table import InputSpec
from trtmesh.router.doors.triton.tensors import TensorSpec

PAGE = Path(__file__).parent / "trtmesh" / "v1" / "README.md"
BEGIN = "<!-- Written by protos/triton_tensors.py. -->\n"
END = "<!-- End of what protos/triton_tensors.py writes. -->\n"


def render() -> str:
    """The tables of all templates; one that extends or restricts another has only the difference."""
    parts: list[str] = []
    known: dict[str, dict[str, dict[str, str]]] = {"inputs": {}, "outputs": {}}
    for template in TEMPLATES.values():
        tables = {"inputs": template.inputs, "outputs": template.all_outputs()}
        for kind, specs in tables.items():
            rows = {spec.name: _row(spec) for spec in specs}
            parts += [f"### `{template.name}`: {kind}\n\n", *_table(rows, known[kind]), "\n"]
            known[kind][template.name] = rows
    return "".join(parts)


def _table(rows: dict[str, str], known: dict[str, dict[str, str]]) -> Iterator[str]:
    for name, others in known.items():
        if others.items() <= rows.items():
            rows = {tensor: row for tensor, row in rows.items() if tensor not in others}
            yield f"Those of `{name}`{', and:' if rows else '.'}\n"
            if not rows:
                return
            yield "\n"
            break
        if rows.items() < others.items():
            lacking = ", ".join(f"`{tensor}`" for tensor in others if tensor not in rows)
            yield from _wrapped(f"Those of `{name}` without {lacking}.")
            return
    yield "| Tensor | Field | Note | Releases |\n|---|---|---|---|\n"
    yield from rows.values()


def _wrapped(text: str, width: int = 118) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield line + "\n"
            line = ""
        line = f"{line} {word}" if line else word
    yield line + "\n"


def _row(spec: TensorSpec) -> str:
    source = spec.source
    if not source and isinstance(spec, InputSpec) and spec.put is not None:
        source = ", ".join(f"`{_message(path)}.{path}`" for path in spec.put.fields)
    note = spec.note
    if not note and isinstance(spec, InputSpec) and spec.same_as:
        note = f"another name of `{spec.same_as}`"
    return f"| `{spec.name}` | {source} | {note} | {spec.history.text} |\n"


def _message(path: str) -> str:
    return "GenerateItem" if path.startswith("prompt.") else "GenerationConfig"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = f"{before}{BEGIN}\n{render()}{END}{after}"
    if check:
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
