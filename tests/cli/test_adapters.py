"""`trtmesh adapters` and `generate --adapter` against a running stack, whose tokens depend on adapter and version."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli.commands import (
    Stack,
    read_until_closed,
    running,
    running_stack,
    start_command,
    trtmesh,
)
from cli.test_admin_commands import WIDE, as_objects
from e2e.mesh import DEMO
from forwarder import forwarded
from process_constants import constants
from processes import service_process
from router.adapters.contents_of import content, write
from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent, number_of
from trtmesh.client import AdminClient, Client
from trtmesh.v1 import generation_pb2 as pb

ADAPTERS = DEMO.parent / "demo-adapters"
PEFT = FILE_NAMES[pb.ADAPTER_FORMAT_PEFT]
NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two simulated engines with adapters, and the demo model with its adapters."""
    env = {
        "TRTMESH_ENGINE_SIMULATED_ADAPTERS_SLOTS": "4",
        "TRTMESH_ROUTER_ADAPTERS_ROOTS": str(DEMO.parent),
    }
    with running_stack("--engines", "2", "--port", "0", env=env) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def admin(stack: Stack) -> str:
    return stack.admin


def adapters(admin: str, *words: str) -> subprocess.CompletedProcess[str]:
    return trtmesh("adapters", *words, "--admin", admin, env=WIDE)


def listed(admin: str) -> dict[str, Any]:
    """The adapters of the registry by name."""
    return {each["name"]: each for each in as_objects(adapters(admin, "list", "--json").stdout)}


