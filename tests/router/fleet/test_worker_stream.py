"""Messages of router and worker on their stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router.scene import Scene, scene
from router.scripted import (
    LENGTH,
    REFUSED,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    BackendFailed,
    InvalidRequest,
    NotUnderstood,
    QueueFull,
    UnsupportedField,
)
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.router.fleet.worker import MESSAGE_OVERHEAD_BYTES
from trtmesh.router.tokenizers import tokenizer
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb


async def test_submit_carries_ids_deadline_and_config_without_texts() -> None:
    fields = ["stopping.max_tokens", "stopping.bad_token_ids"]
    fields += ["sampling.embedding_bias_token_ids", "sampling.embedding_bias_weights"]
    async with scene(ScriptedEngine(supported_fields=fields)) as on:
        asked = on.ask(
            "ab",
            max_tokens=7,
            bad_texts=["x"],
            stop_texts=["never"],
            skip_special_tokens=False,
            embedding_bias_texts=["b"],
            embedding_bias_weights=[2.0],
            request_id="told",
            timeout_seconds=50,
        )
        (submit,) = await on.engine.submitted()
        assert list(submit.token_ids) == [97, 98]
        assert submit.request_id == "told"
        assert 40_000 < submit.timeout_ms <= 51_000
        config = submit.config
        assert config.stopping.max_tokens == 7
        assert [list(ids.ids) for ids in config.stopping.bad_token_ids] == [[120]]
        assert not config.stopping.stop_texts
        assert not config.stopping.bad_texts
        assert not config.output.ListFields()
        assert not asked.done()
        assert config.sampling.HasField("seed")
        assert [list(ids.ids) for ids in config.sampling.embedding_bias_token_ids] == [[98]]
        assert list(config.sampling.embedding_bias_weights) == [2.0]
        assert not config.sampling.embedding_bias_texts


async def test_words_that_an_older_tokenizer_does_not_spell_are_not_left_out() -> None:
    engine = ScriptedEngine(supported_fields=["stopping.bad_token_ids"])
    async with scene(engine) as on:
        on.tokenizer.spells = False
        (item,) = await on.ask("ab", bad_texts=["x"])
        assert item.error is not None
        assert item.error.reason == "SCHEMA_MISMATCH"
        assert not on.engine.submits


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stopping.bad_texts", {"bad_texts": ["x"]}),
        (
            "sampling.embedding_bias_texts",
            {"embedding_bias_texts": ["b"], "embedding_bias_weights": [1.0]},
        ),
        ("output.log_probs", {"log_probs": True}),
    ],
)
async def test_unsupported_field_is_refused_by_the_client_s_name_before_encoding(
    name: str, options: dict[str, Any]
) -> None:
    engine = ScriptedEngine(supported_fields=["sampling.embedding_bias"])
    async with scene(engine) as on:
        (item,) = await on.ask("a", **options)
        assert isinstance(item.error, UnsupportedField)
        group = name.partition(".")[0]
        assert item.error.fields == tuple(f"{group}.{option}" for option in options)
        assert not on.tokenizer.encodes


async def test_repeated_tokens_are_dropped() -> None:
    async with scene() as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        await on.engine.step((submit.handle, 0, [65, 66]))
        await on.engine.step((submit.handle, 1, [66, 68]), ends=[(submit.handle, LENGTH)])
        (item,) = await asked
        assert item.text == "ABD."
        assert item.error is None


async def test_worker_error_follows_all_tokens() -> None:
    async with scene() as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        error = to_proto(BackendFailed("it broke", worker="scripted"))
        end = epb.SequenceEnd(handle=submit.handle, reason=pb.FINISH_REASON_ERROR, error=error)
        await on.engine.step((submit.handle, 0, [65, 66]), ends=[end])
        (item,) = await asked
        assert isinstance(item.error, BackendFailed)
        assert item.text == "AB."
        assert item.usage.generated_tokens == 2


async def test_item_that_an_older_worker_does_not_understand_goes_to_another() -> None:
    older, newer = (ScriptedEngine(worker=name, supported_fields=["stopping.max_tokens"])
                    for name in ("older", "newer"))  # fmt: skip
    error = to_proto(NotUnderstood("field 17 of submit"))
    async with serving_engine(newer) as second, scene(older) as on:
        asked = on.ask([65], max_tokens=1)
        (submit,) = await older.submitted()
        await on.client.admin.add_worker(second)
        end = epb.SequenceEnd(handle=submit.handle, reason=pb.FINISH_REASON_ERROR, error=error)
        await older.step(ends=[end])
        (again,) = await newer.submitted()
        await newer.step((again.handle, 0, [66]), ends=[(again.handle, LENGTH)])
        assert (await asked)[0].text == "B."
        assert len(older.submits) == 1


async def test_item_that_no_worker_understands_ends_with_the_name_of_the_field() -> None:
    async with scene() as on:
        on.tokenizer.last_text = ""
        asked = on.ask([65], max_tokens=1)
        (submit,) = await on.engine.submitted()
        error = to_proto(NotUnderstood("worker scripted does not understand field 17 of submit"))
        end = epb.SequenceEnd(handle=submit.handle, reason=pb.FINISH_REASON_ERROR, error=error)
        await on.engine.step(ends=[end])
        (item,) = await asked
        assert isinstance(item.error, NotUnderstood)
        assert "field 17 of submit" in item.error.message


async def test_worker_and_tokenizer_two_revisions_away_are_refused_with_a_remedy() -> None:
    far = SCHEMA_REVISION + 2
    remedy = f"upgrade this router to a release of revision {far - 1} first"
    async with (
        serving_tokenizer(ScriptedTokenizer(schema_revision=far)) as address,
        serving_engine(ScriptedEngine(schema_revision=far)) as engine,
        serving_router([engine], [address]) as client,
    ):
        await until_states(client, [REFUSED], [REFUSED])
        status = await client.status()
        (worker,), (tokenizer,) = status.workers, status.tokenizers
    for peer in (worker, tokenizer):
        assert remedy in peer.problem


async def test_neighbours_of_both_sides_serve() -> None:
    engine = ScriptedEngine(
        schema_revision=SCHEMA_REVISION + 1, supported_fields=["stopping.max_tokens"]
    )
    async with scene(engine, ScriptedTokenizer(schema_revision=SCHEMA_REVISION + 1)) as on:
        asked = on.ask("a", max_tokens=1)
        (submit,) = await on.engine.submitted()
        await on.engine.step((submit.handle, 0, [66]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "B."


@pytest.mark.parametrize(("ahead", "told"), [(0, 0), (1, SCHEMA_REVISION + 1)])
async def test_older_tokenizer_alone_is_told_the_revision(
    ahead: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "SCHEMA_REVISION", SCHEMA_REVISION + ahead)
    asked = ScriptedTokenizer()
    async with scene(ScriptedEngine(supported_fields=["stopping.max_tokens"]), asked) as on:
        waiting = on.ask("a", max_tokens=1)
        (submit,) = await on.engine.submitted()
        await on.engine.step((submit.handle, 0, [66]), ends=[(submit.handle, LENGTH)])
        await waiting
    assert {command.schema_revision for command in asked.encodes} == {told}


async def test_oversized_item_fails_alone() -> None:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    async with scene(engine, max_message_bytes=100_000) as on:
        neighbour = on.ask([65], max_tokens=1)
        (submit,) = await engine.submitted()
        (item,) = await on.ask([127] * 99_990, max_tokens=1)
        assert type(item.error) is InvalidRequest
        assert item.error.limit == f"at most {100_000 - MESSAGE_OVERHEAD_BYTES} bytes"
        assert int(item.error.value) > 100_000 - MESSAGE_OVERHEAD_BYTES
        assert item.error.worker == "scripted"
        await engine.step((submit.handle, 0, [66]), ends=[(submit.handle, LENGTH)])
        assert (await neighbour)[0].text == "B."
        assert len(engine.hellos) == 1


async def test_items_beyond_the_limit_are_refused_at_once() -> None:
    async with scene(admission={"max_items": 5}) as on:
        asked = [on.ask("a", "b", max_tokens=1, request_id=f"r{index}") for index in range(8)]
        submits = await on.engine.submitted(4)
        results = {index: request for index, request in enumerate(asked) if request.done()}
        await eventually(lambda: sum(request.done() for request in asked) == 6)
        for request in asked:
            if request.done():
                with pytest.raises(QueueFull) as refused:
                    request.result()
                assert refused.value.limit == "at most 5"
        assert len(results) <= 6
        assert len(submits) == 4
        admitted = [request for request in asked if not request.done()]
        tokens = [(submit.handle, 0, [66]) for submit in submits]
        await on.engine.step(*tokens, ends=[(submit.handle, LENGTH) for submit in submits])
        for items in await asyncio.gather(*admitted):
            assert [item.text for item in items] == ["B.", "B."]
        again = on.ask("a", "b", "c", "d", "e", max_tokens=1)
        await on.engine.submitted(9)
        assert not again.done()


async def test_sequence_in_a_workers_queue_is_told_from_a_running_one() -> None:
    async with scene() as on:
        await on.engine.report(waiting_sequences=1)
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        assert await queued(on) == [True]
        await on.engine.step((submit.handle, 0, [65]))
        while await queued(on) != [False]:
            assert not asked.done()
        await on.engine.step((submit.handle, 1, [66]), ends=[(submit.handle, LENGTH)])
        await asked


async def queued(on: Scene) -> list[bool]:
    (request,) = (await on.client.admin.list_requests()).requests
    return [each.queued for each in request.items[0].sequences]
