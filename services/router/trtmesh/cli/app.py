"""All commands of `trtmesh`, as one application."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer
from trtmesh.cli.adapters import adapters
from trtmesh.cli.build import build
from trtmesh.cli.convert import convert
from trtmesh.cli.demo import demo
from trtmesh.cli.fleet import policy, status, workers
from trtmesh.cli.generate import generate
from trtmesh.cli.handoffs import handoffs
from trtmesh.cli.import_triton import import_triton
from trtmesh.cli.keys import keys
from trtmesh.cli.output import put
from trtmesh.cli.replay import replay
from trtmesh.cli.requests import explain, requests
from trtmesh.cli.top import top
from trtmesh.cli.triton.infer import triton
from trtmesh.cli.up import up

app = typer.Typer(
    name="trtmesh",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    up,
    import_triton,
    convert,
    build,
    generate,
    status,
    top,
    explain,
    handoffs,
    replay,
    demo,
):
    app.command()(command)
for group in (workers, requests, adapters, keys, policy, triton):
    app.add_typer(group)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's
    if asked:
        put(f"trtmesh {version('trtmesh')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve LLMs over gRPC as a mesh of three services: tokenizer, engine, router."""
