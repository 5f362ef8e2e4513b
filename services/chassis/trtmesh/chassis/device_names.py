"""Names of devices in settings: PyTorch's words, or identities as `nvidia-smi -L` prints them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

AUTO = "auto"
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that limits a process to some devices of CUDA."""

_WORDS = (AUTO, "cpu", "cuda")
_NUMBERED = re.compile(r"cuda:(0|[1-9]\d{0,2})")
_HEX = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_IDENTITY = re.compile(rf"(GPU|MIG)-{_HEX}|MIG-GPU-{_HEX}/\d+/\d+")
_FORMS = "auto, cpu, cuda, cuda:NUMBER, or a GPU-... or MIG-... as `nvidia-smi -L` prints it"


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A device by name, not checked for presence. Raises ValueError for an invalid name."""

    text: str

    def __post_init__(self) -> None:
        if self.text not in _WORDS and self.number is None and not self.is_identity:
            raise ValueError(f"must be {_FORMS}")

    @property
    def number(self) -> int | None:
        """The place among the visible GPUs, if the name is a place."""
        match = _NUMBERED.fullmatch(self.text)
        return int(match[1]) if match else None

    @property
    def is_identity(self) -> bool:
        """Whether the name identifies a GPU or MIG device independently of the visible devices."""
        return bool(_IDENTITY.fullmatch(self.text))

    @property
    def is_gpu(self) -> bool:
        """Whether the name is certainly a GPU's."""
        return self.text not in (AUTO, "cpu")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class DeviceNames:
    """Devices for a model, by names between commas. Raises ValueError for an invalid name."""

    text: str

    def __post_init__(self) -> None:
        _ = self.names

    @property
    def names(self) -> tuple[DeviceName, ...]:
        return tuple(DeviceName(part.strip()) for part in self.text.split(","))

    def __str__(self) -> str:
        return self.text


def _parsed(value: object) -> DeviceNames:
    return value if isinstance(value, DeviceNames) else DeviceNames(str(value).strip())


Devices = Annotated[DeviceNames, BeforeValidator(_parsed), PlainSerializer(str, return_type=str)]
"""The names of devices, in the form of the setting."""
