from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

from cli.commands import FREE_PORTS, running, trtmesh

SIMULATED = ("--backend", "simulated", *FREE_PORTS)


def test_demo_streams_three_tagged_prompts_and_exits() -> None:
    with running("demo", "--exit", *SIMULATED) as demo:
        demo.wait_for("three prompts in one request")
        assert demo.wait() == 0
        assert demo.left_nothing()
        tags = {line.split(" ")[0] for line in demo.out if line.startswith("[")}
        assert tags == {"[0]", "[1]", "[2]"}
        assert sum("ended: length" in line for line in demo.err) == 3


def test_demo_serves_until_ctrl_c() -> None:
    with running("demo", *SIMULATED) as demo:
        hint = demo.wait_for("cli/__main__.py generate --router")
        router = hint.split("--router ")[1].split()[0]
        result = trtmesh("generate", "--router", router, "--max-tokens", "2", "hi")
        assert result.returncode == 0, result.stderr
        assert len(demo.descendants()) == 3
        demo.wait_for("asyncio.run(main())")
        printed = "".join(demo.out).partition("From Python")[2].partition("\n")[2]
        program = [sys.executable, "-c", textwrap.dedent(printed)]
        subprocess.run(program, check=True, capture_output=True)
        demo.signal(signal.SIGINT)
        assert demo.wait() == 0
        assert demo.left_nothing()


def test_options_of_up_are_taken() -> None:
    result = trtmesh("demo", "--exit", "--engines", "0")
    assert result.returncode == 2
    assert "--engines" in result.stderr
