"""vLLM's CPU build with the demo model as workers of a mesh, beside engines of ours. Run by `make foreign-test`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from chaos.proxy import proxy_to
from e2e.mesh import DEMO, PATIENT, Mesh, StreamReader, eventually, running_mesh, scrape
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trtmesh.chassis.errors import Unavailable
from trtmesh.client import Client, FinishReason, ItemResult
from trtmesh.v1 import router_admin_pb2 as admin_pb

pytestmark = [pytest.mark.foreign, pytest.mark.asyncio(loop_scope="module")]

VLLM = Path(os.environ.get("FOREIGN_VLLM", ".foreign/vllm"))
READY_SECONDS = 900.0
PROMPTS = ["def fibonacci(n):", "import os\n", "class Point:"]
WIDE_GAP = 0.4
"""Least distance of the two best logits at which kernels must agree on the best."""

TORCH = (
    *("--model-dir", str(DEMO), "--torch-threads", "1", "--torch-kv-cache-tokens", "8192"),
    *("--torch-dtype", "bfloat16"),
)
ROUTER = (*PATIENT, "--foreign-model-dirs", str(DEMO), "--deadlines-queue-seconds", "300")


@dataclass
class VllmWorker:
    url: str
    process: asyncio.subprocess.Process

    def kill(self) -> None:
        """kill -9 of the front and of the engine's processes behind it."""
        os.killpg(self.process.pid, signal.SIGKILL)


@asynccontextmanager
async def vllm_worker(
    core: int, *flags: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[VllmWorker]:
    port = free_port()
    log = (VLLM.parent / f"vllm-{port}.log").open("wb")
    own = {
        "OMP_NUM_THREADS": "1",
        # Two workers whose threads share a core fall to half a token a second.
        "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "SMG_VLLM_SERVICER_WARMUP": "off",
    }
    process = await asyncio.create_subprocess_exec(
        # The command `vllm` looks for a distribution of that name, which the CPU build is not.
        *(str(VLLM / "bin" / "python"), "-m", "vllm.entrypoints.launchers.grpc_server"),
        *("--model", str(DEMO), "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"),
        *("--block-size", "32", "--dtype", "bfloat16"),
        *flags,
        env={**os.environ, **own, **(env or {})},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        await serving(f"127.0.0.1:{port}", process)
        yield VllmWorker(f"vllm://127.0.0.1:{port}", process)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        log.close()


async def serving(address: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(READY_SECONDS), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while process.returncode is None:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest())
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.5)
    raise AssertionError(
        f"vLLM ended with {process.returncode} before it served; see its log in {VLLM.parent}"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kv_events() -> tuple[str, str]:
    """An endpoint with a host would connect instead of binding, and no event would ever come."""
    place = f"tcp://*:{free_port()}"
    told = f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "{place}"}}'
    return ("--kv-events-config", told)


@dataclass
class Site:
    mesh: Mesh
    workers: Sequence[VllmWorker]

    async def only(self, *, foreign: bool) -> None:
        """Places items on foreign workers alone, or on our own alone."""
        for worker in (await self.mesh.status()).workers:
            if worker.address.startswith("vllm://") == foreign:
                await self.mesh.admin.resume_worker(worker.address)
            else:
                await self.mesh.admin.drain_worker(worker.address)

    async def everywhere(self) -> None:
        for worker in (await self.mesh.status()).workers:
            await self.mesh.admin.resume_worker(worker.address)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    """Two vLLM workers beside two engines of ours."""
    async with AsyncExitStack() as stack:
        starts = [stack.enter_async_context(vllm_worker(core, *kv_events())) for core in range(2)]
        workers = await gather(starts)

        async def start(mesh: Mesh) -> None:
            await mesh.start_tokenizer()
            for number in range(2):
                await mesh.start_engine(*TORCH, "--worker", f"own-{number}")
            own = [engine.address for engine in mesh.engines]
            urls = ",".join([*own, *(worker.url for worker in workers)])
            await mesh.start_router(*ROUTER, "--engines", urls)
            await mesh.ready(4, 1)

        mesh = await stack.enter_async_context(running_mesh(start=start))
        yield Site(mesh, workers)


async def gather(starts: Sequence[Any]) -> list[VllmWorker]:
    return list(await asyncio.gather(*starts))


def worker_of(item: ItemResult) -> str:
    assert item.started
    return item.started.worker


def show(text: str) -> None:
    print(f"\n    {text}", flush=True)


async def test_workers_are_listed_as_found(site: Site) -> None:
    workers = (await site.mesh.status()).workers
    found = [(worker.address, worker.engine.backend, worker.engine.model) for worker in workers]
    for line in found:
        show(" ".join(line))
    assert sorted(backend for _, backend, _ in found) == ["torch", "torch", "vllm", "vllm"]
    assert {model for _, _, model in found} == {"demo"}
    assert len({worker.engine.model_fingerprint for worker in workers}) == 1


