"""The command line client of Triton's models against simulated engines."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from cli.commands import live_requests, running, trtmesh, until_idle

LONG = ("--max-tokens", "30000", "--input", "end_id=-1")


def texts(router: str, *arguments: str) -> list[str]:
    """The lines of a successful command."""
    result = trtmesh("triton", "infer", "--url", router, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def native(router: str, prompt: str, tokens: int) -> str:
    flags = ("--router", router, "--max-tokens", str(tokens), "--json")
    events = map(json.loads, trtmesh("generate", *flags, prompt).stdout.splitlines())
    return "".join(event["text"] for event in events if event["event"] == "tokens")


def native_ids(router: str, prompt: str, tokens: int) -> list[int]:
    flags = ("--router", router, "--max-tokens", str(tokens), "--json")
    events = map(json.loads, trtmesh("generate", *flags, prompt).stdout.splitlines())
    return [each for e in events if e["event"] == "tokens" for each in e["token_ids"]]


def test_single_prompt_is_bare_text(router: str) -> None:
    whole = "\n".join(texts(router, "--max-tokens", "8", "one"))
    assert whole == native(router, "one", 8)
    assert "\n".join(texts(router, "--max-tokens", "8", "--no-stream", "one")) == "one" + whole


@pytest.mark.parametrize("batch", [(), ("--batch",)])
def test_lines_of_several_prompts_have_numbers(router: str, batch: tuple[str, ...]) -> None:
    lines = texts(router, "--max-tokens", "8", *batch, "one", "two")
    assert sorted(lines) == [f"[{i}] {native(router, p, 8)}" for i, p in enumerate(("one", "two"))]


def test_token_ids(router: str) -> None:
    lines = texts(router, "--ids", "5 6,7", "--max-tokens", "4")
    assert [line.split(":")[0] for line in lines] == [
        "output_ids [1, 1, 4]",
        "sequence_length [1, 1]",
    ]
    many = texts(router, "--ids", "5 6 7", "--ids", "8", "--max-tokens", "4", "--batch")
    assert f"[0] {lines[0]}" in many
    assert f"[1] {lines[0]}" not in many
    assert len(many) == 4


def test_json_lines(router: str) -> None:
    lines = [json.loads(line) for line in texts(router, "--max-tokens", "4", "--json", "one")]
    assert {line["event"] for line in lines} == {"response"}
    assert [line["final"] for line in lines] == [False] * (len(lines) - 1) + [True]
    text = "".join(line["outputs"]["text_output"]["data"][0] for line in lines)
    assert text == native(router, "one", 4)


def test_stop_word_ends_the_text(router: str) -> None:
    whole = native(router, "one", 20)
    word = whole[8:12]
    stopped = "\n".join(texts(router, "--max-tokens", "20", "--stop-word", word, "one"))
    assert stopped == whole[: whole.index(word) + len(word)]


def test_stop_keeps_the_output(router: str, admin: str) -> None:
    """The whole output would take minutes; the received part depends on the machine."""
    flags = (*LONG, "--stop-after-ms", "300", "--model", "tensorrt_llm_bls")
    text, whole = "\n".join(texts(router, *flags, "one")), native(router, "one", 40)
    assert text[: len(whole)] == whole[: len(text)]
    until_idle(admin)


def test_stopping_several_requests_of_ids(router: str, admin: str) -> None:
    flags = ("--ids", "5", "--ids", "6", "--stop-after-ms", "200")
    told = {line.split(" [")[0] for line in texts(router, *LONG, *flags)}
    names = ("output_ids", "sequence_length")
    assert told <= {f"[{request}] {name}" for request in (0, 1) for name in names}
    until_idle(admin)


def test_finished_request_is_not_stopped(router: str) -> None:
    assert texts(router, "--max-tokens", "2", "--stop-after-ms", "600000", "one")


def test_ctrl_c_ends_the_request(router: str, admin: str) -> None:
    with running("triton", "infer", "--url", router, "--json", *LONG, "one") as command:
        command.wait_for('"response"')
        assert live_requests(admin) == 1
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        assert "Traceback" not in "".join(command.err)
    until_idle(admin)


def test_texts_for_a_model_of_ids_are_encoded_by_the_server(router: str) -> None:
    flags = ("--model", "tensorrt_llm", "--max-tokens", "4", "--no-stream", "--exclude-input")
    told = map(json.loads, texts(router, *flags, "--json", "one", "three words long"))
    rows = {line["request"]: line["outputs"]["output_ids"]["data"][0] for line in told}
    assert rows == {
        i: [native_ids(router, p, 4)] for i, p in enumerate(("one", "three words long"))
    }


def test_saved_outputs_are_as_expected_in_every_mode(router: str, tmp_path: Path) -> None:
    for name, model in (("a.json", "ensemble"), ("a.csv", "tensorrt_llm")):
        flags = ("--model", model, "--max-tokens", "8", "one", "two")
        file = str(tmp_path / name)
        texts(router, *flags, "--save-output", file)
        for mode in (("--stream",), ("--no-stream",), ("--batch",), ("--json",)):
            texts(router, *flags, *mode, "--check-output", file)


def test_other_outputs_than_expected_fail(router: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.csv"
    ids = native_ids(router, "one", 8)
    file.write_text(",".join(map(str, [*ids[:7], ids[7] + 1])) + "\n")
    flags = ("triton", "infer", "--url", router, "--max-tokens", "8", "--check-output", str(file))
    for match, status in (("1", 1), ("0.875", 0), ("0.9", 1)):
        result = trtmesh(*flags, "--model", "tensorrt_llm", "--match", match, "one")
        assert result.returncode == status, result.stderr
    assert "output 0 matches by 0.875" in result.stderr
    assert trtmesh(*flags, "one").returncode == 1


def test_requested_outputs_come_alone(router: str) -> None:
    flags = ("--model", "tensorrt_llm", "--max-tokens", "4", "--json", "one")
    asked = ("--requested-outputs", "output_ids,sequence_length")
    for line in texts(router, *flags, *asked):
        assert set(json.loads(line)["outputs"]) <= {"output_ids", "sequence_length"}


def test_missing_requested_output_fails(router: str) -> None:
    flags = ("--requested-outputs", "text_output, batch_index", "--max-tokens", "4", "one")
    result = trtmesh("triton", "infer", "--url", router, *flags)
    assert result.returncode == 1
    assert "batch_index, text_output were requested, but text_output came" in result.stderr


def test_cancelled_call_keeps_the_output(router: str, admin: str) -> None:
    flags = (*LONG, "--stop-after-ms", "300", "--stop-via-request-cancel")
    text, whole = "\n".join(texts(router, *flags, "one")), native(router, "one", 40)
    assert text[: len(whole)] == whole[: len(text)]
    until_idle(admin)


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_requests_may_be_compressed(router: str, compression: str) -> None:
    lines = texts(router, "--compression", compression, "--max-tokens", "8", "one")
    assert "\n".join(lines) == native(router, "one", 8)


def test_failed_request_leaves_the_others(router: str) -> None:
    result = trtmesh("triton", "infer", "--url", router, "--max-tokens", "4", "one", "")
    assert result.returncode == 1
    assert result.stdout.startswith("[0] ")
    assert "error: [1]" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        ((), 2, "give prompts"),
        (("--ids", "a"), 2, "must be numbers"),
        (("--stop-via-request-cancel", "one"), 2, "--stop-after-ms"),
        (("--check-output", "/nowhere.csv", "one"), 2, "/nowhere.csv"),
        (("--root-certificates", "/nowhere.pem", "one"), 2, "/nowhere.pem"),
        (("--prompt-table-id", "7", "--vocab-size", "9", "one"), 2, "needs token ids"),
        (("--input", "x", "one"), 2, "must be NAME=JSON"),
        (("--input", "top_k=[", "one"), 2, "--input top_k"),
        (("--input", "nothing=1", "one"), 2, "has no input for nothing"),
        (("--input", 'top_k="a"', "one"), 2, "cannot be sent as INT32"),
        (("--model", "preprocessing", "one"), 2, "takes texts"),
        (("--model", "tensorrt_llm", "--preprocessing", "no", "one"), 1, "unknown model: 'no'"),
        (("--ids", "5", "--model", "ensemble"), 2, "takes texts"),
        (("--model", "nothing", "one"), 1, "Request for unknown model: 'nothing' is not found"),
        (("--log-probs", "one"), 1, "return_log_probs not supported"),
        (("--url", "127.0.0.1:1", "one"), 1, "--url names another"),
    ],
)
def test_mistakes_are_reported(
    router: str, arguments: tuple[str, ...], status: int, complaint: str
) -> None:
    result = trtmesh("triton", "infer", *arguments, env={"TRTMESH_ROUTER": router})
    assert result.returncode == status, result.stderr
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_deadline_ends_the_requests(router: str) -> None:
    """Either side may notice the deadline first, with different sentences."""
    result = trtmesh("triton", "infer", "--url", router, "--timeout", "0.3", *LONG, "one")
    assert result.returncode == 1
    assert "deadline" in result.stderr.lower()
    assert "Traceback" not in result.stderr


def test_equal_sequences_are_announced(router: str) -> None:
    flags = ("--url", router, "--max-tokens", "2", "--sequences", "2")
    for more, equal in (((), True), (("--temperature", "0.8"), True), (("--top-k", "9"), False)):
        result = trtmesh("triton", "infer", *flags, *more, "one")
        assert result.returncode == 0, result.stderr
        assert ("sequences are equal" in result.stderr) == equal
