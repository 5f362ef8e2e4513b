"""The doors of a router, and of peers, for load over the mesh's own client: method, request, and what is an answer."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tritonclient.grpc import service_pb2 as kserve
from trtmesh.chassis.grpc.client import Method
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


class Door(Protocol):
    """How a text becomes a request and messages become tokens; messages stay bytes while time is measured."""

    method: Method[bytes, bytes]

    def request(self, prompt: str | Sequence[int], max_tokens: int) -> bytes:
        """A request with a single item."""

    def begins(self, message: bytes) -> bool:
        """Whether a message has tokens. Raises SystemExit for an error."""

    def text(self, messages: Iterable[bytes]) -> str:
        """The text of an answer."""

    def check(self, messages: Sequence[bytes], tokens: int) -> None:
        """Raises SystemExit unless messages are a whole answer of `tokens` tokens."""


class Native:
    """MeshService.Generate."""

    method: Method[bytes, bytes] = Method("/trtmesh.v1.MeshService/Generate", bytes, bytes)

    def request(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        text: bool = True,
        ignore_end_id: bool = False,
        lora: pb.LoraConfig | None = None,
    ) -> bytes:
        config = pb.GenerationConfig(
            stopping=pb.StoppingConfig(max_tokens=max_tokens, ignore_end_id=ignore_end_id),
            output=None if text else pb.OutputConfig(text=False),
            lora=lora,
        )
        given = (
            pb.Prompt(text=prompt)
            if isinstance(prompt, str)
            else pb.Prompt(token_ids=pb.TokenIds(ids=prompt))
        )
        item = router_pb.GenerateItem(prompt=given)
        return router_pb.GenerateRequest(items=[item], config=config).SerializeToString()

    def begins(self, message: bytes) -> bool:
        return bool(self.count(message))

    def text(self, messages: Iterable[bytes]) -> str:
        return "".join(event.tokens.text for each in messages for event in self._events(each))

    def check(self, messages: Sequence[bytes], tokens: int) -> None:
        """A token that is missing, repeated or out of order is an error."""
        came, finished = 0, False
        for event in (event for message in messages for event in self._events(message)):
            if event.HasField("tokens"):
                if event.tokens.token_offset != came:
                    raise SystemExit(f"token {event.tokens.token_offset} came, not {came}")
                came += len(event.tokens.token_ids)
            finished |= event.HasField("item_finished")
        if came != tokens or not finished:
            raise SystemExit(f"{came} of {tokens} tokens came")

    def count(self, message: bytes) -> int:
        """Tokens of a message."""
        return sum(len(event.tokens.token_ids) for event in self._events(message))

    def cached(self, messages: Iterable[bytes]) -> int:
        """Prompt tokens that were reused."""
        return sum(
            event.item_finished.usage.cached_prompt_tokens
            for message in messages
            for event in self._events(message)
        )

    def _events(self, message: bytes) -> Iterable[router_pb.GenerateEvent]:
        events = router_pb.GenerateResponse.FromString(message).events
        for event in events:
            if event.HasField("item_failed"):
                raise SystemExit(f"an item failed: {event.item_failed.error.message}")
        return events


class Triton:
    """ModelStreamInfer of a Triton model. Responses have texts in place of tokens, so only the end is checked."""

    method: Method[bytes, bytes] = Method(
        "/inference.GRPCInferenceService/ModelStreamInfer", bytes, bytes
    )

    def __init__(self, model: str, *, ends_with_content: bool) -> None:
        """`ends_with_content` says whether the last response is final, or an empty one that is not sent."""
        self._model = model
        self._ends = ends_with_content

    def request(self, prompt: str | Sequence[int], max_tokens: int) -> bytes:
        if not isinstance(prompt, str):
            raise SystemExit(f"`{self._model}` takes texts")
        request = kserve.ModelInferRequest(model_name=self._model)
        text = prompt.encode()
        for name, data_type, data in (
            ("text_input", "BYTES", struct.pack("<I", len(text)) + text),
            ("max_tokens", "INT32", struct.pack("<i", max_tokens)),
            ("stream", "BOOL", b"\1"),
        ):
            request.inputs.add(name=name, datatype=data_type, shape=(1, 1))
            request.raw_input_contents.append(data)
        serialized: bytes = request.SerializeToString()
        return serialized

    def begins(self, message: bytes) -> bool:
        outputs = self._response(message).outputs
        return any(output.name == "text_output" for output in outputs)

    def text(self, messages: Iterable[bytes]) -> str:
        parts = [part[4:] for each in messages for part in self._response(each).raw_output_contents]
        return b"".join(parts).decode()

    def check(self, messages: Sequence[bytes], tokens: int) -> None:
        responses = [self._response(message) for message in messages]
        finals = [
            each.parameters["triton_final_response"].bool_param
            for each in responses
            if "triton_final_response" in each.parameters
        ]
        ends = [False] * (len(finals) - self._ends) + [True] * self._ends
        if not any(map(self.begins, messages)) or finals != ends:
            raise SystemExit(f"an answer of {tokens} tokens is incomplete: {responses}")

    def _response(self, message: bytes) -> kserve.ModelInferResponse:
        response = kserve.ModelStreamInferResponse.FromString(message)
        if response.error_message:
            raise SystemExit(f"a request failed: {response.error_message}")
        return response.infer_response


NATIVE = Native()
DOORS: dict[str, Door] = {"native": NATIVE, "ensemble": Triton("ensemble", ends_with_content=True)}


class Http:
    """A client of an address or a URL over HTTP/1.1, with a connection for each request at a time; answers are parsed
    when they are whole."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition("/")[2].rpartition(":")
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(
        self, path: str, fields: dict[str, Any], on_part: Callable[[], object] = lambda: None
    ) -> bytes:
        """The body of an answer; calls `on_part` for each part of a stream. Raises SystemExit unless the status is
        200."""
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        if not self._free:
            self._free.append(await asyncio.open_connection(self._host, int(self._port)))
        reader, writer = self._free.pop()
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        told = await reader.readuntil(b"\r\n\r\n")
        answer = b""
        if b"chunked" in told:
            while size := int(await reader.readline(), 16):
                answer += (await reader.readexactly(size + 2))[:-2]
                on_part()
            await reader.readline()
        else:
            length = told.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            answer = await reader.readexactly(int(length))
        self._free.append((reader, writer))
        if not told.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"{told.decode()}{answer.decode()}")
        return answer
