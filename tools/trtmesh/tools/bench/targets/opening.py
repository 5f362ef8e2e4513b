"""The target of a URL."""

from __future__ import annotations

from trtmesh.tools.bench.targets.native import NativeTarget
from trtmesh.tools.bench.targets.target import Connecting, OpenTarget


def open_target(connecting: Connecting) -> OpenTarget:
    """A connection to the target, to be opened by `async with`."""
    return NativeTarget(connecting)
