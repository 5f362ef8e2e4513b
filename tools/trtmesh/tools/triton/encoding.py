"""Token ids of texts, from the server's preprocessing model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.triton.client import TritonConnection
from trtmesh.tools.triton.requests import TritonModel, make_encoding
from trtmesh.tools.triton.tensors import decode_outputs

DEFAULTS = {"OUT_END_ID": "end_id", "OUT_PAD_ID": "pad_id"}
"""Options that take the tokenizer's ids."""


@dataclass(frozen=True, slots=True)
class Encoded:
    rows: Sequence[list[int]]
    defaults: Mapping[str, Any]
    """Options for the request, from the tokenizer."""


async def encode(connection: TritonConnection, model: TritonModel, texts: Sequence[str]) -> Encoded:
    """Encodes each text. Raises InvalidRequest."""
    requests = [make_encoding(model, str(index), text) for index, text in enumerate(texts)]
    answers: dict[str, dict[str, Sequence[Any]]] = {}
    async with aclosing(connection.stream(_all(requests), None)) as responses:
        async for message in responses:
            if message.error_message:
                raise InvalidRequest(f"model '{model.name}': {message.error_message}")
            response = message.infer_response
            outputs = {output.name: output.elements for output in decode_outputs(response)}
            answers.setdefault(response.id, {}).update(outputs)
    rows = []
    for index in range(len(texts)):
        answer = answers[str(index)]
        rows.append([*answer["INPUT_ID"]][: answer["REQUEST_INPUT_LEN"][0]])
    told = answers["0"]
    return Encoded(
        rows, {option: told[name][0] for name, option in DEFAULTS.items() if name in told}
    )


async def _all(requests: Sequence[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request
