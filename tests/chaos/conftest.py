"""What can be asked of the tests of faults."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where this folder or a file of it is named; elsewhere the default holds."""
    parser.addoption("--seeds", help="seeds of test_random_faults, as 3 or 0-99")
