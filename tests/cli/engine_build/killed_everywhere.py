"""Kills a build at its first change of a file, another STRIDE changes later, and so on until one ends by itself.

Each build starts with the finished build of an older plan in `old/`, and is resumed after the kill. Prints a line of
JSON for each: the change, the results after the kill, and those after the resumed build. Forks save the imports.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path

from cli.engine_build.building import Workshop
from trtmesh.cli.app import COMMANDS, app

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "subprocess.Popen")


def build(kill_at: int) -> int:
    """The status of a build that is killed at a change of a file; 0 kills none."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = kill_at

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and str(arguments[1])[:1] in "wax"
        if event in CHANGES or writes:
            left -= 1
            if not left:
                Path("killed").write_text(f"{event} {arguments[0]}")
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    sys.stdout = Path("output").open("w")  # noqa: SIM115 - open until the end of the process
    try:
        app(["build", "plan.yaml"])
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(0)


def main() -> None:
    for command in COMMANDS:
        import_module(command.module)
    workshop = Workshop(Path.cwd())
    stride = int(sys.argv[1])
    number, status = 1 - stride, -signal.SIGKILL
    while status == -signal.SIGKILL:
        number += stride
        shutil.rmtree("out", ignore_errors=True)
        shutil.copytree("old", "out")
        status = build(number)
        killed = workshop.results()
        line = [Path("killed").read_text(), status, killed, build(0), workshop.results()]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
