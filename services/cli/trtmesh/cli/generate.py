"""`trtmesh generate`: streams completions of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

import typer
from google.protobuf import json_format
from rich.console import Console
from trtmesh.chassis.errors import InvalidField, TrtmeshError
from trtmesh.chassis.parsing import parse_config
from trtmesh.cli.adapters import adapter_key
from trtmesh.cli.completion import complete_adapter
from trtmesh.cli.config_options import takes_config_options
from trtmesh.cli.guides import GuideOptions
from trtmesh.cli.output import say_equal, say_error
from trtmesh.cli.prompts import PROMPTS_HELP, LinesOption, read_prompts
from trtmesh.cli.session import FAILED, OK, RouterOptions, run
from trtmesh.cli.streams import Printer, choose_printer
from trtmesh.client import Accepted, Client, GenerationConfig, ItemFailed
from trtmesh.client.options import build_config


@takes_config_options
def generate(
    prompts: Annotated[list[str], typer.Argument(help=PROMPTS_HELP)],
    connection: RouterOptions,
    *,
    model: Annotated[str, typer.Option(help="Model; unset means the only one.")] = "",
    config_fields: Mapping[str, object],
    guide: GuideOptions,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="LoRA adapter of the registry, by name or number.", autocompletion=complete_adapter
        ),
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="A GenerationConfig as JSON, for fields without an option.")
    ] = "",
    request_id: Annotated[str, typer.Option(help="Name of the request; unset draws one.")] = "",
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which the request ends.")
    ] = None,
    stop_after_ms: Annotated[
        int | None, typer.Option(min=0, help="Stop the request this long after its acceptance.")
    ] = None,
    lines: LinesOption = False,
    log_probs: Annotated[
        bool,
        typer.Option(
            "--log-probs",
            help="Print the log-probability of each sequence at its end; with --json, of each token.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event.")] = False,
) -> None:
    """Stream completions of PROMPTS.

    Exit status: 0 every item completed, 1 an item or the call failed, 2 wrong usage, 130 Ctrl-C.
    """
    given = dict(config_fields)
    if log_probs:
        given["log_probs"] = True
    if adapter is not None:
        given["adapter"] = adapter_key(adapter)
    if (asked_guide := guide.message()) is not None:
        given["guided_decoding"] = asked_guide
    texts = read_prompts(prompts, lines=lines)
    asked = _build_config(generation_config, given)
    if _are_equal(asked):
        say_equal(_sequences(asked), "add --temperature, --top-k or --top-p")
    printer = choose_printer(
        as_json_lines=json, items=len(texts), sequences=_sequences(asked), console=Console()
    )
    if asked.beam_search.beam_width > 1 and not printer.redraws:
        # Printed text cannot be replaced when a beam is rewritten.
        asked.output.stream = False
    request = Request(
        prompts=texts,
        config=asked,
        request_id=request_id,
        model=model,
        timeout_seconds=timeout,
        stop_after_seconds=None if stop_after_ms is None else stop_after_ms / 1000,
    )
    run(_generate(connection, request, printer))


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the command line."""

    prompts: Sequence[str]
    config: GenerationConfig
    request_id: str = ""
    model: str = ""
    timeout_seconds: float | None = None
    stop_after_seconds: float | None = None


async def _generate(connection: RouterOptions, request: Request, printer: Printer) -> int:
    async with connection.connected() as client:
        return await stream(client, request, printer)


async def stream(client: Client, request: Request, printer: Printer) -> int:
    """Prints the events of the request; returns the exit status."""
    failed = False
    stopping: asyncio.Task[None] | None = None
    events = client.generate(
        request.prompts,
        config=request.config,
        request_id=request.request_id,
        model=request.model,
        timeout_seconds=request.timeout_seconds,
    )
    try:
        async with aclosing(events):
            with printer:
                async for event in events:
                    if isinstance(event, Accepted) and request.stop_after_seconds is not None:
                        stopping = asyncio.create_task(
                            _stop_later(client, event.request_id, request.stop_after_seconds)
                        )
                    printer.show(event)
                    failed |= isinstance(event, ItemFailed)
    finally:
        if stopping:
            stopping.cancel()
    return FAILED if failed else OK


async def _stop_later(client: Client, request_id: str, seconds: float) -> None:
    await asyncio.sleep(seconds)
    try:
        await client.stop(request_id)
    except TrtmeshError as error:
        say_error(f"cannot stop {request_id}: {error.reason}: {error}")


def _sequences(config: GenerationConfig) -> int:
    """Sequences returned per prompt."""
    if config.sampling.HasField("num_return_sequences"):
        return config.sampling.num_return_sequences
    return max(1, config.beam_search.beam_width)


def _are_equal(config: GenerationConfig) -> bool:
    """Returns whether all sequences are the most likely sequence."""
    try:
        parsed = parse_config(config)
    except InvalidField:
        # The router reports the field.
        return False
    return parsed.sequences > 1 and parsed.beam_search.beam_width == 1 and parsed.sampling.greedy


def _build_config(text: str, options: Mapping[str, object]) -> GenerationConfig:
    """`options` over the JSON of --generation-config."""
    config = GenerationConfig()
    try:
        if text:
            json_format.Parse(text, config)
        return build_config(config, options)
    except (json_format.ParseError, TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
