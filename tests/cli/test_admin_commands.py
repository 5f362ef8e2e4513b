"""Operators' commands against a running stack."""

from __future__ import annotations

import json
import os
import pty
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from cli.commands import (
    STOP_SECONDS,
    Stack,
    read_until_closed,
    run_program,
    running,
    running_stack,
    start_command,
    trtmesh,
    until_idle,
)
from processes import service_process

WIDE = {"COLUMNS": "200"}
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


PATIENT = """
import sys
from trtmesh.cli import completion
from trtmesh.cli.main import main
completion.PATIENCE_SECONDS = 60.0
sys.argv = ["trtmesh"]
main()
"""
"""The command, with unlimited time for the completion of names."""


def as_objects(text: str) -> list[dict[str, Any]]:
    """Standard output of `--json`: one object a line."""
    return [json.loads(line) for line in text.splitlines()]


@contextmanager
def live_request(router: str, name: str) -> Iterator[None]:
    """A long request of two items with two sequences each; the client has tokens of all four."""
    arguments = ("--router", router, "--request-id", name, "--max-tokens", "30000", "--json")
    with running("generate", *arguments, "--sequences", "2", "one", "two") as client:
        for item, sequence in ((0, 0), (0, 1), (1, 0), (1, 1)):
            of = f'"batch_index": {item}, "sequence_index": {sequence}'
            client.wait_for(f'{{"event": "tokens", {of},')
        yield
        client.signal(signal.SIGINT)
        client.wait()


def test_workers_are_listed(stack: Stack, admin: str) -> None:
    result = trtmesh("workers", "list", "--admin", admin, env=WIDE)
    assert result.returncode == 0, result.stderr
    for name in ("engine-0", "engine-1"):
        assert stack.child(name)["address"] in result.stdout
    result = trtmesh("workers", "list", "--json", env={"TRTMESH_ADMIN": admin})
    workers = as_objects(result.stdout)
    assert {worker["worker"] for worker in workers} == {"engine-0", "engine-1"}
    assert {worker["state"] for worker in workers} == {"WORKER_STATE_READY"}


def test_request_is_listed_shown_explained_and_stopped(router: str, admin: str) -> None:
    with live_request(router, "shown"):
        listed = trtmesh("requests", "list", "--admin", admin, env=WIDE)
        assert listed.returncode == 0, listed.stderr
        assert "2 generate" in next(line for line in listed.stdout.splitlines() if "shown" in line)
        (told,) = as_objects(trtmesh("requests", "list", "--admin", admin, "--json").stdout)
        assert (told["request_id"], told["model"], len(told["items"])) == ("shown", "demo", 2)

        shown = trtmesh("requests", "show", "shown", "--admin", admin, env=WIDE)
        assert shown.stdout.startswith("request shown of anonymous, model demo, age ")
        assert shown.stdout.count("running") == 4
        (told,) = as_objects(
            trtmesh("requests", "show", "shown", "--admin", admin, "--json").stdout
        )
        for item in told["items"]:
            assert (item["stage"], len(item["sequences"])) == ("generate", 2)
            for sequence in item["sequences"]:
                assert sequence["worker"] == item["worker"]
                assert 0 < sequence["next_token_offset"] <= sequence["generated_tokens"]

        explained = trtmesh("explain", "shown", "--admin", admin, env=WIDE)
        assert explained.returncode == 0, explained.stderr
        assert "item 0 (first): " in explained.stdout
        assert "item 1 so far: " in explained.stdout

        item = trtmesh("requests", "stop", "shown", "--item", "1", "--admin", admin)
        assert (item.returncode, item.stdout) == (0, "stopped 1 items of request shown\n")
        (told,) = as_objects(
            trtmesh("requests", "stop", "shown", "--admin", admin, "--json").stdout
        )
        assert told["stopped_items"] in (
            1,
            2,
        )  # The worker may not have reported the end of the first yet.
    (told,) = as_objects(trtmesh("explain", "shown", "--admin", admin, "--json").stdout)
    assert [placement["batch_index"] for placement in told["placements"]] == [0, 1]
    assert {len(placement["candidates"]) for placement in told["placements"]} == {2}


