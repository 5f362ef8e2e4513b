"""Runs a tool in a process group that ends with its parent: `python -m trtmesh.tools.engine_build.guard TOOL ...`.

It is started as the leader of its group. The parent keeps the other end of standard input open for as long as the tool
may run. Even a parent that is killed closes it, and this process then kills the group, itself included.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    # A handler, because an ignored signal would stay ignored in the tool.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        # Inherited descriptors include the lock of the build, which is free once the last process of the tool ended.
        status = subprocess.Popen(  # noqa: S603 - a command of the plan, without a shell
            sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False
        ).wait()
    except OSError as error:
        sys.stderr.write(f"cannot run {sys.argv[1]}: {error.strerror}\n")
        sys.exit(127)
    if status < 0:
        _end_by(-status)
    sys.exit(status)


def _end_by(number: int) -> None:
    """Ends by the signal that ended the tool."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
