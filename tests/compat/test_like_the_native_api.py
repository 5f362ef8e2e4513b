"""A thousand random requests agree with the native API and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from compat.triton import Response, Triton, request
from e2e.mesh import Mesh
from trtmesh.client import ItemResult

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS = 300
MODELS = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
CORE_NAMES = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "max_tokens": "request_output_len",
}


@dataclass(frozen=True)
class Case:
    """A request for both APIs."""

    model: str
    prompt: str | list[int]
    options: dict[str, Any]
    stop_words: list[str]
    stream: bool

    def native(self) -> dict[str, Any]:
        """Options of the native client."""
        words: dict[str, Any] = {}
        if self.stop_words:
            words = {"stop_texts": self.stop_words, "include_stop_text": True}
        if isinstance(self.prompt, list):
            words["ignore_end_id"] = True
        return self.options | words

    def tensors(self) -> dict[str, Any]:
        """Inputs of the Triton model."""
        counted = {"return_num_output_tokens": True, "exclude_input_in_output": True}
        if isinstance(self.prompt, list):
            options = {CORE_NAMES.get(name, name): value for name, value in self.options.items()}
            prompt = {"input_ids": self.prompt, "input_lengths": len(self.prompt)}
            return counted | options | prompt | {"streaming": self.stream}
        words = {"stop_words": self.stop_words} if self.stop_words else {}
        prompt_text = {"text_input": self.prompt, "stream": self.stream}
        return counted | self.options | words | prompt_text

    def check(self, responses: list[Response], item: ItemResult) -> None:
        """The sequences of `item` in all its `responses`."""
        # The empty final response of BLS was not requested.
        ends = [response.final for response in responses].count(True)
        assert ends == (self.model != "tensorrt_llm_bls"), self
        for index, sequence in enumerate(item.sequences):
            own = [r for r in responses if r.number.get("sequence_index", 0) == index]
            if isinstance(self.prompt, list):
                ids = [i for r in own for i in r.outputs["output_ids"].ravel().tolist()]
                assert ids == list(sequence.token_ids), self
            else:
                assert "".join(response.text for response in own) == sequence.text, self
            assert own[-1].number["num_output_tokens"] == len(sequence.token_ids), self


def draw(random_: random.Random, index: int) -> Case:
    """Any of what both APIs share."""
    options: dict[str, Any] = {"max_tokens": random_.randint(1, 6)}
    if random_.random() < 0.5:
        options |= {"top_k": random_.randint(2, 50), "seed": random_.getrandbits(64)}
        options["num_return_sequences"] = random_.choice([1, 1, 2])
    if random_.random() < 0.2:
        options["top_p"] = 0.75
        options.setdefault("seed", random_.getrandbits(64))
    if random_.random() < 0.3 and "seed" in options:
        options["temperature"] = random_.choice([0.5, 1.5])
    if random_.random() < 0.3:
        options["repetition_penalty"] = 1.25
    if random_.random() < 0.2:
        options["min_tokens"] = options["max_tokens"]
    model = random_.choice(MODELS)
    prompt: Any = f"{random_.randint(0, 99)} bottles {index}"
    stop_words = random_.sample("etaoin s", 2) if random_.random() < 0.3 else []
    if model == "tensorrt_llm":
        prompt, stop_words = [random_.randint(8, 6000) for _ in range(random_.randint(1, 9))], []
    return Case(model, prompt, options, stop_words, random_.random() < 0.5)


async def test_random_requests_equal_the_native_api(mesh: Mesh, triton: Triton) -> None:
    random_ = random.Random(5)
    cases = [draw(random_, index) for index in range(REQUESTS)]
    native = await asyncio.gather(
        *(mesh.client.complete([case.prompt], **case.native()) for case in cases)
    )
    responses = await triton.stream_all(
        [
            request(case.model, case.tensors(), request_id=str(index))
            for index, case in enumerate(cases)
        ]
    )
    own: dict[str, list[Response]] = {str(index): [] for index in range(REQUESTS)}
    for response in responses:
        assert not response.error
        own[response.request_id].append(response)
    for index, (case, (item,)) in enumerate(zip(cases, native, strict=True)):
        case.check(own[str(index)], item)
    assert any(case.stop_words and item.text for case, (item,) in zip(cases, native, strict=True))
    await mesh.idle()
