"""`trtmesh generate`: streams completions of prompts."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from rich.console import Console
from trtmesh.chassis.errors import InvalidField, TrtmeshError
from trtmesh.chassis.parsing import parse_config
from trtmesh.cli.adapters import adapter_key
from trtmesh.cli.completion import complete_adapter
from trtmesh.cli.output import say_equal, say_error
from trtmesh.cli.prompts import PROMPTS_HELP, LinesOption, read_prompts
from trtmesh.cli.session import FAILED, OK, ApiKeyFileOption, connected, run
from trtmesh.cli.streams import Printer, choose_printer
from trtmesh.cli.tls import (
    CONNECTION,
    CaOption,
    CertOption,
    KeyOption,
    ServerNameOption,
    TlsOption,
    tls_of,
)
from trtmesh.client import (
    DEFAULT_ADDRESS,
    Accepted,
    ApiKey,
    Client,
    ClientTls,
    GenerationConfig,
    ItemFailed,
)
from trtmesh.client.options import build_config
from trtmesh.v1.generation_fields import HELP, NEGATIVE_IS_UNSET
from trtmesh.v1.generation_pb2 import SamplingConfig

UINT32 = 2**32 - 1
MOST = {FieldDescriptor.CPPTYPE_UINT32: UINT32, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}

RouterOption = Annotated[
    str | None,
    typer.Option(
        envvar="TRTMESH_ROUTER",
        help=f"Router to talk to, host:port; unset, that of your stack, else {DEFAULT_ADDRESS}.",
        rich_help_panel=CONNECTION,
    ),
]


def takes_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command(sampling=, own options)` an option for each field of SamplingConfig with a help, at the place of
    its parameter `sampling`."""

    def with_options(**values: Any) -> None:
        command(sampling={name: values.pop(name) for name in HELP}, **values)

    parameters = inspect.signature(command, eval_str=True).parameters
    own, place = [*parameters.values()], [*parameters].index("sampling")
    own[place : place + 1] = [_sampling_option(name, text) for name, text in HELP.items()]
    signature = inspect.Signature(own)
    functools.update_wrapper(with_options, command, assigned=("__name__", "__doc__", "__module__"))
    with_options.__annotations__ = {n: p.annotation for n, p in signature.parameters.items()}
    with_options.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return with_options


def _sampling_option(name: str, text: str) -> inspect.Parameter:
    field = SamplingConfig.DESCRIPTOR.fields_by_name[name]
    kind: Any = Annotated[float | None, typer.Option(help=text)]
    if field.cpp_type in MOST:
        lowest = -1 if name in NEGATIVE_IS_UNSET else 0
        option = typer.Option(min=lowest, max=MOST[field.cpp_type], help=text)
        kind = Annotated[int | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


@takes_sampling_options
def generate(
    *,
    prompts: Annotated[list[str], typer.Argument(help=PROMPTS_HELP)],
    router: RouterOption = None,
    api_key_file: ApiKeyFileOption = None,
    model: Annotated[str, typer.Option(help="Model; unset means the only one.")] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=UINT32, help="Most new tokens; unset means up to the model's length."
        ),
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(min=0, max=UINT32, help="Fewest new tokens.")
    ] = None,
    sampling: Mapping[str, float | None],
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a sequence; repeatable.")
    ] = None,
    end_id: Annotated[
        int | None, typer.Option(min=0, max=UINT32, help="Token id that ends a sequence.")
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, max=UINT32, help="Sequences per prompt; with beams, the best ones."),
    ] = None,
    beam_width: Annotated[
        int | None,
        typer.Option(min=1, max=UINT32, help="Beams; all are returned without --sequences."),
    ] = None,
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
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
    tls: TlsOption = False,
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
    given = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        **sampling,
        "log_probs": log_probs or None,
        "stop_texts": stop or None,
        "end_id": end_id,
        "num_return_sequences": sequences,
        "beam_width": beam_width,
        "adapter": None if adapter is None else adapter_key(adapter),
    }
    texts = read_prompts(prompts, lines=lines)
    asked = _build_config(
        generation_config, {name: v for name, v in given.items() if v is not None}
    )
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
    security = tls_of(tls=tls, ca=ca, cert=cert, key=key, server_name=server_name)
    run(_generate(router, security, api_key_file, request, printer))


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the command line."""

    prompts: Sequence[str]
    config: GenerationConfig
    request_id: str = ""
    model: str = ""
    timeout_seconds: float | None = None
    stop_after_seconds: float | None = None


async def _generate(
    router: str | None,
    tls: ClientTls | None,
    api_key_file: Path | None,
    request: Request,
    printer: Printer,
) -> int:
    async with connected(router, tls, ApiKey.read(api_key_file, os.environ)) as client:
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
    """Whether all sequences are the most likely one."""
    try:
        parsed = parse_config(config)
    except InvalidField:
        # The router says what is wrong.
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
