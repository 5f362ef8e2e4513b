"""Keys of a `generate` body that their sender took for inputs: Triton passes them on as parameters, without effect."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.templates.catalogue import TEMPLATES
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.doors.triton.templates.tensor_table import InputSpec

ALIKE = 0.8
"""Least similarity of a misspelt name, by difflib's ratio."""
LONGEST_NAME = 64
"""Longer keys are no misspelt names; comparing them would take long."""


def refuse_near_miss(model: Model, key: str) -> None:
    """Raises InvalidRequest for an input of another model, or a misspelt name of an input or a parameter."""
    if key in model.template.request_parameters or len(key) > LONGEST_NAME:
        return
    elsewhere = [*_inputs_elsewhere(key)]
    meant = next((name for spec in elsewhere for name in _same_input(model, spec)), "")
    meant = meant or _alike((*model.inputs, *model.template.request_parameters), key)
    if meant:
        raise InvalidRequest(
            f"is no input of model '{model.name}'; did you mean {meant}?", field=key
        )
    if elsewhere:
        raise InvalidRequest(
            f"is an input of other models, without effect in model '{model.name}'; leave it out",
            field=key,
        )


def _inputs_elsewhere(key: str) -> Iterator[InputSpec]:
    """The inputs of this name in all templates."""
    return (spec for template in TEMPLATES.values() for spec in template.inputs if spec.name == key)


def _same_input(model: Model, spec: InputSpec) -> Iterator[str]:
    """The model's names of an input."""
    return (name for name, own in model.inputs.items() if _meaning(own) & _meaning(spec))


def _meaning(spec: InputSpec) -> set[str]:
    """The fields set by an input, or what it asks for."""
    return set(spec.put.fields) if spec.put is not None else {spec.source} - {""}


@lru_cache(maxsize=4096)
def _alike(names: tuple[str, ...], key: str) -> str:
    """The most similar name, or ''. Comparing takes a third of a millisecond, and clients repeat their keys."""
    by_letters = {_letters(name): name for name in names}
    close = get_close_matches(_letters(key), by_letters, n=1, cutoff=ALIKE)
    return by_letters[close[0]] if close else ""


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
