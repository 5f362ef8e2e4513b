"""A mesh over foreign engines: real processes of router, tokenizer, bridges and stand-in engines."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from e2e.mesh import DEMO, PATIENT, SIMULATED, Mesh, decode, eventually, running_mesh, scrape
from foreign.language import greedy
from foreign.serving import ForeignProcess, foreign_process
from process_constants import constants
from trtmesh.chassis.errors import InvalidField, UnsupportedField, WorkerLost
from trtmesh.client import Client, FinishReason
from trtmesh.v1 import router_admin_pb2 as admin_pb

CONTRACTS = ("vllm", "sglang", "trtllm")
PROMPTS = [list(range(100, 140)), list(range(200, 260)), list(range(300, 310))]
LONG = 3000


@dataclass
class Fleet:
    """A mesh and the engines behind its bridges."""

    mesh: Mesh
    engines: list[ForeignProcess] = field(default_factory=list)


@asynccontextmanager
async def fleet(*contracts: str, flags: Sequence[str] = (), own: int = 0) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(foreign_process(each)) for each in contracts]

        async def start(mesh: Mesh) -> None:
            await mesh.start_tokenizer()
            for _ in range(own):
                await mesh.start_engine(*SIMULATED)
            urls = [*(each.address for each in mesh.engines), *(each.url for each in engines)]
            # TensorRT-LLM sends no tokenizer.
            known = ("--foreign-model-dirs", str(DEMO))
            await mesh.start_router(*PATIENT, *known, *flags, "--engines", ",".join(urls))
            await mesh.ready(len(urls), 1)

        mesh = await stack.enter_async_context(running_mesh(start=start))
        yield Fleet(mesh, engines)


def bridges_of(router: int) -> list[int]:
    return [child.pid for child in psutil.Process(router).children()]


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has, and its new parent may never reap it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_three_prompts_stream(contract: str) -> None:
    async with fleet(contract) as running:
        items = await running.mesh.client.complete(PROMPTS, max_tokens=40, ignore_end_id=True)
        (worker,) = (await running.mesh.status()).workers
    for prompt, item in zip(PROMPTS, items, strict=True):
        (sequence,) = item.sequences
        assert item.error is None
        assert sequence.token_ids == tuple(greedy(prompt, 40))
        assert sequence.text == decode(sequence.token_ids)
        assert len(sequence.chunks) > 1
        assert item.usage.prompt_tokens == len(prompt)
        assert item.usage.generated_tokens == 40
    assert worker.worker == running.engines[0].url
    assert worker.address == running.engines[0].url


async def test_stop_and_disconnect_end_the_sequences_there() -> None:
    async with fleet("vllm") as running:
        mesh = running.mesh

        async def busy() -> bool:
            (worker,) = (await mesh.status()).workers
            return bool(worker.load.running_sequences or worker.load.waiting_sequences)

        async def idle() -> bool:
            return not await busy()

        # A report may be from before the sequences began, so `idle` counts only after `busy`.
        stopped = mesh.open(PROMPTS[:2], max_tokens=LONG, ignore_end_id=True, text=False)
        await eventually(busy)
        items = await stopped.stopped_at(5)
        assert {item.reason for item in items} == {FinishReason.STOPPED}
        for prompt, item in zip(PROMPTS, items, strict=False):
            (sequence,) = item.sequences
            assert sequence.token_ids == tuple(greedy(prompt, len(sequence.token_ids)))
        await eventually(idle)
        left = mesh.open(PROMPTS, max_tokens=LONG, ignore_end_id=True, text=False)
        await left.tokens_here(5)
        await eventually(busy)
        await left.cancel()
        await eventually(idle)
        await mesh.idle()


@pytest.mark.parametrize(
    "contract",
    [pytest.param(each, marks=[] if each == "vllm" else pytest.mark.soak) for each in CONTRACTS],
)
async def test_streams_survive_the_kill_of_an_engine(contract: str) -> None:
    count = 300
    async with fleet(contract, contract, flags=("--placement-policy", "round_robin")) as running:
        mesh = running.mesh
        readers = [
            mesh.open([prompt], max_tokens=count, ignore_end_id=True, text=False)
            for prompt in PROMPTS
        ]
        for reader in readers:
            await reader.tokens_here(20)
        await running.engines[0].kill()
        for prompt, reader in zip(PROMPTS, readers, strict=True):
            (item,) = await reader.result()
            assert item.error is None
            assert item.sequences[0].token_ids == tuple(greedy(prompt, count))

        async def told() -> bool:
            workers = (await mesh.status()).workers
            problems = [w.problem for w in workers if w.state != admin_pb.WORKER_STATE_READY]
            return any(running.engines[0].url in problem for problem in problems)

        await eventually(told)


async def test_frozen_engine_is_left() -> None:
    count = 300
    quick = ("--deadlines-step-gap-seconds", "1.0")
    placing = ("--placement-policy", "round_robin")
    async with fleet("vllm", "vllm", flags=(*quick, *placing)) as running:
        readers = [
            running.mesh.open([prompt], max_tokens=count, ignore_end_id=True, text=False)
            for prompt in PROMPTS
        ]
        for reader in readers:
            await reader.tokens_here(20)
        running.engines[0].process.send_signal(signal.SIGUSR1)
        for prompt, reader in zip(PROMPTS, readers, strict=True):
            (item,) = await reader.result()
            assert item.error is None
            assert item.sequences[0].token_ids == tuple(greedy(prompt, count))


async def test_engine_that_comes_back_serves_again() -> None:
    async with fleet("vllm") as running:
        mesh, engine = running.mesh, running.engines[0]
        port = int(engine.url.rpartition(":")[2])
        await engine.kill()

        async def gone() -> bool:
            (worker,) = (await mesh.status()).workers
            return worker.state == admin_pb.WORKER_STATE_CONNECTING

        await eventually(gone)
        async with foreign_process("vllm", port=port):
            await mesh.ready(1)
            (item,) = await mesh.client.complete(PROMPTS[:1], max_tokens=5, ignore_end_id=True)
    assert item.sequences[0].token_ids == tuple(greedy(PROMPTS[0], 5))


async def test_prefix_goes_where_the_engine_has_it() -> None:
    """A second router knows of the prefix by the engine's events alone: the first one placed it."""
    blocks = 10
    prefix = list(range(1000, 1000 + 32 * blocks))
    by_prefix = ("--placement-policy", "prefix_aware")
    async with fleet("vllm", "vllm", flags=by_prefix) as running:
        mesh = running.mesh
        urls = ",".join(each.url for each in running.engines)
        known = ("--foreign-model-dirs", str(DEMO))
        other = await mesh.start("router", "--port", "0", "--engines", urls, *known, *by_prefix)

        async def sample(name: str) -> float:
            return (await scrape(other)).get(f"trtmesh_router_{name}", 0.0)

        async def ready() -> bool:
            return await sample("ready_workers") == 2

        async def told() -> bool:
            return await sample("kv_index_blocks") >= blocks

        async def ask(client: Client, last: int) -> tuple[str, int]:
            (item,) = await client.complete(
                [[*prefix, last]], max_tokens=2, ignore_end_id=True, text=False
            )
            assert item.started
            return item.started.worker, item.usage.cached_prompt_tokens

        await eventually(ready)
        first, _ = await ask(mesh.client, 7)
        await eventually(told)
        async with Client(other.address) as client:
            found = [await ask(client, 20 + number) for number in range(4)]
    assert {worker for worker, _ in found} == {first}
    assert {cached for _, cached in found} == {len(prefix)}


