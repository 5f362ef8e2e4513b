"""The engines of a Triton model, as far as its requests depend on them."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.chassis.quoting import quoted
from trtmesh.router.doors.triton.metrics import EngineFigures, engine_figures
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.requests.requests import Requests
from trtmesh.v1 import engine_pb2 as engine_pb


class Engines:
    def __init__(self, fleet: Fleet, requests: Requests) -> None:
        self._fleet = fleet
        self._requests = requests

    def of(self, model: Model) -> Sequence[Worker]:
        """The workers of a model; none where several models could be meant."""
        served = self._served(model)
        workers = [*self._fleet.workers.values()]
        return [each for each in workers if served and each.description.model == served]

    def _served(self, model: Model) -> str:
        """The mesh's model, or '' where several could be meant."""
        names = {worker.description.model for worker in [*self._fleet.workers.values()]} - {""}
        default = next(iter(self._fleet.configured), "")
        return model.mesh_model or default or (names.pop() if len(names) == 1 else "")

    def problem(self, model: Model) -> str:
        """Why no engine takes requests of a model now, or ''."""
        problems = {worker.name: worker.unusable for worker in self.of(model)}
        if not problems:
            return f"no worker of model {quoted(self._served(model))} has joined"
        if not all(problems.values()):
            return ""
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items())

    def have_roles(self, model: Model) -> bool:
        """Whether workers of a model are for prefill, and others for decode."""
        roles = {worker.load.role or worker.description.role for worker in self.of(model)}
        return {engine_pb.WORKER_ROLE_PREFILL, engine_pb.WORKER_ROLE_DECODE} <= roles

    def longest_prompt(self) -> int:
        """Most tokens of a prompt that leaves room for a new token."""
        workers = self._fleet.workers.values()
        return max((w.description.max_sequence_tokens for w in workers), default=1) - 1

    def vocabulary_size(self, model: Model) -> int:
        """0 while no engine of the model is known."""
        return max((worker.description.vocabulary_size for worker in self.of(model)), default=0)

    def support(self, model: Model, field: str) -> bool:
        """Whether an engine of the model supports a field."""
        return any(field in worker.capabilities.supported_fields for worker in self.of(model))

    def figures(self, model: Model) -> EngineFigures:
        """Figures of a model's workers and of what waits for one. Runs on the thread of the metrics endpoint."""
        served = self._served(model)
        waiting = sum(count for name, _, count in self._requests.unplaced() if name == served)
        return engine_figures(self.of(model), waiting)
