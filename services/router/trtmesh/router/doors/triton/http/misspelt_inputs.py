"""Keys of a `generate` body that their sender took for inputs: Triton passes them on as parameters, without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.templates.catalogue import TEMPLATES
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.doors.triton.templates.tensor_table import InputSpec

ALIKE = 0.8
"""Least similarity of a misspelt name, by difflib's ratio."""
LONGEST_NAME = 64
"""Longer keys are no misspelt names; comparing them would take long."""
MOST_COMPARED = 16
"""Unknown keys of a request that are compared with names: a comparison holds the event loop for 0.15 ms."""

_NAME = attrgetter("name")
INPUTS: Mapping[str, Sequence[InputSpec]] = {
    name: list(specs)
    for name, specs in groupby(
        sorted(chain(*(template.inputs for template in TEMPLATES.values())), key=_NAME), key=_NAME
    )
}
"""The inputs of all templates."""


class MisspeltInputs:
    """Judges the unknown keys of one request."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._compared = 0

    def refuse(self, key: str) -> None:
        """Raises InvalidRequest for an input of another model, or a misspelt name of an input or a parameter."""
        if key in self._model.template.request_parameters or len(key) > LONGEST_NAME:
            return
        elsewhere = INPUTS.get(key, ())
        meant = (
            next((name for spec in elsewhere for name in _same_input(self._model, spec)), "")
            if elsewhere
            else self._alike(key)
        )
        if meant:
            raise InvalidRequest(
                f"is no input of model '{self._model.name}'; did you mean {meant}?", field=key
            )
        if elsewhere:
            raise InvalidRequest(
                f"is an input of other models, without effect in model '{self._model.name}'; leave it out",
                field=key,
            )

    def _alike(self, key: str) -> str:
        self._compared += 1
        if self._compared > MOST_COMPARED:
            return ""
        return _alike((*self._model.inputs, *self._model.template.request_parameters), key)


def _same_input(model: Model, spec: InputSpec) -> Iterator[str]:
    """The model's names of an input: they set the same field from the same type of data."""
    return (
        name
        for name, own in model.inputs.items()
        if _meaning(own) & _meaning(spec) and {*own.data_types} & {*spec.data_types}
    )


def _meaning(spec: InputSpec) -> set[str]:
    """The fields set by an input, or what it asks for."""
    return set(spec.put.fields) if spec.put is not None else {spec.source} - {""}


@lru_cache(maxsize=4096)
def _alike(names: tuple[str, ...], key: str) -> str:
    """The most similar name, or ''. Clients repeat their keys."""
    by_letters = {_letters(name): name for name in names}
    close = get_close_matches(_letters(key), by_letters, n=1, cutoff=ALIKE)
    return by_letters[close[0]] if close else ""


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
