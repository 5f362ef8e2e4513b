"""context_only and generation_only: the client brings the two halves of a prompt together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e.mesh import DEMO, PATIENT, SIMULATED, Mesh, eventually, running_mesh, scrape
from process_constants import constants
from trtmesh.chassis.errors import InvalidField
from trtmesh.client import (
    AdminClient,
    Client,
    FinishReason,
    GenerationPhase,
    HandoffConfig,
    ItemResult,
)
from trtmesh.router.values.handoff_state import END
from trtmesh.v1.kv_transfer_pb2 import HandoffDescriptor

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 100 + 70))
OPTIONS: Mapping[str, Any] = {"max_tokens": 12, "seed": 5, "temperature": 0.8, "top_k": 40}
CONTEXT_ONLY = HandoffConfig(phase=GenerationPhase.GENERATION_PHASE_CONTEXT_ONLY)


def read(state: bytes) -> HandoffDescriptor:
    return HandoffDescriptor.FromString(state.removesuffix(END))


def generation_only(state: bytes) -> HandoffConfig:
    return HandoffConfig(phase=GenerationPhase.GENERATION_PHASE_GENERATION_ONLY, state=state)


BACKENDS = {
    "simulated": SIMULATED,
    "torch": ("--backend", "torch", "--model-dir", str(DEMO), "--torch-threads", "1"),
}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["simulated", pytest.param("torch", marks=pytest.mark.soak)],
)
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    flags = BACKENDS[request.param]

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(
            mesh.start_tokenizer(),
            mesh.start_engine(*flags, "--worker", "prefill-0", "--role", "prefill"),
            mesh.start_engine(*flags, "--worker", "decode-0", "--role", "decode"),
        )
        await mesh.start_router(*PATIENT)
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def first_half(client: Client, prompt: Any = PROMPT, **options: Any) -> ItemResult:
    (item,) = await client.complete([prompt], handoff=CONTEXT_ONLY, **{**OPTIONS, **options})
    assert item.error is None
    return item


def state_of(item: ItemResult, sequence: int = 0) -> bytes:
    finished = item.sequences[sequence].finished
    assert finished is not None
    assert finished.handoff_state is not None
    return finished.handoff_state


async def second_half(
    client: Client, state: bytes, prompt: Any = PROMPT, **options: Any
) -> ItemResult:
    given = {**OPTIONS, **options}
    (item,) = await client.complete([prompt], handoff=generation_only(state), **given)
    return item


async def whole(mesh: Mesh, prompt: Any = PROMPT, **options: Any) -> ItemResult:
    (item,) = await mesh.client.complete([prompt], **{**OPTIONS, **options})
    return item


async def counts(mesh: Mesh) -> dict[str, Any]:
    """The leases that workers offered, then those they reserved, by worker."""
    workers = (await mesh.status()).workers
    return {w.worker: (w.load.sent_handoffs, w.load.received_handoffs) for w in workers}


async def consumed(mesh: Mesh) -> float:
    """Handoffs whose KV was used."""
    samples = [await scrape(e, side="received", outcome="consumed") for e in mesh.engines]
    return sum(each.get("trtmesh_engine_handoffs_total", 0.0) for each in samples)


async def granted(mesh: Mesh, worker: str) -> None:
    """Waits until the worker reports that it offered a lease."""

    async def reported() -> bool:
        return bool((await counts(mesh))[worker][0].granted)

    await eventually(reported)


async def no_leases(mesh: Mesh) -> None:
    """Waits until every lease of every worker has an outcome: reports lag behind by their interval."""

    async def all_ended() -> bool:
        return all(
            each.granted == each.consumed + each.released + each.expired
            for pair in (await counts(mesh)).values()
            for each in pair
        )

    await eventually(all_ended)
    await mesh.idle()


@pytest.mark.parametrize("mesh", BACKENDS, indirect=True, scope="module")
async def test_two_halves_equal_the_whole(mesh: Mesh) -> None:
    expected, before = await whole(mesh), await consumed(mesh)
    first = await first_half(mesh.client)
    assert (first.reason, first.token_ids) == (FinishReason.HANDOFF, expected.token_ids[:1])
    assert first.started is not None
    assert first.started.worker == "prefill-0"
    second = await second_half(mesh.client, state_of(first))
    assert second.error is None
    assert second.token_ids == expected.token_ids
    assert (second.text, second.reason) == (expected.text, expected.reason)
    assert second.usage.generated_tokens == len(expected.token_ids)
    await no_leases(mesh)
    assert await consumed(mesh) == before + 1


async def test_documented_halves_are_the_whole(mesh: Mesh) -> None:
    page = (Path(__file__).parents[2] / "docs" / "handoff.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    prompt = "def fibonacci(n):\n    return " * 4
    (expected,) = await mesh.client.complete([prompt], seed=7, max_tokens=64)
    assert await names["in_halves"](mesh.client, prompt) == expected.text
    await no_leases(mesh)


async def test_limit_of_the_first_half_does_not_keep_its_kv(mesh: Mesh) -> None:
    first = await first_half(mesh.client, max_tokens=1)
    assert first.reason is FinishReason.HANDOFF
    assert read(state_of(first)).lease_id
    second = await second_half(mesh.client, state_of(first))
    assert second.token_ids == (await whole(mesh)).token_ids
    await no_leases(mesh)


async def test_text_prompts_have_halves(mesh: Mesh) -> None:
    prompt = "def fibonacci(n):\n    return " * 4
    first = await first_half(mesh.client, prompt)
    second = await second_half(mesh.client, state_of(first), prompt)
    assert second.text == (await whole(mesh, prompt)).text
    assert second.text.startswith(first.text)
    await no_leases(mesh)


async def test_state_is_good_on_another_router(mesh: Mesh) -> None:
    peers = (mesh.engines, mesh.tokenizers)
    engines, tokenizers = (",".join(p.address for p in each) for each in peers)
    flags = ("--engines", engines, "--tokenizers", tokenizers, *PATIENT)
    other = await mesh.start("router", "--port", "0", *flags)
    first, before = await first_half(mesh.client), await consumed(mesh)
    async with Client(other.address) as client, AdminClient(other.admin_address) as admin:

        async def ready() -> bool:
            return len([w for w in (await admin.list_workers()).workers if w.state == 2]) == 2

        await eventually(ready)
        second = await second_half(client, state_of(first))
    assert second.token_ids == (await whole(mesh)).token_ids
    await no_leases(mesh)
    assert await consumed(mesh) == before + 1


async def test_second_use_of_a_state_computes_the_prompt_again(mesh: Mesh) -> None:
    first, before = await first_half(mesh.client), await consumed(mesh)
    expected = (await whole(mesh)).token_ids
    state = state_of(first)
    together = await asyncio.gather(*(second_half(mesh.client, state) for _ in range(3)))
    for item in (*together, await second_half(mesh.client, state)):
        assert item.error is None
        assert item.token_ids == expected
    await no_leases(mesh)
    assert await consumed(mesh) == before + 1


async def test_several_sequences_share_the_first_half(mesh: Mesh) -> None:
    expected, before = await whole(mesh, num_return_sequences=3), await consumed(mesh)
    first = await first_half(mesh.client, num_return_sequences=3)
    assert [sequence.reason for sequence in first.sequences] == [FinishReason.HANDOFF] * 3
    assert first.token_ids == ()
    second = await second_half(mesh.client, state_of(first, 2), num_return_sequences=3)
    tokens = [sequence.token_ids for sequence in second.sequences]
    assert tokens == [sequence.token_ids for sequence in expected.sequences]
    await no_leases(mesh)
    assert await consumed(mesh) == before + 1


async def test_kv_of_no_use_is_released(mesh: Mesh) -> None:
    """Nothing is left to generate after the first token."""
    before = await consumed(mesh)
    state = state_of(await first_half(mesh.client))
    second = await second_half(mesh.client, state, max_tokens=1)
    assert (second.reason, second.token_ids) == (
        FinishReason.LENGTH,
        (await whole(mesh)).token_ids[:1],
    )
    await no_leases(mesh)
    assert await consumed(mesh) <= before + 1


async def test_unused_state_expires(mesh: Mesh) -> None:
    """Without other means to free the KV."""
    peers = (mesh.engines, mesh.tokenizers)
    engines, tokenizers = (",".join(p.address for p in each) for each in peers)
    flags = ("--engines", engines, "--tokenizers", tokenizers, *PATIENT)
    brief = await mesh.start("router", "--port", "0", *flags, *constants(client_lease_seconds=0.5))
    expired = sum(pair[0].expired for pair in (await counts(mesh)).values())
    async with Client(brief.address) as client, AdminClient(brief.admin_address) as admin:

        async def ready() -> bool:
            return len([w for w in (await admin.list_workers()).workers if w.state == 2]) == 2

        await eventually(ready)
        state = state_of(await first_half(client))
    # The lease outlives the stream of its router.
    assert await brief.stop() == 0

    async def one_more_expired() -> bool:
        now = sum(pair[0].expired for pair in (await counts(mesh)).values())
        assert now <= expired + 1
        return bool(now == expired + 1)

    await eventually(one_more_expired)
    await no_leases(mesh)
    again = await second_half(mesh.client, state)
    assert again.token_ids == (await whole(mesh)).token_ids
    await no_leases(mesh)


async def test_state_of_an_unknown_worker_computes_the_prompt_again(mesh: Mesh) -> None:
    state = read(state_of(await first_half(mesh.client)))
    state.worker = "10.6.6.6:9999"
    second = await second_half(mesh.client, state.SerializeToString() + END)
    assert second.token_ids == (await whole(mesh)).token_ids


def with_address(state: HandoffDescriptor) -> None:
    state.address = "10.6.6.6:9999"


def with_token(state: HandoffDescriptor) -> None:
    state.first_token_id = 2**31


def cut(state: HandoffDescriptor) -> None:
    state.ClearField("backend_state")


@pytest.mark.parametrize("change", [with_address, with_token, cut])
async def test_changed_state_is_refused(mesh: Mesh, change: Any) -> None:
    state = read(state_of(await first_half(mesh.client)))
    change(state)
    try:
        second = await second_half(mesh.client, state.SerializeToString() + END)
        error = second.error
    except InvalidField as refused:
        error = refused
    assert isinstance(error, InvalidField)
    assert error.field == "handoff.state"


async def test_state_of_another_prompt_is_refused(mesh: Mesh) -> None:
    state = state_of(await first_half(mesh.client))
    second = await second_half(mesh.client, state, [*PROMPT[:-1], 7])
    assert isinstance(second.error, InvalidField)
    assert second.error.field == "handoff.state"


@pytest.mark.parametrize("fields", [("block_ids", "computed_tokens"), ("compatibility_hash",)])
async def test_lies_about_the_kv_cost_time_only(mesh: Mesh, fields: Sequence[str]) -> None:
    state: Any = read(state_of(await first_half(mesh.client)))
    for field in fields:
        state.ClearField(field)
    second = await second_half(mesh.client, state.SerializeToString() + END)
    assert second.token_ids == (await whole(mesh)).token_ids
