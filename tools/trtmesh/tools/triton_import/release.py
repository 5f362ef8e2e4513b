"""Recognises the release of a repository by the tensors that its models declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trtmesh.router.doors.triton.releases import RELEASES
from trtmesh.router.doors.triton.settings import Release
from trtmesh.tools.triton_import.fields import data_type_of
from trtmesh.tools.triton_import.findings import Draft, Subject
from trtmesh.tools.triton_import.recipes import RepositoryModel

MOST_DIFFERENCES = 0.25
"""Share of the declared tensors that may differ from the release; templates are adapted, not rewritten."""
PATH = ("router", "triton", "release")


class Declared(NamedTuple):
    """A tensor as declared. A type that the template leaves open is ''."""

    data_type: str
    dims: tuple[int, ...]
    required: bool

    def equals(self, other: Declared) -> bool:
        types = {self.data_type, other.data_type}
        return self[1:] == other[1:] and ("" in types or len(types) == 1)


Tensors = Mapping[tuple[str, str], Declared]
"""Declarations by direction and name."""


def set_release(models: Sequence[RepositoryModel], draft: Draft) -> None:
    """Sets the release whose declarations are closest, the newest of equals; none if all are far."""
    dated = [model for model in models if model.recipe and model.recipe.template.dated]
    if not dated:
        return
    tensors = {model.name: _declared(model) for model in dated}
    differences = {
        release: sum(_differences(tensors[m.name], _of_release(m, release)) for m in dated)
        for release in reversed(RELEASES)
    }
    closest = min(differences, key=differences.__getitem__)
    count = differences[closest]
    if count <= MOST_DIFFERENCES * sum(map(len, tensors.values())):
        draft.put(PATH, closest)
        subject = Subject("all models", "tensors", "")
        draft.count(subject, f"{'.'.join(PATH)}: {closest} ({count} declarations differ)")


def _declared(model: RepositoryModel) -> Tensors:
    config = model.config
    return {
        (direction, tensor.name): Declared(
            data_type_of(tensor),
            tuple(tensor.dims),
            direction == "input" and not tensor.optional,
        )
        for direction, listed in (("input", config.input), ("output", config.output))
        for tensor in listed
    }


def _of_release(model: RepositoryModel, release: Release) -> Tensors:
    assert model.recipe is not None
    template = model.recipe.template
    found: dict[tuple[str, str], Declared] = {}
    for direction, specs in (("input", template.inputs), ("output", template.all_outputs())):
        for spec in specs:
            if (declared := spec.history.at(release)) is not None:
                found[direction, spec.name] = Declared(
                    declared.data_types[0],
                    declared.dims,
                    direction == "input" and declared.required,
                )
    return found


def _differences(own: Tensors, release: Tensors) -> int:
    """Tensors with another declaration, and those that one side lacks."""
    names: Iterable[tuple[str, str]] = own.keys() & release.keys()
    alike = sum(own[name].equals(release[name]) for name in names)
    return len(own.keys() | release.keys()) - alike
