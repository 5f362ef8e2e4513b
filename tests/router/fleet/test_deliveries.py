"""Adapters reach workers before the items that use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from leaks import gone, without_collector
from process_constants import patch
from router.scripted import LENGTH, ScriptedEngine, eventually
from router.scripted_fleet import FIELDS, Fleet, fleet, refusal
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    AdapterNotFound,
    AdaptersFull,
    InvalidField,
    InvalidRequest,
    WorkerLost,
)
from trtmesh.chassis.vocabulary import Adapter, Tensor
from trtmesh.client import FinishReason
from trtmesh.router.adapters.adapters import ItemAdapter
from trtmesh.router.adapters.usage import Usages
from trtmesh.router.fleet.deliveries import PART_BYTES, Deliveries, _Delivery, parts
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.metrics import RouterMetrics
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

LORA_FIELDS = [*FIELDS, "lora.id", "lora.name", "lora.version"]


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    with without_collector():
        yield
        await gone(_Delivery)


def engine(name: str = "one") -> ScriptedEngine:
    return ScriptedEngine(worker=name, supported_fields=LORA_FIELDS)


def lora(number: int = 7, weights: bytes = b"", **more: Any) -> pb.LoraConfig:
    message = pb.LoraConfig(id=number, **more)
    if weights:
        message.weights.data_type, message.weights.data = pb.DATA_TYPE_FP16, weights
        message.weights.shape.extend([1, len(weights) // 2])
        message.config.data_type, message.config.data = pb.DATA_TYPE_INT32, bytes(12)
        message.config.shape.extend([1, 3])
    return message


def content(weights: bytes) -> AdapterContent:
    return AdapterContent.of_arrays(
        Tensor(pb.DATA_TYPE_FP16, (1, len(weights) // 2), weights),
        Tensor(pb.DATA_TYPE_INT32, (1, 3), bytes(12)),
    )


async def finish(engine: ScriptedEngine, count: int = 1) -> None:
    """Ends the last `count` items with one token."""
    for submit in engine.submits[-count:]:
        await engine.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])


def nothing_left(on: Fleet) -> bool:
    gauges = ("live_items", "worker_bookings", "worker_sequences")
    return not any(on.client.gauge(name) for name in gauges)


def test_parts_are_the_content_in_order() -> None:
    whole = AdapterContent(pb.ADAPTER_FORMAT_PEFT, b"c" * 10, b"w" * (2 * PART_BYTES + 5))
    told = [*parts(whole)]
    assert b"".join(data for _, data in told) == whole.config + whole.weights
    assert [offset for offset, _ in told] == [0, 10, 10 + PART_BYTES, 10 + 2 * PART_BYTES]
    assert max(len(data) for _, data in told) == PART_BYTES


async def test_weights_arrive_before_the_item_and_never_in_it() -> None:
    one = engine()
    async with fleet(one) as on:
        asked = on.ask([1], adapter=lora(weights=b"abcd", name="a"))
        (submit,) = await one.submitted()
        version = content(b"abcd").version
        assert one.commands.index(next(c for c in one.commands if c.HasField("submit"))) > 0
        assert one.contents[7, version] == content(b"abcd").config + content(b"abcd").weights
        assert submit.config.lora == pb.LoraConfig(id=7, name="a", version=version)
        await finish(one)
        assert (await asked)[0].error is None
        on.start([2], adapter=lora())
        submit = (await one.submitted(2))[-1]
        assert submit.config.lora == pb.LoraConfig(id=7, name="a", version=version)
        assert len(one.loads) == 2, "config and weights, once"


async def test_one_delivery_serves_all_waiting_items_and_others_do_not_wait() -> None:
    one = engine()
    one.loads_adapters = False
    weights = bytes(3 * PART_BYTES)
    version = content(weights).version
    async with fleet(one) as on:
        for _ in range(3):
            on.start([1], adapter=lora(weights=weights))
        on.start([2])
        (other,) = await one.submitted()
        assert not other.config.HasField("lora")
        await eventually(lambda: len(one.contents.get((7, version), b"")) > 3 * PART_BYTES)
        assert len(one.submits) == 1
        await one.tell_adapter(7, version)
        await one.submitted(4)
        offsets = [part.offset for part in one.loads]
        assert offsets == sorted(set(offsets))
        assert max(len(part.data) for part in one.loads) <= PART_BYTES


async def test_adapter_that_arrives_right_after_the_placement_is_not_delivered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = engine()
    one.loads_adapters = False
    version = content(b"ab").version
    hold, late = Worker.hold, list[ItemAdapter]()

    async def hold_late(worker: Worker, adapter: ItemAdapter) -> None:
        """Begins the second delivery once the first one is over."""
        late.append(adapter)
        if len(late) == 2:
            await eventually(lambda: worker.adapters.holds(adapter.identity))
        await hold(worker, adapter)

    monkeypatch.setattr(Worker, "hold", hold_late)
    async with fleet(one) as on:
        on.start([1], adapter=lora(weights=b"ab"))
        await eventually(lambda: len(one.loads) == 2)
        on.start([2], adapter=lora(weights=b"ab"))
        await eventually(lambda: len(late) == 2)
        await one.tell_adapter(7, version)
        await one.submitted(2)
        assert len(one.loads) == 2


async def test_stopped_item_leaves_no_booking_and_no_delivery() -> None:
    one = engine()
    one.loads_adapters = False
    async with fleet(one) as on:
        asked = on.ask([1], adapter=lora(weights=b"ab"), request_id="r")
        await eventually(lambda: len(one.loads) == 2)
        assert on.client.gauge("worker_bookings") == 1
        assert await on.client.stop("r") == 1
        (item,) = await asked
        assert item.reason is FinishReason.STOPPED
        await eventually(lambda: nothing_left(on))
        assert not [task for task in asyncio.all_tasks() if "_carry" in repr(task.get_coro())]
        assert not one.submits


async def test_part_waits_until_the_former_was_written() -> None:
    sent: list[epb.EngineCommand] = []

    def command(_: int) -> epb.EngineCommand:
        sent.append(epb.EngineCommand())
        return sent[-1]

    async def load() -> AdapterContent:
        return AdapterContent(pb.ADAPTER_FORMAT_PEFT, b"{}", bytes(2 * PART_BYTES))

    deliveries = Deliveries(command, Usages(), RouterMetrics())
    waiting = [
        asyncio.create_task(deliveries.deliver(Adapter(number, "", "v"), load)) for number in (1, 2)
    ]
    for count in range(1, 7):
        await eventually(partial(lambda least: len(sent) >= least, count))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(sent) == count
        deliveries.written.set()
    assert [each.load_adapter.adapter.id for each in sent] == [1, 1, 1, 2, 2, 2]
    deliveries.lost(WorkerLost("it died"))
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [WorkerLost, WorkerLost]


async def test_refused_pin_of_an_adapter_in_memory_ends_its_delivery_with_the_error() -> None:
    sent: list[epb.EngineCommand] = []

    def command(_: int) -> epb.EngineCommand:
        sent.append(epb.EngineCommand())
        return sent[-1]

    async def load() -> AdapterContent:
        return content(b"ab")

    adapter = Adapter(7, "", content(b"ab").version)
    deliveries = Deliveries(command, Usages(), RouterMetrics())
    waiting = asyncio.create_task(deliveries.deliver(adapter, load, pinned=True))
    await eventually(lambda: sent)
    assert sent[0].load_adapter.pinned
    state = epb.AdapterState(id=7, version=adapter.version, place=epb.ADAPTER_PLACE_HOST)
    refused = epb.AdapterState(error=to_proto(AdaptersFull("pinned adapters take the slots")))
    refused.MergeFrom(state)
    deliveries.on_states([refused, state])
    with pytest.raises(AdaptersFull):
        await waiting


async def test_item_right_after_a_stopped_one_gets_a_delivery_of_its_own() -> None:
    """In one turn of the loop: the former delivery is over, but not yet forgotten."""
    metrics, sent = RouterMetrics(), []

    def command(_: int) -> epb.EngineCommand:
        sent.append(epb.EngineCommand())
        return sent[-1]

    async def load() -> AdapterContent:
        return content(b"ab")

    adapter = Adapter(7, "", content(b"ab").version)
    deliveries = Deliveries(command, Usages(), metrics)
    first = asyncio.create_task(deliveries.deliver(adapter, load))
    await eventually(lambda: sent)
    first.cancel()
    second = asyncio.create_task(deliveries.deliver(adapter, load))
    await eventually(lambda: len(sent) == 2)
    deliveries.on_states(
        [epb.AdapterState(id=7, version=adapter.version, place=epb.ADAPTER_PLACE_HOST)]
    )
    await second
    await asyncio.sleep(0)
    assert metrics.deliveries == {"unwanted": 1, "loaded": 1}


@pytest.mark.parametrize("gone", ["cancelled", "late"])
async def test_client_that_leaves_during_a_delivery_leaves_nothing(gone: str) -> None:
    one = engine()
    one.loads_adapters = False
    async with fleet(one) as on:
        timeout = {"timeout_seconds": 1.0} if gone == "late" else {}
        asked = on.ask([1], adapter=lora(weights=b"ab"), **timeout)
        await eventually(lambda: len(one.loads) == 2)
        if gone == "cancelled":
            asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: nothing_left(on))


async def test_content_that_the_worker_refuses_fails_the_item_alone() -> None:
    one = engine()
    one.loads_adapters = False
    async with fleet(one) as on:
        asked = on.ask([1], adapter=lora(weights=b"ab"))
        await eventually(lambda: len(one.loads) == 2)
        error = to_proto(InvalidRequest("layer 3 has rank 9 but the model takes 8"))
        await one.tell_adapter(7, content(b"ab").version, place=0, error=error)
        (item,) = await asked
        assert isinstance(item.error, InvalidRequest)
        assert item.error.worker == "one"
        assert nothing_left(on)
        again = on.ask([1], adapter=lora())
        await eventually(lambda: len(one.loads) == 4)
        await one.tell_adapter(7, content(b"ab").version)
        await one.submitted()
        assert not again.done()


async def test_full_worker_is_left_for_another_and_asked_again() -> None:
    one, two = engine("one"), engine("two")
    full = to_proto(AdaptersFull("all slots are in use"))
    one.loads_adapters = two.loads_adapters = False
    async with fleet(one, two, retries={"worker_wait_seconds": 60}) as on:
        asked = on.ask([1], adapter=lora(weights=b"ab"))
        version = content(b"ab").version
        await eventually(lambda: len(one.loads) + len(two.loads) == 2)
        first = one if one.loads else two
        await first.tell_adapter(7, version, place=0, error=full)
        second = on.other(first)
        await eventually(lambda: len(second.loads) == 2)
        await second.tell_adapter(7, version, place=0, error=full)
        await eventually(lambda: len(one.loads) + len(two.loads) >= 6)
        for each in (one, two):
            each.loads_adapters = True
            await each.tell_adapter(7, version)
        taker = await on.first()
        await finish(taker)
        assert (await asked)[0].error is None


async def test_fleet_that_stays_full_ends_the_item_with_its_error() -> None:
    one = engine()
    one.loads_adapters = False
    async with fleet(one) as on:
        asked = on.ask([1], adapter=lora(weights=b"ab"))
        full = to_proto(AdaptersFull("all slots are in use"))
        answered = 0
        while not asked.done():
            if len(one.loads) > answered:
                answered = len(one.loads)
                if answered % 2 == 0:
                    await one.tell_adapter(7, content(b"ab").version, place=0, error=full)
            await asyncio.sleep(0.005)
        assert isinstance((await asked)[0].error, AdaptersFull)
        assert nothing_left(on)


async def test_late_worker_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, delivery_seconds=0.2)
    one, two = engine("one"), engine("two")
    one.loads_adapters = two.loads_adapters = False
    async with fleet(one, two) as on:
        asked = on.ask([1], adapter=lora(weights=b"ab"))
        await eventually(lambda: one.loads and two.loads)
        (item,) = await asked
        assert isinstance(item.error, WorkerLost)
        assert nothing_left(on)


async def test_worker_lost_during_a_delivery_is_replaced() -> None:
    one, two = engine("one"), engine("two")
    one.loads_adapters = two.loads_adapters = False
    async with fleet(one, two) as on:
        asked = on.ask([1], adapter=lora(weights=b"ab"))
        await eventually(lambda: len(one.loads) + len(two.loads) == 2)
        first = one if one.loads else two
        second = on.other(first)
        second.loads_adapters = True
        await first.hang_up()
        await second.submitted()
        await finish(second)
        assert (await asked)[0].error is None
        await eventually(lambda: nothing_left(on))


async def test_evicted_adapter_is_delivered_again() -> None:
    one = engine()
    async with fleet(one) as on:
        asked = on.ask([1], adapter=lora(weights=b"ab"))
        (submit,) = await one.submitted()
        unknown = AdapterNotFound("is 7", field="lora.id", value="7")
        await one.step(ends=[refusal(submit.handle, unknown)])
        await one.submitted(2)
        assert len(one.loads) == 4
        await finish(one)
        assert (await asked)[0].error is None


async def test_migration_delivers_the_same_version_first() -> None:
    one, two = engine("one"), engine("two")
    async with fleet(one, two) as on:
        asked = on.ask([1], adapter=lora(weights=b"ab"))
        first = await on.first()
        (submit,) = first.submits
        await first.step((submit.handle, 0, [5, 6]))
        on.start([1], adapter=lora(weights=b"cd"))
        await on.submitted(2)
        second = on.other(first)
        await first.hang_up()
        await eventually(lambda: any(s.emitted_tokens == 2 for s in second.submits))
        moved = next(s for s in second.submits if s.emitted_tokens == 2)
        assert moved.config.lora.version == content(b"ab").version
        assert (7, content(b"ab").version) in second.contents
        await second.step((moved.handle, 2, [7]), ends=[(moved.handle, LENGTH)])
        (item,) = await asked
        assert item.token_ids == (5, 6, 7)


async def test_two_uploads_of_a_number_at_once_each_compute_their_own() -> None:
    one = engine()
    async with fleet(one) as on:
        for weights in (b"ab", b"cd"):
            on.start([1], adapter=lora(weights=weights))
        submits = await one.submitted(2)
        versions = {submit.config.lora.version for submit in submits}
        assert versions == {content(b"ab").version, content(b"cd").version}


async def test_version_of_the_client_is_honoured() -> None:
    one = engine()
    async with fleet(one) as on:
        first = on.ask([1], adapter=lora(weights=b"ab"))
        await one.submitted()
        await finish(one)
        await first
        version = content(b"ab").version
        (item,) = await on.ask([1], adapter=lora(version="0" * 32))
        assert isinstance(item.error, AdapterNotFound)
        (item,) = await on.ask([1], adapter=lora(weights=b"cd", version=version))
        assert isinstance(item.error, InvalidField)
        assert item.error.fields == ("lora.version",)
        on.start([1], adapter=lora(version=version))
        await one.submitted(2)


async def test_adapter_that_a_worker_reports_is_found_by_name_and_by_version() -> None:
    one = engine()
    async with fleet(one) as on:
        await one.tell_adapter(9, "v9", name="prefetched")
        named = pb.LoraConfig(name="prefetched")
        on.start([1], adapter=named)
        (submit,) = await one.submitted()
        assert submit.config.lora == pb.LoraConfig(id=9, name="prefetched", version="v9")
        assert not one.loads
        (item,) = await on.ask([1], adapter=pb.LoraConfig(id=9, version="v8"))
        assert isinstance(item.error, AdapterNotFound)
        (item,) = await on.ask([1], adapter=pb.LoraConfig(name="other"))
        assert isinstance(item.error, AdapterNotFound)
        assert item.error.field == "lora.name"
