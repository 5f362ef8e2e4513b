"""`trtmesh triton infer`: a client of Triton models on the command line."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from trtmesh.chassis.bearer import ApiKey
from trtmesh.chassis.errors import InvalidRequest, Unauthenticated
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.option_groups import grouped, option
from trtmesh.cli.output import say_equal, say_error
from trtmesh.cli.plain_help import CommandGroup
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

triton = CommandGroup(name="triton", help="Client of Triton models.", no_args_is_help=True)


@triton.callback()
def _group() -> None:
    """Client of Triton models."""


INT32, UINT64 = 2**31 - 1, 2**64 - 1

DRAWING = frozenset({"top_k", "runtime_top_k", "top_p", "runtime_top_p"})
"""Inputs of which one has the executor draw tokens."""

URL = AddressOption(
    "--url", "TRTMESH_ROUTER", "server", "a server of the KServe protocol over gRPC",
    tls="--tls, --root-certificates, --certificate-chain and --private-key",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to reach the server."""

    url: str | None = option(
        f"Server of the KServe protocol, host:port; unset, your stack, else {DEFAULT_ADDRESS}.",
        envvar="TRTMESH_ROUTER",
        panel=CONNECTION,
    )
    api_key_file: ApiKeyFileOption = None
    root_certificates: Path | None = option(
        "PEM file to check the server by; turns on TLS.", panel=CONNECTION
    )
    private_key: Path | None = option("PEM file with the client's key, for TLS.", panel=CONNECTION)
    certificate_chain: Path | None = option(
        "PEM file with the client's certificates, for TLS.", panel=CONNECTION
    )
    compression: Compression = option(
        "Compression of the requests.", default=Compression.NONE, panel=CONNECTION
    )
    tls: bool = option("Connect over TLS.", "--tls", default=False, panel=CONNECTION)

    def client_tls(self) -> ClientTls | None:
        """Returns TLS as the options ask for it, or None for plain text."""
        if not (self.tls or self.root_certificates or self.private_key):
            return None
        settings = ("--root-certificates", "--certificate-chain", "--private-key")
        files = (self.root_certificates, self.certificate_chain, self.private_key)
        return ClientTls(*files, settings=settings)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[TritonConnection]:
        """Connects to the server, without an address to the user's stack; errors name it and the remedy."""
        api_key = ApiKey.read(self.api_key_file, os.environ)
        url, tls = self.url, self.client_tls()
        if url is None:
            stack = stack_meant(URL.setting)
            url, tls = stack.router, stack.tls(tls)
        with address_explained(url, URL):
            async with TritonConnection(url, tls, self.compression, api_key) as connection:
                yield connection


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Inputs of the model with an option of their own; each field has the name of its input."""

    max_tokens: int = option("Most new tokens.", default=16, min=1, max=INT32)
    stream: bool | None = option(
        "Print tokens as they arrive; default for decoupled models.", "--stream/--no-stream"
    )
    beam_width: int | None = option("Beams of a search.", min=1, max=INT32)
    num_return_sequences: int | None = option(
        "Sequences of each prompt.", "--sequences", min=1, max=INT32
    )
    temperature: float | None = option("Needs --top-k or --top-p too.")
    top_k: int | None = option("Keep the k most likely tokens; -1 is off.", min=-1, max=INT32)
    top_p: float | None = option("Keep tokens up to this probability.")
    seed: int | None = option("Seed of the draws.", min=0, max=UINT64)
    end_id: int | None = option("Token id to end a sequence at.")
    stop_words: list[str] | None = option("Text to end a sequence at; repeatable.", "--stop-word")
    bad_words: list[str] | None = option("Text to exclude; repeatable.", "--bad-word")


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Other inputs, and the outputs."""

    given: list[str] | None = option(
        "Any other input; NAME=@FILE reads a .npy, .csv or .json file; repeatable.",
        "--input",
        metavar="NAME=JSON",
    )
    prompt_table: Path | None = option(
        "Prompt embedding table, .npy: [rows, size] or [tasks, rows, size]."
    )
    prompt_task: int = option("Task of a table with several.", default=0, min=0)
    prompt_table_id: int | None = option(
        "Identity of the table; its prompts share KV.", min=1, max=UINT64
    )
    vocab_size: int = option("First token id that addresses the table.", default=0, min=0)
    requested_outputs: list[str] | None = option(
        "Exactly these outputs, separated by commas; default all; repeatable.", metavar="NAMES"
    )

    def inputs(self, options: Mapping[str, Any]) -> Inputs:
        """Returns the inputs beside the prompts. Raises BadParameter."""
        own = {
            **_table(self.prompt_table, self.prompt_task),
            **dict(map(read_input, self.given or ())),
        }
        table = TableId(self.prompt_table_id, self.vocab_size) if self.prompt_table_id else None
        names = [
            name for each in self.requested_outputs or () for name in each.replace(",", " ").split()
        ]
        return Inputs({**options, **own}, table, names)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Outputs to compare with, and to save."""

    check_output: Path | None = option(
        "Expected outputs, a sequence or a prompt each: .csv with rows of token ids, or .json with"
        " texts or lists of ids; either may begin with the prompt."
    )
    match: float = option("Least share of equal tokens or characters.", default=1.0, min=0, max=1)
    save_output: Path | None = option("Write the outputs as a file for --check-output.")

    def expected(self) -> Expected | None:
        return Expected.read(self.check_output, self.match) if self.check_output else None


@dataclass(frozen=True, slots=True)
class EndOptions:
    """The name of the requests, and when they end, if not by themselves."""

    request_id: str = option("Id of the request; default random.", default="")
    stop_after_ms: int | None = option("Stop the requests after this time.", min=0)
    timeout: float | None = option("Deadline of the call in seconds.", min=0)
    stop_via_request_cancel: bool = option(
        "Cancel the call after --stop-after-ms instead of sending stop requests.",
        "--stop-via-request-cancel",
        default=False,
    )

    def ending(self) -> Ending:
        """Returns when the requests end. Raises BadParameter."""
        if self.stop_after_ms is None:
            if self.stop_via_request_cancel:
                raise typer.BadParameter("--stop-via-request-cancel needs --stop-after-ms")
            return Ending(self.timeout)
        return Ending(self.timeout, self.stop_after_ms / 1000, self.stop_via_request_cancel)


@dataclass(frozen=True, slots=True)
class OutputSwitches:
    """What answers have beside the new tokens; each field has the name of its input."""

    exclude_input: bool = option(
        "Leave the prompt out of a whole answer.", "--exclude-input", default=False
    )
    log_probs: bool = option("Print log-probabilities.", "--log-probs", default=False)
    return_context_logits: bool = option(
        "Print the logits of the prompt.", "--context-logits", default=False
    )
    return_generation_logits: bool = option(
        "Print the logits of new tokens.", "--generation-logits", default=False
    )
    perf_metrics: bool = option("Print times and KV figures.", "--perf-metrics", default=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """The parsed command line."""

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
@grouped
def infer(
    prompts: Annotated[list[str] | None, typer.Argument(help=PROMPTS_HELP)] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            help="Token ids to continue: '1 2 3', or @FILE.csv, a prompt a row; repeatable."
        ),
    ] = None,
    *,
    server: ServerOptions,
    model: Annotated[
        str, typer.Option(help="Model; default ensemble, and tensorrt_llm for --ids.")
    ] = "",
    preprocessing: Annotated[
        str, typer.Option(help="Model that encodes texts for a model of token ids.")
    ] = "preprocessing",
    generation: GenerationOptions,
    others: InputOptions,
    checks: CheckOptions,
    end: EndOptions,
    lines: LinesOption = False,
    switches: OutputSwitches,
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
    ending = end.ending()
    values = {**asdict(generation), **asdict(switches), "stream": None}
    inputs = others.inputs({n: v for n, v in values.items() if v is not None and v is not False})
    _note_equal(generation, inputs)
    ask = Ask(
        model=model,
        preprocessing=preprocessing,
        prompts=asked,
        inputs=inputs,
        request_id=end.request_id or uuid.uuid4().hex,
        stream=generation.stream,
        batch=batch,
        ending=ending,
        as_json=json,
        expected=checks.expected(),
        save_output=checks.save_output,
    )
    run(_infer(server, ask))


def _note_equal(generation: GenerationOptions, inputs: Inputs) -> None:
    """Says that all sequences will be equal, if nothing draws their tokens."""
    sequences = generation.num_return_sequences or 1
    if sequences > 1 and (generation.beam_width or 1) == 1 and not inputs.options.keys() & DRAWING:
        say_equal(sequences, "add --top-k or --top-p")


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


async def _infer(server: ServerOptions, ask: Ask) -> int:
    async with server.connected() as connection:
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
