"""A run is the same on every machine.

The environment is nobody's: what a developer or a CI has set reaches no process. Hypothesis draws the same examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

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

# A run is judged by what is right and not by luck or by the machine's speed: the same examples every time, however long
# they take. `pytest --hypothesis-profile=default` draws new ones.
settings.register_profile(
    "same examples every time",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same examples every time")