def text(stack: Stack, *words: str) -> str:
    """The continuation of a prompt."""
    result = trtmesh(
        "generate", "--router", stack.wait_ready(), "--max-tokens", "8", *words, "def f():"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def peft_directory(directory: Path, *, weights: bytes = b"weights", rank: int = 4) -> Path:
    """An adapter for simulated engines, which read its rank alone."""
    write(directory, content(weights, rank))
    return directory


def test_demo_adapters_are_registered_and_change_the_text(stack: Stack, admin: str) -> None:
    known = listed(admin)
    assert {"docstrings", "unit-tests"} <= known.keys()
    content = AdapterContent.read(ADAPTERS / "docstrings", 1 << 30)
    (version,) = known["docstrings"]["versions"]
    assert (version["version"], version["format"]) == (content.version, "ADAPTER_FORMAT_PEFT")
    assert version["size_bytes"] == str(content.size_bytes)
    number = known["docstrings"]["id"]
    texts = {
        text(stack),
        text(stack, "--adapter", "docstrings"),
        text(stack, "--adapter", "unit-tests"),
    }
    assert len(texts) == 3
    assert text(stack, "--adapter", number) == text(stack, "--adapter", "docstrings")


def test_status_tells_where_each_version_is(stack: Stack, admin: str) -> None:
    text(stack, "--adapter", "unit-tests", "--request-id", "placed")
    shown = adapters(admin, "status", "unit-tests")
    assert shown.returncode == 0, shown.stderr
    (told,) = as_objects(adapters(admin, "status", "unit-tests", "--json").stdout)
    (version,) = told["versions"]
    assert (int(version["items"]) >= 1, int(version["loads"]) >= 1) == (True, True)
    assert version["rank"] == 16
    for each in version["residencies"]:
        assert each["worker"] in ("engine-0", "engine-1")
        assert each["worker"] in shown.stdout
    assert version["residencies"]
    assert version["version"] in shown.stdout
    explained = trtmesh("explain", "placed", "--admin", admin, env=WIDE).stdout
    assert f"adapter unit-tests (version {version['version'][:12]}, rank" in explained


def test_canary_becomes_current_by_a_second_add(stack: Stack, admin: str, tmp_path: Path) -> None:
    old, new = peft_directory(tmp_path / "old"), peft_directory(tmp_path / "new", weights=b"new")
    added = adapters(admin, "add", "mine", str(old), "--id", "77")
    assert (added.returncode, added.stderr) == (0, "")
    before = text(stack, "--adapter", "mine")
    canary = adapters(admin, "add", "mine", str(new), "--canary", "0.25", "--json")
    assert canary.returncode == 0, canary.stderr
    (told,) = as_objects(canary.stdout)
    assert (told["id"], [each["share"] for each in told["versions"]]) == ("77", [0.75, 0.25])
    table = adapters(admin, "list").stdout
    rows = [line.split() for line in table.splitlines() if line.startswith("mine")]
    assert [(row[1], row[-1]) for row in rows] == [("77", "75%"), ("77", "25%")]
    assert adapters(admin, "add", "mine", str(new)).returncode == 0
    current = listed(admin)["mine"]["version"]
    assert current == AdapterContent.read(new, 1 << 20).version
    assert text(stack, "--adapter", "77") != before


def test_canary_is_removed_by_the_start_of_its_version(admin: str, tmp_path: Path) -> None:
    for name, words in (("old", ()), ("new", ("--canary", "0.5"))):
        directory = peft_directory(tmp_path / name, weights=name.encode())
        assert adapters(admin, "add", "trial", str(directory), *words).returncode == 0
    old, new = (each["version"] for each in listed(admin)["trial"]["versions"])
    unknown = adapters(admin, "remove", "trial", "--version", "x")
    assert unknown.returncode == 1
    assert old in unknown.stderr
    removed = adapters(admin, "remove", "trial", "--version", new[:10])
    assert removed.returncode == 0, removed.stderr
    assert [each["version"] for each in listed(admin)["trial"]["versions"]] == [old]


def test_removed_adapter_is_unknown_and_the_error_says_how_to_add_it(
    stack: Stack, admin: str, tmp_path: Path
) -> None:
    directory = peft_directory(tmp_path / "gone")
    assert adapters(admin, "add", "gone", str(directory)).returncode == 0
    assert text(stack, "--adapter", "gone")
    removed = adapters(admin, "remove", "gone")
    assert (removed.returncode, removed.stdout) == (0, "adapter gone was removed\n")
    again = adapters(admin, "remove", "gone")
    assert again.returncode == 1
    assert "'gone'" in again.stderr
    refused = trtmesh("generate", "--router", stack.wait_ready(), "--adapter", "gone", "def f():")
    assert refused.returncode == 1
    assert "'gone'" in refused.stderr
    assert "trtmesh adapters add" in refused.stderr
    assert "docstrings, " in refused.stderr


def test_source_names_a_directory_of_the_router(admin: str) -> None:
    added = adapters(admin, "add", "second", "--source", "demo-adapters/docstrings", "--json")
    assert added.returncode == 0, added.stderr
    (told,) = as_objects(added.stdout)
    assert told["version"] == listed(admin)["docstrings"]["version"]
    outside = adapters(admin, "add", "third", "--source", "../tests")
    assert outside.returncode == 1
    assert "third" not in listed(admin)


def test_pinned_adapter_stays_loaded(stack: Stack, admin: str, tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "kept")
    added = adapters(admin, "add", "kept", str(directory), "--pin")
    assert added.returncode == 0
    assert "pinned" in added.stdout
    assert listed(admin)["kept"]["pinned"] is True
    assert adapters(admin, "unpin", "kept").returncode == 0
    assert listed(admin)["kept"]["pinned"] is False
    assert "pinned" in adapters(admin, "pin", "kept").stdout


def test_bad_directories_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    both = peft_directory(tmp_path / "both")
    for name in FILE_NAMES[pb.ADAPTER_FORMAT_ARRAYS]:
        (both / name).touch()
    half = peft_directory(tmp_path / "half")
    (half / PEFT.weights).unlink()
    for words, complaint in (
        ([str(tmp_path / "none")], str(tmp_path / "none")),
        ([str(half)], PEFT.weights),
        ([str(both)], "two formats"),
        ([], "--source"),
        ([str(both), "--source", "x"], "--source"),
    ):
        refused = adapters(NOWHERE, "add", "bad", *words)
        assert refused.returncode == 2
        (line,) = refused.stderr.splitlines()
        assert complaint in line


@pytest.mark.parametrize("received_bytes", [0, 1 << 20])
async def test_interrupted_upload_leaves_nothing(
    stack: Stack, admin: str, tmp_path: Path, received_bytes: int
) -> None:
    # A router that stands still takes none of it, or stops in the middle.
    directory = peft_directory(tmp_path / "large", weights=bytes(1 << 24))
    async with forwarded(admin, received_bytes) as router:
        words = ("adapters", "add", "large", str(directory), "--admin", router.address)
        with running(*words) as upload:
            await router.is_held.wait()
            upload.signal(signal.SIGINT)
            assert await asyncio.to_thread(upload.wait) == 130
            assert upload.err == []
    assert "large" not in await asyncio.to_thread(listed, admin)


def bring(stack: Stack, number: int, name: str) -> None:
    """Sends an adapter's weights with a request."""
    weights = pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=[1, 1], data=number.to_bytes(2, "big"))
    config = pb.Tensor(data_type=pb.DATA_TYPE_INT32, shape=[1, 3], data=struct.pack("<3i", 1, 0, 4))
    lora = pb.LoraConfig(id=number, name=name, weights=weights, config=config)

    async def send() -> None:
        async with Client(stack.wait_ready()) as client:
            (item,) = await client.complete(["def f():"], max_tokens=2, adapter=lora)
            assert item.error is None, item.error.message

    asyncio.run(send())


