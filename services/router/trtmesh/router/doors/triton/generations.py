"""Runs the generation requests of the Triton door, and stops them by name."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import DeadlineExceeded, TrtmeshError
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.chassis.forwarding import Sink
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.router.callers.identity import Identity
from trtmesh.router.doors.generation import Caller, GenerationCall, RunningCall
from trtmesh.router.doors.triton.answers import Answer, Answers, PlainText
from trtmesh.router.doors.triton.bls_loop import BlsLoop
from trtmesh.router.doors.triton.engines import Engines
from trtmesh.router.doors.triton.statistics import Counting, Timed
from trtmesh.router.doors.triton.templates.generation import GenerationTemplate, ItemFailure
from trtmesh.router.doors.triton.templates.outputs import RowOutput, SequenceOutput
from trtmesh.router.doors.triton.templates.template import Call, Model
from trtmesh.router.doors.triton.templates.texts import Texts
from trtmesh.router.doors.triton.token_ids import (
    ADJUSTED,
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
from trtmesh.router.streams.client_stream import ClientStream, Waiting
from trtmesh.router.tracing import CallTrace
from trtmesh.router.values.request import MAX_REQUEST_ID_LENGTH, GenerationRequest
from trtmesh.v1 import router_pb2 as router_pb

T = TypeVar("T")

DOOR = "triton"
"""Its name in metrics."""


def _read(
    template: GenerationTemplate, call: Call, vocabulary_size: int, bias_size: int
) -> tuple[Call, GenerationRequest]:
    """Returns the call with the prompt wrapped and the bias fitted, and the request."""
    call = with_fitted_bias(with_wrapped_prompt(call, vocabulary_size), bias_size)
    return call, template.request(call, "")


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
        self._named: dict[RequestKey, LiveRequest | BlsLoop] = {}
        self._unread: dict[ReceivedMessage, RequestKey] = {}
        """Named requests in large messages, which may be overtaken by stops."""
        self._overtaken = set[ReceivedMessage]()
        """Those of them to be stopped."""

    def refused(self, model: Model, error: TrtmeshError, began: float) -> None:
        """Counts a request that could not be read, which arrived at a monotonic time."""
        self._call_of(model, began).end(error)

    def _call_of(
        self, model: Model, began: float, trace: CallTrace | None = None
    ) -> GenerationCall:
        metrics = self._requests.metrics_of(model.mesh_model)
        return GenerationCall(DOOR, metrics, began=began, trace=trace)

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
        key = (owner.name, call.request_id)
        self._overtaken.update(each for each, named in self._unread.items() if named == key)
        running = self._named.get(key)
        if running is not None:
            running.stop(())

    def arriving(
        self, message: ReceivedMessage, owner: Identity, name: str
    ) -> AbstractContextManager[None]:
        """The block in which a request is read and served: a stop reaches it from here on. A small one needs none, as
        it is read at once."""
        may_be = name and message.is_large
        return self._arriving(message, (owner.name, name)) if may_be else nullcontext()

    @contextmanager
    def _arriving(self, message: ReceivedMessage, key: RequestKey) -> Iterator[None]:
        self._unread[message] = key
        try:
            yield
        finally:
            self._unread.pop(message, None)
            self._overtaken.discard(message)

    async def run(
        self,
        counting: Counting,
        message: ReceivedMessage,
        template: GenerationTemplate,
        caller: Caller,
        sink: Sink[Answer],
    ) -> None:
        """Passes the answers of a call to a sink. Raises TrtmeshError."""
        call, sizes = counting.call, (0, 0)
        if not ADJUSTED.isdisjoint(call.inputs):
            call = without_decoder_start(call, self._engines)
            sizes = (
                wrap_size(call, self._engines),
                bias_size(call, self._engines, self._texts),
            )
        trace = CallTrace.begin(self._requests.tracer, DOOR, caller.headers)
        with self._call_of(call.model, call.arrived_ns / 1e9, trace) as generation:
            owner = caller.identity
            call, request = await message.run(partial(_read, template, call, *sizes))
            if call.model.draft_model and self._may_loop(call.model, request):
                await self._loop(
                    counting, message, call, template, request, caller, generation, sink
                )
                return
            if call.request_id and (name := self._mesh_name(owner, call.request_id)):
                request = replace(request, request_id=name)
            rebind_request_id(request.request_id)
            answers = self._answers_of(call, template, request)
            limit = TimeLimit(call.timeout_seconds)
            opening = self._requests.open(request, caller.remaining_seconds, owner, caller.origin)
            async with RunningCall(generation, opening) as live:
                apart = call.streaming and not call.model.merge_tokens and not has_beams(request)
                complete = partial(self._complete, call.model, answers)
                unmerged = Unmerged() if apart else None
                told = GeneratedAnswers(answers, complete, unmerged, self._metrics, sink)
                known = self._known(message, owner, call.request_id, live)
                with Timed(counting, answers, live), known:
                    await told.forward(live.client, limit)

    def _known(
        self,
        message: ReceivedMessage,
        owner: Identity,
        name: str,
        running: LiveRequest | BlsLoop,
    ) -> AbstractContextManager[None]:
        """Lets stops reach a request by the client's name, if it has one."""
        self._unread.pop(message, None)
        if message in self._overtaken:
            running.stop(())
        return self._named_so((owner.name, name), running) if name else nullcontext()

    @contextmanager
    def _named_so(self, key: RequestKey, running: LiveRequest | BlsLoop) -> Iterator[None]:
        self._named[key] = running
        try:
            yield
        finally:
            if self._named.get(key) is running:
                del self._named[key]

    def _may_loop(self, model: Model, request: GenerationRequest) -> bool:
        """Whether a model of the mesh drafts for a request that asks for it, and the other can verify."""
        draft = request.items[0].config.draft
        if draft is None or not draft.num_draft_tokens:
            return False
        needed = ("draft.token_ids", "draft.logits")[: 1 + draft.use_draft_logits]
        return all(self._engines.support(model, field) for field in needed)

    async def _loop(
        self,
        counting: Counting,
        message: ReceivedMessage,
        call: Call,
        template: GenerationTemplate,
        request: GenerationRequest,
        caller: Caller,
        generation: GenerationCall,
        sink: Sink[Answer],
    ) -> None:
        """Passes on the answers of rounds over two models."""
        owner, name = caller.identity, call.request_id
        answers = self._answers_of(call, template, request)
        loop = BlsLoop(
            self._requests,
            self._metrics,
            request,
            call.model.draft_model,
            caller,
            generation,
            partial(self._mesh_name, owner, name),
            partial(Timed, counting, answers),
        )
        complete = partial(self._complete, call.model, answers)
        told = GeneratedAnswers(answers, complete, None, self._metrics, sink)
        with self._known(message, owner, name, loop):
            async with aclosing(loop):
                await told.forward(loop, TimeLimit(call.timeout_seconds))

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

    async def _complete(self, model: Model, answers: Answers | PlainText) -> None:
        """Puts prompts before the texts of finished sequences."""
        for row, sequence in answers.texts_to_complete():
            sequence.texts = [await self._whole_text(model, row, sequence)]

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


