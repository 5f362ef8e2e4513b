"""A GPU's memory and name: KV on the host and in handoffs, memory that really runs out, a device by its identity."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.short_names import by_short_names
from engine.torch.combinations import Item, play_alone
from engine.torch.handoff_lab import workers
from engine.torch.harness import Harness, configure, running
from engine.torch.test_handoffs import GREEDY, PROMPT, handed_over
from oracle import tiny_models
from trtmesh.chassis.errors import BackendFailed, ModelUnusable
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.cuda.runner import GraphRunner
from trtmesh.engine.backends.torch.settings import TorchSettings

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ON_GPU: dict[str, Any] = {"device": "cuda:0", "dtype": "float32", "kv_cache_tokens": 2048}
SHORT = configure(max_tokens=8, ignore_end_id=True)
READ = configure(max_tokens=8, ignore_end_id=True, prompt_log_probs=True)


async def test_blocks_come_back_from_the_host(llama: Path) -> None:
    """A pool of 60 tokens has no room for the first prompt beside the others."""
    shared = list(range(10, 42))
    expected = tiny_models.greedy(tiny_models.reference_model(llama), shared, 8)
    tiny = {"kv_cache_tokens": 60, "tokens_per_block": 4, "max_batch_size": 4}
    for host_cache_bytes, cached in ((0, 0), (2**20, 31)):
        settings = {**ON_GPU, **tiny, "host_cache_bytes": host_cache_bytes}
        async with running(llama, **settings) as engine:
            for _ in range(3):
                assert await engine.run([shared], SHORT) == [expected]
                await engine.run([[number] * 30 for number in range(60, 64)], SHORT)
                (stream,) = await engine.ended(engine.submit(shared, SHORT))
                assert stream.token_ids == expected
                assert stream.end
                assert stream.end.cached_prompt_tokens == cached


async def test_a_sequence_is_handed_over(llama: Path) -> None:
    item = Item(PROMPT, GREEDY, 0)
    async with running(llama, **ON_GPU) as engine:
        expected = await play_alone(engine, item)
    async with workers(llama, ON_GPU, {**ON_GPU, "tokens_per_block": 8}) as pair:
        for _ in range(3):
            found = await handed_over(pair, item)
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]


@contextmanager
def taking_memory(engine: Harness, marked: int) -> Iterator[None]:
    """Lets the forward of a token take more memory than there is."""
    compute = engine.backend._loaded.engine._compute
    assert isinstance(compute, GraphRunner)
    untyped: Any = compute._runner._model.module
    module = untyped.get_input_embeddings()

    def hook(_: Any, positional: tuple[torch.Tensor]) -> None:
        if bool((positional[0] == marked).any()):
            torch.empty(2**50, dtype=torch.uint8, device="cuda:0")

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


async def test_a_step_that_runs_out_of_memory_fails_the_sequence_to_blame(tmp_path: Path) -> None:
    """Prompt log-probabilities are read operation by operation, and not in a graph."""
    folder, marked = tiny_models.build(tmp_path, max_position_embeddings=2048), 250
    prompts = [[token for token in each if token != marked] for each in tiny_models.prompts(5)]
    long = [7] * 600 + [marked] + [8] * 20
    settings = {**ON_GPU, "max_step_tokens": 1000, "prefix_reuse": False}
    async with running(folder, **settings) as engine:
        expected = await engine.run(prompts, SHORT)
        with taking_memory(engine, marked):
            for _ in range(3):
                with engine.gate.held():
                    keys = [engine.submit(prompt, SHORT)[0] for prompt in prompts[:3]]
                    (failing,) = engine.submit(long, READ)
                    keys += [engine.submit(prompt, SHORT)[0] for prompt in prompts[3:]]
                assert [stream.token_ids for stream in await engine.ended(keys)] == expected
                (failed,) = await engine.ended([failing])
                assert failed.end
                assert isinstance(failed.end.error, BackendFailed)
                text = str(failed.end.error)
                assert re.match(
                    r"the model failed for lack of memory: CUDA out of memory\. Tried", text
                )
                assert "is free; lower the size of engine.torch.kv_cache, " in text
        assert engine.failures == []
        assert await engine.run(prompts, SHORT) == expected
        assert engine.backend.stats().used_blocks == 0


async def test_a_cache_larger_than_the_gpu_is_refused(llama: Path) -> None:
    _, total = torch.cuda.mem_get_info()
    settings = {**ON_GPU, "kv_cache_tokens": 0, "kv_cache_bytes": 2 * total}
    backend = TorchBackend(llama, by_short_names(TorchSettings, threads=1, **settings))
    with pytest.raises(ModelUnusable, match=r"a KV cache of .* does not fit .* is free; lower"):
        await backend.start(lambda _: None, lambda _: None)
    await backend.close()


@pytest.mark.whole_gpu
async def test_graphs_fit_beside_the_largest_cache(llama: Path) -> None:
    settings = {
        "device": "cuda:0",
        "kv_cache_free_memory_fraction": 0.99,
        "tokens_per_block": 256,
        "max_step_tokens": 4096,
        "max_batch_size": 64,
    }
    prompts = tiny_models.prompts(64)
    async with running(llama, **settings) as engine:
        free, total = torch.cuda.mem_get_info()
        assert free < total // 10
        streams = await engine.run(prompts, configure(max_tokens=8, temperature=1.0, top_p=0.9))
        assert all(streams)
        assert engine.failures == []


IDENTIFIED = """
import asyncio, sys
import torch
from pathlib import Path
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.cuda.runner import GraphRunner
from trtmesh.engine.backends.torch.settings import TorchSettings

async def main():
    settings = TorchSettings.model_validate({"device": sys.argv[2], "limits": {"max_batch_size": 2}})
    backend = TorchBackend(Path(sys.argv[1]), settings)
    await backend.start(lambda _: None, lambda _: None)
    pool = backend._loaded.cache.pool
    print(pool.device, torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)
    await backend.close()

asyncio.run(main())
"""


def test_an_engine_runs_on_the_gpu_of_an_identity(llama: Path) -> None:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)
    assert names
    # Tests spread over GPUs see one each, by a number.
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    for name in names:
        command = [sys.executable, "-c", IDENTIFIED, str(llama), name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # The lines before are its progress.
        *_, told = done.stdout.splitlines()
        assert told.split() == ["cuda:0", "1", name.removeprefix("GPU-")]
