"""Sources and secrecy of the admin token."""

from __future__ import annotations

from pathlib import Path

import pytest
from trtmesh.chassis.bearer import AdminToken
from trtmesh.chassis.errors import SettingsError

SECRET = "s3cret-and-long"


def shown(value: str | bytes) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", value)]


def test_only_the_right_token_is_accepted() -> None:
    token = AdminToken.of(SECRET)
    assert token.is_in([token.metadata])
    assert token.is_in(shown(f"Bearer {SECRET}".encode()))
    for wrong in (
        "",
        SECRET,
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
        "Bearer \u00e9",
        b"\xff",
    ):
        assert not token.is_in(shown(wrong))
    assert not token.is_in([])
    assert not token.is_in([*shown("Bearer wrong"), token.metadata])


def test_token_file_wins_over_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    environ = {AdminToken.variable: "another"}
    assert AdminToken.read(file, environ) == AdminToken.of(SECRET)
    assert AdminToken.read(None, environ) == AdminToken.of("another")
    assert AdminToken.read(None, {}) is None


@pytest.mark.parametrize("content", ["", " \n", f"{SECRET} b", f"{SECRET}\u00e9", SECRET * 300])
def test_invalid_token_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(SettingsError) as from_file:
        AdminToken.read(file, {})
    with pytest.raises(SettingsError) as from_variable:
        AdminToken.read(None, {AdminToken.variable: content})
    assert str(file) in str(from_file.value)
    assert AdminToken.variable in str(from_variable.value)
    assert SECRET not in f"{from_file.value}{from_variable.value}"


def test_unreadable_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere: No such file"):
        AdminToken.read(tmp_path / "nowhere", {})


def test_repr_hides_the_token() -> None:
    token = AdminToken.of(SECRET)
    assert SECRET not in f"{token!r} {token} {[token]}"
