"""The `trtmesh` command."""

import trtmesh.chassis.environment  # noqa: F401, I001 - gRPC reads the environment when it is first imported

import typer

from trtmesh.cli.demo import demo
from trtmesh.cli.generate import generate
from trtmesh.cli.status import status
from trtmesh.cli.up import up

app = typer.Typer(
    name="trtmesh",
    help="Serve LLMs over gRPC as a mesh of three services: tokenizer, engine, router.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (up, generate, status, demo):
    app.command()(command)


def main() -> None:
    app()
