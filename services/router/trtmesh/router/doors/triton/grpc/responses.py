"""Responses as bytes. The head common to the responses of a request is serialised once."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.triton.models import MODEL_VERSION
from trtmesh.router.doors.triton.tensors import Output

MOST_HEADS = 32
"""Serialised heads kept for a request: growing shapes need a new head for every response."""


def _tag(message: str, field: str) -> bytes:
    """The tag of a length-delimited field of a message."""
    number = kserve.DESCRIPTOR.message_types_by_name[message].fields_by_name[field].number
    return _long_varint(number << 3 | 2)


def _long_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


SHORT_VARINTS = [_long_varint(value) for value in range(2048)]
"""Encoded lengths of responses with a few tokens."""


def _varint(value: int) -> bytes:
    return SHORT_VARINTS[value] if value < len(SHORT_VARINTS) else _long_varint(value)


RAW_TAG = _tag("ModelInferResponse", "raw_output_contents")
RESPONSE_TAG = _tag("ModelStreamInferResponse", "infer_response")


class ResponseWriter:
    def __init__(self, model: str, request_id: str) -> None:
        self._model = model
        self._request_id = request_id
        self._heads: dict[tuple[object, ...], bytes] = {}

    def unary(self, outputs: Sequence[Output]) -> bytes:
        """A ModelInferResponse."""
        return b"".join(self._parts(outputs, final=None))

    def streamed(self, outputs: Sequence[Output], *, final: bool) -> bytes:
        """A ModelStreamInferResponse."""
        parts = self._parts(outputs, final=final)
        return b"".join((RESPONSE_TAG, _varint(sum(map(len, parts))), *parts))

    def failed(self, message: str, *, final: bool) -> bytes:
        """A ModelStreamInferResponse with an error; the stream continues."""
        # Triton's clients take an empty message for success.
        message = message or "unknown error"
        response = kserve.ModelStreamInferResponse(error_message=message)
        response.infer_response.CopyFrom(self._head((), final=final))
        data: bytes = response.SerializeToString()
        return data

    def _parts(self, outputs: Sequence[Output], *, final: bool | None) -> list[bytes]:
        """A ModelInferResponse in pieces."""
        key: tuple[object, ...] = (final,)
        for name, _, shape, _ in outputs:
            key += (name, shape)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            head = self._heads[key] = self._head(outputs, final=final).SerializeToString()
        parts = [head]
        for _, _, _, data in outputs:
            parts += (RAW_TAG, _varint(len(data)), data)
        return parts

    def _head(self, outputs: Sequence[Output], *, final: bool | None) -> kserve.ModelInferResponse:
        head = kserve.ModelInferResponse(
            model_name=self._model, model_version=MODEL_VERSION, id=self._request_id
        )
        if final is not None:
            head.parameters["triton_final_response"].bool_param = final
        for output in outputs:
            head.outputs.add(name=output.name, datatype=output.data_type, shape=output.shape)
        return head
