from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from cli.commands import (
    TRTMESH,
    read_until_closed,
    running,
    start_command,
    trtmesh,
    until_idle,
)
from trtmesh.cli.guides import GuideOptions
from trtmesh.client import GuideType


def test_lines_of_several_prompts_have_tags(router: str) -> None:
    result = trtmesh("generate", "--router", router, "--max-tokens", "8", "one", "two", "three")
    assert result.returncode == 0, result.stderr
    assert {line.split(" ")[0] for line in result.stdout.splitlines()} == {"[0]", "[1]", "[2]"}
    assert result.stderr.count("8 new") == 3
    assert "\x1b" not in result.stdout


def test_single_prompt_is_bare_text(router: str) -> None:
    result = trtmesh("generate", "--router", router, "--max-tokens", "8", "one")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert not result.stdout.startswith("[0]")


def test_terminal_shows_a_tagged_region_per_prompt(router: str) -> None:
    command = ("generate", "--router", router, "--max-tokens", "8", "one", "two")
    leader, follower = pty.openpty()
    with start_command(*command, env=os.environ, stdout=follower) as process:
        os.close(follower)
        shown = read_until_closed(leader)
    assert process.returncode == 0
    assert "\x1b[" in shown
    assert "[0] ended: length" in shown
    assert "[1] ended: length" in shown


def test_json_lines_tell_the_whole_story(router: str) -> None:
    flags = ("--json", "--max-tokens", "4", "--request-id", "story", "--seed", "7")
    result = trtmesh("generate", "--router", router, *flags, "one", "two")
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert (events[0]["event"], events[0]["request_id"]) == ("accepted", "story")
    for batch_index in (0, 1):
        own = [e for e in events[1:] if e["batch_index"] == batch_index]
        kinds = [e["event"] for e in own]
        assert (kinds[0], kinds[-2:]) == (
            "item_started", ["sequence_finished", "item_finished"],
        )  # fmt: skip
        assert own[0]["seed"] == 7
        token_ids = [i for e in own if e["event"] == "tokens" for i in e["token_ids"]]
        assert len(token_ids) == own[-1]["usage"]["generated_tokens"] == 4
        assert own[-1]["reason"] == "length"


@pytest.mark.parametrize(("flags", "items"), [((), 1), (("--lines",), 2)])
def test_prompts_come_from_standard_input(router: str, flags: tuple[str, ...], items: int) -> None:
    flags = (*flags, "--router", router, "--max-tokens", "2", "--json")
    result = trtmesh("generate", *flags, "-", stdin="one\n\ntwo\n")
    assert result.returncode == 0, result.stderr
    events = map(json.loads, result.stdout.splitlines())
    assert sum(event["event"] == "item_finished" for event in events) == items


def test_sampling_and_log_probs_are_options(router: str) -> None:
    """Each reaches the worker, which refuses a value outside its limits by the field's name."""
    for option, field in (
        ("--min-p", "sampling.min_p"),
        ("--repetition-penalty", "sampling.repetition_penalty"),
        ("--presence-penalty", "sampling.presence_penalty"),
        ("--frequency-penalty", "sampling.frequency_penalty"),
    ):
        refused = trtmesh("generate", "--router", router, option, "-1e9", "one")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert field in refused.stderr
    refused = trtmesh("generate", "--router", router, "--log-probs", "one")
    assert "output.log_probs" in refused.stderr


def test_guide_is_an_option(router: str, tmp_path: Path) -> None:
    """It reaches the worker, which has no model and refuses it."""
    file = tmp_path / "grammar"
    file.write_text('root ::= "a"')
    refused = trtmesh("generate", "--router", router, "--grammar", f"@{file}", "one")
    assert (refused.returncode, refused.stdout.strip()) == (1, "")
    assert "guided_decoding.guide" in refused.stderr
    wrong = trtmesh("generate", "--router", router, "--regex", "a", "--json-object", "one")
    assert wrong.returncode == 2
    assert "give one of --json-object" in wrong.stderr


@pytest.mark.parametrize(
    ("options", "kind", "guide"),
    [
        (GuideOptions(json_object=True), "JSON", ""),
        (GuideOptions(json_schema="{}"), "JSON_SCHEMA", "{}"),
        (GuideOptions(regex="@a+"), "REGEX", "@a+"),
        (GuideOptions(grammar="start: /a/"), "EBNF_GRAMMAR", "start: /a/"),
        (GuideOptions(choice=["a", "b"]), "CHOICE", '["a", "b"]'),
    ],
)
def test_guides_of_options(options: GuideOptions, kind: str, guide: str) -> None:
    message = options.message()
    assert message
    assert (message.guide_type, message.guide) == (GuideType.Value(f"GUIDE_TYPE_{kind}"), guide)


def test_router_address_comes_from_the_environment(router: str) -> None:
    env = {"TRTMESH_ROUTER": router}
    assert trtmesh("generate", "--max-tokens", "2", "one", env=env).returncode == 0


