"""Prompt tables from .npy files, at the torch engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli.commands import Stack, running_stack, trtmesh
from e2e.mesh import DEMO, DEMO_VOCABULARY
from safetensors import safe_open

IDS = (328, 294, 904, 270)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack("--port", "0", "--backend", "torch", "--model", str(DEMO)) as stack:
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks: zeros, and the embeddings of IDS."""
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        rows = weights.get_tensor("model.embed_tokens.weight")[list(IDS)].float().numpy()
    file = tmp_path_factory.mktemp("tables") / "table.npy"
    np.save(file, np.stack([np.zeros_like(rows), rows]))
    return file


def output(stack: Stack, ids: tuple[int, ...], *flags: str) -> list[int]:
    flags = ("--max-tokens", "8", "--no-stream", "--exclude-input", "--json", *flags)
    prompt = ("--ids", " ".join(map(str, ids)))
    result = trtmesh("triton", "infer", *prompt, *flags, env={"TRTMESH_ROUTER": stack.wait_ready()})
    assert result.returncode == 0, result.stderr
    (line,) = map(json.loads, result.stdout.splitlines())
    return list(line["outputs"]["output_ids"]["data"][0][0])


def test_rows_of_the_task_take_the_place_of_embeddings(stack: Stack, table: Path) -> None:
    whole = output(stack, IDS)
    virtual = tuple(range(DEMO_VOCABULARY, DEMO_VOCABULARY + len(IDS)))
    flags = ("--prompt-table", str(table), "--prompt-table-id", "7", "--vocab-size")
    for task, same in (("1", True), ("0", False)):
        told = output(stack, virtual, *flags, str(DEMO_VOCABULARY), "--prompt-task", task)
        assert (told == whole) is same


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [(("--prompt-task", "2"), "no part 2"), (("--prompt-task", "-1"), "task")],
)
def test_missing_task_is_named(table: Path, flags: tuple[str, ...], complaint: str) -> None:
    result = trtmesh("triton", "infer", "--ids", "5", "--prompt-table", str(table), *flags)
    assert result.returncode == 2
    assert complaint in result.stderr
