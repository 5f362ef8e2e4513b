"""The requests of a command on one stream, from the first to the last response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.cli.session import FAILED, OK
from trtmesh.tools.triton.client import TritonConnection
from trtmesh.tools.triton.printer import TritonPrinter
from trtmesh.tools.triton.requests import Inputs, Prompt, TritonModel, make_request, make_stop
from trtmesh.tools.triton.results import Results
from trtmesh.tools.triton.tensors import Tensor, decode_outputs

STOP_ANSWER = "Request cancelled by client"


@dataclass(frozen=True, slots=True)
class Ending:
    """When the requests end, if not by themselves."""

    timeout_seconds: float | None = None
    stop_after_seconds: float | None = None
    by_cancel: bool = False
    """Whether the stop cancels the call instead of sending stop requests."""


class Conversation:
    """All requests of the command. Raises InvalidRequest."""

    def __init__(
        self,
        model: TritonModel,
        groups: Sequence[Sequence[Prompt]],
        request_id: str,
        inputs: Inputs,
        ending: Ending,
        *,
        as_json: bool,
    ) -> None:
        """`groups` has the prompts of each request."""
        self._ending = ending
        self._names = [
            request_id + (f"-{i}" if len(groups) > 1 else "") for i in range(len(groups))
        ]
        self._requests = [
            make_request(model, name, group, inputs)
            for name, group in zip(self._names, groups, strict=True)
        ]
        sends_stops = ending.stop_after_seconds is not None and not ending.by_cancel
        self._stops = {name: make_stop(model, name) for name in self._names} if sends_stops else {}
        self._stopped: set[str] = set()
        self._indexes = {name: index for index, name in enumerate(self._names)}
        self._answers_due = dict.fromkeys(self._names, 1)
        """Final responses still due by name; a stop shares the name of its request."""
        self._all_over = asyncio.Event()
        self._failed = False
        self._requested = frozenset(inputs.outputs)
        self.results = Results(len(groups), accumulates=model.accumulates)
        sizes = [len(group) for group in groups]
        self._printer = TritonPrinter(sizes, self.results, as_json=as_json)

    async def hold(self, connection: TritonConnection) -> int:
        """Sends everything and prints until the server ends the stream; returns the exit status."""
        responses = connection.stream(self._sending(), self._ending.timeout_seconds)
        cut = self._ending.stop_after_seconds if self._ending.by_cancel else None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(cut), aclosing(responses):
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
                async with asyncio.timeout(self._ending.stop_after_seconds):
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
            outputs = decode_outputs(response)
            self._check_names(outputs)
            self._printer.show(index, outputs, final=final)
        if final or message.error_message:
            self._on_end(name, index)

    def _check_names(self, outputs: Sequence[Tensor]) -> None:
        names = {output.name for output in outputs}
        if self._requested and names != self._requested:
            asked, got = (", ".join(sorted(each)) for each in (self._requested, names))
            raise InvalidRequest(f"the outputs {asked} were requested, but {got} came")

    def _on_end(self, name: str, index: int) -> None:
        self._answers_due[name] = self._answers_due.get(name, 1) - 1
        if self._answers_due[name] <= 0:
            del self._answers_due[name]
            self._printer.end(index)
        if not self._answers_due:
            self._all_over.set()
