"""Any adapter on any worker, under random traffic: the tokens are always those of one version that was in force.

`make chaos ADAPTER_REQUESTS=20000` sends more requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from chaos.adapter_traffic import CLIENTS, PROMPTS, RANKS, Item, Traffic
from chaos.tiny_adapters import Oracle, TinyAdapter, save_adapter, tiny_adapter
from e2e.mesh import PATIENT, Mesh, eventually, running_mesh, scrape
from engine_streams import router_stream
from oracle import tiny_models
from processes import ServiceProcess
from trtmesh.chassis.errors import AdapterNotFound
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import router_admin_pb2 as admin_pb

WORKERS, WORKERS_OF_THE_SUITE = 4, 2
SLOTS = 8
UPLOADED, SOURCED, PREFETCHED, BROUGHT = 110, 20, 6, 64
"""200 adapters: registered with their content or from a directory of the router, known to workers alone, brought. The
suite has a quarter of them for half the workers, still three times as many as these hold."""
SUITE_SHARE = 4

MOST_OVERTAKEN = 12 * CLIENTS
"""Items that may end while one waits: a few turns of everything that is open."""

Held = Mapping[tuple[int, str], tuple[int, bool]]
"""Place and pin of each version on a worker."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("tiny"))


def host_bytes() -> int:
    """Memory for SLOTS adapters of the largest rank, in float32."""
    largest = tiny_adapter(0, RANKS[1])
    return SLOTS * sum(4 * (a.numel() + b.numel()) for a, b in largest.updates.values())


async def start(mesh: Mesh, workers: int, model_dir: Path, roots: Path, prefetch: Path) -> None:
    flags = (
        *("--backend", "torch", "--model-dir", str(model_dir), "--torch-threads", "1"),
        *("--torch-kv-cache-tokens", "2048", "--torch-kv-cache-tokens-per-block", "4"),
        *("--torch-adapters-host-bytes", str(host_bytes())),
        *("--torch-adapters-max-batch-adapters", str(SLOTS)),
        *("--torch-adapters-max-rank", str(RANKS[1])),
        *("--torch-adapters-prefetch-directory", str(prefetch)),
    )
    starts = (mesh.start_engine(*flags, "--worker", f"worker-{n}") for n in range(workers))
    await asyncio.gather(*starts)
    await mesh.start_router(*PATIENT, "--adapters-roots", str(roots))
    await mesh.ready(workers)


@asynccontextmanager
async def watched(mesh: Mesh) -> AsyncIterator[None]:
    """Checks the workers' memory for adapters all the time."""
    over = asyncio.Event()

    async def watch() -> int:
        looks = 0
        while not over.is_set():
            check_memory(await mesh.admin.list_workers(), await mesh.admin.list_adapters())
            looks += 1
            await asyncio.sleep(0.3)
        return looks

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        yield
        over.set()
    assert watching.result()


def check_memory(
    fleet: admin_pb.ListWorkersResponse, registry: admin_pb.ListAdaptersResponse
) -> None:
    """Each worker has what it may have at most."""
    for worker in fleet.workers:
        load = worker.load
        assert load.adapter_slots == SLOTS
        assert load.free_adapter_slots + load.evictable_adapter_slots <= SLOTS
        assert load.used_adapter_host_bytes <= load.adapter_host_bytes == host_bytes()
    ready = Counter(
        place.worker
        for adapter in registry.adapters
        for version in adapter.versions
        for place in version.residencies
        if place.place == epb.ADAPTER_PLACE_DEVICE
    )
    assert max(ready.values(), default=0) <= SLOTS, ready


def check_items(model_dir: Path, traffic: Traffic) -> None:
    oracle = Oracle(model_dir)
    outcomes, wrong = Counter[str](), list[str]()
    for item in traffic.items:
        try:
            outcomes[check_item(oracle, item)] += 1
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {len(traffic.items)} items: " + "\n".join(wrong[:20])
    worst = max(item.overtaken for item in traffic.items)
    print(f"\n{dict(outcomes)}, {dict(traffic.changes)}, overtaken by at most {worst} items")
    assert worst <= MOST_OVERTAKEN
    assert outcomes["whole"] > 0.8 * len(traffic.items)


async def figures(mesh: Mesh) -> Mapping[str, float]:
    """The counters of adapters, over all workers."""
    samples = await asyncio.gather(*map(scrape, mesh.engines))
    totals = Counter[str]()
    for sample in samples:
        totals.update({k: v for k, v in sample.items() if "adapter" in k and k.endswith("_total")})
    return totals


def check_item(oracle: Oracle, item: Item) -> str:
    """Checks the tokens against the adapter alone; returns a word for the outcome."""
    error = item.result.error
    if error is not None:
        is_unknown = isinstance(error, AdapterNotFound) and item.may_be_unknown
        assert is_unknown, f"{described(item)}: {error!r}"
        return "unknown"
    if item.result.started:
        adapters = told_adapters(item)
        assert any(is_of(oracle, adapter, item) for adapter in adapters), described(item)
    return "cancelled" if item.is_cancelled else "whole"


def is_of(oracle: Oracle, adapter: TinyAdapter | None, item: Item) -> bool:
    """Whether all tokens of an item are those of one adapter alone."""
    for sequence in item.result.sequences:
        if tokens := sequence.token_ids:
            if not item.is_sampled:
                same = oracle.is_greedy(adapter, item.prompt, tokens)
            else:
                told = [p for c in sequence.chunks if c.details for p in c.details.log_probs]
                expected = oracle.log_probs(adapter, item.prompt, tokens)
                same = told == pytest.approx(expected, abs=1e-2)
            if not same:
                return False
    return True


