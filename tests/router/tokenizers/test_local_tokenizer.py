"""Calls of a tokenizer inside the router: a burst of them holds up nothing, and cancelled texts break nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from e2e.mesh import DEMO
from router.scripted import eventually
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.health import Health
from trtmesh.chassis.service import Runtime
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.router.links.replica import LinkRules
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.tokenizers import pool as pool_module
from trtmesh.router.tokenizers.decoding import DecodedSequence, TextOptions
from trtmesh.router.tokenizers.local_tokenizer import LocalTexts, LocalTokenizer
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.tokenizer.service import TokenizerService
from trtmesh.tokenizer.settings import TokenizerSettings
from trtmesh.v1 import tokenizer_pb2 as tpb

MODEL = "demo"
LONG = "word " * 8000


class Sequence(DecodedSequence):
    """A sequence whose tokens so far have their text."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(MODEL, TextOptions())
        self.token_ids, self.decoded = token_ids, len(token_ids)
        self.text = ""

    @property
    def ended(self) -> bool:
        return False

    def add(self, token_id: int) -> None:
        assert self.decoder
        self.token_ids.append(token_id)
        self.decoder.decode(self, [token_id])

    def on_text(self, count: int, text: str) -> None:
        self.decoded += count
        self.text += text

    def on_stop_text(self, count: int, text: str, stop_index: int) -> None:
        raise AssertionError("the sequence has no stop text")

    def on_text_complete(self) -> None:
        raise AssertionError("the sequence has not ended")

    def on_failure(self, error: TrtmeshError) -> None:
        raise error


@pytest_asyncio.fixture
async def local() -> AsyncIterator[LocalTokenizer]:
    """The only tokenizer of a pool."""
    settings, runtime = TokenizerSettings(model_dir=DEMO), Runtime()
    service = TokenizerService(settings, runtime)
    texts = LocalTexts(service, settings, runtime)
    pool = TokenizerPool(RouterMetrics(), lambda: None)
    local = LocalTokenizer(texts, LinkRules(Deadlines(silence_seconds=2.0), 2**26), pool)
    pool.tokenizers[local.address] = local
    running = asyncio.create_task(local.run())
    try:
        await texts.start(Health(service.service_names))
        await eventually(lambda: local.ready)
        yield local
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await texts.stop()


def pool_of(local: LocalTokenizer) -> TokenizerPool:
    assert isinstance(local._pool, TokenizerPool)
    return local._pool


def encoding(local: LocalTokenizer, *texts: str) -> list[asyncio.Task[tpb.Encoded]]:
    pool = pool_of(local)
    return [asyncio.create_task(pool.encode(MODEL, tpb.EncodeCommand(text=text))) for text in texts]


async def test_cancelled_texts_of_a_queue_are_not_encoded(
    local: LocalTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those cancelled in the pass in which a text before them is answered."""
    monkeypatch.setattr(pool_module, "MAX_PER_TOKENIZER", 4)
    long = encoding(local, *[LONG] * 4)
    short = encoding(local, *[f"short {n}" for n in range(20)])
    answer = local._on_encoded

    def cancel(encoded: tpb.Encoded) -> None:
        for each in short:
            each.cancel()
        answer(encoded)

    def note(*all_lost: Any) -> None:
        lost.append(all_lost)
        on_lost(*all_lost)

    lost, on_lost = list[object](), pool_of(local).on_lost
    monkeypatch.setattr(local, "_on_encoded", cancel)
    monkeypatch.setattr(pool_of(local), "on_lost", note)
    # All are asked for in one pass, before the first can be answered.
    await asyncio.sleep(0)
    assert pool_of(local).queued_encodes == len(short)
    answers = await asyncio.gather(*long, *short, return_exceptions=True)
    assert all(isinstance(each, tpb.Encoded) for each in answers[: len(long)])
    assert not lost


async def test_sequences_of_a_burst_go_on_by_the_stream(local: LocalTokenizer) -> None:
    """Their tokens would hold up the event loop."""
    ids = [500 + n % 1000 for n in range(2000)]
    sequences = [Sequence(ids.copy()) for _ in range(500)]
    pool_of(local).on_lost([], sequences)
    assert 0 < len(local._direct) < len(sequences)
    for token_id in (600, 700, 800):
        for sequence in sequences:
            sequence.add(token_id)
    await eventually(lambda: all(each.decoded == len(each.token_ids) for each in sequences))
    assert len({each.text for each in sequences}) == 1
    assert sequences[0].text
    for sequence in sequences:
        assert sequence.decoder
        sequence.decoder.drop(sequence)
