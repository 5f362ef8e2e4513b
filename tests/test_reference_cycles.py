"""Processes report the cycles of the product that they leave, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

from reference_cycles import components

PROCESS = """
import sys, time
from pathlib import Path
import reference_cycles as cycles

cycles.LOOK_SECONDS = 0.01
cycles.watch(sys.argv[1])

class Foreign:
    __module__ = "aiohttp"
    def __init__(self):
        self.other = [self]

class Own(Foreign):
    __module__ = "trtmesh.router"

Foreign()
Own()
while not any(path.read_text() for path in Path(sys.argv[1]).iterdir()):
    time.sleep(0.01)
"""


def test_cycles_of_the_product_are_reported(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    subprocess.run([sys.executable, "-c", PROCESS, tmp_path], cwd=tests, check=True)
    (report,) = tmp_path.iterdir()
    assert report.read_text() == "Own | list\n"


def test_components_of_random_graphs() -> None:
    dice = Random(1)
    for _ in range(200):
        count = dice.randint(1, 12)
        following = [dice.choices(range(count), k=dice.randint(0, 2)) for _ in range(count)]
        reached = [_reached(following, node) for node in range(count)]
        expected = {
            frozenset(other for other in reached[node] if node in reached[other])
            for node in range(count)
        }
        found = [*components(following)]
        assert {frozenset(each) for each in found} == expected
        assert sum(map(len, found)) == count


def _reached(following: list[list[int]], node: int) -> set[int]:
    """The nodes that can be reached from a node, this one included."""
    reached, waiting = {node}, [node]
    while waiting:
        fresh = {*following[waiting.pop()]} - reached
        reached |= fresh
        waiting += fresh
    return reached
