"""Deliveries, loads and unloads of adapters over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine.adapter_contents import content, identity, load, parts, unload
from engine.short_names import by_short_names
from engine_streams import RouterStream, RunningEngine, eventually, router_stream, serving, submit
from recording_backend import INFO, RecordingBackend
from trtmesh.chassis.errors import AdaptersFull
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import HeldAdapter, StepOutput
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.service.adapter_delivery import DELIVERIES
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

MOST = 1000
ADAPTED = replace(INFO, max_adapter_bytes=MOST)


def simulated(**settings: Any) -> SimulatedBackend:
    values = {"step_ms": 0, "adapters_slots": 2, "adapters_load_ms": 0} | settings
    return SimulatedBackend(by_short_names(SimulatedSettings, **values))


async def state(stream: RouterStream, count: int = 1) -> epb.AdapterState:
    """The last of `count` more states."""
    known = len(stream.adapter_states)
    await stream.until(lambda: len(stream.adapter_states) >= known + count)
    return stream.adapter_states[known + count - 1]


def used_bytes(engine: RunningEngine) -> int:
    return engine.service._loaded().delivery_memory.used_bytes


class TestDelivery:
    @pytest.mark.parametrize("size", [1, 7, 10_000])
    async def test_parts_make_the_content(self, size: int) -> None:
        backend, sent = RecordingBackend(ADAPTED), content(3)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(*parts(5, sent, name="french", pinned=True, size=size))
            await eventually(lambda: backend.loads)
            (loaded,) = backend.loads
            assert loaded.identity == Adapter(5, "french", sent.version)
            assert (loaded.content, loaded.pinned) == (sent, True)

    async def test_load_without_content_reaches_backend(self) -> None:
        backend = RecordingBackend(ADAPTED)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(load(5, "v", pinned=True), unload(6, "w"), unload(7, unpin=True))
            await eventually(lambda: len(backend.unloads) == 2)
            (loaded,) = backend.loads
            assert (loaded.identity, loaded.content) == (Adapter(5, "", "v"), None)
            assert loaded.pinned
            assert backend.unloads == [(6, "w", False), (7, "", True)]

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (lambda part: part.adapter.ClearField("id"), "load_adapter.adapter.id"),
            (lambda part: part.adapter.ClearField("version"), "load_adapter.adapter.version"),
            (
                lambda part: part.adapter.config.CopyFrom(pb.Tensor()),
                "load_adapter.adapter.config",
            ),
            (lambda part: part.ClearField("format"), "load_adapter.format"),
            (lambda part: setattr(part, "config_bytes", 0), "load_adapter"),
            (lambda part: setattr(part, "weights_bytes", 0), "load_adapter"),
            (lambda part: setattr(part, "weights_bytes", MOST), "load_adapter content"),
            (lambda part: setattr(part, "offset", 3), "load_adapter.offset"),
            (lambda part: setattr(part, "data", b""), "load_adapter.data"),
            (lambda part: setattr(part, "data", bytes(MOST)), "load_adapter.data"),
        ],
    )
    async def test_malformed_first_part_is_refused(
        self, change: Callable[[epb.LoadAdapterCommand], None], field: str
    ) -> None:
        backend = RecordingBackend(ADAPTED)
        (command,) = parts(5, content())
        change(command.load_adapter)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(command)
            answer = await state(stream)
            assert list(answer.error.fields) == [field]
            assert answer.error.code == 3
            assert answer.error.worker
            assert answer.place == epb.ADAPTER_PLACE_ABSENT
            assert (backend.loads, used_bytes(engine)) == ([], 0)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (lambda part: setattr(part, "offset", 9), "load_adapter.offset"),
            (lambda part: setattr(part, "offset", 11), "load_adapter.offset"),
            (lambda part: setattr(part, "data", bytes(MOST)), "load_adapter.data"),
            (lambda part: setattr(part.adapter, "id", 6), "load_adapter"),
            (lambda part: setattr(part.adapter, "version", "x"), "load_adapter"),
            (lambda part: setattr(part.adapter, "name", "x"), "load_adapter"),
            (lambda part: setattr(part, "pinned", True), "load_adapter"),
            (lambda part: setattr(part, "format", pb.ADAPTER_FORMAT_ARRAYS), "load_adapter"),
            (lambda part: setattr(part, "config_bytes", 1), "load_adapter"),
        ],
    )
    async def test_malformed_later_part_drops_the_delivery_once(
        self, change: Callable[[epb.LoadAdapterCommand], None], field: str
    ) -> None:
        backend = RecordingBackend(ADAPTED)
        commands = parts(5, content(), size=10)
        change(commands[1].load_adapter)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(*commands)
            answer = await state(stream)
            assert list(answer.error.fields) == [field]
            # The same delivery again, complete, is not mistaken for the refused one.
            await stream.send(*parts(5, content(), size=10))
            await eventually(lambda: backend.loads)
            errors = [each.id for each in stream.adapter_states if each.HasField("error")]
            assert len(errors) <= 2
            assert used_bytes(engine) == content().size_bytes

    async def test_wrong_digest_is_refused(self) -> None:
        backend = RecordingBackend(ADAPTED)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(*parts(5, content(1), version=content(2).version))
            answer = await state(stream)
            assert list(answer.error.fields) == ["load_adapter.adapter.version"]
            assert answer.version == content(2).version
            assert (backend.loads, used_bytes(engine)) == ([], 0)

    async def test_router_that_reads_no_refusal_loses_its_stream(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The digest is refused off the stream's task, whose end must follow all the same."""
        backend = RecordingBackend(ADAPTED)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            monkeypatch.setattr("trtmesh.engine.service.event_outbox.MAX_ANSWERS", 0)
            await stream.send(*parts(5, content(1), version=content(2).version))
            assert (await stream.failure()).reason == "SLOW_CLIENT"
            await eventually(lambda: used_bytes(engine) == 0)

    async def test_refused_delivery_of_a_loaded_version_is_reported_with_its_place(self) -> None:
        async with (
            serving(simulated()) as engine,
            router_stream(engine.address) as stream,
        ):
            await stream.send(*parts(5, content()))
            assert (await state(stream)).place == epb.ADAPTER_PLACE_DEVICE
            await stream.send(*parts(5, content(), size=10)[1:2])
            refused = await state(stream)
            assert list(refused.error.fields) == ["load_adapter.offset"]
            assert refused.place == epb.ADAPTER_PLACE_DEVICE

    async def test_next_delivery_drops_a_partial_one(self) -> None:
        backend = RecordingBackend(ADAPTED)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(*parts(5, content(1), size=10)[:-1], *parts(6, content(2)))
            await eventually(lambda: backend.loads)
            assert [each.identity.id for each in backend.loads] == [6]
            assert used_bytes(engine) == content(2).size_bytes

    async def test_end_of_stream_drops_a_partial_one(self) -> None:
        backend = RecordingBackend(ADAPTED)
        async with serving(backend) as engine:
            async with router_stream(engine.address) as stream:
                await stream.send(*parts(5, content(1), size=10)[:-1])
                await eventually(lambda: used_bytes(engine) == content(1).size_bytes)
            await eventually(lambda: used_bytes(engine) == 0)
            assert backend.loads == []
            async with router_stream(engine.address) as stream:
                await stream.send(*parts(5, content(1), size=10)[-1:])
                assert list((await state(stream)).error.fields) == ["load_adapter.offset"]

    async def test_memory_of_all_routers_is_bounded(self) -> None:
        backend, large = RecordingBackend(ADAPTED), content(1, size=MOST - 100)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            for number in range(DELIVERIES):
                await stream.send(*parts(number, large))
            await eventually(lambda: len(backend.loads) == DELIVERIES)
            async with router_stream(engine.address, router="other") as other:
                first, *_ = parts(9, large, size=500)
                await other.send(first)
                answer = await state(other)
                assert answer.error.reason == "ADAPTERS_FULL"
                held = HeldAdapter(identity(0, large))
                backend.deliver(StepOutput(0, adapters=[held]))
                await state(other)
                await other.send(first)
                await eventually(lambda: used_bytes(engine) == DELIVERIES * large.size_bytes)


