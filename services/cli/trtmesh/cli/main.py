"""The `trtmesh` command."""

from trtmesh.cli.interrupts import ending_at_once


def main() -> None:
    with ending_at_once():
        import trtmesh.chassis.environment  # noqa: F401 - gRPC reads the environment when it is first imported
        from trtmesh.cli.app import app
    try:
        app(prog_name="trtmesh")
    except ModuleNotFoundError as error:
        # An image has the code of its own service alone.
        if not (error.name or "").startswith("trtmesh."):
            raise
        from trtmesh.cli.output import say_error

        say_error(
            f"this command needs {error.name}, which is not here: run it where all of trtmesh is installed,"
            " from its wheel or repository"
        )
        raise SystemExit(1) from None
