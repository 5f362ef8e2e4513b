"""`trtmesh adapters`: show and change the LoRA adapters of a router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from trtmesh.chassis.adapter_content import AdapterContent, is_number
from trtmesh.chassis.errors import InvalidRequest, NotFound, Unsupported
from trtmesh.chassis.quoting import escaped
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.completion import complete_adapter
from trtmesh.cli.lazy import LazyCommand, LazyGroup
from trtmesh.cli.output import say_error
from trtmesh.cli.plain_help import CommandGroup
from trtmesh.cli.session import USAGE
from trtmesh.cli.tables import (
    adapter_versions_table,
    adapters_table,
    residencies_table,
    short_version,
)
from trtmesh.v1 import router_admin_pb2 as pb

UINT64 = 2**64 - 1
MOST_BYTES = 1 << 34


class AdapterCommands(LazyGroup):
    lazy = (
        LazyCommand(
            "trtmesh.tools.adapter_convert:convert",
            "Convert an adapter between PEFT's format and TensorRT-LLM's arrays (lora_weights, lora_config).",
        ),
    )


adapters = CommandGroup(
    name="adapters",
    cls=AdapterCommands,
    help="The LoRA adapters of a router.",
    no_args_is_help=True,
)

AdapterArgument = Annotated[
    str,
    typer.Argument(help="Name of the adapter, or its number.", autocompletion=complete_adapter),
]


@adapters.command("list")
@admin_command
async def list_adapters(context: Context) -> int:
    """List the versions of all adapters; with --json one adapter per line."""
    seen = (await context.admin.list_adapters()).adapters
    return context.answer_each(seen, adapters_table(seen))


@adapters.command()
@admin_command
async def status(context: Context, adapter: AdapterArgument) -> int:
    """Show each version of an adapter: where it is, its size, hits, loads, evictions and error.

    Exit status: 0 success, 1 unknown adapter or the call failed, 2 wrong usage.
    """
    found = await _find(context, adapter)
    refused = f"version {found.refused_version} was refused: {found.refusal.message}"
    notes = [refused] if found.refused_version else []
    tables = (adapter_versions_table(found), residencies_table(found))
    return context.answer(found, _headline(found), *notes, *tables)


@adapters.command()
@admin_command
async def add(
    context: Context,
    name: Annotated[str, typer.Argument(help="Name of the adapter; a new version if it exists.")],
    directory: Annotated[
        Path | None,
        typer.Argument(help="Local directory of the adapter, of PEFT or with arrays, to upload."),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            help="Instead of DIRECTORY: a directory of the router, below one of router.adapters.roots."
        ),
    ] = "",
    number: Annotated[
        int | None,
        typer.Option(
            "--id",
            min=1,
            max=UINT64,
            help="Number (Triton's lora_task_id); unset derives it from NAME.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model of the adapter; unset means the only one.")
    ] = "",
    canary: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of new requests for this version; unset makes it current for all.",
        ),
    ] = None,
    *,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it loaded on workers.")] = False,
) -> int:
    """Register an adapter, or a new version of one: running requests finish on theirs.

    A worker loads it first, if one is ready: a version that it cannot load is refused, and the former one stays.
    Adding the content of a canary again without --canary makes it current.

    Exit status: 0 registered, 1 the call failed, 2 no usable DIRECTORY or other wrong usage, 130 Ctrl-C.
    """
    if (directory is None) == (not source):
        say_error("either DIRECTORY or --source names the adapter's files")
        return USAGE
    asked = pb.AddAdapterRequest(
        id=number or 0,
        name=name,
        source=source,
        model=model,
        canary_share=canary,
        pinned=pin,
    )
    if directory is None:
        added = await context.admin.add_adapter(asked)
    else:
        from trtmesh.chassis.peft_adapter import check_content

        try:
            content = AdapterContent.read(directory, MOST_BYTES)
            check_content(content, f"{directory}/")
        except (InvalidRequest, Unsupported, NotFound) as error:
            say_error(str(error))
            return USAGE
        added = await _upload(context, asked, content)
    return context.answer(added, _headline(added))


async def _upload(
    context: Context, asked: pb.AddAdapterRequest, content: AdapterContent
) -> pb.Adapter:
    """Uploads the files, with a bar on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(escaped(asked.name), total=content.size_bytes)
        return await context.admin.upload_adapter(
            asked, content, on_sent=lambda sent: bar.advance(task, sent)
        )