class GeneratedAnswers(Sink[Sequence[Waiting]]):
    """Makes answers of events and passes them on; with `unmerged`, at least one for each token."""

    def __init__(
        self,
        answers: Answers | PlainText,
        complete: Callable[[], Awaitable[None]],
        unmerged: Unmerged | None,
        metrics: RouterMetrics,
        sink: Sink[Answer],
    ) -> None:
        """`complete` completes the texts of what was seen."""
        self._seen, self._complete = answers, complete
        self._unmerged, self._metrics, self._sink = unmerged, metrics, sink
        self._untold = deque[Answer]()
        """Answers to the message under way."""

    async def forward(self, source: ClientStream | BlsLoop, limit: TimeLimit) -> None:
        """Passes all answers on until all rows are over: without a limit, most in the pass in which they become
        ready."""
        if isinstance(source, ClientStream) and not limit.is_set:
            await source.forward(self)
            return
        while (waiting := await limit.keep(source.next_entries())) is not None:
            await self.write(waiting)

    def _parts(self, waiting: Sequence[Waiting]) -> Iterable[Sequence[Waiting]]:
        return self._unmerged.parts(waiting) if self._unmerged else (waiting,)

    def write_now(self, message: Sequence[Waiting]) -> bool:
        if not isinstance(self._seen, PlainText):
            # Texts may have to be completed.
            return False
        untold = self._untold
        for part in self._parts(message):
            self._seen.see(part)
            untold += self._seen.take()
        while untold and self._sink.write_now(untold[0]):
            untold.popleft()
            self._metrics.client_messages += 1
        return not untold

    async def write(self, message: Sequence[Waiting]) -> None:
        if not self._untold and self.write_now(message):
            return
        if not self._untold:
            for part in self._parts(message):
                self._seen.see(part)
                await self._complete()
                self._untold += self._seen.take()
        while self._untold:
            await self._sink.write(self._untold.popleft())
            self._metrics.client_messages += 1


class TimeLimit:
    """The request parameter `timeout`, counted from now."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.is_set = seconds is not None
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
