"""Prompt tables compared with transformers' `generate` over `inputs_embeds`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.conftest import ModelDir
from engine.torch.harness import SECONDS, Harness, configure, running
from log_lines import LogLine
from oracle import tiny_models
from process_constants import patch
from transformers import PreTrainedModel
from trtmesh.chassis.errors import (
    BackendFailed,
    InvalidField,
    QueueFull,
    TokenOutOfVocabulary,
    TrtmeshError,
)
from trtmesh.chassis.vocabulary import GenerationConfig, PromptTuning, Tensor
from trtmesh.engine.backends.torch.model.prompt_tables import Embedding, PromptTable
from trtmesh.v1 import generation_pb2 as pb

VOCABULARY = tiny_models.VOCABULARY_SIZE
HIDDEN = 64
TOKENS = 10
GREEDY = configure(max_tokens=TOKENS, ignore_end_id=True)
TYPES = {
    pb.DATA_TYPE_FP32: torch.float32,
    pb.DATA_TYPE_FP16: torch.float16,
    pb.DATA_TYPE_BF16: torch.bfloat16,
}


def random_table(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HIDDEN, generator=generator) * tiny_models.WEIGHT_STD


def tensor_of(table: torch.Tensor, data_type: int = pb.DATA_TYPE_FP32) -> Tensor:
    data = table.to(TYPES[pb.DataType.ValueType(data_type)]).view(torch.uint8).numpy().tobytes()
    return Tensor(data_type, tuple(table.shape), data)


def tuned(
    table: Tensor | None,
    config: GenerationConfig = GREEDY,
    **values: Any,
) -> GenerationConfig:
    asked = PromptTuning(embedding_table=table, **values)
    names = [
        name for name in ("embedding_table", "vocabulary_size", "extra_ids") if getattr(asked, name)
    ]
    fields = config.fields_set | {f"prompt_tuning.{name}" for name in names}
    return replace(config, prompt_tuning=asked, fields_set=fields)


def expected(model: PreTrainedModel, prompt: Sequence[int], table: torch.Tensor) -> list[int]:
    """The output of `generate` for these embeddings, with the rows scaled like the model's own."""
    untyped: Any = model
    module = untyped.get_input_embeddings()
    ids = torch.tensor([prompt])
    foreign = ids >= VOCABULARY
    with torch.inference_mode():
        embeddings = module(ids.where(~foreign, 0))
        scale = float(getattr(module, "embed_scale", 1.0))
        embeddings[foreign] = table[ids[foreign] - VOCABULARY] * scale
        output = untyped.generate(
            inputs_embeds=embeddings,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=tiny_models.PAD_ID,
        )
    tokens: list[int] = output[0].tolist()
    return tokens


