"""Tokenizers die, freeze, restart and drain under running streams, without lost or repeated text."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence

from e2e.mesh import (
    ENDLESS,
    SIMULATED,
    Mesh,
    StreamReader,
    check_beginning,
    decode,
    eventually,
    running_mesh,
    scrape,
)
from process_constants import constants
from trtmesh.chassis.errors import NoTokenizer, TokenizerLost
from trtmesh.client import ItemResult

STREAMS = 6
TOKENS = 40

# Single bytes: a character needs several tokens, so a migrating sequence may carry half of one.
BYTES = (
    "--simulated-vocabulary-first-token-id",
    "8",
    "--simulated-vocabulary-last-token-id",
    "263",
)
ENGINE = (
    *(*SIMULATED, *BYTES),
    # Few tokens take as long as a fault.
    *("--simulated-timing-step-ms", "16"),
)

PROMPTS = [f"stream {number}" for number in range(STREAMS)]
STOP_TEXT = "never generated"

WAITING = constants(tokenizer_wait_seconds=3600)
"""Router flags: sequences wait indefinitely for a tokenizer."""


def contents(items: Sequence[ItemResult]) -> list[tuple[tuple[int, ...], str]]:
    assert [item.error for item in items] == [None] * len(items)
    return [(item.token_ids, item.text) for item in items]


async def undisturbed(mesh: Mesh) -> Sequence[ItemResult]:
    """The output of the streams without a fault."""
    found = await mesh.client.complete(PROMPTS, max_tokens=TOKENS)
    assert [item.text for item in found] == [decode(item.token_ids) for item in found]
    return found


async def opened(mesh: Mesh) -> list[StreamReader]:
    """Opens the same streams without end, one request each, at different positions."""
    readers = [
        mesh.open([prompt], max_tokens=ENDLESS, stop_texts=[STOP_TEXT] if index % 2 else [])
        for index, prompt in enumerate(PROMPTS)
    ]
    for index, reader in enumerate(readers):
        await reader.tokens_here(3 + 4 * index)
    return readers


async def check_going_on(readers: Sequence[StreamReader], expected: Sequence[ItemResult]) -> None:
    """Stops the streams and checks their output."""
    least = max(TOKENS, 10 + max(reader.tokens() for reader in readers))
    for reader, whole in zip(readers, expected, strict=True):
        check_beginning(await reader.stopped_at(least), [whole])


async def test_killed_tokenizer_moves_its_encode_jobs() -> None:
    async with running_mesh(tokenizers=2, engine_flags=ENGINE) as mesh:
        long_prompts = [f"{number} " + "word and another word " * 1000 for number in range(8)]
        expected = contents(await mesh.client.complete(long_prompts, max_tokens=4))
        # Frozen, to encode no text before the kill.
        for tokenizer in mesh.tokenizers:
            tokenizer.signal(signal.SIGSTOP)
        readers = [mesh.open([prompt], max_tokens=4) for prompt in long_prompts]

        async def both_encode() -> bool:
            stages = await mesh.stages()
            return stages.count("encode") == len(long_prompts)

        await eventually(both_encode)
        mesh.tokenizers[1].signal(signal.SIGKILL)
        mesh.tokenizers[0].signal(signal.SIGCONT)
        assert contents([(await reader.result())[0] for reader in readers]) == expected
        await mesh.idle()


async def test_killed_only_tokenizer_resumes_its_streams_after_a_restart() -> None:
    async with running_mesh(engine_flags=ENGINE, router_flags=WAITING) as mesh:
        expected = await undisturbed(mesh)
        readers = await opened(mesh)
        await restart(mesh)
        waiting = mesh.open([PROMPTS[0]], max_tokens=TOKENS)
        await check_going_on(readers, expected)
        assert contents(await waiting.result()) == contents(expected[:1])
        await mesh.idle()


async def restart(mesh: Mesh) -> None:
    """Kills the only tokenizer and starts a successor at its address."""
    (killed,) = mesh.tokenizers
    killed.signal(signal.SIGKILL)
    await killed.wait()
    await mesh.start_tokenizer(port=int(killed.address.rpartition(":")[2]))


async def test_killed_only_tokenizer_fails_streams_with_text_only() -> None:
    flags = constants(tokenizer_wait_seconds=0.5)
    async with running_mesh(engine_flags=ENGINE, router_flags=flags) as mesh:
        readers = await opened(mesh)
        ids_only = mesh.open([PROMPTS[0]], max_tokens=TOKENS, text=False)
        await ids_only.tokens_here(1)
        mesh.tokenizers[0].signal(signal.SIGKILL)
        for reader in readers:
            (item,) = await reader.result()
            assert isinstance(item.error, TokenizerLost)
            assert decode(item.token_ids).startswith(item.text.rstrip("\ufffd"))
        (late,) = await mesh.client.complete(["text"], max_tokens=4)
        assert isinstance(late.error, NoTokenizer)
        (item,) = await ids_only.result()
        assert item.error is None
        assert len(item.token_ids) == TOKENS
        (item,) = await mesh.client.complete([[5, 6]], max_tokens=4, text=False)
        assert item.error is None
        await mesh.idle()


async def test_draining_tokenizer_fails_nothing() -> None:
    """As in a rolling restart: neither running nor new requests fail."""
    async with running_mesh(tokenizers=2, engine_flags=ENGINE) as mesh:
        expected = await undisturbed(mesh)
        readers = await opened(mesh)
        mesh.tokenizers[0].signal(signal.SIGTERM)
        meanwhile = [
            contents(await mesh.client.complete([prompt], max_tokens=30)) for prompt in PROMPTS
        ]
        assert [ids for ((ids, _),) in meanwhile] == [item.token_ids[:30] for item in expected]
        await check_going_on(readers, expected)
        assert await mesh.tokenizers[0].wait() == 0
        await mesh.idle()


async def test_frozen_tokenizer_moves_its_decode_states() -> None:
    """Detected by unanswered messages, long before the link counts as silent."""
    flags = ("--deadlines-silence-seconds", "360")
    async with running_mesh(tokenizers=2, engine_flags=ENGINE, router_flags=flags) as mesh:
        expected = await undisturbed(mesh)
        readers = await opened(mesh)
        os.kill(mesh.tokenizers[0].pid, signal.SIGSTOP)
        started = time.monotonic()
        await mesh.counted("moved_decodes", 1)
        print(f"streams went on {time.monotonic() - started:.1f} s after a tokenizer froze")
        await check_going_on(readers, expected)
        await mesh.idle()


async def test_frozen_tokenizer_moves_its_encode_jobs() -> None:
    flags = ("--deadlines-silence-seconds", "360")
    async with running_mesh(tokenizers=2, engine_flags=ENGINE, router_flags=flags) as mesh:
        os.kill(mesh.tokenizers[0].pid, signal.SIGSTOP)
        asked = [mesh.client.complete([prompt], max_tokens=3) for prompt in PROMPTS]
        for (item,) in await asyncio.gather(*asked):
            assert item.error is None
        await mesh.idle()


async def test_tokenizers_restarted_in_turn_lose_no_text() -> None:
    async with running_mesh(tokenizers=2, engine_flags=ENGINE) as mesh:
        expected = await undisturbed(mesh)
        for turn in (0, 1, 0):
            readers = await opened(mesh)
            moved = await moved_decodes(mesh)
            decoding = {each.address for each in (await mesh.status()).tokenizers if each.sequences}
            # Both do, unless one was late on a busy machine.
            victim = turn if mesh.tokenizers[turn].address in decoding else 1 - turn
            killed = mesh.tokenizers[victim]
            killed.signal(signal.SIGKILL)
            await mesh.counted("moved_decodes", moved + 1)
            await killed.wait()
            port = int(killed.address.rpartition(":")[2])
            mesh.tokenizers[victim] = await mesh.start_tokenizer(port=port)
            mesh.tokenizers.pop()
            await mesh.ready(workers=1, tokenizers=2)
            await check_going_on(readers, expected)
        await mesh.idle()


async def moved_decodes(mesh: Mesh) -> float:
    return (await scrape(mesh.router)).get("trtmesh_router_moved_decodes_total", 0.0)


async def test_requests_can_be_cancelled_without_a_tokenizer() -> None:
    async with running_mesh(engine_flags=ENGINE, router_flags=WAITING) as mesh:
        readers = await opened(mesh)
        mesh.tokenizers[0].signal(signal.SIGKILL)
        encoding = mesh.open(["never encoded"], request_id="encoding", max_tokens=4)
        await eventually(lambda: mesh.has_stage("encode"))
        await asyncio.gather(*(reader.cancel() for reader in readers))
        assert await mesh.client.stop("encoding") == 1
        (item,) = await encoding.result()
        assert item.reason == "stopped"
        await mesh.idle()
