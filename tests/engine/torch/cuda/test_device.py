"""The trial of the kernels, by which a device is chosen."""

from __future__ import annotations

import pytest
import torch
from trtmesh.engine.backends.torch.cuda import device as cuda_device
from trtmesh.engine.backends.torch.cuda.device import LEAST_CAPABILITY, works

pytestmark = pytest.mark.gpu


def test_a_trial_without_memory_says_nothing_of_the_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: LEAST_CAPABILITY)
    problem = "Triton Error [CUDA]: no kernel image"

    def norm(*_: object) -> None:
        raise RuntimeError(problem)

    monkeypatch.setattr(cuda_device, "norm", norm)
    assert not works(device)
    problem = "Triton Error [CUDA]: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        works(device)
