"""Finds the process that has opened a TCP connection to this one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def dialer_of(port: int, dialed: int) -> int | None:
    """The process below this one whose connection leads from this local port to the `dialed` one; None for this
    process, and for a connection that has ended. Connections to other ports may share the local port."""
    inode = _inode_of(port, dialed)
    if inode is None:
        return None
    below = _below(str(os.getpid()))
    return next((int(pid) for pid in below if _has(pid, f"socket:[{inode}]")), None)


def _below(pid: str) -> Iterator[str]:
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield child
            yield from _below(child)


def _inode_of(port: int, dialed: int) -> str | None:
    endings = f":{port:04X}", f":{dialed:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines():
        _, local, remote, _, _, _, _, _, _, inode, *_ = line.split()
        ends = local.endswith(endings[0]) and remote.endswith(endings[1])
        if ends and inode != "0":
            return inode
    return None


def _has(pid: str, file: str) -> bool:
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(each.readlink()) == file:
                    return True
    return False
