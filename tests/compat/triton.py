"""Helpers around the real tritonclient: inputs as arrays, streams read to their end."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc
from tritonclient.utils import np_to_triton_dtype
from trtmesh.router.doors.triton.templates.generation import GenerationTemplate
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.values.request import GenerationRequest

PATIENCE_SECONDS = 240.0

T = TypeVar("T")

TYPES = {
    bool: np.bool_,
    int: np.int32,
    float: np.float32,
    str: np.object_,
    bytes: np.object_,
}


def asked(call: Call) -> GenerationRequest:
    """The request of a call."""
    assert isinstance(call.model.template, GenerationTemplate)
    return call.model.template.request(call, "name")


def array(value: Any, dtype: Any = None) -> Any:
    """A batched tensor: arrays unchanged, scalars as [1, 1], lists as [1, n]."""
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    dtype = dtype or (TYPES[type(values[0])] if values else np.int32)
    return np.array([values], dtype=dtype)


def make_inputs(tensors: Mapping[str, Any]) -> list[Any]:
    """Inputs of tritonclient, typed by their values."""
    inputs = []
    for name, value in tensors.items():
        data = array(value, np.uint64 if name in UINT64 else None)
        given = sync_grpc.InferInput(name, data.shape, np_to_triton_dtype(data.dtype))
        given.set_data_from_numpy(data)
        inputs.append(given)
    return inputs


UINT64 = frozenset(
    {"seed", "lora_task_id", "prompt_table_extra_id", "prompt_table_extra_ids",
     "PROMPT_TABLE_EXTRA_ID"}
)  # fmt: skip


@dataclass
class Response:
    """One response as a client reads it."""

    request_id: str = ""
    outputs: dict[str, Any] = field(default_factory=dict)
    final: bool | None = None
    error: str = ""

    @property
    def text(self) -> str:
        """Its only text."""
        (text,) = self.outputs["text_output"].tolist()
        return str(text, "utf-8")

    @property
    def number(self) -> Mapping[str, Any]:
        """Outputs of one element."""
        return {name: value.item() for name, value in self.outputs.items() if value.size == 1}

    @classmethod
    def of(cls, result: Any) -> Response:
        message = result.get_response()
        final = message.parameters.get("triton_final_response")
        return cls(
            message.id,
            {output.name: result.as_numpy(output.name) for output in message.outputs},
            None if final is None else final.bool_param,
        )


def request(model: str, tensors: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of one inference."""
    outputs = more.pop("outputs", None)
    if outputs is not None:
        more["outputs"] = [sync_grpc.InferRequestedOutput(name) for name in outputs]
    return {"model_name": model, "inputs": make_inputs(tensors), **more}


class Triton:
    """A server, with its asynchronous client."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = aio_grpc.InferenceServerClient(address)

    async def infer(self, model: str, tensors: Mapping[str, Any], **more: Any) -> Response:
        """One unary inference."""
        return Response.of(
            await self.client.infer(
                client_timeout=PATIENCE_SECONDS, **request(model, tensors, **more)
            )
        )

    async def stream(self, model: str, tensors: Mapping[str, Any], **more: Any) -> list[Response]:
        """All responses of an inference on a separate stream."""
        if more.pop("empty_final", False):
            # Only the synchronous client has this option.
            more["enable_empty_final_response"] = True
            return await asyncio.to_thread(sync_stream, self.address, model, tensors, **more)
        algorithm = more.pop("compression_algorithm", None)
        return await self.stream_all([request(model, tensors, **more)], algorithm)

    async def stream_all(
        self, requests: Sequence[dict[str, Any]], compression_algorithm: str | None = None
    ) -> list[Response]:
        """Sends requests on a stream, half-closes at once and reads to the end."""

        async def sending() -> AsyncIterator[dict[str, Any]]:
            for each in requests:
                yield each

        responses = []
        results = self.client.stream_infer(
            sending(),
            stream_timeout=PATIENCE_SECONDS,
            compression_algorithm=compression_algorithm,
        )
        async for result, error in results:
            responses.append(_response(result, error))
        return responses

    async def growing(self, model: str, tensors: Mapping[str, Any]) -> tuple[str, str]:
        """From a long, accumulating stream: the first text, and the next longer text.

        How many responses a short text has is nobody's promise: a delayed router merges tokens.
        """

        async def sending() -> AsyncIterator[dict[str, Any]]:
            yield request(model, tensors)

        results = self.client.stream_infer(sending(), stream_timeout=PATIENCE_SECONDS)
        try:
            first = text = _response(*await anext(results)).text
            while len(text) <= len(first):
                text = _response(*await anext(results)).text
            return first, text
        finally:
            results.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()


def _response(result: Any, error: Any) -> Response:
    return Response(error=str(error)) if error is not None else Response.of(result)


class SyncStream:
    """The synchronous client's stream: callbacks in a thread, as in upstream's scripts. Cancels unfinished requests at
    the end of the block."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        self.client = sync_grpc.InferenceServerClient(address)
        self.responses: queue.Queue[Response] = queue.Queue()
        self.client.start_stream(callback=self._on_response, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()
        self.client.close()

    def _on_response(self, result: Any, error: Any) -> None:
        self.responses.put(_response(result, error))

    def send(self, model: str, tensors: Mapping[str, Any], **more: Any) -> None:
        self.client.async_stream_infer(**request(model, tensors, **more))

    def next(self) -> Response:
        return self.responses.get(timeout=PATIENCE_SECONDS)

    def half_close(self) -> list[Response]:
        """Half-closes, waits for the end and returns the remaining responses."""
        self.client.stop_stream()
        left = []
        while not self.responses.empty():
            left.append(self.responses.get_nowait())
        return left

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)


def sync_stream(
    address: str, model: str, tensors: Mapping[str, Any], **more: Any
) -> list[Response]:
    """All responses of an inference, from the synchronous client."""
    with SyncStream(address) as stream:
        stream.send(model, tensors, **more)
        return stream.half_close()


def joined(responses: Sequence[Response]) -> str:
    """The text of a stream with a single sequence."""
    return "".join(response.text for response in responses if response.outputs)


async def in_pieces(ask: Callable[[], Awaitable[Sequence[T]]]) -> Sequence[T]:
    """A streamed answer of several messages. A router that is late joins the tokens that it holds: asks until one is
    not."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(pieces := await ask()) < 2:
            pass
    return pieces
