"""Files of lines, after deaths of their writers."""

from __future__ import annotations

from pathlib import Path

import pytest
from trtmesh.router.line_file import PIECE_BYTES, LineFile


@pytest.mark.parametrize("torn", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 5 * PIECE_BYTES + 1])
@pytest.mark.parametrize("whole", [b"", b"one\n", b"x" * 2 * PIECE_BYTES + b"\n"])
def test_half_a_line_of_any_length_is_cut(tmp_path: Path, whole: bytes, torn: int) -> None:
    file = tmp_path / "lines"
    file.write_bytes(whole + b"y" * torn)
    lines = LineFile(file, "x", "records")
    lines.put("next")
    lines.flush()
    lines.close()
    assert file.read_bytes() == whole + b"next\n"
