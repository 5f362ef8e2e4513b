"""The application with all commands of `trtmesh`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from trtmesh.cli.lazy import LazyCommand, LazyGroup
from trtmesh.cli.plain_help import CommandGroup, PlainCommand

SERVE, USE, OPERATE, PREPARE = "Serve", "Use", "Operate a router", "Prepare"

EXAMPLES = """Examples:

trtmesh up --model DIR

trtmesh generate --max-tokens 64 'def load_json(path):' 'def get_logger(name):'

trtmesh top

trtmesh import-triton MODEL_REPOSITORY --model DIR

trtmesh COMMAND --help"""

MEANT = {
    **dict.fromkeys(("serve", "server", "start", "run", "launch"), "up --model DIR"),
    **dict.fromkeys(("complete", "completion", "infer", "prompt"), "generate PROMPT"),
    **dict.fromkeys(("stop", "cancel"), "requests stop REQUEST_ID"),
    **dict.fromkeys(("add", "drain", "list", "ps"), "workers --help"),
    **dict.fromkeys(("lora", "adapter"), "adapters --help"),
    "import": "import-triton REPOSITORY",
}
"""Commands of other servers, and their counterparts here."""


class StackCommand(PlainCommand):
    """A command of a stack, with its settings as options. Takes a lone directory for a forgotten --model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if ctx.args:
            ctx.fail(
                f"{ctx.args[0]!r} belongs to no option; did you mean `{ctx.command_path} --model {ctx.args[0]}`?"
            )
        return rest


COMMANDS = (
    LazyCommand(
        "trtmesh.cli.up:up",
        "Start routers, with tokenizers inside or beside them, and engines on this machine and serve until Ctrl-C.",
        SERVE,
        StackCommand,
    ),
    LazyCommand(
        "trtmesh.cli.demo:demo",
        "Start a stack with two engines, stream three prompts, then serve until Ctrl-C.",
        SERVE,
        StackCommand,
    ),
    LazyCommand("trtmesh.cli.generate:generate", "Stream completions of PROMPTS.", USE),
    LazyCommand(
        "trtmesh.cli.chat:chat",
        "Talk with a model. Each line is a message; its answer is streamed, and the model sees both from then on.",
        USE,
    ),
    LazyCommand("trtmesh.cli.fleet:status", "Show the router's workers and tokenizers.", OPERATE),
    LazyCommand(
        "trtmesh.cli.top:top",
        "Show workers, their roles, live requests, token rates, KV reuse and handoffs, updated live.",
        OPERATE,
    ),
    LazyCommand(
        "trtmesh.tools.doctor:doctor",
        "Check a running mesh, or the configuration of its services, and say what to do.",
        OPERATE,
    ),
    LazyCommand(
        "trtmesh.cli.requests:explain",
        "Explain the placements of a request's items, live or ended.",
        OPERATE,
    ),
    LazyCommand(
        "trtmesh.cli.handoffs:handoffs",
        "List the live handoffs, oldest first, with the worker that has the KV and the one that continues, and count"
        " the\ncompleted ones.",
        OPERATE,
    ),
    LazyCommand(
        "trtmesh.tools.replay:replay",
        "Replay recorded traffic over a simulated fleet, with the mesh's own placement and scheduler; compare"
        " policies.",
        OPERATE,
    ),
    LazyCommand(
        "trtmesh.tools.advise:advise",
        "Say how many engines, routers and tokenizers a load needs to keep its SLOs.",
        OPERATE,
    ),
    LazyCommand(
        "trtmesh.tools.audit:audit",
        "Repeat the items of receipts in FILES, and compare their tokens.",
        OPERATE,
    ),
    LazyCommand(
        "trtmesh.tools.import_triton:import_triton",
        "Write the configuration of a mesh with the models of a Triton model REPOSITORY under their names.",
        PREPARE,
    ),
    LazyCommand(
        "trtmesh.tools.build:build",
        "Download, quantize, convert and build models for TensorRT-LLM, and write the configuration of a mesh for"
        " each.",
        PREPARE,
    ),
    LazyCommand(
        "trtmesh.tools.convert:convert",
        "Write the weights in pytorch_model.bin as safetensors, which engines serve.",
        PREPARE,
    ),
    LazyCommand("trtmesh.tools.triton.infer:triton", "Client of Triton models.", USE),
    LazyCommand(
        "trtmesh.tools.bench.app:bench",
        "Measure a server, compare two runs, and prove that no byte was lost.",
        OPERATE,
    ),
    LazyCommand("trtmesh.cli.fleet:workers", "The workers of a router.", OPERATE),
    LazyCommand("trtmesh.cli.requests:requests", "The live requests of a router.", OPERATE),
    LazyCommand("trtmesh.cli.adapters:adapters", "The LoRA adapters of a router.", OPERATE),
    LazyCommand("trtmesh.cli.fleet:policy", "The placement policy of a router.", OPERATE),
    LazyCommand("trtmesh.cli.keys:keys", "The file of API keys of routers.", PREPARE),
)
"""Each with the first paragraph of its help."""


class Commands(LazyGroup):
    """The commands. An unknown command is refused with the most likely alternative."""

    lazy = COMMANDS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (meant := self._meant(args[0])):
            ctx.fail(f"No such command {args[0]!r}; did you mean `trtmesh {meant}`?")
        return super().resolve_command(ctx, args)

    def _meant(self, name: str) -> str:
        from difflib import get_close_matches

        return MEANT.get(name) or next(iter(get_close_matches(name, self.commands, n=1)), "")


app = CommandGroup(
    name="trtmesh",
    cls=Commands,
    epilog=EXAMPLES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's
    if asked:
        from importlib.metadata import version

        typer.echo(f"trtmesh {version('trtmesh')}")
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
