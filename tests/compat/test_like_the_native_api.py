"""A thousand random requests give what the native API gives, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from compat.triton import Triton, joined, request
from e2e.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS = 1000
MODELS = ("ensemble", "tensorrt_llm_bls")


def draw(random_: random.Random) -> dict[str, Any]:
    """Options under the names that both APIs share."""
    options: dict[str, Any] = {"max_tokens": random_.randint(1, 6)}
    if random_.random() < 0.5:
        options |= {"top_k": random_.randint(2, 50), "seed": random_.getrandbits(64)}
    if random_.random() < 0.3:
        options["temperature"] = random_.choice([0.5, 1.5]) if "top_k" in options else 0.0
    if random_.random() < 0.3:
        options["repetition_penalty"] = 1.25
    return options


async def test_random_requests(mesh: Mesh, triton: Triton) -> None:
    random_ = random.Random(5)
    prompts = [f"{random_.randint(0, 99)} bottles {index}" for index in range(REQUESTS)]
    asked = [draw(random_) for _ in prompts]
    native = await asyncio.gather(
        *(mesh.client.complete([p], **options) for p, options in zip(prompts, asked, strict=True))
    )
    responses = await triton.stream_all(
        [
            request(
                random_.choice(MODELS),
                {"text_input": prompt, "stream": random_.random() < 0.5,
                 "exclude_input_in_output": True, **options},
                request_id=str(index),
            )
            for index, (prompt, options) in enumerate(zip(prompts, asked, strict=True))
        ]
    )  # fmt: skip
    own: dict[str, list[Any]] = {str(index): [] for index in range(REQUESTS)}
    for response in responses:
        assert not response.error
        own[response.request_id].append(response)
    for index, (item,) in enumerate(native):
        assert joined(own[str(index)]) == item.text, (prompts[index], asked[index])
    await mesh.idle()
