"""The admin calls about adapters, with workers that load them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from process_constants import patch
from router.adapters.contents_of import content, write
from router.scripted import (
    LENGTH,
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_fleet import FIELDS
from trtmesh.chassis.adapter_content import AdapterContent, number_of
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    AdapterBroken,
    AdapterMismatch,
    AdapterNotFound,
    AdaptersFull,
    Exhausted,
    InvalidField,
    InvalidRequest,
    Mismatch,
    NotFound,
    TrtmeshError,
    Unsupported,
)
from trtmesh.client import AdminClient
from trtmesh.router.fleet import pins
from trtmesh.router.fleet.worker import Worker
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb
from trtmesh.v1 import router_admin_pb2_grpc

OLD, NEW = content(b"old"), content(b"new")
WEIGHTS = pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=[1, 1], data=b"ab")
CONFIG = pb.Tensor(data_type=pb.DATA_TYPE_INT32, shape=[1, 3], data=bytes(12))


def engine(name: str = "one", **more: Any) -> ScriptedEngine:
    fields = [*FIELDS, "lora.id", "lora.name", "lora.version"]
    return ScriptedEngine(worker=name, supported_fields=fields, **more)


@asynccontextmanager
async def mesh(*engines: ScriptedEngine, **adapters: Any) -> AsyncIterator[RouterClient]:
    """A router of scripted engines."""
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving_engine(each)) for each in engines]
        client = await stack.enter_async_context(
            serving_router(addresses, adapters=adapters, retries={"worker_wait_seconds": 0.3})
        )
        await until_states(client, [READY] * len(engines), [])
        yield client


def asked(name: str = "a", **more: Any) -> admin_pb.AddAdapterRequest:
    return admin_pb.AddAdapterRequest(name=name, **more)


async def listed(client: RouterClient) -> Sequence[admin_pb.Adapter]:
    return (await client.admin.list_adapters()).adapters


async def until_listed(
    client: RouterClient, condition: Callable[[Sequence[admin_pb.Adapter]], object]
) -> Sequence[admin_pb.Adapter]:
    async with asyncio.timeout(60):
        while not condition(adapters := await listed(client)):  # noqa: ASYNC110 - the router sets no event
            await asyncio.sleep(0.02)
    return adapters


def ask(client: RouterClient, **lora: Any) -> asyncio.Task[Any]:
    options: dict[str, Any] = {"text": False, "max_tokens": 9, "adapter": pb.LoraConfig(**lora)}
    return asyncio.create_task(client.complete([[1]], **options))


async def answer(one: ScriptedEngine, submit: epb.SubmitCommand) -> None:
    await one.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])


async def version_used(client: RouterClient, one: ScriptedEngine, name: str = "a") -> str:
    """The version that a new request gets."""
    before = len(one.submits)
    task = ask(client, name=name)
    submit = (await one.submitted(before + 1))[-1]
    await answer(one, submit)
    assert (await task)[0].error is None
    return submit.config.lora.version


async def test_uploaded_adapter_is_listed_delivered_and_counted() -> None:
    one = engine()
    async with mesh(one) as client:
        added = await client.admin.upload_adapter(asked(id=7), OLD)
        assert (added.id, added.name, added.version) == (7, "a", OLD.version)
        (version,) = added.versions
        assert (version.share, version.size_bytes) == (1.0, OLD.size_bytes)
        assert version.format == pb.ADAPTER_FORMAT_PEFT
        assert await version_used(client, one) == OLD.version
        assert await version_used(client, one) == OLD.version
        assert one.contents[7, OLD.version] == OLD.config + OLD.weights
        await one.tell_adapter(7, OLD.version, rank=8)
        (adapter,) = await until_listed(client, lambda known: known[0].versions[0].rank)
        (version,) = adapter.versions
        assert (version.items, version.hits, version.loads, version.evictions) == (2, 2, 1, 0)
        assert adapter.workers == ["one"]
        (residency,) = version.residencies
        assert (residency.worker, residency.place) == ("one", epb.ADAPTER_PLACE_HOST)
        value = client.registry.get_sample_value
        assert value("trtmesh_router_adapter_items_total", {"adapter": "a"}) == 2
        assert value("trtmesh_router_adapter_hits_total", {"adapter": "a"}) == 2
        assert value("trtmesh_router_adapter_deliveries_total", {"outcome": "loaded"}) == 1
        assert value("trtmesh_router_adapter_delivery_bytes_total") == OLD.size_bytes


async def test_evicted_adapter_is_loaded_again_and_counted() -> None:
    one = engine()
    async with mesh(one) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        await version_used(client, one)
        await one.tell_adapter(7, OLD.version, place=epb.ADAPTER_PLACE_ABSENT)
        await until_listed(client, lambda known: known[0].versions[0].evictions == 1)
        await version_used(client, one)
        assert (await listed(client))[0].versions[0].loads == 2


async def test_new_version_is_for_new_requests_alone() -> None:
    one = engine()
    async with mesh(one) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        running = ask(client, name="a")
        (first,) = await one.submitted()
        await one.step((first.handle, 0, [5]))
        await client.admin.upload_adapter(asked(), NEW)
        assert await version_used(client, one) == NEW.version
        assert first.config.lora.version == OLD.version
        assert not one.unloads, "the running item still uses the old version"
        await one.step((first.handle, 1, [6]), ends=[(first.handle, LENGTH)])
        assert (await running)[0].token_ids == (5, 6)
        await eventually(lambda: one.unloads)
        assert (one.unloads[0].id, one.unloads[0].version) == (7, OLD.version)
        assert not one.unloads[0].unpin


async def test_old_version_moves_to_another_worker_while_it_runs() -> None:
    one, two = engine("one"), engine("two")
    async with mesh(one, two) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        running = ask(client, name="a")
        await eventually(lambda: one.submits or two.submits)
        first, second = (one, two) if one.submits else (two, one)
        await first.step((first.submits[0].handle, 0, [5]))
        await client.admin.upload_adapter(asked(), NEW)
        await first.hang_up()
        moved = (await second.submitted())[0]
        assert moved.config.lora.version == OLD.version
        assert second.contents[7, OLD.version] == OLD.config + OLD.weights
        await second.step((moved.handle, 1, [6]), ends=[(moved.handle, LENGTH)])
        assert (await running)[0].token_ids == (5, 6)


async def test_canary_serves_its_share_and_is_promoted() -> None:
    one = engine()
    async with mesh(one) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        added = await client.admin.upload_adapter(asked(canary_share=0.5), NEW)
        assert [version.share for version in added.versions] == [0.5, 0.5]
        used = {await version_used(client, one) for _ in range(16)}
        assert used == {OLD.version, NEW.version}
        await client.admin.upload_adapter(asked(), NEW)
        assert {await version_used(client, one) for _ in range(4)} == {NEW.version}


DORA = b'{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "use_dora": true}'
BROKEN = {
    "torn weights": replace(NEW, weights=NEW.weights[:-1]),
    "torn header": replace(NEW, weights=NEW.weights[:20]),
    "no JSON": replace(NEW, config=b"{"),
    "nested JSON": replace(NEW, config=b'{"a":' * 100_000),
    "DoRA": replace(NEW, config=DORA),
    "another type": replace(NEW, config=NEW.config.replace(b"LORA", b"IA3")),
    "another rank": replace(NEW, config=NEW.config.replace(b"8", b"9")),
    "no array": replace(NEW, format=pb.ADAPTER_FORMAT_ARRAYS),
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_broken_version_is_refused_before_anything_is_sent(kind: str, tmp_path: Path) -> None:
    one = engine()
    async with mesh(one, roots=str(tmp_path)) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        before = len(one.loads)
        write(tmp_path / "new", BROKEN[kind])
        for share in (None, 0.5):
            for adding in (
                client.admin.upload_adapter(asked(canary_share=share), BROKEN[kind]),
                client.admin.add_adapter(asked(source="new", canary_share=share)),
            ):
                with pytest.raises((InvalidRequest, Unsupported), match=r"adapter|lora_config"):
                    await adding
                (adapter,) = await listed(client)
                assert [version.version for version in adapter.versions] == [OLD.version]
                assert adapter.refused_version == BROKEN[kind].version
                assert adapter.refusal.reason
        assert len(one.loads) == before
        assert await version_used(client, one) == OLD.version
        await client.admin.upload_adapter(asked(), NEW)
        assert not (await listed(client))[0].refused_version


@pytest.mark.parametrize("share", [None, 0.5])
async def test_version_that_a_worker_cannot_load_gets_no_request(share: float | None) -> None:
    one = engine()
    async with mesh(one) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        one.refused_versions[NEW.version] = InvalidRequest("layer 3 has rank 9")
        with pytest.raises(InvalidRequest, match="layer 3"):
            await client.admin.upload_adapter(asked(canary_share=share), NEW)
        (adapter,) = await listed(client)
        assert [version.version for version in adapter.versions] == [OLD.version]
        assert (adapter.refused_version, adapter.refusal.message) == (
            NEW.version,
            "layer 3 has rank 9",
        )
        assert {await version_used(client, one) for _ in range(4)} == {OLD.version}


@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("on_disk", [False, True])
async def test_version_that_fails_at_its_first_item_is_taken_back(
    share: float | None, on_disk: bool, tmp_path: Path
) -> None:
    """No worker could try it; clients do not notice."""
    one = engine()
    directory = {"directory": str(tmp_path)} if on_disk else {}
    async with mesh(one, **directory) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        assert await version_used(client, one) == OLD.version
        one.refused_versions[NEW.version] = AdaptersFull("all are in use")
        added = await client.admin.upload_adapter(asked(canary_share=share), NEW)
        assert NEW.version in [version.version for version in added.versions]
        one.refused_versions[NEW.version] = InvalidRequest("layer 3 has rank 9")
        # Half of the requests get the canary; by 8, one in 256 runs would have none.
        for _ in range(32 if share else 8):
            assert await version_used(client, one) == OLD.version
        (adapter,) = await listed(client)
        assert [version.version for version in adapter.versions] == [OLD.version]
        assert adapter.versions[0].share == 1
        assert (adapter.refused_version, adapter.refusal.reason) == (NEW.version, "INVALID_REQUEST")


async def test_items_of_a_request_share_a_version() -> None:
    one = engine()
    async with mesh(one) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        await client.admin.upload_adapter(asked(canary_share=0.5), NEW)
        prompts = [[n] for n in range(8)]
        lora = pb.LoraConfig(name="a")
        task = asyncio.create_task(client.complete(prompts, text=False, max_tokens=9, adapter=lora))
        submits = await one.submitted(8)
        assert len({submit.config.lora.version for submit in submits}) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pinned_adapter_is_on_every_worker_and_again_after_a_restart() -> None:
    one, two = engine("one"), engine("two")
    async with mesh(one, two) as client:
        await client.admin.upload_adapter(asked(id=7, pinned=True), OLD)
        (adapter,) = await until_listed(client, lambda known: len(known[0].workers) == 2)
        assert all(residency.pinned for residency in adapter.versions[0].residencies)
        await one.hang_up()
        await eventually(lambda: len([load for load in one.loads if load.pinned]) >= 3)
        assert (await client.admin.pin_adapter(7, pinned=False)).pinned is False
        await eventually(lambda: one.unloads and two.unloads)
        assert one.unloads[0].unpin
        for each in (one, two):
            await each.tell_adapter(7, OLD.version)
        before = len(one.loads)
        await client.admin.pin_adapter(7)
        await eventually(lambda: len(one.loads) == before + 1)
        assert (one.loads[-1].config_bytes, one.loads[-1].pinned) == (0, True)


async def test_pins_beyond_the_slots_of_a_worker_are_refused() -> None:
    one = engine()
    async with mesh(one) as client:
        await one.report(adapter_slots=1, free_adapter_slots=1)
        await eventually(lambda: next(iter(workers_of(client))).adapters.slots == 1)
        await client.admin.upload_adapter(asked(id=7, pinned=True), OLD)
        await client.admin.upload_adapter(asked("b", id=8), NEW)
        for pin in (
            client.admin.pin_adapter(8),
            client.admin.upload_adapter(asked("c", id=9, pinned=True), NEW),
            client.admin.upload_adapter(asked(id=7, canary_share=0.5), NEW),
        ):
            with pytest.raises(AdaptersFull, match=r"2 pinned .* has 1 slots .* unpin"):
                await pin
        await client.admin.pin_adapter(7)
        await client.admin.pin_adapter(7, pinned=False)
        assert (await client.admin.pin_adapter(8)).pinned


def workers_of(client: RouterClient) -> Collection[Worker]:
    return client.router._fleet.workers.values()


async def test_pinned_adapter_that_a_worker_refuses_is_sent_once_per_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for constant, seconds in (("ROUND", 0.05), ("AGAIN", 0.1), ("MOST", 0.1)):
        monkeypatch.setattr(pins, f"{constant}_SECONDS", seconds)
    full = AdaptersFull("all are in use")
    one = engine()
    one.loads_adapters = False
    async with mesh(one) as client:
        await _upload_unloaded(client, one, asked(id=7, pinned=True), OLD)
        for sent, error in ((2, full), (3, full), (4, InvalidRequest("layer 3 has rank 9"))):
            await eventually(partial(_was_sent, one, 7, sent))
            await one.tell_adapter(7, OLD.version, place=0, error=to_proto(error))
        # Refused later and with the same pause: before it arrives a third time, the other would have arrived again.
        await _upload_unloaded(client, one, asked("b", id=8, pinned=True), NEW)
        for sent in range(2, 5):
            await eventually(partial(_was_sent, one, 8, sent))
            await one.tell_adapter(8, NEW.version, place=0, error=to_proto(full))
        assert _was_sent(one, 7, 4)
        await one.hang_up()
        await eventually(partial(_was_sent, one, 7, 5))


async def _upload_unloaded(
    client: RouterClient,
    one: ScriptedEngine,
    adapter: admin_pb.AddAdapterRequest,
    content: AdapterContent,
) -> None:
    """Registers an adapter while the worker has no room for it, which takes one delivery."""
    one.refused_versions[content.version] = AdaptersFull("all are in use")
    await client.admin.upload_adapter(adapter, content)
    del one.refused_versions[content.version]


def _was_sent(one: ScriptedEngine, number: int, times: int) -> bool:
    parts = [load for load in one.loads if load.adapter.id == number]
    return len(parts) == 2 * times


async def test_removed_adapter_is_unloaded_and_unknown() -> None:
    one = engine()
    async with mesh(one) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        await version_used(client, one)
        await client.admin.remove_adapter(7)
        await eventually(lambda: one.unloads)
        await one.tell_adapter(7, OLD.version, place=epb.ADAPTER_PLACE_ABSENT)
        (item,) = await ask(client, name="a")
        assert isinstance(item.error, AdapterNotFound)
        with pytest.raises(NotFound):
            await client.admin.remove_adapter(7)


async def test_number_of_an_operator_takes_no_weights_from_clients() -> None:
    one = engine()
    async with mesh(one) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        for named in ({"id": 7}, {"id": 8, "name": "a"}, {"name": "a"}):
            (item,) = await ask(client, weights=WEIGHTS, config=CONFIG, **named)
            assert isinstance(item.error, InvalidField)
            assert item.error.fields == ("lora.weights",)
        (item,) = await ask(client, id=7, weights=WEIGHTS)
        assert isinstance(item.error, InvalidField)
        assert item.error.fields == ("lora.weights", "lora.config")
        (item,) = await ask(client, id=7, name="b")
        assert isinstance(item.error, InvalidField)
        assert item.error.fields == ("lora.name",)
        assert not one.submits


async def test_name_that_reads_as_a_number_is_refused() -> None:
    one = engine()
    async with mesh(one) as client:
        with pytest.raises(InvalidField) as refused:
            await client.admin.upload_adapter(asked("7"), OLD)
        assert refused.value.fields == ("name",)
        (item,) = await ask(client, name="7", weights=WEIGHTS, config=CONFIG)
        assert isinstance(item.error, InvalidField)
        assert item.error.fields == ("lora.name",)
        assert not await listed(client)


async def test_fault_of_a_content_is_shown_and_full_workers_are_not_to_blame() -> None:
    one = engine()
    one.loads_adapters = False
    async with mesh(one) as client:
        await _upload_unloaded(client, one, asked(id=7), OLD)
        for error, told in (
            (InvalidRequest("layer 3 has rank 9"), AdapterBroken),
            (AdaptersFull("all are in use"), AdaptersFull),
        ):
            one.refused_versions[OLD.version] = error
            (item,) = await ask(client, name="a")
            assert type(item.error) is told
            (adapter,) = await listed(client)
            assert adapter.versions[0].error.reason == "INVALID_REQUEST"
        one.refused_versions.clear()
        one.loads_adapters = True
        await version_used(client, one)
        (adapter,) = await listed(client)
        assert not adapter.versions[0].HasField("error")


async def test_source_is_registered_and_read_again_only_if_unchanged(tmp_path: Path) -> None:
    one = engine()
    write(tmp_path / "team" / "a", OLD)
    async with mesh(one, roots=str(tmp_path), bytes=0) as client:
        added = await client.admin.add_adapter(asked(source="team/a", version=OLD.version))
        assert (added.source, added.version) == ("team/a", OLD.version)
        assert await version_used(client, one) == OLD.version
        write(tmp_path / "team" / "a", NEW)
        await one.tell_adapter(added.id, OLD.version, place=epb.ADAPTER_PLACE_ABSENT)
        await until_listed(client, lambda known: not known[0].workers)
        (item,) = await ask(client, name="a")
        assert isinstance(item.error, AdapterBroken)
        assert "changed on disk" in item.error.message
        assert (await listed(client))[0].versions[0].error.reason == "ADAPTER_MISMATCH"
        await client.admin.add_adapter(asked(source="team/a"))
        assert await version_used(client, one) == NEW.version


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (asked(source="../a"), InvalidField),
        (asked(source="a", version="0" * 32), AdapterMismatch),
        (asked(source="a", name="b\n"), InvalidField),
        (asked(source="a", canary_share=0.5), InvalidField),
        (asked(source="a", name="7"), InvalidField),
    ],
)
async def test_refused_registration_leaves_nothing(
    tmp_path: Path, request_: admin_pb.AddAdapterRequest, kind: type[TrtmeshError]
) -> None:
    write(tmp_path / "roots" / "a", OLD)
    async with mesh(engine(), roots=str(tmp_path / "roots")) as client:
        with pytest.raises(kind):
            await client.admin.add_adapter(request_)
        assert not await listed(client)


def upload(**values: Any) -> admin_pb.UploadAdapterRequest:
    first: dict[str, Any] = {"adapter": asked(), "format": pb.ADAPTER_FORMAT_PEFT}
    return admin_pb.UploadAdapterRequest(**first | {"config_bytes": 2, "weights_bytes": 3} | values)


PART = admin_pb.UploadAdapterRequest


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [PART(data=b"12345")],
        [upload(data=b"1234")],
        [upload(), PART(data=b"123456")],
        [upload(data=b"12345"), PART(data=b"6")],
        [upload(), upload(data=b"12345")],
        [upload(config_bytes=0, data=b"123")],
        [upload(weights_bytes=2000), PART(data=b"1" * 2002)],
        [upload(config_bytes=2**40, data=b"12345")],
        [upload(format=0, data=b"12345")],
        [upload(format=9, data=b"12345")],
        [upload(adapter=asked(source="a"), data=b"12345")],
        [upload(adapter=asked(version="0" * 32), data=b"12345")],
    ],
)
async def test_wrong_upload_leaves_nothing(
    parts: Sequence[PART], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, max_adapter_bytes=1000)
    async with (
        mesh() as client,
        grpc.aio.insecure_channel(client.admin.address) as channel,
    ):
        stub: Any = router_admin_pb2_grpc.RouterAdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.UploadAdapter(iter(parts))
        assert refused.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        assert not await listed(client)
        assert client.gauge("adapter_bytes") == 0


async def test_interrupted_upload_leaves_nothing() -> None:
    sent = asyncio.Event()

    async def parts() -> AsyncIterator[PART]:
        yield upload(data=b"12")
        sent.set()
        await asyncio.Event().wait()

    async with mesh() as client, grpc.aio.insecure_channel(client.admin.address) as channel:
        stub: Any = router_admin_pb2_grpc.RouterAdminServiceStub(channel)
        call = stub.UploadAdapter(parts())
        await sent.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not await listed(client)
        await client.admin.upload_adapter(asked(), OLD)


async def test_memory_alone_holds_registered_adapters_up_to_its_limit() -> None:
    async with mesh(bytes=OLD.size_bytes) as client:
        await client.admin.upload_adapter(asked(), OLD)
        with pytest.raises(Exhausted) as refused:
            await client.admin.upload_adapter(asked("b"), NEW)
        assert refused.value.limit_field == "router.adapters.bytes"
        assert [adapter.name for adapter in await listed(client)] == ["a"]


async def test_routers_of_a_directory_agree_and_survive_a_restart(tmp_path: Path) -> None:
    one = engine()
    async with (
        mesh(one, directory=str(tmp_path)) as first,
        mesh(engine("two"), directory=str(tmp_path)) as second,
    ):
        await first.admin.upload_adapter(asked(id=7), OLD)
        await until_listed(second, lambda known: [a.version for a in known] == [OLD.version])
        await second.admin.upload_adapter(asked(), NEW)
        await second.admin.upload_adapter(asked("b"), OLD)
        await until_listed(first, lambda known: len(known) == 2)
        assert await version_used(first, one) == NEW.version
        await first.admin.remove_adapter(7)
        await until_listed(second, lambda known: [a.name for a in known] == ["b"])
    async with mesh(two := engine(), directory=str(tmp_path)) as again:
        assert await version_used(again, two, "b") == OLD.version


async def test_brought_adapter_survives_the_router_with_a_directory(tmp_path: Path) -> None:
    one = engine()
    async with mesh(one, directory=str(tmp_path)) as client:
        task = ask(client, id=7, weights=WEIGHTS, config=CONFIG)
        (submit,) = await one.submitted()
        await answer(one, submit)
        await task
    two = engine()
    async with mesh(two, directory=str(tmp_path)) as client:
        task = ask(client, id=7)
        (again,) = await two.submitted()
        assert again.config.lora == submit.config.lora
        (adapter,) = await listed(client)
        assert adapter.brought
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_health(client: RouterClient, status: int) -> None:
    """Waits for the health of the adapters."""
    async with grpc.aio.insecure_channel(client.addresses[0]) as channel, asyncio.timeout(60):
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="adapters")
        while (await stub.Check(request)).status != status:  # noqa: ASYNC110 - the router sets no event
            await asyncio.sleep(0.02)


async def test_corrupt_registry_keeps_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    async with mesh(one, directory=str(tmp_path)) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        good = (tmp_path / "registry.json").read_bytes()
        (tmp_path / "registry.json").write_bytes(good[: len(good) // 2])
        await eventually(lambda: client.gauge("adapter_registry_stale"))
        await until_health(client, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await version_used(client, one) == OLD.version
        with pytest.raises(Mismatch):
            await client.admin.upload_adapter(asked(), NEW)
        told = [record for record in caplog.records if "stays as it was" in record.message]
        assert len(told) == 1
        (tmp_path / "registry.json").write_bytes(good)
        await until_health(client, health_pb2.HealthCheckResponse.SERVING)
        assert not client.gauge("adapter_registry_stale")
        await client.admin.upload_adapter(asked(), NEW)


async def test_unreachable_registry_keeps_the_last_good_one_until_it_is_back(
    tmp_path: Path,
) -> None:
    one = engine()
    async with mesh(one, directory=str(tmp_path)) as client:
        await client.admin.upload_adapter(asked(id=7), OLD)
        file, aside = tmp_path / "registry.json", tmp_path / "aside"
        file.rename(aside)
        file.symlink_to(file.name)
        await eventually(lambda: client.gauge("adapter_registry_stale"))
        assert await version_used(client, one) == OLD.version
        file.unlink()
        aside.rename(file)
        await eventually(lambda: not client.gauge("adapter_registry_stale"))
        assert await version_used(client, one) == OLD.version


async def test_damaged_content_fails_its_adapter_alone(tmp_path: Path) -> None:
    one = engine()
    async with mesh(one, directory=str(tmp_path), bytes=0) as client:
        await client.admin.upload_adapter(asked("a"), OLD)
        await client.admin.upload_adapter(asked("b"), NEW)
        (tmp_path / "contents" / OLD.version).write_bytes(b"1 1 1 xx")
        await one.tell_adapter(number_of("a"), OLD.version, place=epb.ADAPTER_PLACE_ABSENT)
        await until_listed(client, lambda known: not known[0].workers)
        (item,) = await ask(client, name="a")
        assert isinstance(item.error, AdapterBroken)
        assert "damaged" in item.error.message
        assert await version_used(client, one, "b") == NEW.version


async def test_follower_serves_the_followed_registry_and_changes_nothing() -> None:
    one = engine()
    async with (
        mesh() as leader,
        mesh(one, follow=leader.admin.address) as follower,
    ):
        await leader.admin.upload_adapter(asked(id=7, pinned=True), OLD)
        await leader.admin.upload_adapter(asked(canary_share=0.5), NEW)
        (told,) = await until_listed(follower, lambda known: known and len(known[0].versions) == 2)
        assert [version.share for version in told.versions] == [0.5, 0.5]
        wanted = {(7, content.version): content.config + content.weights for content in (OLD, NEW)}
        await eventually(lambda: one.contents == wanted)
        for change in (
            follower.admin.upload_adapter(asked("b"), NEW),
            follower.admin.remove_adapter(7),
            follower.admin.pin_adapter(7),
        ):
            with pytest.raises(Unsupported, match=leader.admin.address):
                await change
        await leader.admin.remove_adapter(7)
        await until_listed(follower, lambda known: not known)


async def test_follower_keeps_the_registry_of_a_lost_router() -> None:
    one = engine()
    async with mesh(bytes=0) as _, AsyncExitStack() as stack:
        leader = await stack.enter_async_context(mesh())
        await leader.admin.upload_adapter(asked(id=7), OLD)
        async with mesh(one, follow=leader.admin.address) as follower:
            await until_listed(follower, lambda known: known)
            await version_used(follower, one)
            await stack.aclose()
            await eventually(lambda: follower.gauge("adapter_registry_stale"))
            assert await version_used(follower, one) == OLD.version


async def test_followed_router_with_a_token_is_shown_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTMESH_ADMIN_TOKEN", "secret")
    (tmp_path / "token").write_text("secret")
    (tmp_path / "wrong").write_text("wrong")
    async with (
        serving_router(["127.0.0.1:1"]) as leader,
        AdminClient(leader.admin.address, token="secret") as admin,
    ):
        await admin.upload_adapter(asked(id=7), OLD)
        monkeypatch.delenv("TRTMESH_ADMIN_TOKEN")
        follow = {"follow": leader.admin.address}
        async with mesh(**follow, follow_token_file=str(tmp_path / "token")) as follower:
            await until_listed(follower, lambda known: known)
        async with mesh(**follow, follow_token_file=str(tmp_path / "wrong")) as follower:
            await eventually(lambda: follower.gauge("adapter_registry_stale"))
            assert not await listed(follower)


async def test_new_version_finds_the_model_of_its_name() -> None:
    async with mesh(engine("one", model="m"), engine("two", model="n")) as client:
        with pytest.raises(InvalidField, match="one of m, n"):
            await client.admin.upload_adapter(asked(id=7), OLD)
        await client.admin.upload_adapter(asked(id=7, model="n"), OLD)
        added = await client.admin.upload_adapter(asked(), NEW)
        assert (added.model, added.version) == ("n", NEW.version)


async def test_status_tells_that_the_router_drains() -> None:
    async with mesh(engine()) as client:
        assert not (await client.status()).draining
        await client.router.drain()
        assert (await client.status()).draining
