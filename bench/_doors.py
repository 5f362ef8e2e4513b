"""The doors of a router, and of peers, for load over the mesh's own client: method, request, and what is an answer."""

from __future__ import annotations

import struct
from typing import Protocol

from tritonclient.grpc import service_pb2 as kserve
from trtmesh.chassis.grpc.client import Method
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


class Door(Protocol):
    """How a text becomes a request and messages become tokens; messages stay bytes while time is measured."""

    method: Method[bytes, bytes]

    def request(self, prompt: str | list[int], max_tokens: int) -> bytes:
        """A request with a single item."""

    def begins(self, message: bytes) -> bool:
        """Whether a message has tokens. Raises SystemExit for an error."""

    def check(self, messages: list[bytes], tokens: int) -> None:
        """Raises SystemExit unless messages are a whole answer of `tokens` tokens."""


class Native:
    """MeshService.Generate."""

    method: Method[bytes, bytes] = Method("/trtmesh.v1.MeshService/Generate", bytes, bytes)

    def request(self, prompt: str | list[int], max_tokens: int) -> bytes:
        config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=max_tokens))
        given = (
            pb.Prompt(text=prompt)
            if isinstance(prompt, str)
            else pb.Prompt(token_ids=pb.TokenIds(ids=prompt))
        )
        item = router_pb.GenerateItem(prompt=given)
        return router_pb.GenerateRequest(items=[item], config=config).SerializeToString()

    def begins(self, message: bytes) -> bool:
        return bool(self._count(message))

    def check(self, messages: list[bytes], tokens: int) -> None:
        if (came := sum(map(self._count, messages))) != tokens:
            raise SystemExit(f"{came} of {tokens} tokens came")

    def _count(self, message: bytes) -> int:
        events = router_pb.GenerateResponse.FromString(message).events
        for event in events:
            if event.HasField("item_failed"):
                raise SystemExit(f"an item failed: {event.item_failed.error.message}")
        return sum(len(event.tokens.token_ids) for event in events)


class Ensemble:
    """ModelStreamInfer of Triton's `ensemble`. Responses have texts in place of tokens, so only the end is checked."""

    method: Method[bytes, bytes] = Method(
        "/inference.GRPCInferenceService/ModelStreamInfer", bytes, bytes
    )

    def request(self, prompt: str | list[int], max_tokens: int) -> bytes:
        if not isinstance(prompt, str):
            raise SystemExit("`ensemble` takes texts")
        request = kserve.ModelInferRequest(model_name="ensemble")
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

    def check(self, messages: list[bytes], tokens: int) -> None:
        responses = [self._response(message) for message in messages]
        finals = [
            each.parameters["triton_final_response"].bool_param
            for each in responses
            if "triton_final_response" in each.parameters
        ]
        if not any(map(self.begins, messages)) or finals.count(True) != 1 or not finals[-1]:
            raise SystemExit(f"an answer of {tokens} tokens is incomplete: {responses}")

    def _response(self, message: bytes) -> kserve.ModelInferResponse:
        response = kserve.ModelStreamInferResponse.FromString(message)
        if response.error_message:
            raise SystemExit(f"a request failed: {response.error_message}")
        return response.infer_response


DOORS: dict[str, Door] = {"native": Native(), "ensemble": Ensemble()}
