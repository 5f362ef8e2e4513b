"""Documented commands and programs work."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli.commands import Stack, loaded, run_program, running_stack, trtmesh
from e2e.mesh import DEMO
from trtmesh.chassis.settings import load_settings
from trtmesh.cli.app import app
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.tokenizer.settings import TokenizerSettings

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    "README.md": 12,
    "docs/adapters.md": 8,
    "docs/advise.md": 4,
    "docs/bench.md": 3,
    "docs/build.md": 3,
    "docs/handoff.md": 5,
    "docs/keys.md": 5,
    "docs/openai.md": 1,
    "docs/operating.md": 15,
    "docs/parallel.md": 1,
    "docs/tls.md": 1,
    "docs/tracing.md": 1,
    "docs/triton.md": 9,
    "deploy/README.md": 4,
}
"""Least number of commands per page."""


def commands_of(page: str) -> list[str]:
    """Arguments of `trtmesh` in the page's code blocks, after an optional path and variables, without a file for the
    output."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    typed = "".join(block for language, block in blocks if not language)
    found = re.findall(r"^(?:\w+=\S+ |\S+/)*trtmesh (.*)", typed, re.MULTILINE)
    return [re.sub(r" > \S+$", "", line) for line in found]


@pytest.mark.parametrize(("page", "least"), PAGES.items())
def test_pages_have_commands(page: str, least: int) -> None:
    assert len(commands_of(page)) >= least


@pytest.mark.parametrize("line", [line for page in PAGES for line in commands_of(page)])
def test_documented_command_line_parses(line: str) -> None:
    """Parses a command line without running the command; raises for unknown options."""
    words = shlex.split(line, comments=True)
    if words == ["--install-completion"]:
        assert words[0] in options_of(typer.main.get_command(app))
        return
    command, words, context = resolved(words)
    assert command.make_context(command.name, words, parent=context).params


def resolved(words: list[str]) -> tuple[Any, list[str], Any]:
    """The command that words name, its arguments and the context of its group."""
    # Any: by version, typer has an own click or uses the installed one.
    command: Any = typer.main.get_command(app)
    context: Any = None
    while hasattr(command, "resolve_command"):
        context = command.context_class(command, info_name=command.name, parent=context)
        _, command, words = command.resolve_command(context, words)
        command = loaded(command)
    return command, words, context


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("page", PAGES)
def test_options_of_commands_within_sentences_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (REPOSITORY / page).read_text("utf-8"), flags=re.DOTALL)
    for line in re.findall(r"`trtmesh (\w[^`]* --[^`]*)`", text):
        command, words, _ = resolved(line.split())
        given = {word for word in words if word.startswith("--")}
        assert given <= options_of(command) | {"--help"}, line


SETTINGS = {each.section: each for each in (EngineSettings, RouterSettings, TokenizerSettings)}
SERVICE_PAGES = ("README.md", *(f"services/{name}/README.md" for name in SETTINGS))


@pytest.mark.parametrize("page", SERVICE_PAGES)
def test_documented_flags_of_services_are_settings(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8").replace("\\\n", "")
    lines = re.findall(r"^\W*python -m trtmesh\.(\w+) (--.*)", text, re.MULTILINE)
    assert lines
    for service, flags in lines:
        words = shlex.split(flags, comments=True)
        assert load_settings(SETTINGS[service], words, {}).section == service


@pytest.fixture(scope="module")
def simulated() -> Iterator[Stack]:
    """A stack with the demo model's tokenizer and adapters."""
    slots = {"TRTMESH_ENGINE_SIMULATED_ADAPTERS_SLOTS": "4"}
    with running_stack("--port", "0", "--model", str(DEMO), env=slots) as stack:
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The demo model, computed as the page says."""
    with running_stack("--port", "0", "--backend", "torch", "--model", str(DEMO)) as stack:
        stack.wait_ready()
        yield stack


@pytest.mark.parametrize(
    "program",
    [
        program
        for page in ("README.md", "docs/operating.md", "docs/tracing.md")
        for program in re.findall(
            r"```python\n(.*?)```", (REPOSITORY / page).read_text("utf-8"), re.DOTALL
        )
    ],
)
def test_documented_program_runs(simulated: Stack, program: str, tmp_path: Path) -> None:
    """The program with the stack's ports."""
    own = program.replace("127.0.0.1:8001", simulated.wait_ready())
    own = own.replace("127.0.0.1:8003", simulated.admin)
    assert own != program
    result = run_program(own, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


def test_log_probabilities_are_printed(stack: Stack) -> None:
    """The sum of a sequence at its end; with --json those of its tokens."""
    penalties = ("--presence-penalty", "0.5", "--frequency-penalty", "-0.5", "--min-p", "0.1")
    ask = (
        "generate",
        "--router",
        stack.wait_ready(),
        "--max-tokens",
        "3",
        *penalties,
        "--log-probs",
    )
    found = re.search(
        r"3 new, log-probability (-\d+\.\d{4})$", trtmesh(*ask, "x = ").stderr.strip()
    )
    assert found
    told = trtmesh(*ask, "--seed", "3", "--json", "x = ").stdout
    events = [json.loads(line) for line in told.splitlines()]
    probs = [p for e in events if e["event"] == "tokens" for p in e["details"]["log_probs"]]
    (end,) = [e["cumulative_log_prob"] for e in events if e["event"] == "sequence_finished"]
    assert len(probs) == 3
    assert sum(probs) == pytest.approx(end)


def test_documented_adapters_change_the_text(
    simulated: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the README's section, one after the other."""
    monkeypatch.chdir(REPOSITORY)
    text = (REPOSITORY / "README.md").read_text("utf-8")
    section = text.partition("## LoRA adapters\n")[2].partition("\n## ")[0]
    env = {"TRTMESH_ROUTER": simulated.wait_ready(), "TRTMESH_ADMIN": simulated.admin}
    told: list[str] = []
    for line in re.findall(r"^trtmesh (.*)", section, re.MULTILINE):
        result = trtmesh(*shlex.split(line, comments=True), env=env)
        assert result.returncode == 0, f"{line}: {result.stderr}"
        told.append(result.stdout)
    assert len(told) == 7
    assert all(told)
    assert len(set(told[:3])) == 3


@pytest.mark.parametrize(
    "line", [line for line in commands_of("docs/triton.md") if line.startswith("triton infer ")]
)
def test_documented_request_is_answered(
    stack: Stack, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    result = trtmesh(*words, env={"TRTMESH_ROUTER": stack.wait_ready()})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip()
    if "--generation-logits" in words:
        assert re.search(r"^generation_logits \[1, 2, \d+, \d+\]", result.stdout, re.MULTILINE)
