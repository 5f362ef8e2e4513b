"""Runs the generation requests of the Triton door, and stops them by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import DeadlineExceeded, TrtmeshError
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.router.callers.identity import Identity
from trtmesh.router.doors.generation import Caller, GenerationCall
from trtmesh.router.doors.triton.answers import Answer, Answers, PlainText
from trtmesh.router.doors.triton.engines import Engines
from trtmesh.router.doors.triton.statistics import Counting
from trtmesh.router.doors.triton.templates.generation import GenerationTemplate, ItemFailure
from trtmesh.router.doors.triton.templates.outputs import RowOutput, SequenceOutput
from trtmesh.router.doors.triton.templates.template import Call, Model
from trtmesh.router.doors.triton.templates.texts import Texts
from trtmesh.router.doors.triton.token_ids import (
    bias_size,
    with_fitted_bias,
    with_wrapped_prompt,
    without_decoder_start,
    wrap_size,
)
from trtmesh.router.doors.triton.unmerged import Unmerged
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.requests.requests import RequestKey, Requests
from trtmesh.router.values.request import MAX_REQUEST_ID_LENGTH, GenerationRequest
from trtmesh.v1 import router_pb2 as router_pb

T = TypeVar("T")


def _read(
    template: GenerationTemplate, call: Call, vocabulary_size: int, bias_size: int
) -> tuple[Call, GenerationRequest]:
    """Returns the call with the prompt wrapped and the bias fitted, and the request."""
    fitted = with_fitted_bias(with_wrapped_prompt(call, vocabulary_size), bias_size)
    return fitted, template.request(fitted, "")


def has_beams(request: GenerationRequest) -> bool:
    """Whether a beam search may rewrite what was told."""
    return request.items[0].config.beam_search.beam_width > 1


class Generations:
    """Runs generation requests. Clients may use a name twice: it then means the latest request."""

    def __init__(
        self,
        requests: Requests,
        texts: Texts,
        metrics: RouterMetrics,
        engines: Engines,
    ) -> None:
        self._requests = requests
        self._texts = texts
        self._metrics = metrics
        self._engines = engines
        self._named: dict[RequestKey, LiveRequest] = {}

    def refused(self, model: Model) -> None:
        """Counts a request that could not be read."""
        self._requests.metrics_of(model.mesh_model).requests["refused"] += 1

    def problem(self, model: Model, template: GenerationTemplate) -> str:
        """Why a model takes no requests now, or ''."""
        try:
            self._requests.served_model(model.mesh_model)
        except TrtmeshError as error:
            return error.message
        return self._engines.problem(model) or (self._texts.problem(model) if template.text else "")

    def stop(self, call: Call, template: GenerationTemplate, owner: Identity) -> None:
        """Ends the owner's request of any model early, if the request is known and running."""
        if not call.request_id:
            raise template.unnamed_stop()
        live = self._named.get((owner.name, call.request_id))
        if live is not None:
            live.stop(())

    @asynccontextmanager
    async def run(
        self,
        counting: Counting,
        message: ReceivedMessage,
        template: GenerationTemplate,
        caller: Caller,
    ) -> AsyncIterator[AsyncIterator[Answer]]:
        """The answers of a call, while inside. Raises TrtmeshError."""
        call = without_decoder_start(counting.call, self._engines)
        sizes = (
            wrap_size(call, self._engines),
            bias_size(call, self._engines, self._texts),
        )
        with GenerationCall(self._requests.metrics_of(call.model.mesh_model)) as generation:
            owner = caller.identity
            call, request = await message.run(partial(_read, template, call, *sizes))
            if name := self._mesh_name(owner, call.request_id):
                request = replace(request, request_id=name)
            rebind_request_id(request.request_id)
            answers = self._answers_of(call, template, request)
            limit = TimeLimit(call.timeout_seconds)
            opening = self._requests.open(request, caller.remaining_seconds, owner, caller.origin)
            async with generation.running(opening) as live:
                with (
                    counting.generating(live, answers),
                    self._known_as(owner, call.request_id, live),
                ):
                    apart = (
                        call.streaming and not call.model.merge_tokens and not has_beams(request)
                    )
                    unmerged = Unmerged() if apart else None
                    forward = self._forward(call.model, live, answers, limit, unmerged)
                    async with aclosing(forward) as told:
                        yield told

    def _answers_of(
        self, call: Call, template: GenerationTemplate, request: GenerationRequest
    ) -> Answers | PlainText:
        def item_error(failed: router_pb.ItemFailed) -> TrtmeshError:
            usage, longest = failed.usage, self._engines.longest_prompt()
            error = from_proto(failed.error)
            failure = ItemFailure(error, request.request_id, usage.prompt_tokens, longest)
            return template.failed(call, failure)

        builder = template.output_builder(call, request)
        rewrites = has_beams(request) or call.model.accumulate_tokens
        if call.streaming and builder.only_new_text and not rewrites:
            return PlainText(item_error, final_alone=template.final_alone)
        return Answers(call, request, builder, item_error, with_prompts=template.text)

    def _mesh_name(self, owner: Identity, name: str) -> str:
        """The client's name of a request, or '' for a name of the mesh's choice: Triton accepts any name, any number
        of times."""
        usable = self._requests.find(owner, name) is None and name.isprintable()
        return name if usable and len(name) <= MAX_REQUEST_ID_LENGTH else ""

    @contextmanager
    def _known_as(self, owner: Identity, name: str, live: LiveRequest) -> Iterator[None]:
        key = (owner.name, name)
        if name:
            self._named[key] = live
        try:
            yield
        finally:
            if self._named.get(key) is live:
                del self._named[key]

    async def _forward(
        self,
        model: Model,
        live: LiveRequest,
        answers: Answers | PlainText,
        limit: TimeLimit,
        unmerged: Unmerged | None,
    ) -> AsyncGenerator[Answer]:
        """The answers, until all rows are over; with `unmerged`, at least one for each token."""
        while (waiting := await limit.keep(live.client.next_entries())) is not None:
            for part in unmerged.parts(waiting) if unmerged else (waiting,):
                answers.see(part)
                for row, sequence in answers.texts_to_complete():
                    sequence.texts = [await self._whole_text(model, row, sequence)]
                for answer in answers.take():
                    yield answer
                    self._metrics.client_messages += 1

    async def _whole_text(self, model: Model, row: RowOutput, sequence: SequenceOutput) -> str:
        """The text of prompt and generated ids, decoded together because a tokenizer may put a space between them. It
        ends at the same stop text as the generated text."""
        text = "".join(sequence.texts)
        whole = await self._texts.decode(model, [*row.prompt_ids, *sequence.token_ids])
        if sequence.stop_text is None:
            return whole
        prompt = await self._texts.decode(model, row.prompt_ids)
        start = whole.find(text, len(prompt)) if whole.startswith(prompt) else -1
        return prompt + text if start < 0 else whole[: start + len(text)]


class TimeLimit:
    """The request parameter `timeout`, counted from now."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def keep(self, waiting: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """The result of `waiting`. Raises DeadlineExceeded when time is up before.

        Only waits are cut off: an interrupted write leaves the stream unusable.
        """
        return waiting if self._deadline is None else self._within(waiting, self._deadline)

    async def _within(self, waiting: Coroutine[Any, Any, T], deadline: float) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                # Lets the timeout act even if there is always something to read.
                await asyncio.sleep(0)
                return await waiting
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request took longer than its timeout of {self._seconds} s"
            ) from None
        finally:
            # The coroutine may not have started.
            waiting.close()
