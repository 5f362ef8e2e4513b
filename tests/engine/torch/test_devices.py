"""Devices by name, and devices that are not there."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from trtmesh.chassis.device_names import VISIBLE, DeviceName, DeviceNames
from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.engine.backends.torch import loading
from trtmesh.engine.backends.torch.devices import hardware_of, present, see_alone
from trtmesh.engine.backends.torch.settings import TorchSettings

GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER = "GPU-00000000-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-f3b23c1c-9b4d-5d0a-8c4b-1a2b3c4d5e6f"


def test_kind_of_a_cpu_has_its_instructions() -> None:
    assert hardware_of(torch.device("cpu")).endswith(torch.backends.cpu.get_cpu_capability())


@pytest.mark.parametrize("name", [GPU, MIG])
@pytest.mark.parametrize("given", [None, "{name}", "{other},{name}"])
def test_a_process_sees_the_device_of_an_identity_alone(name: str, given: str | None) -> None:
    environ = {} if given is None else {VISIBLE: given.format(name=name, other=OTHER)}
    see_alone(DeviceName(name), environ)
    assert environ == {VISIBLE: name}


@pytest.mark.parametrize("given", ["", "0", "0,1", OTHER])
def test_a_hidden_device_is_refused(given: str) -> None:
    environ = {VISIBLE: given}
    with pytest.raises(SettingsError, match=f"is '{GPU}' but {VISIBLE}={given} hides it") as caught:
        see_alone(DeviceName(GPU), environ)
    assert caught.value.setting == "engine.torch.device"
    assert environ == {VISIBLE: given}


def test_an_identity_comes_too_late_in_a_process_that_uses_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SettingsError, match="uses CUDA already"):
        see_alone(DeviceName(GPU), {})
    see_alone(DeviceName(GPU), {VISIBLE: GPU})


@pytest.mark.parametrize("text", ["cuda:64", GPU, MIG])
def test_an_absent_device_is_refused_in_pytorchs_words(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Removed again after the test.
    monkeypatch.setenv(VISIBLE, "")
    monkeypatch.delenv(VISIBLE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingsError) as caught:
        present(DeviceName(text))
    assert caught.value.setting == "engine.torch.device"
    problem = caught.value.problem
    assert problem.startswith(f"is '{text}' but PyTorch finds")
    assert "CUDA devices here: " in problem
    assert problem.endswith("`nvidia-smi -L` lists the devices of this machine")
    if torch.version.cuda is None:
        assert "Torch not compiled with CUDA enabled" in problem
    assert os.environ.get(VISIBLE) == (None if text == "cuda:64" else text)


@pytest.mark.parametrize(
    ("text", "device"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_present_devices_are_pytorchs(
    text: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert present(DeviceName(text)) == torch.device(device)


@pytest.mark.parametrize("text", ["auto", "cuda:0"])
def test_a_full_device_is_an_error_that_says_so(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    # The room needs Triton.
    room = SimpleNamespace(Cuda=None, InvariantCuda=None, works=None)
    for module in ("device", "invariant_device"):
        monkeypatch.setitem(sys.modules, f"trtmesh.engine.backends.torch.cuda.{module}", room)
    monkeypatch.setattr(loading, "find_spec", lambda _: True)
    for name, value in (("is_available", True), ("device_count", 1), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", full)
    with pytest.raises(ModelUnusable) as caught:
        loading._device(TorchSettings(device=DeviceNames(text)))
    assert str(caught.value) == (
        "a first kernel does not fit into memory: CUDA error: out of memory; lower what else runs on cuda:0, or take"
        " another device"
    )
