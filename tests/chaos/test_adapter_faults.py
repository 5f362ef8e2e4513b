"""Workers, routers and their files fail while adapters load and run; no other stream notices."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from chaos.fragile import NAMES, Fragile, contents, fragile_mesh
from chaos.proxy import proxy_to
from chaos.steady_streams import Ask, steady_streams
from e2e.mesh import SIMULATED, WIDE_TOKENS, Mesh, StreamReader, eventually, scrape
from processes import ServiceProcess
from router.adapters.contents_of import content as content_of
from trtmesh.chassis.adapter_content import AdapterContent, number_of
from trtmesh.chassis.errors import Mismatch, Unavailable
from trtmesh.client import AdminClient, Client, ItemResult
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOTS = 2
LOAD_SECONDS = 0.5
ENGINE = (
    *(*SIMULATED, *WIDE_TOKENS, "--simulated-adapters-slots", str(SLOTS)),
    *("--simulated-adapters-load-ms", str(1000 * LOAD_SECONDS)),
    *("--simulated-vocabulary-end-probability", "0"),
    # Few tokens take as long as a fault.
    *("--simulated-timing-step-ms", "16"),
)
PROMPT = ["an adapter changes what follows"]
TOKENS = 8
LONG = 5 * TOKENS
"""Tokens of a stream that still runs when its worker is lost."""
STEADY = 9
"""Number of an adapter that is always in use."""


@dataclass
class Shared:
    """A fragile mesh under two routers with a common directory."""

    fragile: Fragile
    other: ServiceProcess
    client: Client
    """A client of the other router."""
    admin: AdminClient
    directory: Path

    async def restart_other(self) -> None:
        """Starts a successor of the other router at its addresses."""
        ports = [each.rpartition(":")[2] for each in (self.other.address, self.other.admin_address)]
        flags = ("--port", ports[0], "--admin-port", ports[1])
        self.other = await start_router(self.fragile, (*self.flags, *flags))

    @property
    def flags(self) -> Sequence[str]:
        """Flags of both routers."""
        return router_flags(self.directory)


def router_flags(directory: Path) -> Sequence[str]:
    return ("--adapters-directory", str(directory))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    directory = tmp_path_factory.mktemp("adapters")
    flags = router_flags(directory)
    async with AsyncExitStack() as stack:
        fragile = await stack.enter_async_context(fragile_mesh(ENGINE, router_flags=flags))
        other = await start_router(fragile, (*flags, "--port", "0"))
        client = await stack.enter_async_context(Client(other.address))
        admin = await stack.enter_async_context(AdminClient(other.admin_address))
        yield Shared(fragile, other, client, admin, directory)


async def start_router(fragile: Fragile, flags: Sequence[str]) -> ServiceProcess:
    """A second router of the same engines and tokenizers."""
    tokenizers = ",".join(each.address for each in fragile.mesh.tokenizers)
    router = await fragile.mesh.start(
        "router", "--tokenizers", tokenizers, *fragile.engines_flags, *flags
    )
    await eventually(lambda: has_workers(router))
    return router


async def has_workers(router: ServiceProcess) -> bool:
    samples = await scrape(router)
    return samples.get("trtmesh_router_ready_workers") == len(NAMES) and bool(
        samples.get("trtmesh_router_ready_tokenizers")
    )


def bring(number: int, seed: int = 0, rank: int = 8, size: int = 1000) -> pb.LoraConfig:
    """An adapter with its weights; `seed` makes another version."""
    weights = np.full((1, size), seed, np.float16)
    config = np.array([[0, 0, rank]], np.int32)
    return pb.LoraConfig(
        id=number,
        weights=pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=weights.shape, data=weights.tobytes()),
        config=pb.Tensor(data_type=pb.DATA_TYPE_INT32, shape=config.shape, data=config.tobytes()),
    )


async def generate(client: Client, lora: pb.LoraConfig | None, tokens: int = TOKENS) -> ItemResult:
    options: dict[str, Any] = {} if lora is None else {"adapter": lora}
    (item,) = await client.complete(PROMPT, max_tokens=tokens, **options)
    return item


async def steady(shared: Shared) -> list[Ask]:
    """Streams of the base model and of an adapter, through both routers."""
    asks: list[Ask] = []
    for client in (shared.fragile.mesh.client, shared.client):
        for lora in (None, bring(STEADY)):
            expected = contents([await generate(client, lora)])

            async def ask(
                client: Client = client, lora: Any = lora, expected: Any = expected
            ) -> None:
                assert contents([await generate(client, lora)]) == expected

            asks.append(ask)
    return asks


async def loading(mesh: Mesh, first: int) -> tuple[StreamReader, int, str]:
    """A stream for which a worker loads an adapter, with the adapter's number and the worker. On a busy machine a load
    may pass unseen; the next stream brings the next number."""
    for number in count(first):
        name = f"brings {number}"
        reader = mesh.open(PROMPT, max_tokens=TOKENS, adapter=bring(number), request_id=name)
        if await is_seen_loading(mesh, reader, name):
            return reader, number, (await mesh.admin.explain(name)).placements[-1].worker
        await reader.result()
    raise AssertionError


async def is_seen_loading(mesh: Mesh, reader: StreamReader, name: str) -> bool:
    """Waits until a request is at its adapter's load, or past it."""
    stages: list[str] = []

    async def loads_or_past() -> bool:
        live = (await mesh.admin.list_requests(name)).requests
        stages[:] = [each.items[0].stage for each in live]
        return "load" in stages or bool(reader.tokens()) or reader.is_over

    await eventually(loads_or_past)
    return "load" in stages