async def test_stops_act_and_an_unsupported_field_is_refused_by_name() -> None:
    answer = greedy(PROMPTS[0], 60)
    async with fleet("vllm") as running:
        client = running.mesh.client
        by_ids, by_text = await asyncio.gather(
            client.complete(
                PROMPTS[:1], max_tokens=LONG, ignore_end_id=True, stop_token_ids=[answer[10:12]]
            ),
            client.complete(
                PROMPTS[:1],
                max_tokens=LONG,
                ignore_end_id=True,
                stop_texts=[decode(answer[10:13]).strip() or decode(answer[10:13])],
            ),
        )
        (refused,) = await client.complete(PROMPTS[:1], max_tokens=3, beam_width=2)
    assert by_ids[0].sequences[0].token_ids == tuple(answer[:12])
    assert by_ids[0].reason is FinishReason.STOP_WORD
    assert by_text[0].reason is FinishReason.STOP_WORD
    assert isinstance(refused.error, UnsupportedField)
    assert "beam_search.beam_width" in refused.error.fields


async def test_clients_seed_finds_no_place_on_an_engine_without_seeds() -> None:
    async with fleet("sglang") as running:
        client = running.mesh.client
        (seeded,) = await client.complete(PROMPTS[:1], max_tokens=3, temperature=1.0, seed=3)
        (drawn,) = await client.complete(PROMPTS[:1], max_tokens=3, temperature=1.0)
    assert isinstance(seeded.error, UnsupportedField)
    assert "sampling.seed" in seeded.error.fields
    assert drawn.error is None


