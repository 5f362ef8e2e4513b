"""A GPU in triton's interpreter: tensors are in host memory, and a graph is computed again."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import tiny_models
from torch import Tensor
from trtmesh.engine.backends.torch.accelerator import Accelerator
from trtmesh.engine.backends.torch.compute import self_check
from trtmesh.engine.backends.torch.compute.memory_probe import StepSize
from trtmesh.engine.backends.torch.cuda import chunk_graphs
from trtmesh.engine.backends.torch.cuda.capturing import Record, Replay
from trtmesh.engine.backends.torch.cuda.kernels import attention
from trtmesh.engine.backends.torch.model.model import Model


class Interpreted(Accelerator):
    """Goes before the class of a GPU."""

    pins_memory = False

    def free_memory(self) -> int:
        return 1 << 30

    def spare_memory(self, _model: Model, _largest: StepSize) -> int:
        return 1 << 26

    def allocated_bytes(self) -> int:
        return 0

    def release_memory(self) -> None:
        """There is none."""

    def _synchronize(self) -> Callable[[], None]:
        return lambda: None

    def _recorder(self) -> Record:
        return recomputed


def recomputed(compute: Callable[[], Tensor]) -> Replay:
    """In place of a captured operation, the operation itself."""

    def again() -> Tensor:
        with torch.inference_mode():
            return compute()

    return again


def small_model(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A model, and graphs and checks as of `make_small`."""
    make_small(patch)
    return tiny_models.build(folder, num_hidden_layers=1, num_key_value_heads=1)


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Graphs and checks for the interpreter, which is slow."""
    patch.setattr(chunk_graphs, "SIZES", (8, 16))
    patch.setattr(attention, "MOST_SPLITS", 2)
    patch.setattr(self_check, "LONG_CHUNKS", ((1, 3, 1, 2), (2, 1, 1, 1)))


def add_up_in_order(patch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter add up their inputs one after another, as a GPU does for tiles of any shape; those of
    numpy's library differ with the shape."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")

    def dot(_: Any, a: Any, b: Any, d: Any, *_others: Any) -> Any:
        found = d.data.copy()
        for k in range(a.data.shape[1]):
            found += a.data[:, k, None].astype(found.dtype) * b.data[k].astype(found.dtype)
        return interpreter.TensorHandle(found, d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
