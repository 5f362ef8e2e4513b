"""The device named by a setting, in PyTorch's terms."""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from trtmesh.chassis.device_names import VISIBLE, DeviceName
from trtmesh.chassis.errors import SettingsError

SETTING = "engine.torch.device"
LIST = "`nvidia-smi -L` lists the devices of this machine"


def present(name: DeviceName) -> torch.device:
    """Raises SettingsError for a device missing on this machine. A process with a device named by identity sees no
    other device from then on."""
    if name.text == "cpu":
        return torch.device("cpu")
    if name.is_identity:
        see_alone(name, os.environ)
    index = name.number or 0
    count = torch.cuda.device_count()
    if index >= count:
        raise SettingsError(
            f"is {name.text!r} but PyTorch finds {count} CUDA devices here: {_complaint(index)}; {LIST}",
            setting=SETTING,
        )
    return torch.device("cuda", index)


def hardware_of(device: torch.device) -> str:
    """The kind of a device that is present: other ones may add up in another order."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
    return platform.machine()


def see_alone(name: DeviceName, environ: MutableMapping[str, str]) -> None:
    """Hides all other devices from CUDA. CUDA reads the variable at the first use in the process. Raises SettingsError
    after this use, or for a hidden device."""
    given = environ.get(VISIBLE)
    if given == name.text:
        return
    if given is not None and name.text not in given.split(","):
        raise SettingsError(
            f"is {name.text!r} but {VISIBLE}={given} hides it; unset the variable, or name the device by its place"
            " there, such as cuda:0",
            setting=SETTING,
        )
    untyped: Any = torch.cuda
    if untyped.is_initialized():
        raise SettingsError(
            f"is {name.text!r} but this process uses CUDA already; set {VISIBLE} when it starts",
            setting=SETTING,
        )
    environ[VISIBLE] = name.text


def _complaint(index: int) -> str:
    """PyTorch's words for a missing device."""
    try:
        torch.cuda.get_device_properties(index)
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return "it is not among them"
