"""Impossible items are refused with one clear error, and the engine continues."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
from engine.torch.harness import configure, running
from oracle import tiny_models
from trtmesh.chassis.errors import (
    InvalidField,
    OutOfBlocks,
    PromptEmpty,
    PromptTooLong,
    QueueFull,
    TokenOutOfVocabulary,
    TrtmeshError,
)
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backends.torch.sequence import Sequence

FEW = configure(max_tokens=4)

REFUSALS: list[tuple[list[int], GenerationConfig, TrtmeshError]] = [
    ([], FEW, PromptEmpty()),
    ([5] * 64, FEW, PromptTooLong(field="prompt", value="64", limit="below 64")),
    ([5] * 70, FEW, PromptTooLong(field="prompt", value="70", limit="below 64")),
    (
        [5, 6, 320, 9999],
        FEW,
        TokenOutOfVocabulary(field="prompt.token_ids", value="320", limit="below 320"),
    ),
    ([5] * 40, configure(max_tokens=20), OutOfBlocks(value="15", limit="at most 12")),
    ([5] * 60, configure(), OutOfBlocks(value="15", limit="at most 12")),
    (
        [5],
        configure(end_id=320),
        InvalidField.of("stopping.end_id", 320, "below the vocabulary size, 320"),
    ),
]


@pytest.mark.parametrize(("prompt", "config", "expected_error"), REFUSALS)
async def test_refused_item_leaves_no_trace(
    llama: Path,
    prompt: list[int],
    config: GenerationConfig,
    expected_error: TrtmeshError,
) -> None:
    settings = {"max_sequence_tokens": 64, "kv_cache_tokens": 48, "tokens_per_block": 4}
    good = tiny_models.prompts(2)[1]
    expected = tiny_models.greedy(tiny_models.reference_model(llama), good, 4)
    async with running(llama, **settings) as engine:
        before = engine.backend.stats()
        with pytest.raises(type(expected_error)) as refused:
            engine.submit(prompt, config)
        error = refused.value
        assert (error.fields, error.value, error.limit) == (
            expected_error.fields,
            expected_error.value,
            expected_error.limit,
        )
        assert engine.backend.stats() == before
        assert await engine.run([good], configure(max_tokens=4, ignore_end_id=True)) == [expected]


async def test_longest_prompt_is_admitted(llama: Path) -> None:
    async with running(llama, max_sequence_tokens=64) as engine:
        (stream,) = await engine.ended(engine.submit([5] * 63, configure(ignore_end_id=True)))
        assert len(stream.token_ids) == 1


async def test_full_queue_refuses_until_it_empties(llama: Path) -> None:
    config = configure(max_tokens=30, ignore_end_id=True)
    async with running(llama, max_batch_size=2, max_queue_size=3) as engine:
        with engine.gate.held():
            keys = [engine.submit([5], config)[0] for _ in range(5)]
            with pytest.raises(QueueFull, match="at most 3 may"):
                engine.submit([5], configure(max_tokens=30, num_return_sequences=2))
        await engine.ended(keys)
        await engine.ended(engine.submit([5], config))


async def test_item_larger_than_batch_and_queue_is_invalid(
    llama: Path,
) -> None:
    async with running(llama, max_batch_size=2, max_queue_size=3) as engine:
        assert engine.info.max_sequences_per_item == 5
        config = configure(max_tokens=3, temperature=1.0, seed=1, num_return_sequences=5)
        assert len(await engine.ended(engine.submit([5], config))) == 5


async def test_sequence_starting_during_submit_counts_once(llama: Path) -> None:
    config = configure(max_tokens=3, ignore_end_id=True)
    async with running(llama, max_batch_size=4, max_queue_size=4) as engine:
        scheduler = engine.backend._loaded.engine.scheduler
        with engine.gate.held():
            keys = [engine.submit([5], config)[0] for _ in range(5)]
            await engine.until(lambda: engine.streams[keys[0]].token_ids)
            # The sequences start between two reads of this thread.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scheduler, "running", scheduler.running * 4)
                patch.setattr(scheduler, "waiting_sequences", 4)
                keys += engine.submit([5], config)
        await engine.ended(keys)


async def test_item_counts_while_the_engine_takes_it(llama: Path) -> None:
    """Otherwise items that arrive in this moment could exceed the queue."""
    async with running(llama) as engine:
        taking = engine.backend._loaded.engine
        add, seen = taking.add, list[int]()

        def watched(keys: SequenceOf[int], sequences: SequenceOf[Sequence]) -> None:
            seen.append(engine.backend.stats().waiting_sequences)
            add(keys, sequences)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(taking, "add", watched)
            await engine.ended(engine.submit([5], FEW))
        assert seen == [1]
        assert engine.backend.stats().waiting_sequences == 0


async def test_a_negative_id_is_refused(llama: Path) -> None:
    async with running(llama) as engine:
        with pytest.raises(TokenOutOfVocabulary) as refused:
            engine.submit([5, -1], FEW)
        assert refused.value.value == "-1"
