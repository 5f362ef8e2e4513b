"""`trtmesh chat` as a program would use it: lines in, answers out."""

from __future__ import annotations

from cli.commands import trtmesh

FLAGS = ("--max-tokens", "6", "--temperature", "0.8", "--seed", "3")


def chat(router: str, *lines: str, flags: tuple[str, ...] = FLAGS) -> tuple[int, str, str]:
    result = trtmesh(
        "chat", "--router", router, *flags, stdin="".join(f"{line}\n" for line in lines)
    )
    return result.returncode, result.stdout, result.stderr


def test_model_sees_what_was_said(router: str) -> None:
    status, first, problem = chat(router, "Hello")
    assert (status, problem) == (0, "")
    assert first.endswith("\n")
    _, both, _ = chat(router, "Hello", "Go on")
    assert both.startswith(first)
    _, anew, _ = chat(router, "Hello", "/new", "Go on", "/quit", "never read")
    assert anew.startswith(first)
    assert anew != both
    _, alone, _ = chat(router, "Go on")
    assert anew == first + alone


def test_problem_is_told_and_the_talk_goes_on(router: str) -> None:
    status, out, problem = chat(router, "/model nope", "Hello", "/model demo", "/what", "Hello")
    assert status == 0
    assert "MODEL_NOT_FOUND" in problem
    assert "no command /what" in problem
    assert out == chat(router, "Hello")[1]
    assert chat(router, "/model nope", "Hello")[0] == 1


def test_answer_is_stopped(router: str) -> None:
    endless = ("--max-tokens", "8000", "--end-id", "5")
    status, out, problem = chat(router, "Hello", "/stop", flags=endless)
    assert (status, problem) == (0, "")
    assert len(out) < 20_000