async def settled(shared: Shared) -> None:
    """Nothing is in use or half loaded anywhere."""
    await shared.fragile.check_nothing_is_left()
    for router in (shared.fragile.mesh.router, shared.other):
        assert (await scrape(router))["trtmesh_router_worker_bookings"] == 0


@pytest.mark.parametrize("fault", ["kill", "freeze", "cut"])
async def test_worker_lost_while_it_loads(shared: Shared, fault: str) -> None:
    fragile = shared.fragile
    async with steady_streams(await steady(shared)):
        first = 1000 * (1 + ["kill", "freeze", "cut"].index(fault))
        reader, number, victim = await loading(fragile.mesh, first)
        getattr(fragile, fault)(victim)
        (item,) = await reader.result()
        await fragile.mend(*[victim] * (fault == "kill"))
        assert item.error is None
        assert item.started
        expected = await generate(fragile.mesh.client, pb.LoraConfig(id=number))
        assert contents([item]) == contents([expected])
    await settled(shared)


@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_worker_lost_while_it_decodes_with_an_adapter(shared: Shared, fault: str) -> None:
    fragile, lora = shared.fragile, bring(30 + len(fault))
    expected = await generate(fragile.mesh.client, lora, LONG)
    async with steady_streams(await steady(shared)):
        reader = fragile.mesh.open(PROMPT, max_tokens=LONG, adapter=pb.LoraConfig(id=lora.id))
        await reader.tokens_here(TOKENS)
        (victim,) = [name for name in NAMES if fragile.begun_on(reader, name)]
        getattr(fragile, fault)(victim)
        assert contents(await reader.result()) == contents([expected])
        await fragile.mend(*[victim] * (fault == "kill"))
    await settled(shared)


async def test_more_adapters_at_once_than_slots(shared: Shared) -> None:
    clients = (shared.fragile.mesh.client, shared.client)
    loras = [bring(40 + number) for number in range(4 * SLOTS)]
    async with steady_streams(await steady(shared)):
        items = await asyncio.gather(
            *(generate(clients[at % 2], lora) for at, lora in enumerate(loras) for _ in range(3))
        )
    alone = [await generate(clients[0], lora) for lora in loras]
    assert len({item.token_ids for item in alone}) == len(loras)
    assert contents(items) == contents([item for item in alone for _ in range(3)])
    await settled(shared)


async def test_one_number_brought_through_two_routers_at_once(shared: Shared) -> None:
    clients = (shared.fragile.mesh.client, shared.client)
    loras = [bring(60, seed) for seed in (1, 2)]
    async with steady_streams(await steady(shared)):
        items = await asyncio.gather(
            *(generate(*each) for each in zip(clients, loras, strict=True))
        )

        async def agreed() -> bool:
            one, other = [await generate(client, pb.LoraConfig(id=60)) for client in clients]
            return one.token_ids == other.token_ids in [item.token_ids for item in items]

        await eventually(agreed)
    alone = [await generate(clients[0], lora) for lora in loras]
    assert contents(items) == contents(alone)
    assert len({item.token_ids for item in alone}) == 2
    await settled(shared)