async def test_foreign_and_own_engines_serve_side_by_side() -> None:
    async with fleet("vllm", own=1, flags=("--placement-policy", "round_robin")) as running:
        items = [
            (await running.mesh.client.complete(PROMPTS[:1], max_tokens=3, text=False))[0]
            for _ in range(4)
        ]
    workers = {item.started.worker for item in items if item.started}
    assert len(workers) == 2
    assert running.engines[0].url in workers


async def test_admin_adds_and_removes_an_engine_and_learns_why_one_is_absent() -> None:
    async with foreign_process("vllm") as engine, fleet("vllm") as running:
        mesh = running.mesh
        added = await mesh.admin.add_worker(engine.url, wait_seconds=120)
        assert added.worker.address == engine.url
        await mesh.ready(2)
        router = mesh.router.pid
        assert len(bridges_of(router)) == 2
        await mesh.admin.remove_worker(engine.url)

        async def one_left() -> bool:
            return len(bridges_of(router)) == 1

        await eventually(one_left)
        with pytest.raises(InvalidField, match="address"):
            await mesh.admin.add_worker("vlm://127.0.0.1:1")
        with pytest.raises(InvalidField, match="link-local"):
            await mesh.admin.add_worker("vllm://169.254.169.254:80")
        with pytest.raises(WorkerLost):
            await mesh.admin.add_worker("vllm://127.0.0.1:1", wait_seconds=0.1)
        await mesh.admin.add_worker("vllm://127.0.0.1:1", wait_seconds=0)

        async def is_explained() -> bool:
            workers = (await mesh.status()).workers
            return any("cannot use vllm://127.0.0.1:1" in worker.problem for worker in workers)

        await eventually(is_explained)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_bridges_end_with_the_router(number: signal.Signals) -> None:
    async with fleet("vllm", "sglang") as running:
        router = running.mesh.router
        bridges = bridges_of(router.pid)
        assert len(bridges) == 2
        router.signal(number)
        await router.wait()

        async def all_gone() -> bool:
            return not any(map(is_running, bridges))

        await eventually(all_gone)


async def test_prefill_and_decode_are_a_pair_by_the_engines_own_transfer() -> None:
    roles = ("kv_producer", "kv_consumer")
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(foreign_process("vllm", kv_role=role)) for role in roles
        ]

        async def start(mesh: Mesh) -> None:
            urls = ",".join(each.url for each in engines)
            known = ("--handoff-enabled", "always", *constants(handoff_reserve_seconds=60))
            await mesh.start_router(*PATIENT, *known, "--engines", urls)
            await mesh.ready(2)

        mesh = await stack.enter_async_context(running_mesh(start=start))
        options: dict[str, Any] = {
            "max_tokens": 30,
            "ignore_end_id": True,
            "text": False,
            "request_id": "pair",
        }
        items = await mesh.client.complete(PROMPTS, **options)
        for prompt, item in zip(PROMPTS, items, strict=True):
            assert item.error is None
            assert item.sequences[0].token_ids == tuple(greedy(prompt, 30))
        placements = (await mesh.admin.explain("pair")).placements
        assert {placement.prefill_worker for placement in placements} == {engines[0].url}
        assert {placement.worker for placement in placements} == {engines[1].url}
        assert {placement.handoff_kind for placement in placements} == {"vllm-nixl"}