def test_stop_after_keeps_the_output(router: str) -> None:
    flags = ("--router", router, "--max-tokens", "20000", "--stop-after-ms", "300", "--json")
    result = trtmesh("generate", *flags, "one", "two")
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    ends = [event for event in events if event["event"] == "item_finished"]
    assert [end["reason"] for end in ends] == ["stopped", "stopped"]
    for end in ends:
        own = [e for e in events[1:] if e["batch_index"] == end["batch_index"]]
        came = sum(len(e["token_ids"]) for e in own if e["event"] == "tokens")
        assert came == end["usage"]["generated_tokens"] < 20000


def test_interrupt_exits_with_130_and_stops_the_request(router: str, admin: str) -> None:
    arguments = ("--router", router, "--max-tokens", "20000", "--request-id", "cut-off", "--json")
    with running("generate", *arguments, "one") as command:
        command.wait_for('"tokens"')
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        assert "Traceback" not in "".join(command.err)
    until_idle(admin)


def test_refused_request_is_one_line_and_status_1(router: str) -> None:
    result = trtmesh("generate", "--router", router, "--temperature", "-1", "one")
    assert result.returncode == 1
    assert result.stdout.strip() == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("trtmesh: error: INVALID_FIELD: ")
    assert "temperature" in line


def test_failed_item_is_status_1_and_siblings_complete(router: str) -> None:
    """Only the second prompt exceeds the model's length."""
    flags = ("--router", router, "--max-tokens", "4", "--json", "--lines")
    result = trtmesh("generate", *flags, "-", stdin="one\n" + "word " * 60000 + "\n")
    assert result.returncode == 1
    events = [json.loads(line) for line in result.stdout.splitlines()]
    ends = {e["batch_index"]: e for e in events if e["event"] in ("item_finished", "item_failed")}
    assert ends[0]["event"] == "item_finished"
    assert ends[1]["error"]["reason"] == "PROMPT_TOO_LONG"


@pytest.mark.parametrize("flags", [("\udcff",), ("--request-id", "\udcff", "a")])
def test_invalid_utf_8_of_an_argument_is_one_line(flags: tuple[str, ...]) -> None:
    result = trtmesh("generate", "--router", "127.0.0.1:1", *flags)
    assert result.returncode in (1, 2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("trtmesh: error: INVALID_FIELD: ")


def test_invalid_utf_8_of_standard_input_is_one_line() -> None:
    command = [TRTMESH, "generate", "--router", "127.0.0.1:1", "-"]
    env = {**os.environ, "PYTHONUTF8": "1"}
    result = subprocess.run(command, input=b"\xff\n", capture_output=True, env=env, check=False)
    assert result.returncode in (1, 2)
    (line,) = result.stderr.splitlines()
    assert line.startswith(b"trtmesh: error: INVALID_FIELD: ")


def test_no_router_is_said_in_one_line() -> None:
    result = trtmesh("generate", "--router", "127.0.0.1:1", "one")
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert "127.0.0.1:1" in line
    assert "trtmesh up" in line


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--max-tokens", "many", "one"),
        ("--max-tokens", "-5", "one"),
        ("--generation-config", "{", "one"),
        ("--generation-config", '{"nonsense": 1}', "one"),
        ("--nonsense", "one"),
        ("-",),
        ("@/nowhere/prompt.txt",),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    assert trtmesh("generate", *arguments).returncode == 2


@pytest.mark.parametrize("command", [("generate",), ("triton", "infer")])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "-1"),
        ("--max-tokens", "0"),
        ("--seed", "-1"),
        ("--beam-width", "0"),
    ],
)
def test_number_outside_its_range_names_the_option(
    command: tuple[str, ...], option: str, value: str
) -> None:
    result = trtmesh(*command, option, value, "one")
    assert result.returncode == 2
    assert option in result.stderr


def test_closed_pipe_prints_no_traceback(router: str) -> None:
    command = f"{TRTMESH} generate --router {router} --max-tokens 20000 --json one | head -1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (1, "")
    assert json.loads(result.stdout)["event"] == "accepted"


@pytest.mark.parametrize(
    ("flags", "equal"),
    [
        (("--sequences", "3"), True),
        (("--sequences", "3", "--temperature", "0"), True),
        (("--sequences", "3", "--temperature", "0.8"), False),
        (("--sequences", "3", "--top-k", "1"), True),
        (("--sequences", "1"), False),
    ],
)
def test_equal_sequences_are_announced(router: str, flags: tuple[str, ...], equal: bool) -> None:
    result = trtmesh("generate", "--router", router, "--max-tokens", "2", *flags, "one")
    assert result.returncode == 0, result.stderr
    assert ("sequences are equal" in result.stderr) == equal
    assert "sequences are equal" not in result.stdout
