"""Headers of an HTTP error."""

from __future__ import annotations

import pytest
from trtmesh.chassis.errors import Draining
from trtmesh.router.doors.http.errors import error_headers


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(0, "1"), (1, "1"), (1001, "2"), (60_000, "60")]
)
def test_time_to_retry_is_whole_seconds_and_at_least_one(milliseconds: int, seconds: str) -> None:
    """With 0, clients would come back in a loop."""
    assert error_headers(Draining("", retry_after_ms=milliseconds))["Retry-After"] == seconds
