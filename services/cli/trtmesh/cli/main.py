"""The `trtmesh` command."""

import trtmesh.chassis.environment  # noqa: F401 - gRPC reads the environment when it is first imported


def main() -> None:
    try:
        # During imports, too, Ctrl-C ends the command quietly.
        from trtmesh.cli.app import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app(prog_name="trtmesh")
