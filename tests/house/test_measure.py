"""The script that measures the house runs, and counts right."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from house.measure import ROOT, Size, class_names_twice, settings_of, size_of, static
from house.profiled import CountedLoop, Crossings
from trtmesh.v1 import generation_pb2 as pb

SOURCE = '''"""A page
of two lines."""

# A comment.
NAME = """a text,
not a docstring"""


def double(number: int) -> int:
    """Returns twice the number."""
    return 2 * number
'''


def test_lines_are_code_or_docstrings_or_neither() -> None:
    assert size_of(SOURCE) == Size(lines=11, code=4, docstrings=3)


def test_settings_of_every_section_are_counted() -> None:
    assert {"mesh", "router", "engine", "tokenizer"} <= set(settings_of(ROOT))


def test_class_names_are_compared_within_a_service(tmp_path: Path) -> None:
    package = tmp_path / "services" / "tokenizer" / "trtmesh" / "tokenizer"
    package.mkdir(parents=True)
    (package / "one.py").write_text("class Job: ...\nclass _Row: ...\nclass Lone: ...\n")
    (package / "two.py").write_text("class Job: ...\nclass _Row: ...\n")
    assert class_names_twice(tmp_path) == {"tokenizer": {"Job": ["one.py", "two.py"]}}


def test_an_entry_is_a_call_or_a_return_from_another_file(tmp_path: Path) -> None:
    """One calls two twice, with the built-in `map` between: three entries of one, two of two."""
    space: dict[str, object] = {}
    for name, source in (
        ("two", "def double(number): return 2 * number"),
        ("one", "def work(): return [*map(double, (1, 2))]"),
    ):
        exec(compile(source, str(tmp_path / name), "exec"), space)
    crossings = Crossings(str(tmp_path))
    work = space["work"]
    assert callable(work)
    sys.setprofile(crossings.see)
    try:
        assert work() == [2, 4]
    finally:
        sys.setprofile(None)
    assert {Path(file).name: count for file, count in crossings.entries.items()} == {
        "one": 3,
        "two": 2,
    }


def test_a_loop_counts_its_passes_and_what_it_makes() -> None:
    """Ten steps of a coroutine take ten passes; a sleep takes a timer and a future."""

    async def work() -> list[int]:
        began, before = CountedLoop.passes.value, CountedLoop.made.copy()
        for _ in range(10):
            await asyncio.sleep(0)
        passes = CountedLoop.passes.value - began
        await asyncio.create_task(asyncio.sleep(0.001))
        made = CountedLoop.made - before
        return [passes, made["tasks"], made["futures"], made["timers"]]

    with asyncio.Runner(loop_factory=CountedLoop) as runner:
        assert runner.run(work()) == [10, 1, 1, 1]


def test_calls_and_parses_are_counted() -> None:
    crossings = Crossings("/")
    sys.setprofile(crossings.see)
    try:
        double(int.from_bytes(b"\1"))
        pb.TokenIds.FromString(b"")
    finally:
        sys.setprofile(None)
    assert crossings.calls == {"calls": 1, "parses": 1}


def double(number: int) -> int:
    return 2 * number


@pytest.mark.soak
def test_every_room_of_the_product_is_measured() -> None:
    _, *table = itertools.takewhile(bool, static(ROOT))
    sizes = {line[:40].strip(): [int(each) for each in line[40:].split()] for line in table}
    assert {"router/requests", "engine/backends/torch", "tokenizer", "cli", "client"} <= set(sizes)
    assert all(
        lines > code > 0 for room, (lines, code, *_) in sizes.items() if room != "engine/backends"
    )


@pytest.mark.soak
def test_script_follows_a_prompt_through_three_processes() -> None:
    script = Path(__file__).with_name("measure.py")
    environment = {**os.environ, "PYTHONPATH": ""}
    result = subprocess.run(
        [sys.executable, str(script), "--files", "--repeats", "1"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    printed = result.stdout.splitlines()
    assert any(line.startswith("native prompt of 3 tokens:") for line in printed)
    assert any(line.startswith("ensemble stream of 3 tokens:") for line in printed)
    for file in (
        "router/requests/item.py",
        "router/doors/triton/templates/template.py",
        "tokenizer/router_stream.py",
        "engine/service/streams.py",
        "engine/backends/torch/engine.py",
    ):
        assert any(line.endswith(f" {file}") for line in printed)