async def test_router_killed_during_a_delivery(shared: Shared) -> None:
    fragile, router = shared.fragile, shared.other
    addresses = [router.address, fragile.mesh.router.address]
    lora = bring(70, size=400_000)
    asks = await steady(shared)
    async with Client(addresses, resume_seconds=60) as client:
        async with steady_streams(asks[:2]):
            for proxy in fragile.proxies.values():
                proxy.delay(0.2)
            reader = StreamReader(client, PROMPT, max_tokens=TOKENS, adapter=lora)
            await eventually(lambda: sent_bytes(router))
            router.signal(signal.SIGKILL)
            await router.wait()
            for proxy in fragile.proxies.values():
                proxy.mend()
            (item,) = await reader.result()
        expected = await generate(client, pb.LoraConfig(id=70))
    assert contents([item]) == contents([expected])
    await shared.restart_other()
    await settled(shared)


async def sent_bytes(router: ServiceProcess) -> float:
    return (await scrape(router))["trtmesh_router_adapter_delivery_bytes_total"]


def content(seed: int, size: int = 64) -> AdapterContent:
    return content_of(bytes([seed]) * size)


def named(name: str) -> admin_pb.AddAdapterRequest:
    return admin_pb.AddAdapterRequest(name=name)


async def current_version(admin: AdminClient, name: str) -> str:
    """The version of a registered adapter, or ''."""
    listed = (await admin.list_adapters()).adapters
    return next((each.version for each in listed if each.name == name), "")


async def test_one_name_uploaded_through_two_routers_at_once(shared: Shared) -> None:
    admins, versions = (shared.fragile.mesh.admin, shared.admin), [content(1), content(2)]
    async with steady_streams(await steady(shared)):
        await asyncio.gather(
            *(
                admin.upload_adapter(named("twice"), each)
                for admin, each in zip(admins, versions, strict=True)
            )
        )

        async def agreed() -> bool:
            one, other = [await current_version(admin, "twice") for admin in admins]
            return one == other and one in [each.version for each in versions]

        await eventually(agreed)
        clients = (shared.fragile.mesh.client, shared.client)
        items = [await generate(client, pb.LoraConfig(name="twice")) for client in clients]
    assert contents(items[:1]) == contents(items[1:])
    await settled(shared)


async def test_upload_cut_half_way_leaves_nothing(shared: Shared) -> None:
    half, admin = content(3, size=1 << 20), shared.fragile.mesh.admin
    files = [*shared.directory.rglob("*")]
    async with (
        steady_streams(await steady(shared)),
        proxy_to(shared.fragile.mesh.router.admin_address) as proxy,
        AdminClient(proxy.address) as cut_off,
    ):
        sent: list[int] = []

        def cut(size: int) -> None:
            sent.append(size)
            if sum(sent) > half.size_bytes // 2:
                proxy.cut()

        with pytest.raises(Unavailable):
            await cut_off.upload_adapter(named("half"), half, on_sent=cut)
        assert await current_version(admin, "half") == ""
        assert [*shared.directory.rglob("*")] == files
        await admin.upload_adapter(named("half"), half)
        assert await current_version(admin, "half") == half.version
        await eventually(lambda: knows(shared.admin, "half"))
        item = await generate(shared.client, pb.LoraConfig(id=number_of("half")))
        assert item.error is None
    await settled(shared)


async def test_corrupt_registry_changes_nothing_that_runs(shared: Shared) -> None:
    file, lora = shared.directory / "registry.json", bring(80)
    admin, clients = shared.fragile.mesh.admin, (shared.fragile.mesh.client, shared.client)
    await admin.upload_adapter(named("kept"), content(4))
    asked = (lora, pb.LoraConfig(name="kept"))
    expected = [await generate(clients[0], each) for each in asked]
    await eventually(lambda: knows(shared.admin, "kept"))
    before = file.read_bytes()
    async with steady_streams(await steady(shared)):
        file.write_bytes(before[: len(before) // 2])
        for router in (shared.fragile.mesh.router, shared.other):
            await eventually(partial(has_logged, router, "registry.json"))
        for client in clients:
            found = [await generate(client, each) for each in asked]
            assert contents(found) == contents(expected)
        with pytest.raises(Mismatch) as refused:
            await admin.upload_adapter(named("refused"), content(5))
        assert refused.value.reason == "MISMATCH"
        assert "registry.json" in refused.value.message
        file.write_bytes(before)
        await admin.upload_adapter(named("later"), content(6))
        await eventually(lambda: knows(shared.admin, "later"))
        assert not await knows(shared.admin, "refused")
    await settled(shared)


async def knows(admin: AdminClient, name: str) -> bool:
    return bool(await current_version(admin, name))


async def has_logged(process: ServiceProcess, text: str) -> bool:
    return text in process.stderr
