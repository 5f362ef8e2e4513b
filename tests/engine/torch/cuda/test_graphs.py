"""A captured step gives what its operations give one by one, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.torch.combinations import rows
from engine.torch.conftest import ModelDir
from engine.torch.cuda.interpreted import recomputed
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from trtmesh.engine.backends.torch.cuda.capturing import Rows
from trtmesh.engine.backends.torch.cuda.device import Cuda
from trtmesh.engine.backends.torch.cuda.runner import GraphRunner

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

CONFIGS = [
    configure(max_tokens=16, ignore_end_id=True, generation_logits=True),
    configure(max_tokens=16, ignore_end_id=True, generation_logits=True, temperature=1.1, seed=4),
    configure(max_tokens=16, ignore_end_id=True),
    configure(max_tokens=16, ignore_end_id=True, temperature=0.9, seed=5),
]


async def streams(engine: Harness) -> list[tuple[list[int], list[bytes]]]:
    """The tokens and the logits of 1, 3 and 17 items at once."""
    prompts = tiny_models.prompts(17)
    found = []
    for count in (1, 3, 17):
        # All begin in one step: other batches round differently.
        with engine.backend._wake:
            keys = [
                engine.submit(prompt, CONFIGS[place % len(CONFIGS)])[0]
                for place, prompt in enumerate(prompts[:count])
            ]
        for stream in await engine.ended(keys):
            logits = [
                rows(each.generation_logits).tobytes()
                for each in stream.details
                if each.generation_logits
            ]
            found.append((stream.token_ids, logits))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gemma3", "phi3", "mixtral", "gpt2"]
)
async def test_captured_steps_equal_their_operations(
    family: str, dtype: str, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_dir(family)
    options: dict[str, Any] = {
        "device": "cuda:0", "dtype": dtype, "max_batch_size": 20, "prefix_reuse": False,
    }  # fmt: skip
    async with running(folder, **options) as engine:
        captured = await streams(engine)
    monkeypatch.setattr(Cuda, "_recorder", lambda _: recomputed)
    async with running(folder, **options) as engine:
        assert await streams(engine) == captured
    assert any(logits for _, logits in captured)


class SharedGraphs:
    """Decode graphs of a divided model, as far as a step launched ahead needs them."""

    are_captured = are_shared = True

    def __init__(self) -> None:
        self.followed: list[list[int]] = []

    def follow(self, chunks: list[Any], places: list[int]) -> Rows:
        self.followed.append(list(places))
        return Rows(torch.zeros(len(chunks), 8), torch.zeros(len(chunks), dtype=torch.int64))


def test_ranks_follow_by_the_rows_of_graphs() -> None:
    """The first alone chooses. Where its rows are others than those of the graph, nothing follows."""
    own: Any = SimpleNamespace(move=0, synchronize=0, check=0, release_memory=0)
    rules: Any = SimpleNamespace(find=lambda *_: SimpleNamespace(by_host=[], guided=[]))
    untyped: Any = None

    def rank() -> tuple[GraphRunner, SharedGraphs]:
        graphs: Any = SharedGraphs()
        return GraphRunner(own, graphs, untyped, None, rules, untyped), graphs

    chunks: list[Any] = [SimpleNamespace(sequence=SimpleNamespace(key=key)) for key in range(3)]
    (first, its), (other, others) = rank(), rank()
    sequences = [chunk.sequence for chunk in chunks]
    for going in ([0, 1, 2], [0, 2]):
        for each in (first, other):
            forward = each.follow([chunks[row] for row in going], going)
            if each is first:
                first.choose([chunk.sequence for chunk in forward.completing], forward.logits)
                assert first.may_follow
    assert its.followed == others.followed == [[0, 1, 2], [0, 2]]
    first.choose(sequences[2:], forward.logits[1:])
    assert not first.may_follow
