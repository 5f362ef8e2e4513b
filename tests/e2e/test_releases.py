"""Receipts of one release of the tree, audited on the next one, and on one with a planted change.

`make audit-releases BEFORE=REV RECEIPTS=10000` has revision REV make them, on real weights too. In every run this tree
makes some by simulated workers.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli.commands import trtmesh
from e2e.corruption import CHANGES, FIRST_CHANGED, corrupted
from e2e.mesh import DEMO, SIMULATED, Mesh, eventually, running_mesh
from trtmesh.tools.auditing.receipt_file import FiledReceipt, read_receipts

TREE = Path(__file__).parents[2]
ROOTS = ("protos", "tools", *(f"services/{name}" for name in
         ("chassis", "cli", "client", "engine", "router", "tokenizer")))  # fmt: skip
"""Where a tree has its packages."""
RECEIPTS = 48
"""Those of every run."""
ITEMS, AT_ONCE, TOKENS = 8, 4, 24
"""Prompts of a request, requests at once, and tokens of a sequence."""
ENGINES = {
    "simulated": (*SIMULATED, "--simulated-timing-step-ms", "1"),
    "torch": (
        *("--model-dir", str(DEMO), "--torch-threads", "1", "--torch-batch-invariant", "true"),
        *("--torch-kv-cache-tokens", "16384"),
    ),
}
ASKED: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 40, "num_return_sequences": 2},
    {"frequency_penalty": 0.5},
    {"temperature": 1.0, "top_p": 0.9, "min_tokens": 9},
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_asked = metafunc.config.getoption("--before", default=None) is not None
    metafunc.parametrize("backend", [*ENGINES] if is_asked else ["simulated"])


@pytest.fixture
def before(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tree that makes the receipts."""
    revision = request.config.getoption("--before", default=None)
    if not revision:
        return TREE
    git = ("git", "-C", str(TREE), "archive", revision, *ROOTS)
    archived = subprocess.run(git, check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(tmp_path / "before", filter="data")
    return tmp_path / "before"


def mesh_of(
    backend: str, receipts: Path, env: Mapping[str, str], *, changes: str = ""
) -> AbstractAsyncContextManager[Mesh]:
    """A mesh with these variables, whose engines have a planted change; it writes receipts with requests."""
    of_engines = dict(env)
    if changes:
        of_engines |= corrupted(receipts.parent / f"{receipts.stem}-change", changes)

    async def start(mesh: Mesh) -> None:
        starts = [mesh.start_engine(*ENGINES[backend], env=of_engines) for _ in range(2)]
        await asyncio.gather(mesh.start_tokenizer(env=env), *starts)
        filed = ("--receipts-file", str(receipts), "--receipts-requests", "true")
        await mesh.start_router(*filed, env=env)
        await mesh.ready(2, 1)

    return running_mesh(start=start)


async def test_next_release_reproduces_and_a_changed_one_is_told(
    request: pytest.FixtureRequest, before: Path, tmp_path: Path, backend: str
) -> None:
    count = int(request.config.getoption("--receipts", default=None) or RECEIPTS)
    roots = [] if before == TREE else [str(before / root) for root in ROOTS]
    env = {"PYTHONPATH": os.pathsep.join(roots)} if roots else {}
    kept = tmp_path / "before.jsonl"
    async with mesh_of(backend, kept, env) as mesh:
        await record(mesh, count)
        receipts = await filed(kept, count)
    async with mesh_of(backend, tmp_path / "now.jsonl", {}) as mesh:
        assert await audited(mesh, kept) == {}
    for name, changes in CHANGES[backend].items():
        again = tmp_path / f"{name}.jsonl"
        async with mesh_of(backend, again, {}, changes=changes) as mesh:
            told = await audited(mesh, kept)
            truth = first_changes(receipts, await filed(again, count))
        assert told == truth
        print(f"{backend}, another {name}: {len(told)} of {count} differ, each told from its first")
        assert told
        if backend == "simulated":
            assert len(told) == count
        if name == "token kernel":
            assert {*told.values()} == {FIRST_CHANGED}


async def record(mesh: Mesh, count: int) -> None:
    """Has so many items generated."""
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int) -> None:
        prompts = [f"def name_{n}(value):" for n in range(number, min(number + ITEMS, count))]
        options = ASKED[number // ITEMS % len(ASKED)]
        async with free:
            items = await mesh.client.complete(
                prompts, max_tokens=TOKENS, ignore_end_id=True, **options
            )
        assert not any(item.error for item in items)

    async with asyncio.TaskGroup() as group:
        for number in range(0, count, ITEMS):
            group.create_task(ask(number))


Named = Mapping[str, FiledReceipt]


async def filed(file: Path, count: int) -> Named:
    """The receipts of a file, once there are so many, by what was asked."""
    found = dict[str, FiledReceipt]()

    async def all_written() -> bool:
        found.clear()
        for each in read_receipts(file, None):
            told = each.receipt
            found[f"{told.draw_index} {told.item_digest.hex()}"] = each
        return len(found) == count

    await eventually(all_written)
    return found


def first_changes(kept: Named, again: Named) -> dict[str, int]:
    """The first other offset of each item that differs, by the tokens of both files."""
    found = {}
    for name, each in kept.items():
        ids, others = each.token_ids, again[name].token_ids
        assert ids is not None
        assert others is not None
        for one, other in zip(ids, others, strict=True):
            if one != other:
                pairs = enumerate(zip(one, other, strict=False))
                first = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
                found[f"{each.receipt.request_id}[{each.receipt.batch_index}]"] = first
                break
    return found


async def audited(mesh: Mesh, file: Path) -> dict[str, int]:
    """Audits a file by the command; returns the offset that it tells of each item that differs."""
    given = ("audit", "--upgrade", "--json", str(file), "--router", mesh.client.addresses[0])
    ended = await asyncio.to_thread(partial(trtmesh, *given))
    print(ended.stderr)
    told = [*map(json.loads, ended.stdout.splitlines())]
    assert {each["verdict"] for each in told} <= {"different"}
    assert ended.returncode == bool(told)
    return {f"{each['request_id']}[{each['batch_index']}]": each["offset"] for each in told}