def test_watch_prints_drain_resume_add_and_remove(router: str, admin: str) -> None:
    with running("workers", "watch", "--admin", admin, env=WIDE) as watch:
        watch.wait_for("2 workers")
        with live_request(router, "moving"):
            drained = trtmesh(
                "workers", "drain", "engine-1", "--finish-seconds", "0", "--admin", admin
            )
            assert drained.returncode == 0, drained.stderr
            watch.wait_for("draining")
            (told,) = as_objects(
                trtmesh("requests", "show", "moving", "--admin", admin, "--json").stdout
            )
            assert {s["worker"] for i in told["items"] for s in i["sequences"]} == {"engine-0"}
            by = trtmesh("workers", "drain", "engine-1", "--by", "1s", "--admin", admin)
            assert by.returncode == 0, by.stderr
            assert "sequences: 0 ended, 0 moved" in by.stdout
            soon = trtmesh("workers", "drain", "engine-1", "--by", "soon", "--admin", admin)
            assert soon.returncode == 2
            assert "no time such as 20s" in soon.stderr
        until_idle(admin)
        resumed = trtmesh("workers", "resume", "engine-1", "--admin", admin)
        planned = trtmesh("workers", "rebalance", "--dry-run", "--admin", admin)
        assert planned.stdout.splitlines()[-1] == "0 moves, planned"
        assert (resumed.returncode, resumed.stderr) == (0, "")
        assert (
            trtmesh("workers", "add", "127.0.0.1:1", "--wait", "0", "--admin", admin).returncode
            == 0
        )
        watch.wait_for("3 workers")
        assert trtmesh("workers", "remove", "127.0.0.1:1", "--admin", admin).returncode == 0
        # The router forgets a worker soon after its removal.
        watch.wait_until(lambda: "2 workers" in "".join(watch.out).rpartition("3 workers")[2], "2")
        again = trtmesh("workers", "remove", "127.0.0.1:1", "--admin", admin)
        assert again.returncode == 1
        assert "NOT_FOUND" in again.stderr
        watch.signal(signal.SIGINT)
        assert watch.wait() == 130


def test_unknown_request_is_not_found(admin: str) -> None:
    for command in (("requests", "show"), ("requests", "stop"), ("explain",)):
        result = trtmesh(*command, "nobody", "--admin", admin)
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith("trtmesh: error: NOT_FOUND: ")
        assert "'nobody'" in line


def test_policy_is_shown_and_changed(admin: str) -> None:
    (before,) = as_objects(trtmesh("policy", "get", "--admin", admin, "--json").stdout)
    changed = trtmesh("policy", "set", "round_robin", "--admin", admin)
    assert (changed.returncode, changed.stdout) == (
        0, f"policy round_robin, {before['policy']} until now\n",
    )  # fmt: skip
    assert "* round_robin\n" in trtmesh("policy", "get", "--admin", admin).stdout
    (told,) = as_objects(
        trtmesh("policy", "set", before["policy"], "--admin", admin, "--json").stdout
    )
    assert told == {"previous": "round_robin"}
    refused = trtmesh("policy", "set", "fastest", "--admin", admin)
    assert refused.returncode == 2
    assert "'fastest'" in refused.stderr
    assert "round_robin" in refused.stderr


def test_top_shows_workers_streams_and_rates(router: str, admin: str) -> None:
    with live_request(router, "watched"):
        flags = ("--admin", admin, "--interval", "0.3")
        with running("top", *flags, "--json") as top:

            def moving() -> dict[str, Any] | None:
                """The first sample with a new report of the worker and new tokens of the request."""
                for look in as_objects("".join(top.out[1:])):
                    rates = look["rates"]
                    (request,) = rates["requests"]
                    if rates["generated_tokens_per_second"] and request["tokens_per_second"]:
                        return look
                return None

            look = top.wait_until(moving, "rates above 0")
            assert json.loads(top.out[0])["rates"]["generated_tokens_per_second"] is None
        rates = look["rates"]
        assert {worker["worker"] for worker in rates["workers"]} == {"engine-0", "engine-1"}
        assert [request["request_id"] for request in rates["requests"]] == ["watched"]
        assert [request["request_id"] for request in look["requests"]] == ["watched"]
        pages = trtmesh("top", *flags, "--count", "2", env=WIDE)
        assert pages.returncode == 0, pages.stderr
        assert pages.stdout.count(f"router {admin}: policy") == 2
        assert {"engine-0", "engine-1", "watched"} <= set(pages.stdout.split())


