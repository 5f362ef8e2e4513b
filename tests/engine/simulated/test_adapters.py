"""Adapters of the simulated backend: tokens by identity, both tiers, pins, and time by rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine.adapter_contents import content, identity
from engine.simulated.runs import Run, item, running
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import AdapterNotFound, AdaptersFull, InvalidField
from trtmesh.chassis.vocabulary import Adapter, Lora, Tensor
from trtmesh.engine.backend import AdapterLoad, HeldAdapter, Submission
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

DEVICE, HOST, ABSENT = (
    epb.ADAPTER_PLACE_DEVICE,
    epb.ADAPTER_PLACE_HOST,
    epb.ADAPTER_PLACE_ABSENT,
)


def asking(number: int, of: AdapterContent, key: int = 1, **values: Any) -> Submission:
    asked = item(key, **values)
    return replace(asked, config=replace(asked.config, lora=Lora(number, version=of.version)))


def told(run: Run) -> list[HeldAdapter]:
    return [each for output in run.outputs for each in output.adapters]


async def load(run: Run, number: int, of: AdapterContent, *, pinned: bool = False) -> HeldAdapter:
    """Loads an adapter; the state that answers."""
    before = len(told(run))
    run.backend.load_adapter(AdapterLoad(identity(number, of), of, pinned))

    def answers() -> list[HeldAdapter]:
        return [each for each in told(run)[before:] if each.adapter == identity(number, of)]

    await run.until(answers)
    return answers()[-1]


async def test_tokens_depend_on_number_and_version() -> None:
    async with running(adapters_slots=4) as run:
        for number, seed in ((1, 1), (1, 2), (2, 1)):
            await load(run, number, content(seed))
        streams = [await run.generate(item(1, 40))]
        for key, (number, seed) in enumerate(((1, 1), (1, 2), (2, 1)), start=2):
            streams.append(await run.generate(asking(number, content(seed), key, max_tokens=40)))
        assert len({tuple(each) for each in streams}) == 4
        again = await run.generate(asking(1, content(1), 9, max_tokens=40))
        assert again == streams[1]


async def test_prefix_is_reused_within_an_adapter_only() -> None:
    prompt = tuple(range(50, 63))
    async with running(adapters_slots=4, tokens_per_block=4) as run:
        for seed in (1, 2):
            await load(run, 1, content(seed))
        await run.generate(item(1, prompt=prompt))
        await run.generate(asking(1, content(1), 2, prompt=prompt))
        await run.generate(asking(1, content(2), 3, prompt=prompt))
        await run.generate(asking(1, content(1), 4, prompt=prompt))
        assert [run.ends[key].cached_prompt_tokens for key in (1, 2, 3, 4)] == [0, 0, 0, 12]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (Lora(name="a", version="v"), InvalidField),
        (Lora(1), InvalidField),
        (Lora(1, version="other"), AdapterNotFound),
        (Lora(2, version=content(1).version), AdapterNotFound),
    ],
)
async def test_unknown_adapter_is_refused(asked: Lora, error: type[Exception]) -> None:
    async with running(adapters_slots=1) as run:
        await load(run, 1, content(1))
        wrong = item()
        with pytest.raises(error):
            run.backend.submit(replace(wrong, config=replace(wrong.config, lora=asked)))


async def test_rank_comes_from_either_format() -> None:
    config = Tensor(pb.DATA_TYPE_INT32, (1, 2, 3), b"".join(
        each.to_bytes(4, "little") for each in (1, 0, 4, 2, 0, 16)
    ))  # fmt: skip
    weights = Tensor(pb.DATA_TYPE_FP16, (1, 2, 1), bytes(4))
    async with running(adapters_slots=2) as run:
        assert (await load(run, 1, content(rank=12))).rank == 12
        arrays = AdapterContent.of_arrays(weights, config)
        assert (await load(run, 2, arrays)).rank == 16


@pytest.mark.parametrize("config", [b"{}", b'{"r": 0}', b"[", b'{"r": 9999}'])
async def test_content_without_rank_is_refused(config: bytes) -> None:
    async with running(adapters_slots=2) as run:
        broken = AdapterContent(pb.ADAPTER_FORMAT_PEFT, config, b"w")
        state = await load(run, 1, broken)
        assert state.error is not None
        assert state.error.reason in ("INVALID_REQUEST", "INVALID_FIELD")
        assert state.place == ABSENT
        assert run.backend.adapters() == []


async def test_slots_pass_from_the_longest_unused() -> None:
    async with running(adapters_slots=2) as run:
        places = [(await load(run, number, content(number))).place for number in (1, 2, 3)]
        assert places == [DEVICE, DEVICE, HOST]
        await run.generate(asking(1, content(1), 1))
        await run.generate(asking(3, content(3), 2))
        held = {each.adapter.id: each.place for each in run.backend.adapters()}
        assert held == {1: DEVICE, 2: HOST, 3: DEVICE}
        stats = run.backend.stats()
        assert (stats.free_adapter_slots, stats.evictable_adapter_slots) == (0, 2)
        # Only the sequence of 1 found its adapter ready.
        assert stats.adapter_hits == 1


async def test_host_memory_evicts_the_longest_unused() -> None:
    async with running(adapters_slots=2, host_adapters=2) as run:
        await load(run, 1, content(1))
        await load(run, 2, content(2))
        await run.generate(asking(1, content(1), 1))
        await load(run, 3, content(3))
        assert [each.adapter.id for each in run.backend.adapters()] == [1, 3]
        assert [each.adapter.id for each in told(run) if each.place == ABSENT] == [2]
        assert run.backend.stats().adapter_evictions == 1


async def test_adapters_in_use_and_pinned_are_never_evicted() -> None:
    async with running(adapters_slots=2, host_adapters=2, step_ms=60_000) as run:
        await load(run, 1, content(1))
        await load(run, 2, content(2), pinned=True)
        run.backend.submit(asking(1, content(1), 1, max_tokens=1000))
        refused = await load(run, 3, content(3))
        assert isinstance(refused.error, AdaptersFull)
        assert refused.error.limit_field == "adapters.host_adapters"
        assert [each.adapter.id for each in run.backend.adapters()] == [2, 1]


async def test_pins_leave_a_slot_to_sequences() -> None:
    async with running(adapters_slots=2, step_ms=60_000) as run:
        for number in (1, 2, 3):
            await load(run, number, content(number))
        run.backend.submit(asking(1, content(1), 1, max_tokens=1000))
        await load(run, 2, content(2), pinned=True)
        refused = await load(run, 3, content(3), pinned=True)
        assert isinstance(refused.error, AdaptersFull)
        # Its place holds: only the pin was refused.
        (held,) = [each for each in run.backend.adapters() if each.adapter.id == 3]
        assert replace(refused, error=None) == held
        run.backend.stop([1], pb.FINISH_REASON_CANCELLED)
        await run.end(1)
        assert (await load(run, 3, content(3), pinned=True)).pinned
        with pytest.raises(AdaptersFull):
            run.backend.submit(asking(1, content(1), 2))
        run.backend.unload_adapter(3, "", unpin=True)
        run.backend.submit(asking(1, content(1), 2))


async def test_unload_waits_for_the_sequences_of_the_version() -> None:
    async with running(adapters_slots=2, step_ms=60_000) as run:
        await load(run, 1, content(1))
        run.backend.submit(asking(1, content(1), 1, max_tokens=1000))
        run.backend.unload_adapter(1, content(1).version, unpin=False)
        run.backend.unload_adapter(7, "v", unpin=False)
        with pytest.raises(AdapterNotFound):
            run.backend.submit(asking(1, content(1), 2))
        await run.until(lambda: any(each.adapter.id == 7 for each in told(run)))
        assert [each.adapter.id for each in run.backend.adapters()] == [1]
        run.backend.stop([1], pb.FINISH_REASON_CANCELLED)
        await run.until(lambda: told(run)[-1].place == ABSENT and told(run)[-1].adapter.id == 1)
        assert run.backend.adapters() == []


async def test_load_again_keeps_a_version_that_is_about_to_leave() -> None:
    async with running(adapters_slots=2, step_ms=60_000) as run:
        await load(run, 1, content(1))
        run.backend.submit(asking(1, content(1), 1, max_tokens=1000))
        run.backend.unload_adapter(1, content(1).version, unpin=False)
        await load(run, 1, content(1))
        run.backend.stop([1], pb.FINISH_REASON_CANCELLED)
        await run.end(1)
        assert [each.adapter.id for each in run.backend.adapters()] == [1]
        assert run.backend.stats().adapter_loads == 1


async def test_more_adapters_than_slots_all_get_their_turn() -> None:
    async with running(adapters_slots=2) as run:
        for number in range(1, 9):
            await load(run, number, content(number))
        for key in range(64):
            number = 1 + key % 8
            run.backend.submit(asking(number, content(number), key, max_tokens=20))
        for key in range(64):
            assert (await run.end(key)).reason == pb.FINISH_REASON_LENGTH
        assert run.tokens[0] == run.tokens[8] != run.tokens[1]


async def test_load_without_content_of_an_unknown_version_fails() -> None:
    async with running(adapters_slots=2) as run:
        run.backend.load_adapter(AdapterLoad(Adapter(4, version="v"), None))
        await run.until(lambda: told(run))
        assert isinstance(told(run)[0].error, AdapterNotFound)
