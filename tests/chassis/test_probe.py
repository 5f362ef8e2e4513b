"""The command line of the health probe."""

from __future__ import annotations

import pytest
from trtmesh.chassis.probe import run


@pytest.mark.parametrize(
    ("words", "status"), [(("--help",), 0), ((), 2), (("a:1", "live", "b"), 2)]
)
def test_probe_explains_itself(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int
) -> None:
    assert run(*words) == status
    said = capsys.readouterr()
    assert "usage: python -m trtmesh.chassis.probe HOST:PORT [SERVICE]" in said.out + said.err
