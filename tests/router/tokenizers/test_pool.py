"""Texts and sequences on full, lost and mismatched tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations

import pytest
from process_constants import patch
from router.scene import scene
from router.scripted import (
    LENGTH,
    eventually,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.chassis.errors import (
    NoTokenizer,
    QueueFull,
    QueueTimeout,
    TokenizerLost,
)
from trtmesh.client import FinishReason
from trtmesh.router.links import replica
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.router.links.replica import LinkRules
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.tokenizers import pool as pool_module
from trtmesh.router.tokenizers.decoding import TextOptions, WholeText
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.tokenizers.tokenizer import LONG_BYTES, TRIAL_TEXT, Tokenizer
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import tokenizer_pb2 as tpb

LONG = (10.0, 60.0)
IMPATIENT = (0.1, 0.2)
"""Seconds to answer a decode and an encode."""


async def test_end_without_tokens_waits_for_the_last_text() -> None:
    async with scene() as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        on.tokenizer.answering.clear()
        await on.engine.step((submit.handle, 0, [65]))
        await eventually(lambda: any(c.HasField("decode") for c in on.tokenizer.commands))
        await on.engine.step(ends=[(submit.handle, LENGTH)])
        decodes = [c.decode for c in on.tokenizer.commands if c.HasField("decode")]
        assert len(decodes) == 1
        on.tokenizer.answering.set()
        (item,) = await asked
        assert item.text == "A."
        assert item.reason is FinishReason.LENGTH


async def test_text_breaking_every_tokenizer_fails_only_the_item() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.breaks_on_encode = True
        (item,) = await on.ask("poison", max_tokens=1)
        assert isinstance(item.error, TokenizerLost)
        assert item.error.value == "4"
        assert len(tokenizer.encodes) == 4
        tokenizer.breaks_on_encode = False
        asked = on.ask("fine", max_tokens=1)
        (submit,) = await on.engine.submitted()
        await on.engine.step((submit.handle, 0, [65]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "A."


async def test_token_breaking_every_tokenizer_fails_only_the_sequence() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        neighbour = on.ask("a", max_tokens=9)
        poisoned = on.ask("b", max_tokens=9)
        handles = {s.token_ids[0]: s.handle for s in await on.engine.submitted(2)}
        first, second = handles[ord("a")], handles[ord("b")]
        await on.engine.step((first, 0, [65]), (second, 0, [66]))
        await eventually(lambda: sum(len(d.token_ids) for d in tokenizer.decodes) == 2)
        tokenizer.breaks_on_token = 67
        await on.engine.step((second, 1, [67]))
        (item,) = await poisoned
        assert isinstance(item.error, TokenizerLost)
        assert item.error.value == "4"
        assert item.text == "B"
        await eventually(lambda: on.engine.stops)
        ends = [(second, pb.FINISH_REASON_CANCELLED), (first, LENGTH)]
        await on.engine.step((first, 1, [68]), ends=ends)
        assert (await neighbour)[0].text == "AD."


async def test_tokenizer_with_an_incomplete_answer_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for constant in ("FIRST", "LONGEST"):
        monkeypatch.setattr(replica, f"{constant}_REST_SECONDS", 0.05)
    monkeypatch.setattr(replica, "REFUSED_RECONNECT_SECONDS", 0.05)
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.forgets_a_text = True
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()
        await on.engine.step((submit.handle, 0, [65, 66]))
        await eventually(lambda: tokenizer.streams > 1)
        tokenizer.forgets_a_text = False
        await on.engine.step((submit.handle, 2, [67]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "ABC."

        tokenizer.forgets_a_text = True
        asked = on.ask("b", max_tokens=9)
        submit = (await on.engine.submitted(2))[1]
        await on.engine.step((submit.handle, 0, [65]))
        (item,) = await asked
        assert isinstance(item.error, TokenizerLost)
        assert item.error.value == "4"


async def test_losses_with_progress_between_them_are_not_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch(monkeypatch, max_lost_tokenizers=2)
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        asked = on.ask("a", max_tokens=9)
        (submit,) = await on.engine.submitted()

        async def lose_one_with(token_id: int) -> None:
            tokenizer.breaks_on_token = token_id
            await on.engine.step((submit.handle, token_id - 65, [token_id]))
            await eventually(lambda: tokenizer.broken == token_id - 64)
            tokenizer.breaks_on_token = None
            # Repeated and decoded on the next stream.
            await eventually(lambda: times_asked(tokenizer, token_id) == 2)

        for token_id in range(65, 69):
            await lose_one_with(token_id)
        await on.engine.step(ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "ABCD."


def times_asked(tokenizer: ScriptedTokenizer, token_id: int) -> int:
    return sum(token_id in decode.token_ids for decode in tokenizer.decodes)


async def test_full_tokenizer_queues_jobs_and_full_queue_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "MAX_PER_TOKENIZER", 1)
    monkeypatch.setattr(pool_module, "MAX_QUEUED", 3)
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.answering.clear()
        asked = on.ask("a", "b", "c", "d", max_tokens=1, request_id="first")
        await eventually(lambda: tokenizer.encodes)
        (late,) = await on.ask("e", max_tokens=1)
        assert isinstance(late.error, QueueFull)
        assert late.error.retry_after_ms
        assert late.error.limit == "at most 3"

        assert await on.client.stop("first", [3])
        in_its_place = on.ask("f", max_tokens=1)
        tokenizer.answering.set()
        submits = await on.engine.submitted(4)
        assert "".join(encode.text for encode in tokenizer.encodes) == "abcf"
        await on.engine.step(
            *((submit.handle, 0, [65]) for submit in submits),
            ends=[(submit.handle, LENGTH) for submit in submits],
        )
        items = [*await asked, *await in_its_place]
        assert [item.text for item in items] == ["A.", "A.", "A.", "", "A."]
        assert items[3].reason is FinishReason.STOPPED


async def test_queued_job_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_PER_TOKENIZER", 1)
    monkeypatch.setattr(pool_module, "QUEUE_SECONDS", 0.05)
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.answering.clear()
        first = on.ask("a", max_tokens=1)
        await eventually(lambda: tokenizer.encodes)
        (item,) = await on.ask("b", max_tokens=1)
        assert isinstance(item.error, QueueTimeout)
        assert item.error.limit == "0.05"
        assert not first.done()


async def test_jobs_of_a_lost_tokenizer_are_encoded_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "MAX_PER_TOKENIZER", 1)
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.answering.clear()
        asked = on.ask("a", "b", "c", max_tokens=1)
        await eventually(lambda: tokenizer.encodes)
        await tokenizer.hang_up()
        tokenizer.answering.set()
        submits = await on.engine.submitted(3)
        assert [encode.text for encode in tokenizer.encodes] == ["a", "b", "c", "a"]
        await on.engine.step(
            *((submit.handle, 0, [65]) for submit in submits),
            ends=[(submit.handle, LENGTH) for submit in submits],
        )
        assert [item.text for item in await asked] == ["A.", "A.", "A."]


async def test_stopped_item_withdraws_its_job() -> None:
    tokenizer = ScriptedTokenizer()
    async with scene(tokenizer=tokenizer) as on:
        tokenizer.answering.clear()
        asked = on.ask("never", request_id="gone", max_tokens=1)
        await eventually(lambda: tokenizer.encodes)
        await on.client.stop("gone")
        assert (await asked)[0].reason is FinishReason.STOPPED
        tokenizer.answering.set()
        await eventually(lambda: tokenizer.cancelled == [tokenizer.encodes[0].handle])


async def test_a_sequence_opens_with_its_first_tokens_and_closes_soon_after_its_end() -> None:
    tokenizer = ScriptedTokenizer()
    async with pool_of(tokenizer) as pool:
        whole = WholeText("m", TextOptions(), [])
        pool.attach(whole)
        whole.close()
        assert await pool.decode("m", [65], TextOptions()) == "A."
        kinds = [command.WhichOneof("command") for command in tokenizer.commands]
        assert kinds == ["open_decode", "decode"]
        await eventually(lambda: tokenizer.commands[-1].HasField("close_decode"))
        (closed,) = tokenizer.commands[-1].close_decode.handles
        assert closed == tokenizer.commands[0].open_decode.handle


def link_to(address: str, pool: TokenizerPool) -> Tokenizer:
    return Tokenizer(address, LinkRules(Deadlines(), 2**20), pool)


@asynccontextmanager
async def pool_of(
    *tokenizers: ScriptedTokenizer,
    recovery_seconds: float = 0.0,
    patience: tuple[float, float] = LONG,
    on_agreed: Callable[[], None] = lambda: None,
) -> AsyncIterator[TokenizerPool]:
    """A pool connected to tokenizers."""
    async with AsyncExitStack() as stack:
        patching = stack.enter_context(pytest.MonkeyPatch.context())
        patch(patching, max_lost_tokenizers=2, tokenizer_wait_seconds=recovery_seconds)
        patch(patching, decode_seconds=patience[0], encode_seconds=patience[1])
        pool = TokenizerPool(RouterMetrics(), on_agreed)
        links = []
        for tokenizer in tokenizers:
            address = await stack.enter_async_context(serving_tokenizer(tokenizer))
            link = link_to(address, pool)
            pool.tokenizers[address] = link
            links.append(asyncio.create_task(link.run()))
        await eventually(lambda: all(link.ready for link in pool.tokenizers.values()))
        try:
            yield pool
        finally:
            for task in links:
                task.cancel()
            await asyncio.gather(*links, return_exceptions=True)


@asynccontextmanager
async def joined(pool: TokenizerPool, tokenizer: ScriptedTokenizer) -> AsyncIterator[None]:
    """A pool with another tokenizer, which is ready."""
    async with serving_tokenizer(tokenizer) as address:
        link = pool.tokenizers[address] = link_to(address, pool)
        running = asyncio.create_task(link.run())
        try:
            await eventually(lambda: link.ready)
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def load(pool: TokenizerPool) -> int:
    return sum(tokenizer.load for tokenizer in pool.tokenizers.values())


@pytest.mark.parametrize("kind", ["encode", "decode"])
async def test_tokenizer_deaf_to_a_kind_of_command_is_left_until_it_proves_itself(
    kind: str,
) -> None:
    """Whatever else it answers: with losses alone it would get work again and again."""
    deaf, other = ScriptedTokenizer(), ScriptedTokenizer()
    async with pool_of(deaf, other, patience=IMPATIENT) as pool:
        left, _ = pool.tokenizers.values()
        deaf.deaf_to = {kind}
        for _ in range(3):
            encodes = [pool.encode("m", tpb.EncodeCommand(text=f"text {n}")) for n in range(4)]
            decodes = [pool.decode("m", [65, 66], TextOptions()) for _ in range(4)]
            encoded = await asyncio.gather(*encodes)
            assert [len(each.token_ids) for each in encoded] == [6] * 4
            assert await asyncio.gather(*decodes) == ["AB."] * 4
        assert "unanswered for" in pool.problem(left)
        counted = {"encode": "texts", "decode": "tokens"}[kind]
        assert pool._metrics.unanswered[counted] >= 1
        # It comes back, and is tried with a text of the router's own.
        await eventually(lambda: deaf.streams >= 3)
        assert "unanswered for" in pool.problem(left)
        assert deaf.encodes[-1].text == TRIAL_TEXT
        deaf.deaf_to = set()
        await eventually(lambda: not pool.problem(left))
        assert await pool.decode("m", [65], TextOptions()) == "A."


async def test_text_that_one_tokenizer_never_answers_is_encoded_by_another() -> None:
    """While it answers all others."""
    deaf, other = ScriptedTokenizer(), ScriptedTokenizer()
    deaf.deaf_to = other.deaf_to = {"poison"}
    async with pool_of(deaf, other, patience=IMPATIENT) as pool:
        poisoned = asyncio.create_task(pool.encode("m", tpb.EncodeCommand(text="poison")))
        await eventually(lambda: len(deaf.encodes + other.encodes) == 1)
        (other if deaf.encodes else deaf).deaf_to = set()
        while not poisoned.done():
            # Several, so that both tokenizers get some.
            fine = [pool.encode("m", tpb.EncodeCommand(text="fine")) for _ in range(3)]
            await asyncio.gather(*fine)
            await asyncio.sleep(0.01)
        assert len((await poisoned).token_ids) == len("poison")
        assert not any(map(pool.problem, pool.tokenizers.values()))


async def test_long_text_that_takes_long_is_no_fault_of_its_tokenizer() -> None:
    text = "x" * LONG_BYTES
    slow, other = ScriptedTokenizer(), ScriptedTokenizer()
    slow.deaf_to = other.deaf_to = {text}
    async with pool_of(slow, other, patience=IMPATIENT) as pool:
        encoding = asyncio.create_task(pool.encode("m", tpb.EncodeCommand(text=text)))
        await eventually(lambda: len(slow.encodes + other.encodes) == 1)
        (other if slow.encodes else slow).deaf_to = set()
        assert len((await encoding).token_ids) == len(text)
        assert not any(map(pool.problem, pool.tokenizers.values()))


async def test_text_with_too_many_ids_and_words_is_no_fault_of_its_tokenizer() -> None:
    """Of such a text only the number of ids is told."""
    command = tpb.EncodeCommand(text="x" * 9, words=["w"], spelled_words=["v"], max_token_ids=8)
    async with pool_of(ScriptedTokenizer()) as pool:
        assert (await pool.encode("m", command)).omitted_token_ids == 9
        assert not any(map(pool.problem, pool.tokenizers.values()))


@pytest.mark.parametrize(("most", "omits"), [(0, 9), (8, 8), (8, 1)])
async def test_tokenizer_that_leaves_out_wanted_ids_is_left(most: int, omits: int) -> None:
    """The text would be encoded again and again."""
    liar, other = ScriptedTokenizer(), ScriptedTokenizer()
    async with pool_of(liar, other) as pool:
        left, _ = pool.tokenizers.values()
        liar.omits = omits
        asked = [
            pool.encode("m", tpb.EncodeCommand(text="x" * 8, max_token_ids=most)) for _ in range(4)
        ]
        assert [len(each.token_ids) for each in await asyncio.gather(*asked)] == [8] * 4
        assert "broke the contract" in pool.problem(left)


async def test_text_that_the_only_tokenizer_never_answers_fails() -> None:
    tokenizer = ScriptedTokenizer()
    tokenizer.deaf_to = {"encode"}
    async with pool_of(tokenizer, patience=IMPATIENT) as pool:
        with pytest.raises(TokenizerLost, match="2 tokenizers were lost, or gave no answer"):
            await pool.encode("m", tpb.EncodeCommand(text="text"))
        await eventually(lambda: len(tokenizer.encodes) == len(tokenizer.cancelled) == 2)
        assert not load(pool)


async def test_decode_returns_the_text_of_ids() -> None:
    tokenizer = ScriptedTokenizer()
    async with pool_of(tokenizer) as pool:
        assert await pool.decode("m", [65, 66], TextOptions(skip_special_tokens=False)) == "AB."
        assert await pool.decode("m", [], TextOptions()) == ""
        (opened,) = [c.open_decode for c in tokenizer.commands if c.HasField("open_decode")]
        assert not opened.skip_special_tokens
        assert load(pool) == 0


async def test_decode_continues_on_another_tokenizer() -> None:
    first, second = ScriptedTokenizer(), ScriptedTokenizer()
    async with pool_of(first, second, recovery_seconds=60) as pool:
        for tokenizer in (first, second):
            tokenizer.answering.clear()
        text = asyncio.create_task(pool.decode("m", [65, 66], TextOptions()))
        await eventually(lambda: first.decodes or second.decodes)
        lost = first if first.decodes else second
        await lost.hang_up()
        for tokenizer in (first, second):
            tokenizer.answering.set()
        assert await text == "AB."


async def test_decode_without_a_tokenizer_fails_after_the_recovery_time() -> None:
    async with pool_of() as pool:
        with pytest.raises(TokenizerLost):
            await pool.decode("m", [65], TextOptions())


async def test_cancelled_decode_leaves_its_tokenizer() -> None:
    tokenizer = ScriptedTokenizer()
    async with pool_of(tokenizer) as pool:
        tokenizer.answering.clear()
        text = asyncio.create_task(pool.decode("m", [65], TextOptions()))
        await eventually(lambda: tokenizer.decodes)
        text.cancel()
        await asyncio.gather(text, return_exceptions=True)
        assert load(pool) == 0
        tokenizer.answering.set()
        assert await pool.decode("m", [66], TextOptions()) == "B."


async def test_tokenizer_with_another_fingerprint_gets_no_work() -> None:
    one, other = ScriptedTokenizer(), ScriptedTokenizer(fingerprint="f2")
    async with pool_of(one, other) as pool:
        texts = [await pool.decode("m", [65], TextOptions()) for _ in range(4)]
        assert texts == ["A."] * 4
        assert sorted(bool(pool.problem(t)) for t in pool.tokenizers.values()) == [False, True]
        assert sorted(len(t.decodes) for t in (one, other)) == [0, 4]


@pytest.mark.parametrize("order", [*permutations(["", "t1", "t2"])], ids=str)
async def test_tokenizer_with_other_templates_gets_no_work(order: tuple[str, ...]) -> None:
    """The first that tells of its templates decides; one of a release that does not tell is not asked to."""
    async with AsyncExitStack() as stack:
        one, *others = (ScriptedTokenizer(door_fingerprint=each) for each in order)
        pool = await stack.enter_async_context(pool_of(one))
        for other in others:
            await stack.enter_async_context(joined(pool, other))
        (refused,) = filter(None, map(pool.problem, pool.tokenizers.values()))
        assert "chat templates" in refused
        kept = [each for each in pool.tokenizers.values() if not pool.problem(each)]
        told = {each.description.door_fingerprint for each in kept}
        assert told == {"", next(filter(None, order))}


async def test_tokenizer_without_a_fingerprint_gets_no_work() -> None:
    unknown, known = ScriptedTokenizer(fingerprint=""), ScriptedTokenizer()
    async with pool_of(unknown, known) as pool:
        await eventually(lambda: pool.fingerprint_of("m") == "f1")
        texts = [await pool.decode("m", [65], TextOptions()) for _ in range(4)]
        assert texts == ["A."] * 4
        assert not unknown.decodes
        problems = {bool(pool.problem(t)): pool.problem(t) for t in pool.tokenizers.values()}
        assert "no fingerprint" in problems[True]


async def test_second_address_of_a_process_is_no_second_tokenizer() -> None:
    one, twin = ScriptedTokenizer(instance="a process"), ScriptedTokenizer(instance="a process")
    async with serving_tokenizer(twin) as second, pool_of(one) as pool:
        (first,) = pool.tokenizers.values()
        link = link_to(second, pool)
        pool.tokenizers[second] = link
        task = asyncio.create_task(link.run())
        try:
            await eventually(lambda: first.address in pool.problem(link))
            assert "it is the process at" in pool.problem(link)
            assert not pool.problem(first)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_pool_of_a_tokenizer_without_a_fingerprint_is_not_ready() -> None:
    async with pool_of(ScriptedTokenizer(fingerprint="")) as pool:
        assert not pool.ready
        assert pool.fingerprint_of("m") == ""
        with pytest.raises(NoTokenizer):
            pool.describe("m")


async def test_only_the_tokenizer_that_others_must_agree_with_is_announced() -> None:
    announced: list[None] = []
    tokenizers = (ScriptedTokenizer(), ScriptedTokenizer())
    async with pool_of(*tokenizers, on_agreed=lambda: announced.append(None)) as pool:
        assert pool.fingerprint_of("m") == "f1"
        assert len(announced) == 1


async def test_single_tokenizer_model_serves_every_model() -> None:
    async with pool_of(ScriptedTokenizer()) as pool:
        assert pool.fingerprint_of("another") == "f1"
        assert await pool.decode("another", [65], TextOptions()) == "A."