async def test_three_prompts_stream(site: Site) -> None:
    await site.only(foreign=True)
    await site.mesh.admin.set_policy("round_robin")
    items = await site.mesh.client.complete(PROMPTS, max_tokens=40, ignore_end_id=True)
    for prompt, item in zip(PROMPTS, items, strict=True):
        (sequence,) = item.sequences
        assert item.error is None
        assert len(sequence.token_ids) == 40
        assert len(sequence.chunks) > 1
        show(f"{worker_of(item)}: {prompt!r} -> {sequence.text[:50]!r}...")
    assert {worker_of(item) for item in items} == {worker.url for worker in site.workers}


async def running(site: Site, count: int) -> None:
    """Waits until this many sequences run on vLLM, by its own figures."""

    async def so_many() -> bool:
        workers = (await site.mesh.status()).workers
        loads = [worker.load for worker in workers]
        return sum(load.running_sequences + load.waiting_sequences for load in loads) == count

    await eventually(so_many)


@pytest.mark.parametrize("how", ["stop", "cancel", "disconnect"])
async def test_sequences_end_on_vllm(site: Site, how: str) -> None:
    """Before they are complete: another of equal length, which began earlier, still runs."""
    await site.only(foreign=True)
    client, endless = site.mesh.client, {"max_tokens": 1900, "ignore_end_id": True}
    control = site.mesh.open(PROMPTS[:1], **endless)
    await control.tokens_here(1)
    async with proxy_to(site.mesh.router.address) as proxy, Client(proxy.address) as other:
        reader = StreamReader(client if how == "stop" else other, PROMPTS, **endless)
        await reader.tokens_here(5)
        await running(site, len(PROMPTS) + 1)
        if how == "stop":
            items = await reader.stopped_at(5)
            assert {item.reason for item in items} == {FinishReason.STOPPED}
        elif how == "cancel":
            await reader.cancel()
        else:
            proxy.cut()
            with pytest.raises(Unavailable):
                await reader.result()
        await running(site, 1)
    assert not control.is_over
    show(f"{how}: of 4 sequences on vLLM 1 was left, after {control.tokens()} of 1900 tokens")
    await control.stopped_at(1)
    await running(site, 0)


async def test_end_of_a_stop_sequence_and_of_a_stop_text(site: Site) -> None:
    await site.only(foreign=True)
    client = site.mesh.client
    (whole,) = await client.complete(PROMPTS[:1], max_tokens=30, ignore_end_id=True)
    ids = whole.sequences[0].token_ids
    (by_ids,) = await client.complete(
        PROMPTS[:1], max_tokens=500, ignore_end_id=True, stop_token_ids=[ids[5:7]]
    )
    assert by_ids.sequences[0].token_ids == ids[:7]
    assert by_ids.reason is FinishReason.STOP_WORD
    (by_text,) = await client.complete(
        PROMPTS[:1], max_tokens=500, ignore_end_id=True, stop_texts=['"""']
    )
    assert by_text.reason is FinishReason.STOP_WORD


async def test_sampling_seeds_and_log_probs(site: Site) -> None:
    await site.only(foreign=True)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 11}
    options |= {"num_return_sequences": 3}
    client = site.mesh.client
    (first,) = await client.complete(PROMPTS[:1], **options, text=False)
    (again,) = await client.complete(PROMPTS[:1], **options, text=False)
    answers = [sequence.token_ids for sequence in first.sequences]
    assert len(set(answers)) > 1
    show(f"equal seeds gave equal tokens: {answers == [s.token_ids for s in again.sequences]}")
    (item,) = await client.complete(
        PROMPTS[:1], max_tokens=4, log_probs=True, top_log_probs=2, prompt_log_probs=True
    )
    assert item.error is None
    (sequence,) = item.sequences
    assert len(sequence.log_probs) == len(sequence.token_ids)
    assert all(value <= 0 for value in sequence.log_probs)


async def test_prefix_is_found_by_vllms_events(site: Site) -> None:
    await site.only(foreign=True)
    await site.mesh.admin.set_policy("prefix_aware")
    known = (await scrape(site.mesh.router))["trtmesh_router_kv_index_blocks"]
    prefix = list(range(100, 420))

    async def ask(last: int) -> tuple[str, int]:
        (item,) = await site.mesh.client.complete(
            [[*prefix, last]], max_tokens=2, ignore_end_id=True, text=False
        )
        return worker_of(item), item.usage.cached_prompt_tokens

    async def told() -> bool:
        blocks = (await scrape(site.mesh.router))["trtmesh_router_kv_index_blocks"]
        return blocks >= known + len(prefix) // 32

    first, _ = await ask(7)
    await eventually(told)
    found = [await ask(20 + number) for number in range(6)]
    show(f"first on {first}, then {found}")
    assert {worker for worker, _ in found} == {first}
    assert {cached for _, cached in found} == {320}