def test_operators_adapter_comes_before_a_clients_of_the_same_name(
    stack: Stack, admin: str, tmp_path: Path
) -> None:
    bring(stack, 3, "same")
    bring(stack, 4, "same")
    ambiguous = adapters(admin, "status", "same")
    assert ambiguous.returncode == 1
    assert "3, 4" in ambiguous.stderr
    (told,) = as_objects(adapters(admin, "status", "4", "--json").stdout)
    assert (told["id"], told["name"], told["brought"]) == ("4", "same", True)
    assert adapters(admin, "add", "same", str(peft_directory(tmp_path / "same"))).returncode == 0
    for words in (("status",), ("pin",), ("unpin",)):
        (told,) = as_objects(adapters(admin, *words, "same", "--json").stdout)
        assert (told["id"], told.get("brought", False)) == (str(number_of("same")), False)
    assert adapters(admin, "remove", "same").returncode == 0
    numbers = {each["id"] for each in as_objects(adapters(admin, "list", "--json").stdout)}
    assert {"3", "4"} <= numbers
    assert str(number_of("same")) not in numbers


def test_name_of_digits_is_refused(admin: str, tmp_path: Path) -> None:
    refused = adapters(admin, "add", "7", str(peft_directory(tmp_path / "seven")))
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert "digits" in line
    assert "7" not in listed(admin)


async def test_refused_upload_tells_the_routers_reason(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("s3cret\n")
    wrong.write_text("other\n")
    directory = peft_directory(tmp_path / "large", weights=bytes(1 << 24))
    size = AdapterContent.read(directory, 1 << 30).size_bytes
    flags = ("--port", "0", "--engines", "127.0.0.1:1", "--admin-token-file", str(right))
    limit = constants(max_adapter_bytes=size - 1)
    async with service_process("router", *flags, *limit) as router:
        for token, parts in (
            (wrong, ["UNAUTHENTICATED", "--token-file"]),
            (right, [str(size), f"at most {size - 1} bytes"]),
        ):
            for _ in range(2):  # content on its way must not hide the reason
                words = ("add", "large", str(directory), "--token-file", str(token))
                refused = adapters(router.admin_address, *words)
                assert refused.returncode == 1
                (line,) = refused.stderr.splitlines()
                assert [part for part in parts if part not in line] == [], line
        async with AdminClient(router.admin_address, token="s3cret") as admin:
            assert not (await admin.list_adapters()).adapters


def test_terminal_shows_the_progress_of_an_upload(admin: str, tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "shown", weights=bytes(1 << 22))
    leader, follower = pty.openpty()
    command = ("adapters", "add", "shown", str(directory), "--admin", admin)
    with start_command(*command, env=os.environ | WIDE, stderr=follower) as upload:
        os.close(follower)
        screen = read_until_closed(leader)
        assert upload.stdout
        assert upload.stdout.read().startswith("adapter shown, number ")
    assert upload.returncode == 0
    assert "4.2/4.2 MB" in screen


def test_stack_names_its_broken_adapters_and_serves_the_others(tmp_path: Path) -> None:
    for name in ("7", "own", "torn", "wide"):
        peft_directory(tmp_path / name)
    (tmp_path / "torn" / PEFT.config).unlink()
    config = json.loads((tmp_path / "wide" / PEFT.config).read_text()) | {"r": 5}
    (tmp_path / "wide" / PEFT.config).write_text(json.dumps(config))
    with running_stack("--port", "0", "--adapters", str(tmp_path)) as stack:
        stack.wait_ready()
        assert listed(stack.admin).keys() == {"own"}
        for name, reason in (("7", "digits"), ("torn", PEFT.config), ("wide", "has rank 4")):
            line = next(line for line in stack.err if f"{tmp_path / name} is refused" in line)
            assert reason in line


def test_broken_directory_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "cut")
    whole = (directory / PEFT.weights).read_bytes()
    (directory / PEFT.weights).write_bytes(whole[:-1])
    refused = adapters(NOWHERE, "add", "bad", str(directory))
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert str(directory / PEFT.weights) in line


def test_refused_version_is_shown(stack: Stack, admin: str, tmp_path: Path) -> None:
    old = peft_directory(tmp_path / "old")
    wide = peft_directory(tmp_path / "wide", rank=1 << 20)
    assert adapters(admin, "add", "tried", str(old)).returncode == 0
    before = text(stack, "--adapter", "tried")
    refused = adapters(admin, "add", "tried", str(wide))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "adapter rank" in refused.stderr
    version = AdapterContent.read(wide, 1 << 30).version
    for words in (("list",), ("status", "tried")):
        shown = adapters(admin, *words).stdout
        assert version[:12] in shown
        assert "adapter rank is 1048576" in shown
    assert text(stack, "--adapter", "tried") == before


def test_restarted_router_has_the_adapters_again(tmp_path: Path) -> None:
    peft_directory(tmp_path / "own")
    with running_stack("--port", "0", "--adapters", str(tmp_path)) as stack:
        stack.wait_ready()
        assert listed(stack.admin).keys() == {"own"}
        psutil.Process(stack.child("router-0")["pid"]).kill()
        stack.wait_for("router-0 serves again")
        while not (known := listed(stack.admin)):
            assert stack.popen.poll() is None
        assert known.keys() == {"own"}
