"""Options of the fault tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options for command lines with this folder or a file in it."""
    parser.addoption("--seeds", help="seeds of random tests, as 3 or 0-99")
    parser.addoption("--adapter-requests", help="requests of test_adapter_traffic")
    parser.addoption("--handoffs", help="handoffs of test_handoff_soak")
    parser.addoption(
        "--every-transport", action="store_true", help="every case of test_handoffs with each"
    )
