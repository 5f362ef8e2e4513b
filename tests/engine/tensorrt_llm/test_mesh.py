"""Real engine processes over the stand-in: the tests of other backends, a death, and both halves of an item."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from e2e import test_fan_out, test_output
from e2e.mesh import DEMO, PATIENT, Mesh, decode, eventually, running_mesh
from engine.tensorrt_llm.site import Site, half, suite_of
from engine.tensorrt_llm.stand_in.package import RELEASES
from processes import run_to_exit
from trtmesh.client import FinishReason

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

OTHERS = {
    # This backend has what they expect a refusal of.
    "test_log_probs_are_refused_by_a_backend_without_them",
    "test_bad_texts_are_refused_by_a_backend_without_bad_words",
    # Starts a mesh of its own, of other engines.
    "test_token_ids_only_need_no_tokenizer",
}
globals().update(suite_of(test_fan_out, test_output, but=OTHERS))

PROMPTS = [f"item {number}" for number in range(4)]
TOKENS = 60


# Processes over the older release: the deaths and halves below, and test_many_streams.
@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(RELEASES[0], marks=pytest.mark.soak), RELEASES[-1]],
)
async def mesh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    site = Site(tmp_path_factory.mktemp("mesh"), request.param)

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(mesh.start_tokenizer(), site.engine(mesh), site.engine(mesh))
        await mesh.start_router(*PATIENT)
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


@pytest.mark.parametrize("release", RELEASES)
async def test_an_engine_whose_library_dies_exits_and_its_items_move(
    release: str, tmp_path: Path
) -> None:
    site = Site(tmp_path, release)

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(
            mesh.start_tokenizer(), site.engine(mesh, DIE_AFTER="100"), site.engine(mesh)
        )
        await mesh.start_router(*PATIENT, "--placement-policy", "round_robin")
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh:
        expected = await mesh.client.complete(["prompt"], max_tokens=TOKENS, ignore_end_id=True)
        prompts = ["prompt"] * 2
        items = await mesh.client.complete(prompts, max_tokens=2 * TOKENS, ignore_end_id=True)
        for item in items:
            assert item.error is None
            assert item.token_ids[:TOKENS] == expected[0].token_ids

        async def one_is_over() -> bool:
            return any(each.exit_status is not None for each in mesh.engines)

        await eventually(one_is_over)
        assert [each.exit_status for each in mesh.engines if each.exit_status is not None] == [1]
        await mesh.idle()


@pytest.mark.parametrize("release", RELEASES)
async def test_prompt_and_decode_run_on_two_workers(release: str, tmp_path: Path) -> None:
    site = Site(tmp_path, release)

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(
            mesh.start_tokenizer(),
            site.engine(mesh, *half("prefill"), "--worker", "p0"),
            site.engine(mesh, *half("decode"), "--worker", "d0"),
        )
        await mesh.start_router(*PATIENT, "--handoff-enabled", "always")
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh:
        items = await mesh.client.complete(
            PROMPTS, max_tokens=TOKENS, ignore_end_id=True, request_id="halves"
        )
        for item in items:
            assert item.error is None
            assert item.reason is FinishReason.LENGTH
            assert len(item.token_ids) == TOKENS
            assert item.text == decode(item.token_ids)
        told = (await mesh.admin.explain("halves")).placements
        assert [(each.prefill_worker, each.worker) for each in told] == [("p0", "d0")] * 4

        async def both_have_reported() -> bool:
            """Loads arrive later than the tokens that they count."""
            loads = {each.worker: each.load for each in (await mesh.status()).workers}
            has_handed_over = loads["p0"].sent_handoffs.granted >= len(PROMPTS)
            return has_handed_over and loads["d0"].generated_tokens > 0

        await eventually(both_have_reported)
        await mesh.idle()


async def test_a_process_without_the_library_says_what_to_install() -> None:
    ended = await run_to_exit("engine", "--backend", "tensorrt_llm", "--model-dir", str(DEMO))
    assert ended.status == 2
    assert "trtmesh[tensorrt-llm]" in ended.stderr