class TestAnswers:
    async def test_change_goes_to_all_routers_and_error_to_the_asking_one(self) -> None:
        backend, sent = RecordingBackend(ADAPTED), content()
        async with (
            serving(backend) as engine,
            router_stream(engine.address) as one,
            router_stream(engine.address, router="other") as other,
        ):
            await one.send(*parts(5, sent))
            await eventually(lambda: backend.loads)
            failed = HeldAdapter(
                identity(5, sent), epb.ADAPTER_PLACE_ABSENT, error=AdaptersFull("none")
            )
            loaded = HeldAdapter(
                identity(6, sent), epb.ADAPTER_PLACE_HOST, rank=4, size_bytes=9, pinned=True
            )
            backend.deliver(StepOutput(0, adapters=[failed, loaded]))
            # An error answers once.
            backend.deliver(StepOutput(0, adapters=[failed, loaded]))
            await one.until(lambda: len(one.adapter_states) == 3)
            await other.until(lambda: len(other.adapter_states) == 2)
            assert [each.id for each in one.adapter_states] == [5, 6, 6]
            assert one.adapter_states[0].error.reason == "ADAPTERS_FULL"
            told = other.adapter_states[0]
            assert (told.id, told.rank, told.size_bytes, told.pinned) == (6, 4, 9, True)
            assert used_bytes(engine) == 0

    async def test_two_routers_deliver_one_version_at_once(self) -> None:
        backend, sent = simulated(adapters_load_ms=20), content()
        async with (
            serving(backend) as engine,
            router_stream(engine.address) as one,
            router_stream(engine.address, router="other") as other,
        ):
            await asyncio.gather(*(each.send(*parts(5, sent)) for each in (one, other)))
            for stream in (one, other):
                answer = await state(stream)
                assert (answer.id, answer.version) == (5, sent.version)
                assert answer.place == epb.ADAPTER_PLACE_DEVICE
            await eventually(lambda: used_bytes(engine) == 0)
            assert backend.stats().adapter_loads == 1

    async def test_load_reports_tell_slots_and_loads(self) -> None:
        async with (
            serving(simulated(adapters_host_adapters=2)) as engine,
            router_stream(engine.address) as stream,
        ):
            for number in (1, 2, 3):
                await stream.send(*parts(number, content(number)))
            await stream.until(lambda: stream.loads and stream.loads[-1].adapter_loads == 3)
            told = stream.loads[-1]
            assert (told.adapter_slots, told.adapter_loads, told.adapter_evictions) == (2, 3, 1)
            assert told.used_adapter_host_bytes == told.adapter_host_bytes > 0
            await stream.send(submit(1, config=lora(3, content(3))))
            await stream.end(1)
            await stream.until(
                lambda: stream.loads[-1].adapter_hits and not stream.loads[-1].running_sequences
            )
            told = stream.loads[-1]
            assert told.free_adapter_slots + told.evictable_adapter_slots == 2


def lora(number: int, of: Any) -> pb.GenerationConfig:
    return pb.GenerationConfig(lora=pb.LoraConfig(id=number, version=of.version))
