"""The script that measures the house runs, and counts right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from house.measure import ROOT, Size, class_names_twice, rooms, settings_of, size_of
from house.profiled import Crossings

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


def test_every_room_of_the_product_is_measured() -> None:
    found = rooms(ROOT)
    assert {"router/requests", "engine/backends/torch", "tokenizer", "cli", "client"} <= set(found)
    assert all(
        size.lines > size.code > 0 for room, size in found.items() if room != "engine/backends"
    )
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
    assert "native prompt of 3 tokens:" in result.stdout
    assert "ensemble stream of 3 tokens:" in result.stdout
    for file in (
        "router/requests/item.py",
        "router/doors/triton/templates/template.py",
        "tokenizer/router_stream.py",
        "engine/service/streams.py",
        "engine/backends/torch/engine.py",
    ):
        assert f" {file}\n" in result.stdout
