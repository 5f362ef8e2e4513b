"""KServe's gRPC protocol: any Triton with TensorRT-LLM's models, or a mesh. Streams, or a whole answer a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trtmesh.chassis.errors import InvalidRequest, QueueFull, TrtmeshError
from trtmesh.tools.bench.reception import Reception
from trtmesh.tools.bench.record import Plan, Prompt
from trtmesh.tools.bench.targets.target import Connecting
from trtmesh.tools.triton.client import TritonConnection
from trtmesh.tools.triton.requests import Inputs, TritonModel, make_request
from trtmesh.tools.triton.tensors import decode_outputs

DEFAULT_MODEL = "ensemble"
COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
COUNTED = ("num_input_tokens", "num_output_tokens")
"""Inputs that ask for counts, and the outputs with them."""

QUEUE_IS_FULL = "maximum queue size"


@dataclass(frozen=True, slots=True)
class KserveTarget:
    """A model of a server, whose configuration says which tensors it takes."""

    connection: TritonConnection
    model: TritonModel
    release: str
    streams: bool

    async def answer(self, plan: Plan, reception: Reception) -> None:
        (prompt,) = plan.prompts
        request = make_request(
            self.model,
            reception.request_id,
            [[*prompt.ids] if prompt.ids else prompt.whole_text],
            Inputs(self._options(prompt)),
        )
        reception.sent()
        responses = TritonResponses(reception, accumulates=self.model.accumulates)
        if not self.streams:
            responses.add(await self.connection.infer(request))
            responses.finish()
            return
        messages = self.connection.stream(_only(request), None)
        async with aclosing(messages):
            async for message in messages:
                if message.error_message:
                    raise _error(message.error_message)
                responses.add(message.infer_response)
                if message.infer_response.parameters["triton_final_response"].bool_param:
                    responses.finish()

    def _options(self, prompt: Prompt) -> Mapping[str, Any]:
        options: dict[str, Any] = {
            "max_tokens": prompt.max_tokens,
            **tensor_options(prompt),
            "stream": self.streams,
        }
        wanted = ("exclude_input_in_output", *COUNTS)
        return options | {name: True for name in wanted if name in self.model.inputs}


@asynccontextmanager
async def kserve_target(connecting: Connecting) -> AsyncIterator[KserveTarget]:
    (address,), key = connecting.url.addresses, connecting.api_key
    async with TritonConnection(address, tls=connecting.tls, api_key=key) as connection:
        config = await connection.model_config(connecting.model or DEFAULT_MODEL)
        release = await connection.release()
        streams = connecting.url.protocol == "triton"
        yield KserveTarget(connection, TritonModel.of(config), release, streams)


def tensor_options(prompt: Prompt) -> Mapping[str, Any]:
    """What a prompt asks beside its length, by the names of Triton's tensors. Raises InvalidRequest."""
    options: dict[str, Any] = {}
    if prompt.ignore_end_id:
        options["end_id"] = -1
    if prompt.seed is not None:
        options["seed"] = prompt.seed
    if prompt.adapter:
        if not prompt.adapter.isdecimal():
            raise InvalidRequest(f"Triton takes adapters by number, and {prompt.adapter!r} is none")
        options["lora_task_id"] = int(prompt.adapter)
    if prompt.json_schema is not None:
        options["guided_decoding_guide_type"] = "json_schema"
        options["guided_decoding_guide"] = prompt.json_schema
    return options


@dataclass(slots=True)
class TokenCounts:
    """What the responses to a request say of its tokens: some servers count those so far, others a response's own."""

    prompt: int | None = None
    outputs: list[int] = field(default_factory=list)
    """Of each response with content."""

    def add(self, named: Mapping[str, Any], *, has_content: bool) -> None:
        prompt, output = map(named.get, COUNTED)
        if prompt is not None:
            self.prompt = int(prompt)
        if output is not None and has_content:
            self.outputs.append(int(output))

    def output(self) -> int | None:
        if not self.outputs:
            return None
        grows = all(before < after for before, after in pairwise(self.outputs))
        return self.outputs[-1] if grows else sum(self.outputs)


class TritonResponses:
    """The responses to a request of one prompt, as chunks."""

    def __init__(self, reception: Reception, *, accumulates: bool) -> None:
        self._reception = reception
        self._accumulates = accumulates
        self._before: dict[int, str] = {}
        self._counts = TokenCounts()

    def add(self, response: Any) -> None:
        outputs = {each.name: each.elements for each in decode_outputs(response)}
        first = outputs.get("sequence_index", [0])[0]
        ids, lengths = outputs.get("output_ids", ()), outputs.get("sequence_length", ())
        texts = outputs.get("text_output", [""] * len(lengths))
        width = len(ids) // len(lengths) if lengths else 0
        for beam, text in enumerate(texts):
            new = ids[width * beam : width * beam + lengths[beam]] if lengths else ()
            self._reception.chunk(
                0, self._new(first + beam, text), ids=new, sequence_index=first + beam
            )
        named = {name: outputs[name][0] for name in COUNTED if name in outputs}
        self._counts.add(named, has_content=any(texts) or any(lengths))

    def finish(self) -> None:
        self._reception.usage(0, self._counts.prompt, self._counts.output())
        self._reception.finish(0, "")

    def _new(self, sequence: int, text: str) -> str:
        if not self._accumulates:
            return text
        before, self._before[sequence] = self._before.get(sequence, ""), text
        return text.removeprefix(before)


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


def _error(message: str) -> TrtmeshError:
    """A stream's errors are sentences alone."""
    return QueueFull(message) if QUEUE_IS_FULL in message else TrtmeshError(message)
