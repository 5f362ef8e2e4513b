"""Finds the process that has opened a TCP connection to this one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def dialer_of(port: int, dialed: int) -> int | None:
    """The process whose connection leads from this local port to the `dialed` one; None for this process, and for a
    connection that has ended. Connections to other ports may share the local port."""
    inode = _inode_of(port, dialed)
    if inode is None or _has(os.getpid(), f"socket:[{inode}]"):
        return None
    # Not only processes below this one: another test's process may have forked the dialer.
    pids = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return next((pid for pid in pids if _has(pid, f"socket:[{inode}]")), None)


def _inode_of(port: int, dialed: int) -> str | None:
    endings = f":{port:04X}", f":{dialed:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines():
        _, local, remote, _, _, _, _, _, _, inode, *_ = line.split()
        ends = local.endswith(endings[0]) and remote.endswith(endings[1])
        if ends and inode != "0":
            return inode
    return None


def _has(pid: int, file: str) -> bool:
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(each.readlink()) == file:
                    return True
    return False