async def test_greedy_tokens_equal_transformers_where_gaps_are_wide(site: Site) -> None:
    await site.only(foreign=True)
    spans = await asyncio.to_thread(wide_spans, PROMPTS, 48)
    for before, expected in spans:
        (item,) = await site.mesh.client.complete(
            [before], max_tokens=len(expected), ignore_end_id=True, text=False
        )
        assert list(item.sequences[0].token_ids) == expected
    compared = sum(len(expected) for _, expected in spans)
    show(f"{compared} tokens in {len(spans)} spans with gaps of at least {WIDE_GAP} are equal")
    assert compared >= 60


def wide_spans(prompts: Sequence[str], count: int) -> list[tuple[list[int], list[int]]]:
    """Runs of greedy tokens, each with the tokens before it, between those that nearly tied."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    spans: list[tuple[list[int], list[int]]] = []
    for prompt in prompts:
        tokens = list(tokenizer(prompt).input_ids)
        span: list[int] = []
        for _ in range(count):
            with torch.inference_mode():
                best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            token = int(best.indices[0])
            if float(best.values[0] - best.values[1]) >= WIDE_GAP:
                if not span:
                    spans.append((list(tokens), span))
                span.append(token)
            else:
                span = []
            tokens.append(token)
    return spans


async def test_streams_survive_kill_9_of_a_vllm_worker(site: Site) -> None:
    count = 400
    await site.only(foreign=True)
    mesh = site.mesh
    await mesh.admin.set_policy("round_robin")
    whole = await mesh.client.complete(PROMPTS, max_tokens=count, ignore_end_id=True)
    readers = [mesh.open([prompt], max_tokens=count, ignore_end_id=True) for prompt in PROMPTS]
    for reader in readers:
        await reader.tokens_here(40)
    before = [reader.tokens() for reader in readers]
    # Ours may take over as well.
    await site.everywhere()
    site.workers[0].kill()
    for prompt, reader, position, undisturbed in zip(PROMPTS, readers, before, whole, strict=True):
        (item,) = await reader.result()
        (sequence,) = item.sequences
        assert item.error is None
        assert len(sequence.token_ids) == count
        expected = undisturbed.sequences[0].token_ids
        assert sequence.token_ids[:40] == expected[:40]
        same = next(
            (
                n
                for n, pair in enumerate(zip(sequence.token_ids, expected, strict=False))
                if len({*pair}) > 1
            ),
            count,
        )
        show(f"{prompt!r}: killed at {position}, complete; equal to undisturbed for {same} tokens")

    async def told() -> bool:
        workers = (await mesh.status()).workers
        lost = [w for w in workers if w.address == site.workers[0].url]
        return lost[0].state == admin_pb.WORKER_STATE_CONNECTING and bool(lost[0].problem)

    await eventually(told)
    workers = (await mesh.status()).workers
    show(next(w.problem for w in workers if w.address == site.workers[0].url))


def nixl(role: str) -> tuple[str, str]:
    told = f'{{"kv_connector": "NixlConnector", "kv_role": "{role}", "kv_buffer_device": "cpu"}}'
    return ("--kv-transfer-config", told)


async def test_prefill_and_decode_by_nixl() -> None:
    """One worker computes prompts, the other continues from its KV."""
    async with AsyncExitStack() as stack:
        roles = ("kv_producer", "kv_consumer")
        starts = [
            stack.enter_async_context(
                vllm_worker(
                    core, *nixl(role), env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
                )
            )
            for core, role in enumerate(roles)
        ]
        prefill, decode = await gather(starts)

        async def start(mesh: Mesh) -> None:
            await mesh.start_tokenizer()
            urls = f"{prefill.url},{decode.url}"
            await mesh.start_router(*ROUTER, "--handoff-enabled", "always", "--engines", urls)
            await mesh.ready(2, 1)

        mesh = await stack.enter_async_context(running_mesh(start=start))
        long = [prompt + "\n    # " + "numbers " * 60 for prompt in PROMPTS]
        options: dict[str, Any] = {"max_tokens": 32, "ignore_end_id": True}
        items = await mesh.client.complete(long, **options, request_id="pair")
        placements = (await mesh.admin.explain("pair")).placements
        assert {each.prefill_worker for each in placements} == {prefill.url}
        assert {each.worker for each in placements} == {decode.url}
        sampled = {**options, "temperature": 0.8, "seed": 3}
        draws = await mesh.client.complete(long, **sampled, request_id="drawn")
        for prompt, item in zip(long, [*items, *draws], strict=False):
            assert item.error is None, prompt
            assert len(item.sequences[0].token_ids) == 32
        (left,) = [w for w in (await mesh.status()).workers if w.address == prefill.url]
        counts = left.load.sent_handoffs
        show(f"granted {counts.granted}, consumed {counts.consumed}, released {counts.released}")
        assert counts.consumed == 6
        await mesh.admin.set_worker_role(prefill.url, "mixed")
        await mesh.admin.drain_worker(decode.url)
        whole = await mesh.client.complete(long, **options)
        for item, alone in zip(items, whole, strict=True):
            assert item.sequences[0].token_ids == alone.sequences[0].token_ids
        show("the pair's greedy tokens equal those of one worker")
