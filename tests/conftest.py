"""The environment of the tests is that of nobody's machine: what a developer or a CI has set reaches no process."""

from __future__ import annotations

import os

FOREIGN = (
    # Settings of the services and of the command.
    "TRTMESH_",
    # How a program prints: colours, sizes, and that a pipe be taken for a terminal.
    *("FORCE_COLOR", "NO_COLOR", "CLICOLOR", "PY_COLORS", "COLUMNS", "LINES", "TTY_", "GITHUB_ACTIONS"),
    # gRPC and urllib would ask a proxy for 127.0.0.1.
    *("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"),
)  # fmt: skip
"""Beginnings of the names of variables, in either case, that change what is tested."""

for name in [*os.environ]:
    if name.lower().startswith(tuple(map(str.lower, FOREIGN))):
        del os.environ[name]
# A terminal of a test can do what any can, whatever the tests were started from.
os.environ["TERM"] = "xterm"
