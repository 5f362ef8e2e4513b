"""Items with a common prefix: the leader computes, the others follow, and every wait is bounded."""

from __future__ import annotations

import asyncio

import pytest
from process_constants import patch
from router.scripted import (
    LENGTH,
    READY,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from trtmesh.chassis.block_hashes import chain
from trtmesh.router.placement.load_guard import LoadGuard
from trtmesh.router.requests.siblings import GroupMember, Siblings


def blocks(prefix: int, tail: int) -> list[int]:
    return chain(0, [prefix] * 48 + [tail] * 16, 16)


@pytest.fixture(autouse=True)
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, sibling_wait_seconds=60)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, siblings_together=3)


def found(member: GroupMember | None) -> GroupMember:
    assert member is not None
    return member


@pytest.mark.usefixtures("small_groups")
async def test_group_follows_its_leader_up_to_the_cap() -> None:
    siblings = Siblings()
    guard = LoadGuard(lambda: None)
    assert siblings.find(blocks(1, 0)) is None
    leader = found(siblings.lead(blocks(1, 0)))
    followers = [found(siblings.find(blocks(1, tail))) for tail in (1, 2)]
    assert siblings.find(blocks(2, 0)) is None
    waits = [asyncio.create_task(follower.wait()) for follower in followers]
    await asyncio.sleep(0)
    booking = guard.book(64, 1, 0.0)
    leader.dispatched("a:1", booking)
    second = found(siblings.find(blocks(1, 3)))
    assert second.leads
    assert second.avoid == {"a:1"}
    assert not any(wait.done() for wait in waits)
    booking.started(1.0)
    await asyncio.gather(*waits)
    assert [follower.prefer for follower in followers] == ["a:1", "a:1"]
    await second.wait()
    assert second.prefer == ""


async def test_others_hear_of_a_leader_s_first_token_too() -> None:
    siblings = Siblings()
    leader = found(siblings.lead(blocks(1, 0)))
    follower = found(siblings.find(blocks(1, 1)))
    booking = LoadGuard(lambda: None).book(64, 1, 0.0)
    heard: list[str] = []
    # As a handoff does, whose deadline ends with the first token.
    booking.when_computed.append(lambda: heard.append("handoff"))
    leader.dispatched("a:1", booking)
    booking.started(1.0)
    assert heard == ["handoff"]
    await asyncio.wait_for(follower.wait(), 1)


async def test_lost_or_unsent_leader_frees_its_followers() -> None:
    for end in ("lost", "closed"):
        siblings = Siblings()
        leader = found(siblings.lead(blocks(1, 0)))
        follower = found(siblings.find(blocks(1, 1)))
        if end == "lost":
            booking = LoadGuard(lambda: None).book(64, 1, 0.0)
            leader.dispatched("a:1", booking)
            booking.release(1.0)
        else:
            leader.close()
        await follower.wait()


async def test_wait_of_a_follower_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, sibling_wait_seconds=0.01)
    siblings = Siblings()
    siblings.lead(blocks(1, 0))
    await found(siblings.find(blocks(1, 1))).wait()


async def test_short_prompts_have_no_siblings() -> None:
    siblings = Siblings()
    assert siblings.lead([7]) is None
    assert siblings.find([7]) is None


async def test_siblings_follow_their_leader_to_its_worker() -> None:
    fields = ["stopping.max_tokens"]
    engines = [
        ScriptedEngine(worker=name, supported_fields=fields, tokens_per_block=4) for name in "ab"
    ]
    prefix = [5] * 12
    async with (
        serving_engine(engines[0]) as first,
        serving_engine(engines[1]) as second,
        serving_router([first, second], placement={"policy": "auto"}) as client,
    ):
        await until_states(client, [READY, READY], [])
        prompts = [[*prefix, tail] for tail in range(3)]
        call = asyncio.create_task(client.complete(prompts, text=False, max_tokens=9))
        await eventually(lambda: any(engine.submits for engine in engines))
        home = next(engine for engine in engines if engine.submits)
        (leader,) = home.submits
        await home.step((leader.handle, 0, [7]))
        await home.submitted(3)
        ends = [(submit.handle, LENGTH) for submit in home.submits]
        await home.step(*((submit.handle, 0, [7]) for submit in home.submits), ends=ends)
        items = await call
        assert {item.started.worker for item in items if item.started} == {home.description.worker}
        assert sum(len(engine.submits) for engine in engines) == 3
