"""The models by name: models of the mesh and adapters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtmesh.chassis.errors import ModelNotFound, NoWorker
from trtmesh.chassis.quoting import quoted
from trtmesh.router.adapters.adapters import Adapters
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.requests.requests import Requests

OWNER = "trtmesh"


@dataclass(frozen=True, slots=True)
class Served:
    """The meaning of a name."""

    name: str
    model: str
    """The model of the mesh."""
    adapter: str = ""
    """Name of the adapter, or ''."""


class ServedModels:
    """The models of the mesh, every registered adapter as a model with the base as parent, and further names."""

    def __init__(
        self, fleet: Fleet, adapters: Adapters, requests: Requests, aliases: Mapping[str, str]
    ) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._requests = requests
        self._aliases = aliases
        self._since = int(time.time())

    def find(self, name: str) -> Served:
        """Returns the meaning of a name; '' is the default model. Raises ModelNotFound or NoWorker."""
        if name in self._aliases:
            return replace(self._find(self._aliases[name]), name=name)
        return self._find(name)

    def _find(self, name: str) -> Served:
        if name and name not in self._fleet.models() and name not in self._fleet.configured:
            for adapter in self._adapters_by_name():
                if adapter.name == name:
                    return adapter
            if not self._fleet.models():
                # Clients try again where no worker is ready, and give up where a model is not found.
                raise NoWorker(self._fleet.why_no_models())
            raise self._unknown(name)
        model = self._requests.served_model(name)
        return Served(model, model)

    def describe(self, served: Served) -> dict[str, Any]:
        described = {
            "id": served.name,
            "object": "model",
            "created": self._since,
            "owned_by": OWNER,
            "root": served.model,
            "parent": served.model if served.adapter else None,
        }
        if longest := self._fleet.most_prompt_tokens(served.model):
            described["max_model_len"] = longest + 1
        return described

    def all(self) -> list[Served]:
        """The models, then the adapters, then further names of either, each by name."""
        models = [Served(model, model) for model in sorted(self._fleet.models())]
        named = [*models, *sorted(self._adapters_by_name(), key=lambda adapter: adapter.name)]
        by_name = {served.name: served for served in named}
        meant = ((name, by_name.get(self._aliases[name])) for name in sorted(self._aliases))
        own = [served for served in named if served.name not in self._aliases]
        return own + [replace(served, name=name) for name, served in meant if served]

    def _adapters_by_name(self) -> Iterator[Served]:
        """The adapters registered by operators. The parent of an adapter for any model is the default model."""
        models = self._fleet.models()
        for entry in self._adapters.entries():
            if not entry.name or entry.brought or entry.name in models:
                continue
            try:
                model = entry.model or self._requests.served_model("")
            except (ModelNotFound, NoWorker):
                continue
            yield Served(entry.name, model, entry.name)

    def _unknown(self, name: str) -> ModelNotFound:
        names = [served.name for served in self.all()]
        known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        return ModelNotFound(
            f"is {quoted(name)}, which is not served here; GET /v1/models lists what is: {known}",
            field="model",
        )
