"""The generation requests of the Triton door while they run, and the names by which they can be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import (
    BackendFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PromptTooLong,
    TrtmeshError,
)
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.router.doors.generation import Caller, counted
from trtmesh.router.doors.triton.answers import Answer, Answers
from trtmesh.router.doors.triton.plain_text import PlainText
from trtmesh.router.doors.triton.speculation import without_draft_model
from trtmesh.router.doors.triton.statistics import Counting
from trtmesh.router.doors.triton.templates.generation import Call, to_request
from trtmesh.router.doors.triton.templates.llmapi import LlmApiOutputs
from trtmesh.router.doors.triton.templates.outputs import OutputBuilder, RowOutput, SequenceOutput
from trtmesh.router.doors.triton.texts import Texts, TextsOf
from trtmesh.router.doors.triton.wording import in_tensors, of_request, reworded
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.requests.requests import Requests
from trtmesh.router.values.request import MAX_REQUEST_ID_LENGTH, GenerationRequest, parse_request
from trtmesh.v1 import router_pb2 as router_pb

T = TypeVar("T")
Send = Callable[[Answer], Awaitable[None]]


class Generations:
    """Runs generation requests of the door. Clients' names may repeat: the latest request of a name has it."""

    def __init__(
        self,
        requests: Requests,
        texts_of: TextsOf,
        metrics: RouterMetrics,
        max_items: int,
        longest_prompt: Callable[[], int],
    ) -> None:
        self._requests = requests
        self._texts_of = texts_of
        self._metrics = metrics
        self._max_items = max_items
        self._longest_prompt = longest_prompt
        self._named: dict[str, LiveRequest] = {}

    def stop(self, call: Call) -> None:
        """Ends a request early, whatever model serves it; nothing where it is unknown or over."""
        if not call.request_id:
            raise InvalidRequest(
                "A request id must be provided for request cancellation"
                if call.model.template == "llmapi"
                else "Trying to stop a request but request ID is not provided"
            )
        live = self._named.get(call.request_id)
        if live is not None:
            live.stop(())

    async def run(self, counting: Counting, caller: Caller, send: Send) -> None:
        """Generates what the call asks and sends each response. Raises TrtmeshError."""
        call = counting.call
        with counted(self._metrics) as generation:
            request = self._validate(call)
            rebind_request_id(request.request_id)
            answers = self._answers_of(call, request)
            limit = TimeLimit(call.timeout_seconds)
            opening = self._requests.open(request, caller.remaining_seconds, caller.api_key)
            async with generation.running(opening) as live:
                with counting.generating(live, answers), self._known_as(call.request_id, live):
                    await self._forward(live, answers, self._texts_of(call.model), limit, send)

    def _answers_of(self, call: Call, request: GenerationRequest) -> Answers | PlainText:
        item_error = partial(self._item_error, call, request.request_id)
        if call.model.template == "llmapi":
            return Answers(call, request, LlmApiOutputs(call), item_error)
        builder = OutputBuilder(call, request)
        searched = request.items[0].config.beam_search.beam_width > 1
        rewrites = searched or call.model.accumulate
        if call.streaming and builder.one_text_only and not rewrites:
            return PlainText(item_error, final_alone=call.model.final_alone)
        return Answers(call, request, builder, item_error)

    def _item_error(
        self, call: Call, request_id: str, failed: router_pb.ItemFailed
    ) -> TrtmeshError:
        error = in_tensors(without_draft_model(from_proto(failed.error)), call)
        if isinstance(error, BackendFailed) and call.model.template != "llmapi":
            return reworded(
                error,
                f"Executor failed process requestId {request_id} due to the following error: {error.message}",
            )
        if isinstance(error, PromptTooLong):
            return InternalError(
                f"Prompt length ({failed.usage.prompt_tokens}) exceeds maximum input length"
                f" ({self._longest_prompt()}): {error.message}"
            )
        return error

    def _validate(self, call: Call) -> GenerationRequest:
        name = call.request_id
        if (
            name in self._requests.live
            or len(name) > MAX_REQUEST_ID_LENGTH
            or not name.isprintable()
        ):
            # Triton takes any name, any number of times; the mesh then chooses one of its own.
            name = ""
        request = to_request(call)
        try:
            return parse_request(request, name, self._max_items)
        except TrtmeshError as error:
            raise of_request(error, call) from error

    @contextmanager
    def _known_as(self, name: str, live: LiveRequest) -> Iterator[None]:
        if name:
            self._named[name] = live
        try:
            yield
        finally:
            if self._named.get(name) is live:
                del self._named[name]

    async def _forward(
        self,
        live: LiveRequest,
        answers: Answers | PlainText,
        texts: Texts,
        limit: TimeLimit,
        send: Send,
    ) -> None:
        """Sends what comes until all rows are over."""
        while (waiting := await limit.keep(live.client.take())) is not None:
            answers.see(waiting)
            for row, sequence in answers.texts_to_complete():
                sequence.texts = [await _whole_text(texts, row, sequence)]
            for answer in answers.take():
                await send(answer)
                self._metrics.client_messages += 1


class TimeLimit:
    """The request parameter `timeout`, from now on."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def keep(self, waiting: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """What `waiting` comes to. Raises DeadlineExceeded when time is up before that.

        A wait alone may be cut off: a write that is cut off leaves its stream unusable.
        """
        return waiting if self._deadline is None else self._within(waiting, self._deadline)

    async def _within(self, waiting: Coroutine[Any, Any, T], deadline: float) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                # A client that always has something to read is no reason to go on for ever.
                await asyncio.sleep(0)
                return await waiting
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request took longer than its timeout of {self._seconds} s"
            ) from None
        finally:
            # It may not even have begun.
            waiting.close()


async def _whole_text(texts: Texts, row: RowOutput, sequence: SequenceOutput) -> str:
    """The text of the prompt's ids and the generated ones, decoded as one: a tokenizer may put a space between that
    neither part has alone. A stop text cuts it where it cut the generated text."""
    text = "".join(sequence.texts)
    whole = await texts.decode([*row.prompt_ids, *sequence.token_ids])
    if sequence.stop_text is None:
        return whole
    prompt = await texts.decode(row.prompt_ids)
    start = whole.find(text, len(prompt)) if whole.startswith(prompt) else -1
    return prompt + text if start < 0 else whole[: start + len(text)]
