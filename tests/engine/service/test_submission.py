"""No field of GenerationConfig is accepted and ignored: each is observed at the backend or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine.config_fields import LEAVES, SEED, config_with
from engine_streams import RouterStream, router_stream, serving, submit
from recording_backend import INFO, RecordingBackend
from trtmesh.engine.backends.simulated.backend import SUPPORTED_FIELDS
from trtmesh.engine.backends.torch.fields import SUPPORTED_FIELDS as TORCH_FIELDS
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb


async def send(stream: RouterStream, handle: int, config: pb.GenerationConfig) -> None:
    await stream.send(submit(handle, None, config=config))


@pytest.mark.parametrize("path", LEAVES)
async def test_a_supported_field_reaches_the_backend(path: str) -> None:
    config, fields = config_with(path)
    backend = RecordingBackend(replace(INFO, supported_fields=frozenset(fields)))
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        await send(stream, 1, config)
        await stream.until(lambda: backend.items or stream.received)
        assert not stream.received, stream.received
        seen = backend.items[0].config
        assert fields <= seen.fields_set
        value: Any = seen
        for name in path.split("."):
            value = getattr(value, name)
        assert value not in (None, (), {})


@pytest.mark.parametrize("path", [path for path in LEAVES if path != SEED])
async def test_an_unsupported_field_is_refused_by_name(path: str) -> None:
    config, fields = config_with(path)
    backend = RecordingBackend(replace(INFO, supported_fields=frozenset(fields - {path})))
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        await send(stream, 1, config)
        for received in (await stream.ends(range(1, 1 + _sequences(config)))).values():
            assert received.end is not None
            assert received.end.reason == pb.FINISH_REASON_ERROR
            assert received.end.error.code == 12
            assert received.end.error.reason == "UNSUPPORTED_FIELD"
            assert path in received.end.error.message
        assert backend.items == []


async def test_items_know_the_present_role_of_the_worker() -> None:
    roles = (epb.WORKER_ROLE_MIXED, epb.WORKER_ROLE_PREFILL, epb.WORKER_ROLE_DECODE)
    capabilities = replace(INFO.capabilities, roles=roles)
    backend = RecordingBackend(replace(INFO, capabilities=capabilities))
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        for handle, role in enumerate(roles, start=1):
            set_role = epb.EngineCommand(set_role=epb.SetRoleCommand(role=role))
            await stream.send(set_role)
            await stream.send(submit(handle, None))
        await stream.until(lambda: len(backend.items) == 3)
    assert [item.is_prefill for item in backend.items] == [False, True, False]


@pytest.mark.parametrize("field", ["sender_lease_id", "receiver_lease_id"])
async def test_a_lease_is_refused_by_name(field: str) -> None:
    command = submit(1, None)
    setattr(command.submit, field, "lease")
    backend = RecordingBackend(INFO)
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        await stream.send(command)
        (received,) = (await stream.ends([1])).values()
        assert received.end is not None
        assert received.end.error.reason == "UNSUPPORTED_FIELD"
        assert list(received.end.error.fields) == [f"submit.{field}"]
        assert backend.items == []


def _sequences(config: pb.GenerationConfig) -> int:
    return max(1, config.sampling.num_return_sequences, config.beam_search.beam_width)


@pytest.mark.parametrize(("draw_index", "drawn"), [(None, 5), (0, 0)])
async def test_draw_index_replaces_the_batch_index_of_draws(
    draw_index: int | None, drawn: int
) -> None:
    backend = RecordingBackend(INFO)
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        await stream.send(submit(1, batch_index=5, draw_index=draw_index))
        await stream.until(lambda: backend.items)
        assert backend.items[0].batch_index == drawn


@pytest.mark.parametrize("claimed", [SUPPORTED_FIELDS, TORCH_FIELDS])
def test_a_backend_claims_only_fields_that_exist(claimed: frozenset[str]) -> None:
    assert set(LEAVES) >= claimed
