"""Names of devices in settings."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError
from trtmesh.chassis.device_names import DeviceName, DeviceNames, Devices

GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-f3b23c1c-9b4d-5d0a-8c4b-1a2b3c4d5e6f"
OLD_MIG = f"MIG-{GPU}/1/0"


@pytest.mark.parametrize(
    ("text", "number", "is_identity", "is_gpu"),
    [
        ("auto", None, False, False),
        ("cpu", None, False, False),
        ("cuda", None, False, True),
        ("cuda:0", 0, False, True),
        ("cuda:12", 12, False, True),
        (GPU, None, True, True),
        (MIG, None, True, True),
        (OLD_MIG, None, True, True),
    ],
)
def test_names_say_what_they_are(
    text: str, number: int | None, is_identity: bool, is_gpu: bool
) -> None:
    name = DeviceName(text)
    assert (name.number, name.is_identity, name.is_gpu) == (number, is_identity, is_gpu)
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "0",
            "gpu0",
            "meta",
            "CUDA:0",
            "cuda:",
            "cuda:-1",
            "cuda:01",
            "cuda:0 ",
            "cuda:0,cuda:1",
        ),
        *("GPU-8932f937", GPU.upper(), f"{GPU}-1", f"{GPU}/1/0", "MIG-1", f"MIG-{GPU}", f"{MIG}/0"),
    ],
)
def test_other_words_are_no_names(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"must be auto, cpu, cuda, cuda:NUMBER, or .*nvidia-smi -L"
    ):
        DeviceName(text)


def test_settings_have_names_and_never_texts() -> None:
    setting = TypeAdapter(Devices)
    assert setting.validate_python(GPU) == setting.validate_python(DeviceNames(GPU))
    for wrong in ("gpu0", 0, None, {"text": "cpu"}, "", "cuda:0,", "cuda:0;cuda:1"):
        with pytest.raises(ValidationError):
            setting.validate_python(wrong)


def test_settings_have_several_names_and_are_written_as_read() -> None:
    setting = TypeAdapter(Devices)
    both = setting.validate_python("cuda:0, cuda:1")
    assert both.names == (DeviceName("cuda:0"), DeviceName("cuda:1"))
    assert setting.validate_json(setting.dump_json(both)) == both
