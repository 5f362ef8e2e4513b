"""The length of fuzzing."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds",
        type=float,
        default=0.0,
        help="draw new input for so long; by default, the same few hundred inputs",
    )


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    seconds: float = request.config.getoption("--fuzz-seconds")
    return seconds
