"""What a call of the stand-in returns: one object, changed at every step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._stand_in.strict import made


@dataclass
class Response:
    """What the machine says about one sequence of a request."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    """New tokens; of a beam all."""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    is_final: bool = False


class RequestOutput:
    """Awaitable and iterable; each step yields this very object."""

    def __init__(self, request: Any, executor: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        self.request_id: int = request.number
        self.prompt = None
        self.prompt_token_ids: list[int] = request.prompt
        self.sampling_params = request.params
        self.context_logits: Any = None
        self.finished = False
        self.cached_tokens = 0
        self.disaggregated_params: Any = None
        self.error: str | None = None
        self._executor = executor
        self._request = request
        self._loop = loop
        self._queue: asyncio.Queue[Response] | None = asyncio.Queue() if loop else None
        self._outputs = [made("CompletionOutput")(index) for index in range(request.count)]
        self._aborted = False
        self._death: BaseException | None = None
        """Of the engine: from 1.3 each later use of the result raises it again."""

    @property
    def outputs(self) -> list[Any]:
        params = self.sampling_params
        if params.best_of > params.n and not params.use_beam_search:
            best = sorted(self._outputs, key=lambda each: each.cumulative_logprob or 0.0)[::-1]
            for index, each in enumerate(best[: params.n]):
                each.index = index
            return best[: params.n]
        return self._outputs[: params.n]

    def abort(self) -> None:
        self._aborted = True
        self._executor.abort(self._request)

    def aborted(self) -> bool:
        return self._aborted

    def put(self, response: Response) -> None:
        """Called by the machine, from its thread."""
        if self._loop and self._queue and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, response)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._death:
            raise self._death
        if self.finished:
            raise StopAsyncIteration
        await self._step()
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    async def aresult(self) -> RequestOutput:
        if self._death:
            raise self._death
        while not self.finished:
            await self._step()
        return self

    async def _step(self) -> None:
        assert self._queue, "The asyncio event loop was not present during initialization"
        response = await self._queue.get()
        if response.error:
            self.finished = True
            if type(response.error).__name__ == "EngineDeadError":
                self._death = response.error
            raise response.error
        self._apply(response)
        self.finished = response.is_final

    def _apply(self, response: Response) -> None:
        output = self._outputs[response.index]
        params = self.sampling_params
        output._last_token_ids_len = len(output.token_ids)
        output._last_logprobs_len = len(output.logprobs)
        if params.use_beam_search:
            output.token_ids, output.logprobs = response.token_ids, response.logprobs
        else:
            output.token_ids += response.token_ids
            output.logprobs += response.logprobs
        for name, value in response.extra.items():
            setattr(self if name in ("context_logits", "cached_tokens") else output, name, value)
        if response.finish_reason:
            self._finish(output, response.finish_reason)

    def _finish(self, output: Any, reason: str) -> None:
        """Of a stop word the library names the reason, and cuts it off unless told to keep it."""
        output.finish_reason = reason
        if reason != "stop_words":
            return
        output.finish_reason = "stop"
        for label, word in self.sampling_params._get_stop_reasons_and_words():
            if output.token_ids[-len(word) :] == word:
                output.stop_reason = label
                if not self.sampling_params.include_stop_str_in_output:
                    output.token_ids = output.token_ids[: -len(word)]
                return


class IterationResult:
    """A queue of rows: each is given once, and the iteration ends when it is empty for a while."""

    def __init__(self, queue: asyncio.Queue[dict[str, Any]] | None, timeout: float) -> None:
        self._queue = queue
        self._timeout = timeout

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._queue is None:
            raise StopAsyncIteration
        try:
            return await asyncio.wait_for(self._queue.get(), self._timeout)
        except TimeoutError:
            raise StopAsyncIteration from None
