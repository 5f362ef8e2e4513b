"""Commands without an address find the user's stack, and do not guess between several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.commands import Stack, running_stack, trtmesh
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.stacks import RunningStack, network, stack_file, stack_meant


def place(number: int, namespace: int | None = None) -> RunningStack:
    where = network() if namespace is None else namespace
    return RunningStack(f"127.0.0.1:{number}", f"127.0.0.1:{number + 1}", "demo", "", where)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "trtmesh" / "stacks"


def test_the_only_stack_is_meant_and_several_are_named(folder: Path) -> None:
    assert stack_meant("--admin") == RunningStack()
    with stack_file() as first:
        # A starting stack serves nothing yet.
        assert stack_meant("--admin") == RunningStack()
        first.write(place(1000))
        assert stack_meant("--admin") == place(1000)
        with stack_file() as second, stack_file() as elsewhere:
            assert [each.prefix for each in (first, second, elsewhere)] == ["", "s2-", "s3-"]
            elsewhere.write(place(3000, network() + 1))
            assert stack_meant("--admin") == place(1000)
            second.write(place(2000))
            with pytest.raises(SettingsError, match=r"2 stacks .*127.0.0.1:1001.*127.0.0.1:2001"):
                stack_meant("--admin")
        assert stack_meant("--admin") == place(1000)
    assert not list(folder.iterdir())


def test_files_of_ended_stacks_are_removed_and_their_numbers_free(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps({"router": "127.0.0.1:1", "admin": "127.0.0.1:2"}))
    with stack_file() as first:
        assert first.prefix == ""
    (folder / "2.json").write_text("torn")
    assert stack_meant("--router") == RunningStack()
    assert not list(folder.iterdir())


def test_without_a_place_for_files_a_stack_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with stack_file() as file:
        file.write(place(1000))
        assert (file.prefix, stack_meant("--admin")) == ("", RunningStack())


def names(stack: Stack) -> set[str]:
    return {child["name"] for child in stack.children}


def test_commands_do_not_reach_the_other_of_two_stacks(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with running_stack("--port", "0", env=env) as one:
        one.wait_ready()
        # The supervisor has written where it is before it prints so.
        found = trtmesh("workers", "list", "--json", env=env)
        assert json.loads(found.stdout.splitlines()[0])["worker"] == "engine-0", found
        with running_stack("--port", "0", env=env) as other:
            router = other.wait_ready()
            assert not names(one) & names(other)
            for command in (("workers", "drain", "engine-0"), ("generate", "hi")):
                refused = trtmesh(*command, env=env)
                assert refused.returncode == 2
                assert one.admin in refused.stderr
                assert other.admin in refused.stderr
            chosen = trtmesh("generate", "--router", router, "--max-tokens", "2", "hi", env=env)
            assert chosen.returncode == 0
            other.popen.kill()
            other.popen.wait()
            assert trtmesh("status", env=env).returncode == 0
