"""A rank of a worker besides the first, started by the first as `python -m trtmesh.engine.backends.torch.follower
SOCKET`. Computes the first rank's commands, and ends with the first rank: the socket closes at any death.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

HERE = b"here"


def main(descriptor: int) -> NoReturn:
    """Ends without the clean-up of an interpreter, which may wait for lost ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Signals go to all processes of a terminal or a container; the first rank finishes all work and ends this rank.
        signal.signal(number, signal.SIG_IGN)
    # The first rank has the same records.
    logging.getLogger().addHandler(logging.NullHandler())
    connection = Connection(descriptor)
    try:
        task = json.loads(connection.recv_bytes())
        end = threading.Thread(target=_end_with_the_first, args=(connection, task), daemon=True)
        end.start()
        _follow(connection, task)
    except EOFError:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - the first rank reports it
        _report(connection, error)
        os._exit(1)


def _follow(connection: Connection, task: dict[str, Any]) -> NoReturn:
    # Only here: the imports take seconds, and the first rank may end meanwhile.
    from trtmesh.engine.backends.torch.loading import load_follower
    from trtmesh.engine.backends.torch.parallel.group import RankPlace
    from trtmesh.engine.backends.torch.settings import TorchSettings

    settings = TorchSettings.model_validate_json(task["settings"])
    place = RankPlace(task["rank"], task["ranks"])
    connection.send_bytes(HERE)
    follower = load_follower(
        Path(task["model_dir"]), settings, task["device"], place, Path(task["store"])
    )
    while True:
        follower.obey(connection.recv_bytes())


def _end_with_the_first(connection: Connection, task: dict[str, Any]) -> NoReturn:
    """Waits for the end of the first rank, unseen by the computing thread."""
    closed = select.poll()
    # No events but the hang-up: always reported.
    closed.register(connection.fileno(), 0)
    closed.poll()
    shutil.rmtree(Path(task["store"]).parent, ignore_errors=True)
    os._exit(0)


def _report(connection: Connection, error: BaseException) -> None:
    if not hasattr(error, "problem"):
        traceback.print_exception(error)
    report = {
        "kind": type(error).__name__,
        "problem": getattr(error, "problem", f"{type(error).__name__}: {error}"),
        "setting": getattr(error, "setting", ""),
    }
    with suppress(OSError):
        connection.send_bytes(json.dumps(report).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
