"""What an engine refuses before it loads a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.short_names import by_short_names
from trtmesh.chassis.errors import SettingsError
from trtmesh.engine.backends.torch.loading import load_engine
from trtmesh.engine.backends.torch.settings import TorchSettings


@pytest.mark.parametrize("device", ["cuda:64", "cuda:999"])
def test_absent_device_is_refused_before_the_model_loads(device: str, tmp_path: Path) -> None:
    settings = by_short_names(TorchSettings, device=device)
    with pytest.raises(SettingsError, match=f"is '{device}' but") as caught:
        load_engine(tmp_path / "nothing", [], settings)
    assert caught.value.setting == "engine.torch.device"
