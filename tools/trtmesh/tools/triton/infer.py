"""`trtmesh triton infer`: a client of Triton models on the command line."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from trtmesh.chassis.bearer import ApiKey
from trtmesh.chassis.errors import InvalidRequest, Unauthenticated
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.output import say_equal, say_error
from trtmesh.cli.prompts import PROMPTS_HELP, LinesOption, read_prompts
from trtmesh.cli.session import (
    API_KEY_HINT,
    FAILED,
    OK,
    USAGE,
    AddressOption,
    ApiKeyFileOption,
    address_explained,
    run,
)
from trtmesh.cli.stacks import stack_meant
from trtmesh.cli.tls import CONNECTION
from trtmesh.client import DEFAULT_ADDRESS
from trtmesh.tools.triton.client import Compression, TritonConnection
from trtmesh.tools.triton.conversation import Conversation, Ending
from trtmesh.tools.triton.encoding import encode
from trtmesh.tools.triton.expected import Expected, write_outputs
from trtmesh.tools.triton.requests import Inputs, Prompt, TableId, TritonModel
from trtmesh.tools.triton.results import Results
from trtmesh.tools.triton.values import read_array, read_ids, read_input

triton = typer.Typer(name="triton", help="Client of Triton models.", no_args_is_help=True)


@triton.callback()
def _group() -> None:
    """Client of Triton models."""


INT32 = 2**31 - 1

DRAWING = frozenset({"top_k", "runtime_top_k", "top_p", "runtime_top_p"})
"""Inputs of which one has the executor draw tokens."""

URL = AddressOption(
    "--url", "TRTMESH_ROUTER", "server", "a server of the KServe protocol over gRPC",
    tls="--tls, --root-certificates, --certificate-chain and --private-key",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """The parsed command line."""

    url: str | None
    api_key_file: Path | None
    tls: ClientTls | None
    compression: Compression
    model: str
    preprocessing: str
    prompts: Sequence[Prompt]
    inputs: Inputs
    request_id: str
    stream: bool | None
    batch: bool
    ending: Ending
    as_json: bool
    expected: Expected | None
    save_output: Path | None


@triton.command("infer")
def infer(
    prompts: Annotated[list[str] | None, typer.Argument(help=PROMPTS_HELP)] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            help="Token ids to continue: '1 2 3', or @FILE.csv, a prompt a row; repeatable."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="TRTMESH_ROUTER",
            help=f"Server of the KServe protocol, host:port; unset, your stack, else {DEFAULT_ADDRESS}.",
            rich_help_panel=CONNECTION,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model; default ensemble, and tensorrt_llm for --ids.")
    ] = "",
    preprocessing: Annotated[
        str, typer.Option(help="Model that encodes texts for a model of token ids.")
    ] = "preprocessing",
    max_tokens: Annotated[int, typer.Option(min=1, max=INT32, help="Most new tokens.")] = 16,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print tokens as they arrive; default for decoupled models.",
        ),
    ] = None,
    beam_width: Annotated[
        int | None, typer.Option(min=1, max=INT32, help="Beams of a search.")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, max=INT32, help="Sequences of each prompt.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Needs --top-k or --top-p too.")] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=-1, max=INT32, help="Keep the k most likely tokens; -1 is off."),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep tokens up to this probability.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="Seed of the draws.")
    ] = None,
    end_id: Annotated[int | None, typer.Option(help="Token id to end a sequence at.")] = None,
    stop_word: Annotated[
        list[str] | None, typer.Option(help="Text to end a sequence at; repeatable.")
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Text to exclude; repeatable.")] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=JSON",
            help="Any other input; NAME=@FILE reads a .npy, .csv or .json file; repeatable.",
        ),
    ] = None,
    prompt_table: Annotated[
        Path | None,
        typer.Option(help="Prompt embedding table, .npy: [rows, size] or [tasks, rows, size]."),
    ] = None,
    prompt_task: Annotated[int, typer.Option(min=0, help="Task of a table with several.")] = 0,
    prompt_table_id: Annotated[
        int | None,
        typer.Option(min=1, max=2**64 - 1, help="Identity of the table; its prompts share KV."),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=0, help="First token id that addresses the table.")
    ] = 0,
    requested_outputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Exactly these outputs, separated by commas; default all; repeatable.",
        ),
    ] = None,
    check_output: Annotated[
        Path | None,
        typer.Option(
            help="Expected outputs, a sequence or a prompt each: .csv with rows of token ids, or .json with"
            " texts or lists of ids; either may begin with the prompt."
        ),
    ] = None,
    match: Annotated[
        float,
        typer.Option(min=0, max=1, help="Least share of equal tokens or characters."),
    ] = 1.0,
    save_output: Annotated[
        Path | None, typer.Option(help="Write the outputs as a file for --check-output.")
    ] = None,
    request_id: Annotated[str, typer.Option(help="Id of the request; default random.")] = "",
    stop_after_ms: Annotated[
        int | None, typer.Option(min=0, help="Stop the requests after this time.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Deadline of the call in seconds.")
    ] = None,
    api_key_file: ApiKeyFileOption = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(
            help="PEM file to check the server by; turns on TLS.", rich_help_panel=CONNECTION
        ),
    ] = None,
    private_key: Annotated[
        Path | None,
        typer.Option(help="PEM file with the client's key, for TLS.", rich_help_panel=CONNECTION),
    ] = None,
    certificate_chain: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the client's certificates, for TLS.", rich_help_panel=CONNECTION
        ),
    ] = None,
    compression: Annotated[
        Compression, typer.Option(help="Compression of the requests.", rich_help_panel=CONNECTION)
    ] = Compression.NONE,
    *,
    tls: Annotated[
        bool, typer.Option("--tls", help="Connect over TLS.", rich_help_panel=CONNECTION)
    ] = False,
    stop_via_request_cancel: Annotated[
        bool,
        typer.Option(
            "--stop-via-request-cancel",
            help="Cancel the call after --stop-after-ms instead of sending stop requests.",
        ),
    ] = False,
    lines: LinesOption = False,
    exclude_input: Annotated[
        bool, typer.Option("--exclude-input", help="Leave the prompt out of a whole answer.")
    ] = False,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Print log-probabilities.")
    ] = False,
    context_logits: Annotated[
        bool, typer.Option("--context-logits", help="Print the logits of the prompt.")
    ] = False,
    generation_logits: Annotated[
        bool, typer.Option("--generation-logits", help="Print the logits of new tokens.")
    ] = False,
    perf_metrics: Annotated[
        bool, typer.Option("--perf-metrics", help="Print times and KV figures.")
    ] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="All prompts as rows of one request.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a response.")] = False,
) -> None:
    """Send PROMPTS or --ids to a model, each as a request on one stream, and print the responses.

    Asks the server for the model's configuration and sends the inputs that it declares, so it works with any server of
    Triton's TensorRT-LLM models. Ctrl-C ends the requests.

    Exit status: 0 every request completed, 1 one failed, 2 wrong usage, 130 Ctrl-C.
    """
    asked: list[Prompt] = [*read_prompts(prompts or (), lines=lines)]
    model = model or ("ensemble" if asked else "tensorrt_llm")
    asked += [row for each in ids or () for row in read_ids(each)]
    if not asked:
        raise typer.BadParameter("give prompts, or token ids with --ids")
    if stop_via_request_cancel and stop_after_ms is None:
        raise typer.BadParameter("--stop-via-request-cancel needs --stop-after-ms")
    values = {
        "max_tokens": max_tokens,
        "beam_width": beam_width,
        "num_return_sequences": sequences,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "end_id": end_id,
        "stop_words": stop_word,
        "bad_words": bad_word,
        "exclude_input": exclude_input or None,
        "log_probs": log_probs or None,
        "return_context_logits": context_logits or None,
        "return_generation_logits": generation_logits or None,
        "perf_metrics": perf_metrics or None,
    }
    options = {name: value for name, value in values.items() if value is not None}
    options |= {**_table(prompt_table, prompt_task), **dict(map(read_input, given or ()))}
    if (sequences or 1) > 1 and (beam_width or 1) == 1 and not options.keys() & DRAWING:
        say_equal(sequences or 1, "add --top-k or --top-p")
    table = TableId(prompt_table_id, vocab_size) if prompt_table_id else None
    names = [name for each in requested_outputs or () for name in each.replace(",", " ").split()]
    options_of_tls = ("--root-certificates", "--certificate-chain", "--private-key")
    security = ClientTls(root_certificates, certificate_chain, private_key, settings=options_of_tls)
    ask = Ask(
        url=url,
        api_key_file=api_key_file,
        tls=security if tls or root_certificates or private_key else None,
        compression=compression,
        model=model,
        preprocessing=preprocessing,
        prompts=asked,
        inputs=Inputs(options, table, names),
        request_id=request_id or uuid.uuid4().hex,
        stream=stream,
        batch=batch,
        ending=Ending(
            timeout,
            None if stop_after_ms is None else stop_after_ms / 1000,
            stop_via_request_cancel,
        ),
        as_json=json,
        expected=Expected.read(check_output, match) if check_output else None,
        save_output=save_output,
    )
    run(_infer(ask))


def _table(file: Path | None, task: int) -> Mapping[str, Any]:
    """The inputs of a prompt table. Raises BadParameter."""
    if file is None:
        return {}
    table = read_array(file)
    try:
        rows = table[task] if len(table.shape) == 3 else table
    except IndexError as error:
        raise typer.BadParameter(f"--prompt-task {task}: {error}") from error
    if len(rows.shape) != 2:
        raise typer.BadParameter(f"{str(file)!r} is {list(table.shape)}, not [rows, size]")
    return {"prompt_embedding_table": rows, "prompt_vocab_size": rows.shape[0]}


async def _infer(ask: Ask) -> int:
    api_key = ApiKey.read(ask.api_key_file, os.environ)
    url, tls = ask.url, ask.tls
    if url is None:
        stack = stack_meant(URL.setting)
        url, tls = stack.router, stack.tls(tls)
    with address_explained(url, URL):
        connecting = TritonConnection(url, tls, ask.compression, api_key)
        async with connecting as connection:
            return await _converse(connection, ask)


async def _converse(connection: TritonConnection, ask: Ask) -> int:
    try:
        model = TritonModel.of(await connection.model_config(ask.model))
    except Unauthenticated as error:
        raise Unauthenticated(f"server {connection.address}: {error}; {API_KEY_HINT}") from error
    try:
        if model.takes_ids:
            ask = await _with_ids(connection, ask)
        conversation = _conversation(model, ask)
    except InvalidRequest as error:
        # Nothing was sent: the command line does not fit the model.
        say_error(str(error))
        return USAGE
    status = await conversation.hold(connection)
    return status or _judge(ask, conversation.results)


async def _with_ids(connection: TritonConnection, ask: Ask) -> Ask:
    """The command with texts as token ids, and their tokenizer's end id unless one is given."""
    texts = [prompt for prompt in ask.prompts if isinstance(prompt, str)]
    if not texts:
        return ask
    encoding = TritonModel.of(await connection.model_config(ask.preprocessing))
    encoded = await encode(connection, encoding, texts)
    rows = iter(encoded.rows)
    prompts = [next(rows) if isinstance(prompt, str) else prompt for prompt in ask.prompts]
    options = {**encoded.defaults, **ask.inputs.options}
    return replace(ask, prompts=prompts, inputs=replace(ask.inputs, options=options))


def _conversation(model: TritonModel, ask: Ask) -> Conversation:
    streams = model.decoupled if ask.stream is None else ask.stream
    options = {**ask.inputs.options, **({"stream": True} if streams else {})}
    groups = [ask.prompts] if ask.batch else [[prompt] for prompt in ask.prompts]
    inputs = replace(ask.inputs, options=options)
    return Conversation(model, groups, ask.request_id, inputs, ask.ending, as_json=ask.as_json)


def _judge(ask: Ask, results: Results) -> int:
    """Saves and checks the outputs; returns the exit status."""
    outputs = [*results.sequences()]
    if ask.save_output:
        write_outputs(ask.save_output, outputs)
    if ask.expected is None:
        return OK
    differences = ask.expected.differences(ask.prompts, outputs)
    for difference in differences:
        say_error(difference)
    return FAILED if differences else OK
