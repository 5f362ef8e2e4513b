"""Places the engines of each model on the GPUs that its configuration names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from trtmesh.cli.triton_import.config_file import is_unset
from trtmesh.cli.triton_import.findings import Draft, Subject
from trtmesh.cli.triton_import.recipes import RepositoryModel
from trtmesh.cli.triton_import.rules import TORCH, wrong
from trtmesh.cli.triton_import.weights import Weights

PARAMETER = "gpu_device_ids"
ENGINES, DEVICES = ("mesh", "engines"), ("mesh", "devices")


def place_engines(cores: Sequence[RepositoryModel], weights: Weights, draft: Draft) -> None:
    """Sets the devices of each model of the mesh: those of all Triton models with its weights."""
    if draft.get((*TORCH, "device")):
        return
    for directory in weights.distinct:
        devices: Counter[str] = Counter()
        for core in cores:
            if weights.directories[core.name] == directory:
                devices |= Counter(_devices_of(core))
        if devices:
            draft.put((*DEVICES, directory.name), list(devices.elements()))


def convert_devices(model: RepositoryModel, directory: Path, draft: Draft) -> None:
    """Reports on the instances and the GPUs of a model."""
    if not model.is_core:
        _convert_router_instances(model, draft)
        return
    devices = draft.get((*DEVICES, directory.name))
    _convert_gpus(model, devices, draft)
    count = _count(model)
    subject = Subject(model.name, "instance_group", f"count {count}")
    if not model.config.instance_group:
        return
    if devices is not None:
        draft.replace(subject, f"an engine runs on each of {', '.join(devices)}")
    elif count > 1:
        draft.carry(subject, ENGINES, count)
    else:
        draft.replace(
            subject,
            f"mesh.engines says how many engines there are, one unless it is set; on the CPU unless --device or"
            f" {PARAMETER} names a GPU",
        )


def _convert_gpus(model: RepositoryModel, devices: list[str] | None, draft: Draft) -> None:
    text = model.parameters.get(PARAMETER)
    if text is None:
        return
    subject = Subject(model.name, f"parameters.{PARAMETER}", text)
    if is_unset(text):
        draft.leave(subject)
    elif devices is None:
        draft.replace(subject, f"--device says {draft.get((*TORCH, 'device'))}")
    elif any(len(gpus) > 1 for gpus in _instances(subject)):
        first = ", ".join(dict.fromkeys(_devices_of(model)))
        draft.refuse(
            subject,
            f"an embedded engine runs on one GPU; of each instance the first is used: {first}",
        )
    else:
        draft.count(subject, f"{'.'.join(DEVICES)}: {', '.join(devices)}")


def _convert_router_instances(model: RepositoryModel, draft: Draft) -> None:
    if model.config.instance_group:
        subject = Subject(model.name, "instance_group", f"count {_count(model)}")
        draft.replace(subject, "one router serves any number of requests at once")


def _count(model: RepositoryModel) -> int:
    return sum(group.count or 1 for group in model.config.instance_group)


def _devices_of(core: RepositoryModel) -> list[str]:
    """A device for each instance; none without GPUs."""
    text = core.parameters.get(PARAMETER, "")
    if is_unset(text):
        return []
    instances = _instances(Subject(core.name, f"parameters.{PARAMETER}", text))
    count = max(_count(core), len(instances))
    return [f"cuda:{instances[index % len(instances)][0]}" for index in range(count)]


def _instances(subject: Subject) -> list[list[int]]:
    """GPUs of an instance are separated by commas, instances by semicolons."""
    try:
        instances = [[int(gpu) for gpu in part.split(",")] for part in subject.value.split(";")]
    except ValueError:
        instances = [[-1]]
    if min(gpu for gpus in instances for gpu in gpus) < 0:
        raise wrong(subject, "numbers of GPUs, commas within an instance and semicolons between")
    return instances