def test_top_has_a_screen_of_its_own_in_a_terminal(admin: str) -> None:
    leader, follower = pty.openpty()
    command = ("top", "--admin", admin, "--interval", "3000")
    with start_command(*command, env=os.environ | WIDE, stdout=follower) as top:
        os.close(follower)
        try:
            shown = b""
            while b"engine-1" not in shown:
                shown += os.read(leader, 65536)
            top.send_signal(signal.SIGINT)
            shown += read_until_closed(leader).encode()
            assert top.stderr
            assert top.stderr.read() == ""
            top.wait(STOP_SECONDS)
        finally:
            top.kill()
    assert top.returncode == 130
    assert shown.index(ENTER_SCREEN) < shown.index(b"engine-1") < shown.index(LEAVE_SCREEN)


def test_ctrl_c_ends_top_with_130(admin: str) -> None:
    with running("top", "--admin", admin, "--interval", "3000", "--json") as command:
        command.wait_for('"rates"')
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.err == []


def test_client_address_as_admin_address_is_explained(router: str) -> None:
    result = trtmesh("workers", "list", "--admin", router)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert router in line
    assert "router.admin.port" in line


async def test_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("s3cret\n")
    wrong.write_text("other\n")
    flags = ("--port", "0", "--engines", "127.0.0.1:1", "--admin-token-file", str(right))
    async with service_process("router", *flags) as process:
        command = ("policy", "get", "--admin", process.admin_address)
        assert trtmesh(*command, "--token-file", str(right)).returncode == 0
        assert trtmesh(*command, env={"TRTMESH_ADMIN_TOKEN": "s3cret"}).returncode == 0
        for result in (trtmesh(*command), trtmesh(*command, "--token-file", str(wrong))):
            assert result.returncode == 1
            assert "UNAUTHENTICATED" in result.stderr
            assert "--token-file" in result.stderr
            assert "other" not in result.stderr
        result = trtmesh(*command, "--token-file", str(tmp_path / "none"))
        assert result.returncode == 2
        assert str(tmp_path / "none") in result.stderr


def test_shell_completes_commands_options_and_names(admin: str, tmp_path: Path) -> None:
    for words, expected in (
        ("trtmesh work", {"workers"}),
        (f"trtmesh workers drain --admin {admin} eng", {"engine-0", "engine-1"}),
        ("trtmesh policy set --admin 127.0.0.1:1 r", set()),
        ("trtmesh workers re", {"resume", "remove", "rebalance"}),
        ("trtmesh policy get --tok", {"--token-file"}),
    ):
        env = {
            "_TRTMESH_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        result = run_program(PATIENT, tmp_path, env)
        assert set(result.stdout.split()) == expected
        assert result.stderr == ""


def test_watches_come_back_after_a_router_was_lost() -> None:
    with running_stack("--port", "0") as stack:
        stack.wait_ready()
        router = psutil.Process(stack.child("router-0")["pid"])
        options = ("--json", "--admin", stack.admin)
        with (
            running("top", "--interval", "0.2", *options) as top,
            running("workers", "watch", *options) as workers,
            running("handoffs", "--watch", "--admin", stack.admin) as handoffs,
        ):
            watches = (top, workers, handoffs)
            for each in watches:
                each.wait_until(partial(getattr, each, "out"), "a first look")
            # It stays away until the last of them has looked.
            stack.signal(signal.SIGSTOP)
            router.kill()
            for each in watches:
                each.wait_for("the router is lost")
            stack.signal(signal.SIGCONT)
            for each in watches:
                each.wait_for("the router is back")