def mixed_prompt(length: int, rows: int, seed: int) -> list[int]:
    """Ids of the table before and among ordinary ids."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    places = torch.randperm(length, generator=generator)[: length // 3].tolist()
    for place in [0, *places]:
        prompt[place] = VOCABULARY + (place * 7 + seed) % rows
    return prompt


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.soak), "gpt2", "gemma3"]
)
async def test_table_rows_embed_their_ids(family: str, model_dir: ModelDir) -> None:
    folder = model_dir(family)
    model = tiny_models.reference_model(folder)
    tables = [random_table(5, seed) for seed in range(3)]
    prompts = [mixed_prompt(length, 5, seed) for seed, length in enumerate((3, 33, 18))]
    plain = tiny_models.prompts(3)
    wanted = [expected(model, p, t) for p, t in zip(prompts, tables, strict=True)]
    assert wanted[1] != expected(model, prompts[1], tables[2])
    for settings in ({"max_step_tokens": 7, "prefix_reuse": False}, {"kv_cache_tokens": 96}):
        async with running(folder, **{"tokens_per_block": 4, **settings}) as engine:
            for _ in range(2):
                keys = [
                    engine.submit(p, tuned(tensor_of(t)))[0]
                    for p, t in zip(prompts, tables, strict=True)
                ]
                mates = [engine.submit(prompt, GREEDY)[0] for prompt in plain]
                assert [s.token_ids for s in await engine.ended(keys)] == wanted
                assert [s.token_ids for s in await engine.ended(mates)] == [
                    tiny_models.greedy(model, prompt, TOKENS) for prompt in plain
                ]


@pytest.mark.parametrize("data_type", TYPES)
async def test_tables_of_every_element_type(data_type: int, llama: Path) -> None:
    table = random_table(4, 9).to(TYPES[pb.DataType.ValueType(data_type)])
    prompt = mixed_prompt(12, 4, 3)
    wanted = expected(tiny_models.reference_model(llama), prompt, table.float())
    async with running(llama) as engine:
        (stream,) = await engine.ended(engine.submit(prompt, tuned(tensor_of(table, data_type))))
        assert stream.token_ids == wanted


async def test_blocks_are_shared_only_under_equal_tables_and_extra_ids(llama: Path) -> None:
    table, other = tensor_of(random_table(4, 1)), tensor_of(random_table(4, 2))
    prompt = mixed_prompt(33, 4, 1)
    ones, twos = (1,) * len(prompt), (2,) * len(prompt)
    configs = [
        tuned(table),
        tuned(other),
        tuned(table, extra_ids=ones),
        tuned(table, extra_ids=twos),
    ]
    async with running(llama, tokens_per_block=4) as engine:
        for cached in (0, 32):
            for config in configs:
                (stream,) = await engine.ended(engine.submit(prompt, config))
                assert stream.end
                assert stream.end.cached_prompt_tokens == cached


async def test_item_with_a_table_continues_on_another_worker(llama: Path) -> None:
    table = random_table(4, 1)
    prompt = mixed_prompt(20, 4, 1)
    wanted = expected(tiny_models.reference_model(llama), prompt, table)
    async with running(llama) as engine:
        keys = engine.submit(prompt, tuned(tensor_of(table)), emitted=wanted[:4])
        (stream,) = await engine.ended(keys)
        assert wanted[:4] + stream.token_ids == wanted


async def test_penalties_see_the_vocabulary_alone(llama: Path) -> None:
    """Ids beyond the vocabulary have no logits; the row of a batch mate would change instead."""
    config = configure(
        max_tokens=6, ignore_end_id=True, repetition_penalty=1.3, no_repeat_ngram_size=1
    )
    prompt = [VOCABULARY + token for token in range(300)]
    async with running(llama) as engine:
        (alone,) = await engine.run([[5, 6]], GREEDY)
        keys = engine.submit(prompt, tuned(tensor_of(random_table(300, 0)), config))
        mate = engine.submit([5, 6], GREEDY)
        assert (await engine.ended(mate))[0].token_ids == alone
        (stream,) = await engine.ended(keys)
        assert len(set(stream.token_ids)) == 6


async def test_an_id_of_the_table_has_no_probability(llama: Path) -> None:
    config = configure(max_tokens=1, prompt_log_probs=True)
    async with running(llama) as engine:
        with pytest.raises(InvalidField) as refused:
            engine.submit([5, VOCABULARY], tuned(tensor_of(random_table(1, 0)), config))
        assert refused.value.field == "output.prompt_log_probs"
        await engine.ended(engine.submit([5, 6], tuned(tensor_of(random_table(1, 0)), config)))


REFUSALS: list[tuple[list[int], PromptTuning, TrtmeshError]] = [
    (
        [VOCABULARY],
        PromptTuning(),
        TokenOutOfVocabulary(field="prompt.token_ids", value="320", limit="below 320"),
    ),
    (
        [5, VOCABULARY + 2],
        PromptTuning(tensor_of(random_table(2, 0))),
        TokenOutOfVocabulary(field="prompt.token_ids", value="322", limit="below 322"),
    ),
    (
        [VOCABULARY + 1],
        PromptTuning(tensor_of(random_table(2, 0)), vocabulary_size=1),
        TokenOutOfVocabulary(field="prompt.token_ids", value="321", limit="below 321"),
    ),
    (
        [VOCABULARY],
        PromptTuning(tensor_of(random_table(2, 0)), vocabulary_size=3),
        InvalidField.of("prompt_tuning.vocabulary_size", 3, "in [1, 2]"),
    ),
    (
        [5],
        PromptTuning(Tensor(pb.DATA_TYPE_FP32, (2, 5), bytes(40))),
        InvalidField.of(
            "prompt_tuning.embedding_table.shape",
            [2, 5],
            "[rows, 64], the size of the model's embeddings",
        ),
    ),
    (
        [5],
        PromptTuning(Tensor(pb.DATA_TYPE_INT32, (1, 64), bytes(256))),
        InvalidField.of(
            "prompt_tuning.embedding_table.data_type",
            "DATA_TYPE_INT32",
            "one of DATA_TYPE_FP32, DATA_TYPE_FP16, DATA_TYPE_BF16",
        ),
    ),
    (
        [5, 6],
        PromptTuning(extra_ids=(1,)),
        InvalidField(field="prompt_tuning.extra_ids", value="1", limit="0 or 2"),
    ),
    (
        [5],
        PromptTuning(vocabulary_size=1),
        InvalidField(field="prompt_tuning.vocabulary_size"),
    ),
]


@pytest.mark.parametrize(("prompt", "asked", "expected"), REFUSALS)
async def test_malformed_prompt_tuning_is_refused(
    prompt: list[int], asked: PromptTuning, expected: TrtmeshError, llama: Path
) -> None:
    async with running(llama) as engine:
        with pytest.raises(type(expected)) as refused:
            engine.submit(prompt, replace(GREEDY, prompt_tuning=asked))
        error = refused.value
        assert (error.fields, error.value, error.limit) == (
            expected.fields,
            expected.value,
            expected.limit,
        )
        assert len((await engine.run([[5]], GREEDY))[0]) == TOKENS


class Gate(threading.Event):
    """Holds the reading of tables until set."""

    reached = 0


@contextmanager
def held_up(engine: Harness) -> Iterator[Gate]:
    """Lets tables be read only once the event is set."""
    embedding: Any = engine.backend._loaded.tables.embedding
    read, gate = embedding.read, Gate()

    def waiting(asked: PromptTuning) -> PromptTable:
        gate.reached += 1
        assert gate.wait(SECONDS)
        table: PromptTable = read(asked)
        return table

    embedding.read = waiting
    try:
        yield gate
    finally:
        gate.set()
        del embedding.read


async def test_item_keeps_its_place_while_its_table_is_read(llama: Path) -> None:
    """With one place in the batch, later items overtake only while the item cannot start."""
    table, prompt = random_table(4, 1), mixed_prompt(20, 4, 1)
    wanted = expected(tiny_models.reference_model(llama), prompt, table)
    async with running(llama, max_batch_size=1) as engine:
        running_one = engine.submit([5, 6], replace_max(GREEDY, 400))
        await engine.until(lambda: engine.streams[running_one[0]].token_ids)
        with held_up(engine) as gate:
            told = len(engine.streams[running_one[0]].token_ids)
            outputs = count(1)
            with engine.held_at(lambda _: next(outputs) == 21):
                tuned_one = engine.submit(prompt, tuned(tensor_of(table)))
                later = [engine.submit([7, 8], GREEDY) for _ in range(2)]
                await engine.until(
                    lambda: len(engine.streams[running_one[0]].token_ids) > told + 20
                )
                assert engine.backend.stats().waiting_sequences == 3
                engine.backend.stop(running_one, pb.FINISH_REASON_STOPPED)
            await engine.ended(later[0])
            assert not engine.streams[tuned_one[0]].token_ids
            # Earlier items are over or running; the item precedes all later items.
            next_key = len(engine.streams)
            with engine.held_at(lambda output: next_key in output.keys):
                filler = engine.submit([9], replace_max(GREEDY, 400))
                await engine.until(lambda: engine.streams[filler[0]].token_ids)
                last = engine.submit([7, 8], GREEDY)
                gate.set()
                tables: Any = engine.backend._loaded.tables
                await asyncio.to_thread(tables.close)
                engine.backend.stop(filler, pb.FINISH_REASON_STOPPED)
            await engine.ended()
        order = [end.key for output in engine.outputs for end in output.ends]
        assert order.index(tuned_one[0]) < order.index(last[0])
        assert engine.streams[tuned_one[0]].token_ids == wanted


def replace_max(config: GenerationConfig, max_tokens: int) -> GenerationConfig:
    return replace(config, stopping=replace(config.stopping, max_tokens=max_tokens))


@pytest.mark.parametrize("values", [{}, {"num_return_sequences": 3, "seed": 1}, {"beam_width": 3}])
async def test_item_is_stopped_while_its_table_is_read(values: dict[str, Any], llama: Path) -> None:
    """A stopped item ends at once and leaves nothing behind, whenever the table arrives."""
    config = tuned(tensor_of(random_table(4, 1)), configure(max_tokens=4, **values))
    async with running(llama) as engine:
        with held_up(engine) as gate:
            stopped = engine.submit([VOCABULARY], config)
            waiting = engine.submit([VOCABULARY], config)
            engine.backend.stop(stopped, pb.FINISH_REASON_STOPPED)
            for stream in await engine.ended(stopped):
                assert stream.end
                assert stream.end.reason == pb.FINISH_REASON_STOPPED
            # Items that cannot start cause no empty steps.
            assert not engine.backend._loaded.engine.scheduler.has_work
            gate.set()
            for stream in await engine.ended(waiting):
                assert stream.end
                assert len(stream.token_ids) == stream.end.generated_tokens == 4
            # Only tables with a waiting sequence were read.
            assert gate.reached == 2
        scheduler = engine.backend._loaded.engine.scheduler
        assert not scheduler.sequences
        assert not scheduler._unready
        await no_table_is_held(engine)


async def no_table_is_held(engine: Harness) -> None:
    tables: Any = engine.backend._loaded.tables
    await asyncio.to_thread(tables.close)
    assert tables.held_bytes == 0


async def test_close_does_not_wait_for_queued_tables(llama: Path) -> None:
    config = tuned(tensor_of(random_table(4, 1)))
    async with running(llama) as engine:
        with held_up(engine) as gate:
            keys = [engine.submit([VOCABULARY], config)[0] for _ in range(3)]
            closing = asyncio.ensure_future(engine.backend.close())
            for stream in await engine.ended(keys):
                assert stream.end
                assert stream.end.reason == pb.FINISH_REASON_CANCELLED
            gate.set()
            await closing


@pytest.mark.parametrize("values", [{}, {"num_return_sequences": 3}, {"beam_width": 3}])
async def test_table_with_non_finite_values_ends_the_item(
    values: dict[str, Any], llama: Path
) -> None:
    nan = tensor_of(random_table(2, 0).fill_(float("nan")))
    async with running(llama) as engine:
        keys = engine.submit([VOCABULARY], tuned(nan, configure(max_tokens=4, **values)))
        for stream in await engine.ended(keys):
            assert stream.end
            assert isinstance(stream.end.error, InvalidField)
            assert stream.end.error.field == "prompt_tuning.embedding_table"
        assert len((await engine.run([[5]], GREEDY))[0]) == TOKENS
        await no_table_is_held(engine)


async def test_defect_while_reading_a_table_ends_the_item_and_is_logged(
    llama: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[LogLine]]
) -> None:
    def fault(_: Embedding, asked: PromptTuning) -> PromptTable:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Embedding, "read", fault)
    async with running(llama) as engine:
        keys = engine.submit([VOCABULARY], tuned(tensor_of(random_table(2, 0))))
        (stream,) = await engine.ended(keys)
        assert stream.end
        assert isinstance(stream.end.error, BackendFailed)
    assert logged() == [LogLine("request-0", "a prompt table could not be read")]


async def test_the_tables_of_all_items_have_bounded_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fit; the tables of ended items no longer count."""
    config = tuned(tensor_of(random_table(4, 1)))
    size = 2 * 4 * HIDDEN * 4
    patch(monkeypatch, max_prompt_table_bytes=2 * size + 1)
    async with running(llama) as engine:
        with pytest.raises(InvalidField) as refused:
            engine.submit([VOCABULARY], tuned(tensor_of(random_table(9, 1))))
        assert refused.value.field == "prompt_tuning.embedding_table"
        assert (refused.value.value, refused.value.limit) == ("4608", "at most 4097 bytes")
        for _ in range(3):
            with held_up(engine):
                keys = [engine.submit([VOCABULARY], config)[0] for _ in range(2)]
                with pytest.raises(QueueFull) as full:
                    engine.submit([VOCABULARY], config)
                assert (full.value.value, full.value.limit) == ("4096", "at most 4097 bytes")
            tables: Any = engine.backend._loaded.tables
            await engine.ended(keys)
            assert tables.held_bytes == 0
