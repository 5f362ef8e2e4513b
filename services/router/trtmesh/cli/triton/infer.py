"""`trtmesh triton infer`: a client of Triton models on the command line."""

from __future__ import annotations

import asyncio
import json as json_module
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from trtmesh.chassis.errors import InvalidRequest, Unavailable
from trtmesh.cli.output import say_error
from trtmesh.cli.prompts import PROMPTS_HELP, LinesOption, read_prompts
from trtmesh.cli.session import FAILED, OK, USAGE, run
from trtmesh.cli.triton.client import TritonConnection
from trtmesh.cli.triton.printer import TritonPrinter
from trtmesh.cli.triton.requests import Prompt, TritonModel, make_request, make_stop
from trtmesh.cli.triton.tensors import decode_outputs

triton = typer.Typer(name="triton", help="Client of Triton models.", no_args_is_help=True)


@triton.callback()
def _group() -> None:
    """Client of Triton models."""


INT32 = 2**31 - 1
STOP_ANSWER = "Request cancelled by client"


@dataclass(frozen=True, slots=True)
class Ask:
    """The parsed command line."""

    model: str
    prompts: Sequence[Prompt]
    options: Mapping[str, Any]
    request_id: str
    stream: bool | None
    batch: bool
    timeout_seconds: float | None
    stop_after_seconds: float | None
    as_json: bool


@triton.command("infer")
def infer(
    prompts: Annotated[list[str] | None, typer.Argument(help=PROMPTS_HELP)] = None,
    ids: Annotated[
        list[str] | None, typer.Option(help="Token ids to continue, as '1 2 3'; repeatable.")
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="TRTMESH_ROUTER", help="Server of the KServe protocol, host:port.")
    ] = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="Model; tensorrt_llm takes ids.")] = "",
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
        int | None, typer.Option(min=0, max=INT32, help="Keep the k most likely tokens.")
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
        typer.Option("--input", metavar="NAME=JSON", help="Any other input; repeatable."),
    ] = None,
    request_id: Annotated[str, typer.Option(help="Id of the request; default random.")] = "",
    stop_after_ms: Annotated[
        int | None, typer.Option(min=0, help="Stop the requests after this time.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Deadline of the call in seconds.")
    ] = None,
    *,
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
    texts = read_prompts(prompts or (), lines=lines)
    asked: list[Prompt] = [*texts, *map(_read_ids, ids or ())]
    if not asked:
        raise typer.BadParameter("give prompts, or token ids with --ids")
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
    ask = Ask(
        model=model or ("tensorrt_llm" if ids and not texts else "ensemble"),
        prompts=asked,
        options=options | dict(map(_read_input, given or ())),
        request_id=request_id or uuid.uuid4().hex,
        stream=stream,
        batch=batch,
        timeout_seconds=timeout,
        stop_after_seconds=None if stop_after_ms is None else stop_after_ms / 1000,
        as_json=json,
    )
    run(_infer(url, ask))


async def _infer(url: str, ask: Ask) -> int:
    async with TritonConnection(url) as connection:
        try:
            model = TritonModel.of(await connection.model_config(ask.model))
        except Unavailable as error:
            raise Unavailable(f"server {url}: {error}; --url names another") from error
        try:
            conversation = _Conversation(model, ask)
        except InvalidRequest as error:
            # Nothing was sent: the command line does not fit the model.
            say_error(str(error))
            return USAGE
        return await conversation.hold(connection)


class _Conversation:
    """All requests of the command, on one stream. Raises InvalidRequest."""

    def __init__(self, model: TritonModel, ask: Ask) -> None:
        self._ask = ask
        streams = model.decoupled if ask.stream is None else ask.stream
        options = dict(ask.options) | ({"stream": True} if streams else {})
        groups = [ask.prompts] if ask.batch else [[prompt] for prompt in ask.prompts]
        names = [ask.request_id + (f"-{i}" if len(groups) > 1 else "") for i in range(len(groups))]
        self._requests = [
            make_request(model, name, group, options)
            for name, group in zip(names, groups, strict=True)
        ]
        stops = ask.stop_after_seconds is not None
        self._stops = {name: make_stop(model, name) for name in names} if stops else {}
        self._stopped: set[str] = set()
        self._indexes = {name: index for index, name in enumerate(names)}
        self._answers_due = dict.fromkeys(names, 1)
        """Final responses still due by name; a stop shares the name of its request."""
        self._all_over = asyncio.Event()
        self._failed = False
        self._printer = TritonPrinter(
            [len(group) for group in groups], accumulates=model.accumulates, as_json=ask.as_json
        )

    async def hold(self, connection: TritonConnection) -> int:
        """Sends everything and prints until the server ends the stream; returns the exit status."""
        responses = connection.stream(self._sending(), self._ask.timeout_seconds)
        try:
            async with aclosing(responses):  # type: ignore[type-var]  # an asynchronous generator
                async for response in responses:
                    self._take(response)
        finally:
            self._printer.close()
        return FAILED if self._failed else OK

    async def _sending(self) -> AsyncIterator[Any]:
        """The requests, later the stops of unfinished requests; then half-closes."""
        for request in self._requests:
            yield request
        if self._stops:
            try:
                async with asyncio.timeout(self._ask.stop_after_seconds):
                    await self._all_over.wait()
            except TimeoutError:
                for name in [*self._answers_due]:
                    self._answers_due[name] += 1
                    self._stopped.add(name)
                    yield self._stops[name]

    def _take(self, message: Any) -> None:
        response = message.infer_response
        name, index = response.id, self._indexes.get(response.id, 0)
        final = response.parameters["triton_final_response"].bool_param
        if message.error_message:
            # How the llmapi model says that it did what a stop asked.
            if not (message.error_message == STOP_ANSWER and name in self._stopped):
                self._failed = True
                self._printer.fail(index, message.error_message)
        elif response.outputs:
            self._printer.show(index, decode_outputs(response), final=final)
        if final or message.error_message:
            self._on_end(name, index)

    def _on_end(self, name: str, index: int) -> None:
        self._answers_due[name] = self._answers_due.get(name, 1) - 1
        if self._answers_due[name] <= 0:
            del self._answers_due[name]
            self._printer.end(index)
        if not self._answers_due:
            self._all_over.set()


def _read_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids:
        raise typer.BadParameter(f"--ids {text!r} must be numbers, as '1 2 3'")
    return ids


def _read_input(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if name and equals:
            return name, json_module.loads(value)
    except json_module.JSONDecodeError as error:
        raise typer.BadParameter(f"--input {name}: {error}") from error
    raise typer.BadParameter(f"--input {text!r} must be NAME=JSON")
