"""Places the engines of each model on the GPUs that its configuration names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtmesh.tools.triton_import.config_file import is_unset
from trtmesh.tools.triton_import.findings import Draft, Subject
from trtmesh.tools.triton_import.recipes import RepositoryModel
from trtmesh.tools.triton_import.rules import TORCH, wrong
from trtmesh.tools.triton_import.tensorrt_llm import BACKEND, put_ranks, ranks_of
from trtmesh.tools.triton_import.weights import WeightFolders

PARAMETER = "gpu_device_ids"
ENGINES, DEVICES = ("mesh", "engines"), ("mesh", "devices")
ROLES = {"context_model_name": "prefill", "generation_model_name": "decode"}
"""The role of each half of a disaggregated model, in the order of the engines of a stack."""


def place_engines(models: Sequence[RepositoryModel], weights: WeightFolders, draft: Draft) -> None:
    """Sets the roles and the devices of each model of the mesh: those of all Triton models with its weights."""
    cores = [model for model in models if model.is_core]
    roles = _roles_of(models, weights)
    for role in ROLES.values():
        halves = [core for core in cores if roles.get(core.name) == role]
        if halves:
            draft.put(("mesh", role), sum(map(_engines_of, halves)))
    if draft.get((*TORCH, "device")):
        return
    spread = draft.get(("mesh", "backend")) == BACKEND
    if spread:
        put_ranks(cores, {core.name: ranks_of(core, _groups_of(core)) for core in cores}, draft)
    for directory in weights.distinct:
        own = [core for core in cores if weights.directories[core.name] == directory]
        if devices := _devices_by_role(own, roles, spread=spread):
            draft.put((*DEVICES, directory.name), devices)


def _roles_of(models: Sequence[RepositoryModel], weights: WeightFolders) -> Mapping[str, str]:
    """The role of each half of a disaggregated model, by name.

    None where a model is both halves, where only some halves have GPUs, or where the mesh has other models, because
    those would have the same roles.
    """
    known = {model.name: model for model in models}
    roles: dict[str, str] = {}
    for model in models:
        for parameter, role in ROLES.items():
            half = model.parameters.get(parameter, "")
            if half in known and roles.setdefault(half, role) != role:
                return {}
    on_gpus = {bool(_devices_of(known[name])) for name in roles}
    whole = {*roles.values()} == {*ROLES.values()} and len(on_gpus) == 1
    return roles if whole and len(weights.distinct) == 1 else {}


def _devices_by_role(
    cores: Sequence[RepositoryModel], roles: Mapping[str, str], *, spread: bool
) -> list[str]:
    """The devices of the halves in the order of ROLES, then devices of other models alone. An engine that is `spread`
    has all GPUs of an instance."""
    devices_of = _all_devices_of if spread else _devices_of
    devices = [
        device
        for role in ROLES.values()
        for core in cores
        if roles.get(core.name) == role
        for device in devices_of(core)
    ]
    others: Counter[str] = Counter()
    for core in cores:
        if core.name not in roles:
            others |= Counter(devices_of(core))
    return [*devices, *(others - Counter(devices)).elements()]


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
    elif draft.get(("mesh", "prefill")):
        draft.replace(subject, "mesh.prefill and mesh.decode say how many engines there are")
    elif count > 1:
        draft.carry(subject, ENGINES, count)
    else:
        place = (
            "on the first GPUs"
            if draft.get(("mesh", "backend")) == BACKEND
            else f"on the CPU unless --device or {PARAMETER} names a GPU"
        )
        draft.replace(
            subject, f"mesh.engines says how many engines there are, one unless it is set; {place}"
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
    elif draft.get(("mesh", "backend")) == BACKEND:
        draft.count(subject, f"{'.'.join(DEVICES)}: {'; '.join(devices)}")
    elif any(len(gpus) > 1 for gpus in _instances(subject)):
        first = ", ".join(dict.fromkeys(_devices_of(model)))
        draft.refuse(
            subject,
            f"of each instance the first is used: {first}; where several can share the model, an entry of"
            f" {'.'.join(DEVICES)} may name them, such as cuda:0,cuda:1",
        )
    else:
        text = f"{'.'.join(DEVICES)}: {', '.join(devices)}"
        draft.count(subject, text + _advice(devices, draft))


def _advice(devices: Sequence[str], draft: Draft) -> str:
    """What engines need that share a GPU with others of the mesh."""
    engines = Counter(each for names in draft.get(DEVICES).values() for each in names)
    shared = sorted({each for each in devices if engines[each] > 1})
    limits = (draft.get((*TORCH, "kv_cache", limit)) for limit in ("bytes", "tokens"))
    if not shared or any(limits):
        return ""
    return (
        f"; {', '.join(shared)} has several engines, each of which takes most of the memory that it finds free: set"
        f" {'.'.join(TORCH)}.kv_cache.bytes"
    )


def _convert_router_instances(model: RepositoryModel, draft: Draft) -> None:
    if model.config.instance_group:
        subject = Subject(model.name, "instance_group", f"count {_count(model)}")
        draft.replace(subject, "one router serves any number of requests at once")


def _count(model: RepositoryModel) -> int:
    return sum(group.count or 1 for group in model.config.instance_group)


def _engines_of(core: RepositoryModel) -> int:
    return len(_devices_of(core)) or _count(core)


def _devices_of(core: RepositoryModel) -> list[str]:
    """A device for each instance, its first GPU; none without GPUs."""
    return [f"cuda:{gpus[0]}" for gpus in _groups_of(core)]


def _all_devices_of(core: RepositoryModel) -> list[str]:
    """The GPUs of each instance, separated by commas."""
    return [",".join(f"cuda:{gpu}" for gpu in gpus) for gpus in _groups_of(core)]


def _groups_of(core: RepositoryModel) -> list[list[int]]:
    """The GPUs of each instance; none without GPUs."""
    text = core.parameters.get(PARAMETER, "")
    if is_unset(text):
        return []
    instances = _instances(Subject(core.name, f"parameters.{PARAMETER}", text))
    count = max(_count(core), len(instances))
    return [instances[index % len(instances)] for index in range(count)]


def _instances(subject: Subject) -> list[list[int]]:
    """GPUs of an instance are separated by commas, instances by semicolons."""
    try:
        instances = [[int(gpu) for gpu in part.split(",")] for part in subject.value.split(";")]
    except ValueError:
        instances = [[-1]]
    if min(gpu for gpus in instances for gpu in gpus) < 0:
        raise wrong(subject, "numbers of GPUs, commas within an instance and semicolons between")
    return instances