@adapters.command()
@admin_command
async def remove(
    context: Context,
    adapter: AdapterArgument,
    version: Annotated[
        str, typer.Option(help="Forget this version alone; its first digits are enough.")
    ] = "",
) -> int:
    """Forget an adapter, or one version, and unload it from all workers; running requests finish on it.

    Exit status: 0 forgotten, 1 unknown adapter or version, or the call failed, 2 wrong usage.
    """
    found = await _find(context, adapter)
    whole = _version_of(found, version) if version else ""
    await context.admin.remove_adapter(found.id, whole)
    what = f"version {short_version(whole)} of " if whole else ""
    removed = f"{what}adapter {found.name or found.id} was removed"
    return context.answer(pb.RemoveAdapterResponse(), removed)


@adapters.command()
@admin_command
async def pin(context: Context, adapter: AdapterArgument) -> int:
    """Keep an adapter loaded: workers do not evict it."""
    return await _pin(context, adapter, pinned=True)


@adapters.command()
@admin_command
async def unpin(context: Context, adapter: AdapterArgument) -> int:
    """Let workers evict an adapter again."""
    return await _pin(context, adapter, pinned=False)


async def _pin(context: Context, adapter: str, *, pinned: bool) -> int:
    found = await _find(context, adapter)
    changed = await context.admin.pin_adapter(found.id, pinned=pinned)
    return context.answer(changed, _headline(changed))


def adapter_key(text: str) -> str | int:
    """Returns a text of digits as a number, and any other text as a name."""
    return int(text) if is_number(text) else text


async def _find(context: Context, text: str) -> pb.Adapter:
    """Returns the adapter with the name or the number; an operator's precedes a client's.

    Raises NotFound, or InvalidRequest for a name of several clients' adapters.
    """
    known = (await context.admin.list_adapters()).adapters
    key = adapter_key(text)
    named = [adapter for adapter in known if key in (adapter.name, adapter.id)]
    registered = [adapter for adapter in named if not adapter.brought]
    found = registered or named
    if len(numbers := sorted({adapter.id for adapter in found})) > 1:
        listed = ", ".join(map(str, numbers))
        raise InvalidRequest(
            f"{text!r} is ambiguous: clients brought adapters {listed} under this name; give the number"
        )
    if found:
        return found[0]
    raise NotFound(
        f"router {context.admin.address} has no adapter {text!r}; `trtmesh adapters list` lists them,"
        " `trtmesh adapters add` adds one"
    )


def _version_of(adapter: pb.Adapter, start: str) -> str:
    """Returns the only version with this start. Raises NotFound."""
    known = [version.version for version in adapter.versions]
    match [version for version in known if version.startswith(start)]:
        case [version]:
            return version
        case _:
            raise NotFound(
                f"{start!r} is not the start of exactly one version of adapter {adapter.name or adapter.id}:"
                f" {', '.join(known)}"
            )


def _headline(adapter: pb.Adapter) -> str:
    parts = [f"adapter {adapter.name or adapter.id}", f"number {adapter.id}"]
    parts += [f"version {short_version(each.version)} {_share(each)}" for each in adapter.versions]
    parts += [f"model {adapter.model}"] * bool(adapter.model)
    parts += ["pinned"] * adapter.pinned
    parts += ["brought by a client"] * adapter.brought
    return ", ".join(parts)


def _share(version: pb.AdapterVersion) -> str:
    return f"for {version.share * 100:g} % of new requests"
