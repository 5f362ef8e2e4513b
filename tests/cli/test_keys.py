"""`trtmesh keys`, and the key of the commands that call a router."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.commands import EXECUTED, running_stack, trtmesh
from trtmesh.cli.app import app
from trtmesh.router.callers.key_file import digest_of, read_keys
from typer.testing import CliRunner, Result


def keys(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["keys", *arguments], input=stdin)


def added(file: Path, name: str, *options: str) -> str:
    """The printed key."""
    result = keys("add", name, "--file", str(file), *options)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_key_is_printed_once_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = added(file, "alice", "--max-items", "8", "--expires", "2031-01-31")
    assert key not in file.read_text()
    (kept,) = read_keys(file.read_text())
    assert (kept.name, kept.digest, kept.limits) == ("alice", digest_of(key), {"max_items": "8"})
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    (listed,) = keys("list", "--file", str(file), "--json").stdout.splitlines()
    assert json.loads(listed)["expires"] == "2031-01-31T00:00:00+00:00"
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys"]


def test_successor_takes_over_the_limits_and_the_former_key_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n")
    file.chmod(0o640)
    first = added(file, "alice", "--tokens-per-second", "2.5")
    second = added(file, "alice")
    assert [key.limits for key in read_keys(file.read_text())] == [{"tokens_per_second": "2.5"}] * 2
    gone = keys("remove", "alice", "--file", str(file), "--digest", digest_of(first).hex()[:12])
    assert gone.exit_code == 0
    assert [key.digest for key in read_keys(file.read_text())] == [digest_of(second)]
    assert file.read_text().startswith("# ours\n")
    assert oct(file.stat().st_mode & 0o777) == "0o640"
    assert keys("remove", "bob", "--file", str(file)).exit_code == 1


def test_large_limits_are_kept_whole(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    added(file, "alice", "--burst-tokens", "12345678", "--tokens-per-second", "1234567.5")
    (kept,) = read_keys(file.read_text())
    assert kept.limits == {"burst_tokens": "12345678", "tokens_per_second": "1234567.5"}


def test_existing_key_is_not_printed(tmp_path: Path) -> None:
    file, secret = tmp_path / "keys", "an-existing-key-of-ours"
    result = keys("add", "alice", "--file", str(file), "--api-key-file", "-", stdin=f"{secret}\n")
    assert result.exit_code == 0
    assert secret not in result.output
    assert read_keys(file.read_text())[0].digest == digest_of(secret)
    short = keys("add", "bob", "--file", str(file), "--api-key-file", "-", stdin="short")
    assert (short.exit_code, "at least 20 characters" in short.output) == (2, True)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("al ice", (), "must begin with a name"),
        ("anonymous", (), "has the name anonymous"),
        ("alice", ("--max-items", "0"), "has a wrong max_items"),
        ("alice", ("--expires", "soon"), "has a wrong expires"),
    ],
)
def test_wrong_key_changes_nothing(
    tmp_path: Path, name: str, options: tuple[str, ...], problem: str
) -> None:
    file = tmp_path / "keys"
    result = keys("add", name, "--file", str(file), *options)
    assert (result.exit_code, problem in result.output) == (2, True), result.output
    assert not file.exists()


def test_broken_file_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalice\n")
    for command in (("list",), ("add", "bob"), ("remove", "bob")):
        result = keys(*command, "--file", str(file))
        assert result.exit_code == 2
        assert f"{file}: line 2 must have `sha256:`" in result.output
    assert file.read_text() == "# ours\nalice\n"


def test_no_process_of_a_stack_has_the_key_of_a_client(tmp_path: Path) -> None:
    """Neither in arguments nor in variables, and commands take it from a file or a variable."""
    file, secret = tmp_path / "keys", tmp_path / "alice.key"
    key = added(file, "alice")
    secret.write_text(f"{key}\n")
    env = {"TRTMESH_ROUTER_API_KEYS_FILE": str(file), "TRTMESH_API_KEY": key}
    with running_stack("--backend", "simulated", env={**env, EXECUTED: "yes"}) as stack:
        router = stack.wait_ready()
        services = [(each.cmdline(), each.environ()) for each in stack.descendants()]
        # The other variable reaches them all.
        assert {each["TRTMESH_ROUTER_API_KEYS_FILE"] for _, each in services} == {str(file)}
        for words, variables in services:
            assert key not in " ".join((*words, *variables.values()))
        ask = ("generate", "--router", router, "--max-tokens", "2", "x")
        assert trtmesh(*ask, "--api-key-file", str(secret)).returncode == 0
        assert trtmesh(*ask, env={"TRTMESH_API_KEY": key}).returncode == 0
        refused = trtmesh(*ask)
        assert refused.returncode == 1
        assert "with --api-key-file" in refused.stderr
        infer = ("triton", "infer", "--url", router, "--max-tokens", "2", "x")
        assert trtmesh(*infer, "--api-key-file", str(secret)).returncode == 0
        refused = trtmesh(*infer)
        assert (refused.returncode, "with --api-key-file" in refused.stderr) == (1, True)
    assert key not in "".join((*stack.out, *stack.err))


def test_limits_of_a_name_change_and_its_keys_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    options = ("--max-items", "8", "--max-priority", "3", "--expires", "2031-01-31")
    first = added(file, "alice", *options)
    second, bob = added(file, "alice"), added(file, "bob", "--max-items", "1")
    changed = keys(
        *("limit", "alice", "--file", str(file), "--max-items", "9", "--burst-tokens", "5"),
        *("--unset", "max_priority"),
    )
    assert changed.exit_code == 0, changed.output
    kept = read_keys(file.read_text())
    assert [key.digest for key in kept] == [*map(digest_of, (first, second, bob))]
    assert [key.limits for key in kept] == [
        *[{"max_items": "9", "burst_tokens": "5"}] * 2,
        {"max_items": "1"},
    ]
    assert [key.expires is None for key in kept] == [False, True, True]
    before = file.read_text()
    for words, status in (
        (("alice", "--max-items", "-1"), 2),
        (("alice", "--unset", "colour"), 2),
        (("carol", "--max-items", "2"), 1),
    ):
        assert keys("limit", *words, "--file", str(file)).exit_code == status
        assert file.read_text() == before
