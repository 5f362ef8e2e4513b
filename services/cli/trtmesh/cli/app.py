"""The application with all commands of `trtmesh`."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import version
from typing import Annotated, Any

import typer
from trtmesh.cli.adapters import adapters
from trtmesh.cli.demo import demo
from trtmesh.cli.fleet import policy, status, workers
from trtmesh.cli.generate import generate
from trtmesh.cli.handoffs import handoffs
from trtmesh.cli.keys import keys
from trtmesh.cli.output import put
from trtmesh.cli.requests import explain, requests
from trtmesh.cli.top import top
from trtmesh.cli.up import up
from trtmesh.tools.adapter_convert import convert as convert_adapter
from trtmesh.tools.build import build
from trtmesh.tools.convert import convert
from trtmesh.tools.import_triton import import_triton
from trtmesh.tools.replay import replay
from trtmesh.tools.triton.infer import triton
from typer.core import TyperCommand, TyperGroup

SERVE, USE, OPERATE, PREPARE = "Serve", "Use", "Operate a router", "Prepare"

EXAMPLES = """Examples:

trtmesh up --model DIR

trtmesh generate --max-tokens 64 'def load_json(path):' 'def get_logger(name):'

trtmesh top

trtmesh import-triton MODEL_REPOSITORY --model DIR

trtmesh COMMAND --help"""

MEANT = {
    **dict.fromkeys(("serve", "server", "start", "run", "launch"), "up --model DIR"),
    **dict.fromkeys(("chat", "complete", "completion", "infer", "prompt"), "generate PROMPT"),
    **dict.fromkeys(("stop", "cancel"), "requests stop REQUEST_ID"),
    **dict.fromkeys(("add", "drain", "list", "ps"), "workers --help"),
    **dict.fromkeys(("lora", "adapter"), "adapters --help"),
    "import": "import-triton REPOSITORY",
}
"""Commands of other servers, and their counterparts here."""


class Commands(TyperGroup):
    """The commands. An unknown command is refused with the most likely alternative."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (meant := self._meant(args[0])):
            ctx.fail(f"No such command {args[0]!r}; did you mean `trtmesh {meant}`?")
        return super().resolve_command(ctx, args)

    def _meant(self, name: str) -> str:
        return MEANT.get(name) or next(iter(get_close_matches(name, self.commands, n=1)), "")


class StackCommand(TyperCommand):
    """A command of a stack, with its settings as options. Takes a lone directory for a forgotten --model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if ctx.args:
            ctx.fail(
                f"{ctx.args[0]!r} belongs to no option; did you mean `{ctx.command_path} --model {ctx.args[0]}`?"
            )
        return rest


app = typer.Typer(
    name="trtmesh",
    cls=Commands,
    epilog=EXAMPLES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (up, demo):
    app.command(rich_help_panel=SERVE, cls=StackCommand)(command)
for title, commands in {
    USE: (generate,),
    OPERATE: (status, top, explain, handoffs, replay),
    PREPARE: (import_triton, build, convert),
}.items():
    for command in commands:
        app.command(rich_help_panel=title)(command)
for title, groups in {
    USE: (triton,),
    OPERATE: (workers, requests, adapters, policy),
    PREPARE: (keys,),
}.items():
    for group in groups:
        app.add_typer(group, rich_help_panel=title)

adapters.command()(convert_adapter)


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
