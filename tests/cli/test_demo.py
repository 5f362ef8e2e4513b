from __future__ import annotations

import signal
import textwrap
from pathlib import Path

from cli.commands import FREE_PORTS, run_program, running, trtmesh

SIMULATED = ("--backend", "simulated", *FREE_PORTS)


def test_demo_streams_three_tagged_prompts_and_exits() -> None:
    with running("demo", "--exit", *SIMULATED) as demo:
        demo.wait_for("three prompts in one request")
        assert demo.wait() == 0
        assert demo.left_nothing()
        tags = {line.split(" ")[0] for line in demo.out if line.startswith("[")}
        assert tags == {"[0]", "[1]", "[2]"}
        assert sum("ended: length" in line for line in demo.err) == 3


def test_demo_serves_until_ctrl_c(tmp_path: Path) -> None:
    with running("demo", *SIMULATED) as demo:
        hint = demo.wait_for("cli/__main__.py generate --router")
        router = hint.split("--router ")[1].split()[0]
        result = trtmesh("generate", "--router", router, "--max-tokens", "2", "hi")
        assert result.returncode == 0, result.stderr
        assert len(demo.descendants()) == 3
        demo.wait_for("asyncio.run(main())")
        printed = "".join(demo.out).partition("From Python")[2].partition("\n")[2]
        told = run_program(textwrap.dedent(printed), tmp_path)
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout
        demo.signal(signal.SIGINT)
        assert demo.wait() == 0
        assert demo.left_nothing()


def test_options_of_up_are_taken() -> None:
    result = trtmesh("demo", "--exit", "--engines", "0")
    assert result.returncode == 2
    assert "--engines" in result.stderr