def told_adapters(item: Item) -> list[TinyAdapter | None]:
    """The adapter of the version in the item's placements, one that was in force."""
    if item.known is None:
        assert item.told == {""}
        return [None]
    (version,) = item.told
    found = [each for each in item.spans if each.adapter and each.version == version]
    assert found, described(item)
    return [each.adapter for each in found]


def described(item: Item) -> str:
    known = item.known.spans if item.known else []
    spans = [(span.version[:4], span.since, span.until) for span in known]
    name = item.known.name if item.known else "base"
    asked = item.brings.version if item.brings else item.config.lora.version
    return f"{name} {asked} at {item.since}-{item.until} told {item.told}, versions: {spans}"


async def check_agreement(mesh: Mesh, traffic: Traffic) -> None:
    """Registry, residency and the workers' own lists say the same, and are what the changes left."""
    registry = await mesh.admin.list_adapters()
    expected = {
        known.name: {span.version for span in known.in_force}
        for known in traffic.history.known.values()
        if known.is_registered and known.in_force
    }
    listed = {
        adapter.name or str(adapter.id): {version.version for version in adapter.versions}
        for adapter in registry.adapters
        if adapter.brought or adapter.name in expected
    }
    assert listed == expected

    differing: list[object] = []

    async def agree() -> bool:
        registry = await mesh.admin.list_adapters()
        unregistered = {
            each.number for each in traffic.history.known.values() if not each.is_registered
        }
        differing.clear()
        for adapter in registry.adapters:
            places = [place for version in adapter.versions for place in version.residencies]
            if any(place.pinned != adapter.pinned for place in places):
                differing.append(("pins", adapter.name))
        for engine in mesh.engines:
            worker, held = await held_by(engine)
            own = {key: at for key, at in held.items() if key[0] not in unregistered}
            known = residencies(registry, worker)
            if known != own:
                differing.append((worker, known.items() - own.items(), own.items() - known.items()))
        return not differing

    try:
        await eventually(agree)
    except TimeoutError:
        raise AssertionError(f"registry and workers disagree: {differing}") from None


def residencies(registry: admin_pb.ListAdaptersResponse, worker: str) -> Held:
    return {
        (adapter.id, version.version): (place.place, place.pinned)
        for adapter in registry.adapters
        for version in adapter.versions
        for place in version.residencies
        if place.worker == worker
    }


async def held_by(engine: ServiceProcess) -> tuple[str, Held]:
    """A worker, and what it tells a router that connects."""
    async with router_stream(engine.address) as stream:
        await stream.until(lambda: stream.loads)
        assert stream.welcome
        return stream.welcome.engine.worker, {
            (state.id, state.version): (state.place, state.pinned)
            for state in stream.adapter_states
            if state.place != epb.ADAPTER_PLACE_ABSENT
        }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        asked: str = metafunc.config.getoption("--seeds", default=None) or "0"
        first, _, last = asked.partition("-")
        metafunc.parametrize("seed", range(int(first), int(last or first) + 1))


async def test_tokens_are_always_those_of_one_version_in_force(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path, seed: int
) -> None:
    asked = request.config.getoption("--adapter-requests", default=None)
    requests, share = (int(asked), 1) if asked else (44, SUITE_SHARE)
    workers = WORKERS if asked else WORKERS_OF_THE_SUITE
    roots, prefetch = tmp_path / "roots", tmp_path / "prefetch"
    sourced = {f"sourced-{n}": tiny_adapter(10**6 + n, 2 + n % 15) for n in range(SOURCED // share)}
    prefetched = {f"prefetched-{n}": tiny_adapter(2 * 10**6 + n, 4) for n in range(PREFETCHED)}
    for folder, adapters in ((roots, sourced), (prefetch, prefetched)):
        for name, adapter in adapters.items():
            save_adapter(adapter.content, folder / name)

    async with running_mesh(
        start=lambda mesh: start(mesh, workers, model_dir, roots, prefetch)
    ) as mesh:
        tasks = await idle_tasks(mesh)
        traffic = Traffic(mesh, seed)
        for name, adapter in prefetched.items():
            traffic.prefetched(name, adapter)
        for name, adapter in sourced.items():
            await traffic.register(name, adapter, source=name)
        for number in range(UPLOADED // share):
            await traffic.register(f"uploaded-{number}", traffic.new_adapter())
        for number in range(BROUGHT // share):
            traffic.expect_brought(1 + number)
        async with watched(mesh):
            await traffic.run(requests)
        await mesh.idle()
        check_items(model_dir, traffic)
        await check_agreement(mesh, traffic)
        await eventually(lambda: is_as_idle_as(mesh, tasks))
        print(await figures(mesh))


async def idle_tasks(mesh: Mesh) -> Sequence[float]:
    """Tasks of each process after its first request, which builds caches."""
    await mesh.client.complete([PROMPTS[0]] * len(mesh.engines), max_tokens=2, text=False)
    await mesh.idle()
    return await tasks_of(mesh)


async def is_as_idle_as(mesh: Mesh, tasks: Sequence[float]) -> bool:
    return all(now <= most for now, most in zip(await tasks_of(mesh), tasks, strict=True))


async def tasks_of(mesh: Mesh) -> list[float]:
    samples = await asyncio.gather(*map(scrape, (mesh.router, *mesh.engines)))
    return [sample["trtmesh_tasks"] for sample in samples]
