from __future__ import annotations

import pytest
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.settings import load_settings
from trtmesh.engine.settings import EngineSettings


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--handoff-transports", "pigeon", "pigeon"),
        ("--handoff-transports", "", "at least 1"),
    ],
)
def test_wrong_settings_are_refused(flag: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load_settings(EngineSettings, [flag, value], {})


def test_lists_are_comma_separated() -> None:
    settings = load_settings(EngineSettings, ["--handoff-transports", "grpc,nixl"], {}).handoff
    assert settings.transports == ("grpc", "nixl")
