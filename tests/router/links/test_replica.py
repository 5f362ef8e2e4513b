"""States of a router's replicas."""

from __future__ import annotations

from typing import Any

import pytest
from router.scene import scene
from router.scripted import (
    LENGTH,
    READY,
    ScriptedEngine,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.chassis.fair.turns import ParseScheduler
from trtmesh.chassis.fingerprint import ANY_TOKENIZER
from trtmesh.chassis.grpc.client import connected
from trtmesh.router.links import replica
from trtmesh.v1 import router_admin_pb2 as admin_pb


async def test_hello_names_the_tokenizer_of_the_mesh() -> None:
    async with scene() as on:
        assert [hello.tokenizer_fingerprint for hello in on.engine.hellos] == ["f1"]


async def test_worker_with_another_tokenizer_is_refused() -> None:
    engine = ScriptedEngine(tokenizer_fingerprint="f2", supported_fields=["stopping.max_tokens"])
    async with scene(engine, workers=admin_pb.WORKER_STATE_REFUSED) as on:
        (worker,) = (await on.client.status()).workers
        assert "f1" in worker.problem
        assert "f2" in worker.problem
        (item,) = await on.ask("text", max_tokens=1)
        assert item.error
        assert item.error.reason == "NO_WORKER"


async def test_worker_without_a_fingerprint_is_refused() -> None:
    """Whether the mesh encodes for its model cannot be known."""
    engine = ScriptedEngine(tokenizer_fingerprint="", supported_fields=["stopping.max_tokens"])
    async with scene(engine, workers=admin_pb.WORKER_STATE_REFUSED) as on:
        (worker,) = (await on.client.status()).workers
        assert "f1" in worker.problem
        assert "tokenizer files" in worker.problem
        (item,) = await on.ask("text", max_tokens=1)
        assert item.error
        assert item.error.reason == "NO_WORKER"


async def test_worker_for_any_tokenizer_is_ready() -> None:
    engine = ScriptedEngine(tokenizer_fingerprint=ANY_TOKENIZER)
    async with scene(engine) as on:
        (worker,) = (await on.client.status()).workers
        assert worker.state == READY


async def test_refusal_by_the_worker_is_shown_in_the_worker_s_words() -> None:
    engine = ScriptedEngine()
    engine.refusal = "router r has tokenizer f1 and worker w f2"
    async with scene(engine, workers=admin_pb.WORKER_STATE_REFUSED) as on:
        (worker,) = (await on.client.status()).workers
        assert engine.refusal in worker.problem


async def test_draining_worker_finishes_without_new_items() -> None:
    async with scene() as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        await on.engine.report(draining=True)
        await until_states(on.client, [admin_pb.WORKER_STATE_DRAINING], [READY])
        (late,) = await on.ask("b", max_tokens=1)
        assert late.error
        assert late.error.reason == "NO_WORKER"
        await on.engine.step((submit.handle, 0, [65]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "A."


async def test_all_links_share_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many bad workers and tokenizers take no more time of the router than one."""
    dialled: list[tuple[str, ParseScheduler]] = []

    def noted(*given: Any, **named: Any) -> Any:
        dialled.append((given[0], named["turns"]))
        return connected(*given, **named)

    monkeypatch.setattr(replica, "connected", noted)
    async with (
        serving_engine(ScriptedEngine(worker="a")) as first,
        serving_engine(ScriptedEngine(worker="b")) as second,
        serving_tokenizer(ScriptedTokenizer()) as tokenizer,
        serving_router([first, second], [tokenizer]) as client,
    ):
        await until_states(client, [READY, READY], [READY])
    assert {address for address, _ in dialled} == {first, second, tokenizer}
    assert len({id(turns) for _, turns in dialled}) == 1
