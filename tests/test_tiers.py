from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine.torch import harness
from processes import service_process
from tiers import TESTS, is_fast, is_left_out, left_out, reaches_slow, turns_of


@asynccontextmanager
async def router() -> AsyncIterator[None]:
    async with service_process("router"):
        yield


class Routers:
    async def start(self) -> None:
        async with router():
            pass


async def starts_through_a_helper() -> None:
    async with router():
        pass


async def starts_through_a_method() -> None:
    await Routers().start()


async def loads_through_a_module() -> None:
    harness.running  # noqa: B018 - named, not called


async def waits() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("starts_through_a_helper", True),
        ("starts_through_a_method", True),
        ("loads_through_a_module", True),
        ("waits", False),
    ],
)
def test_tier_follows_from_what_code_reaches(name: str, slow: bool) -> None:
    # By name: a test given the function itself would reach the function's code.
    assert reaches_slow(globals()[name]) is slow


def test_a_test_of_the_soak_is_not_fast(request: pytest.FixtureRequest) -> None:
    assert is_fast(request.node)
    request.node.add_marker("soak")
    assert not is_fast(request.node)


def test_what_is_left_out_exists() -> None:
    assert [path for path in left_out() if not path.exists()] == []


def test_process_in_the_fast_tier_is_refused(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("fast")
    # Imported by name, invisible to tests/tiers.py.
    subprocess = importlib.import_module("subprocess")
    with pytest.raises(RuntimeError, match="mark it slow"):
        subprocess.run([sys.executable, "--version"], check=True)


def test_left_out_are_folders_with_what_is_in_them_and_files() -> None:
    assert is_left_out(Path(TESTS, "e2e", "test_output.py"))
    assert is_left_out(Path(TESTS, "test_forks.py"))
    assert not is_left_out(Path(TESTS, "chassis", "test_settings.py"))
    assert not is_left_out(Path(TESTS))


def test_files_that_wait_alternate_with_those_that_compute_and_small_ones_are_last() -> None:
    names = ("cli/a", "cli/b", "cli/c", "chaos/d", "router/e", "router/f", "e2e/g", "test_h")
    files = [Path(TESTS, name) for name in names]
    slow = {files[place] for place in (1, 2, 3, 5)}
    turns = turns_of(files, slow)
    ordered = [names[files.index(each)][-1] for each in sorted(files, key=lambda each: turns[each])]
    assert "".join(ordered) == "bdfceagh"
