"""JSON and YAML of strangers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trtmesh.chassis.config_file import read_config_file
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.json_text import load_json


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, b"[" * 100_000])
def test_deep_nesting_is_an_error_of_the_text(text: str | bytes) -> None:
    with pytest.raises(json.JSONDecodeError, match="nested too deeply"):
        load_json(text)


@pytest.mark.parametrize("text", ["[" * 3000, "{a: " * 3000, "- " * 3000])
def test_deeply_nested_configuration_is_refused_by_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match="nested too deeply") as refused:
        read_config_file(file)
    assert str(file) in str(refused.value)
