"""Sequences handed over between backends continue as on a single one, and every block comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine.torch.combinations import (
    FAMILIES,
    Item,
    Maker,
    Result,
    compare,
    frequent,
    play_alone,
    result_of,
    some_tokens,
)
from engine.torch.conftest import ModelDir
from engine.torch.drafts.drafters import AnyLengths, Knowing, draft
from engine.torch.guided.lateness import SomeLate
from engine.torch.handoff_lab import Workers, check_free, news_of, told, workers
from engine.torch.harness import Harness, Stream, configure, running
from oracle.adapters import ON, Adapted, load_all
from trtmesh.chassis.block_hashes import chain, root_hash
from trtmesh.chassis.errors import HandoffFailed, QueueFull
from trtmesh.chassis.vocabulary import GenerationConfig, GuidedDecoding, PromptTuning, Tensor
from trtmesh.engine.backend import (
    Awaiting,
    BlocksStored,
    HandedOver,
    Offered,
    PartFinal,
    Reserved,
    StepOutput,
)
from trtmesh.v1 import generation_pb2 as pb

EXACT: dict[str, Any] = {"batch_invariant": True, "kv_cache_tokens": 2048}
SHARED = {"max_tokens": 12, "ignore_end_id": True, "log_probs": True, "seed": 3}
GREEDY = configure(**SHARED)
CONFIGS = {
    "greedy": GREEDY,
    "sampled": configure(**SHARED, temperature=1.3, top_p=0.9),
    "penalised": configure(
        **SHARED,
        temperature=1.1,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        no_repeat_ngram_size=2,
    ),
    "min_tokens": configure(
        max_tokens=12, min_tokens=8, log_probs=True, seed=3, temperature=2.0, top_log_probs=2
    ),
    "decaying": configure(**SHARED, temperature=1.5, top_p=0.9, top_p_decay=0.8, top_p_min=0.2),
    "prompt_data": configure(**SHARED, prompt_log_probs=True, context_logits=True),
    "several": configure(**SHARED, temperature=1.2, num_return_sequences=3),
    "several_with_prompt_data": configure(
        **SHARED,
        temperature=1.2,
        num_return_sequences=2,
        prompt_log_probs=True,
        context_logits=True,
    ),
    "beams": configure(
        max_tokens=12, log_probs=True, beam_width=3, num_return_sequences=2, prompt_log_probs=True
    ),
}
PROMPT = [(7 * place * place + 3 * place) % 310 + 5 for place in range(75)]


async def handed_over(pair: Workers, item: Item, hashes: Sequence[int] = ()) -> list[Result]:
    """The results of an item that is handed over after its prefill."""
    config, several = item.config, is_shared(item.config)
    lease = await pair.reserve(pair.one, pair.other, len(item.prompt) - several, hashes)
    keys = pair.one.submit(item.prompt, config, batch_index=item.batch_index, sender_lease_id=lease)
    before = await pair.one.ended(keys)
    for each in before:
        assert each.end
        assert each.end.reason == pb.FINISH_REASON_HANDOFF, each.end.error
        assert len(each.token_ids) == (0 if several else 1)
    after = await pair.other.ended(
        await pair.decode(
            pair.other,
            lease,
            item.prompt,
            before[0].token_ids,
            config,
            batch_index=item.batch_index,
        )
    )
    return [result_of(item, legs) for legs in zip(before, after, strict=True)]


def is_shared(config: GenerationConfig) -> bool:
    return config.sequences > 1 or config.beam_search.beam_width > 1


def same(found: list[Result], expected: list[Result]) -> None:
    """To the last bit."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.log_probs) == (theirs.token_ids, theirs.log_probs)
        assert mine.cumulative_log_prob == pytest.approx(theirs.cumulative_log_prob, abs=1e-9)
        assert (mine.reason, mine.stop_token_ids) == (theirs.reason, theirs.stop_token_ids)
        assert mine.top_log_probs == theirs.top_log_probs
        assert mine.prompt_log_probs == theirs.prompt_log_probs
        for mine_logits, their_logits in zip(
            mine.context_logits, theirs.context_logits, strict=True
        ):
            assert (mine_logits == their_logits).all()


async def check(
    folder: Path,
    item: Item,
    one: dict[str, Any] | None = None,
    other: dict[str, Any] | None = None,
    shards: tuple[int, int] = (1, 1),
    adapted: Adapted | None = None,
) -> None:
    own = EXACT | ON if adapted else EXACT
    async with running(folder, **own) as engine:
        if adapted:
            await load_all(engine, adapted)
        expected = await play_alone(engine, item)
    async with workers(folder, {**own, **(one or {})}, {**own, **(other or {})}, shards) as pair:
        if adapted:
            for each in (pair.one, pair.other):
                await load_all(each, adapted)
        same(await handed_over(pair, item), expected)


@pytest.mark.parametrize("name", CONFIGS)
async def test_handed_over_item_equals_one_worker(llama: Path, name: str) -> None:
    await check(llama, Item(PROMPT, CONFIGS[name], 2))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(more, marks=pytest.mark.soak) for more in (1, 2, 3))]
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
async def test_chunks_blocks_and_parts_of_any_size(
    family: str, seed: int, model_dir: ModelDir
) -> None:
    dice = Random(seed)

    def settings() -> dict[str, Any]:
        return {
            "max_step_tokens": dice.choice([3, 17, 32, 512]),
            "tokens_per_block": dice.choice([4, 16, 32]),
            "layers_per_part": dice.choice([1, 2]),
        }

    item = Item(PROMPT[: dice.randint(40, 75)], CONFIGS[dice.choice(list(CONFIGS))], 1)
    await check(model_dir(family), item, settings(), settings())


SPLITS = [(1, 2), (2, 1), (2, 2)]
BLOCKS = [(16, 32), (32, 16), (16, 16)]


@pytest.mark.parametrize(
    ("shards", "blocks"),
    [
        pytest.param(shards, blocks, marks=[] if place == other else pytest.mark.soak)
        for place, shards in enumerate(SPLITS)
        for other, blocks in enumerate(BLOCKS)
    ],
)
async def test_head_splits_and_block_sizes(
    llama: Path, shards: tuple[int, int], blocks: tuple[int, int]
) -> None:
    """Each split and each pair of sizes; together in soak."""
    one, other = ({"tokens_per_block": each, "layers_per_part": 1} for each in blocks)
    await check(llama, Item(PROMPT, GREEDY, 0), one, other, shards)


# PEFT reads a name that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        pytest.param(kind, shards, marks=[] if (place + other) % 2 else pytest.mark.soak)
        for place, kind in enumerate(
            ["sampled", "several", "beams", "guided", "adapter", "prompt_table"]
        )
        for other, shards in enumerate([(1, 2), (2, 1)])
    ],
)
async def test_any_item_over_a_head_split(
    kind: str, shards: tuple[int, int], model_dir: ModelDir, tmp_path: Path
) -> None:
    dice = Random(f"{kind} {shards}")
    one, other = (
        {
            "max_step_tokens": dice.randint(1, len(PROMPT)),
            "tokens_per_block": dice.choice([16, 32]),
            "layers_per_part": dice.choice([1, 2]),
        }
        for _ in range(2)
    )
    folder, adapted = model_dir("llama"), None
    item = Item(PROMPT, CONFIGS.get(kind, GREEDY), 1)
    if kind == "guided":
        config = CONFIGS["sampled" if shards[0] == 1 else "several"]
        guide = GuidedDecoding(pb.GUIDE_TYPE_REGEX, "([a-z]{3} )*")
        item = Item(PROMPT, replace(config, guided_decoding=guide), 1)
    elif kind == "prompt_table":
        item = tuned("greedy")
    elif kind == "adapter":
        adapted = Adapted(folder, "llama", tmp_path)
        item = replace(item, config=replace(GREEDY, lora=adapted.by_number(1)))
    await check(folder, item, one, other, shards, adapted)


@pytest.mark.parametrize("kind", ["greedy", "several", "guided"])
async def test_drafts_on_both_sides_change_nothing(kind: str, llama: Path) -> None:
    config = CONFIGS["several" if kind == "guided" else kind]
    if kind == "guided":
        guide = GuidedDecoding(pb.GUIDE_TYPE_REGEX, "([a-z]{3} )*")
        config = replace(config, guided_decoding=guide)
    item, drafts = Item(PROMPT, config, 1), {"drafts": "ngram"}
    async with running(llama, **EXACT) as engine:
        expected = await play_alone(engine, item)
    async with workers(llama, EXACT | drafts, EXACT | drafts) as pair:
        for side in (pair.one, pair.other):
            draft(side, Knowing({}, 0.5), AnyLengths(1))
        same(await handed_over(pair, item), expected)
        assert pair.other.backend.stats().draft_tokens


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        pytest.param(kind, length, marks=[] if place % 2 == other else pytest.mark.soak)
        for other, kind in enumerate(["sampled", "several"])
        for place, length in enumerate([16, 15, 32, 17])
    ],
)
async def test_guided_sequences_sit_out_on_both_sides(kind: str, length: int, llama: Path) -> None:
    """The last token of the prompt is computed again, whether it fills a block or not."""
    guide = GuidedDecoding(pb.GUIDE_TYPE_REGEX, "([a-z]{3} )*")
    item = Item(PROMPT[:length], replace(CONFIGS[kind], guided_decoding=guide), 1)
    options: dict[str, Any] = {"tokens_per_block": 16, "layers_per_part": 1}
    async with running(llama, **EXACT, **options) as engine:
        expected = await play_alone(engine, item)
    async with workers(llama, EXACT | options, EXACT | options) as pair:
        for seed, side in enumerate((pair.one, pair.other)):
            torch_engine = side.backend._loaded.engine
            torch_engine._masks = SomeLate(torch_engine._masks, seed, 0.7, all_may_be=True)
        for _ in range(3):
            same(await handed_over(pair, item), expected)
        assert pair.one.backend.stats().late_masks or kind == "several"
        assert pair.other.backend.stats().late_masks


async def test_half_precision(llama: Path) -> None:
    bfloat16 = {"dtype": "bfloat16"}
    async with running(llama, **EXACT, **bfloat16) as engine:
        expected = await play_alone(engine, Item(PROMPT, GREEDY, 0))
    async with workers(llama, EXACT | bfloat16, EXACT | bfloat16) as pair:
        same(await handed_over(pair, Item(PROMPT, GREEDY, 0)), expected)


# PEFT reads a name that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", ["greedy", "several"])
async def test_adapter(name: str, model_dir: ModelDir, tmp_path: Path) -> None:
    adapted = Adapted(model_dir("llama"), "llama", tmp_path)
    items = [
        Item(PROMPT, replace(CONFIGS[name], lora=adapted.by_number(each)), 0) for each in (1, 2)
    ]
    async with running(adapted.model_dir, **EXACT, **ON) as engine:
        await load_all(engine, adapted)
        expected = [await play_alone(engine, item) for item in items]
    assert expected[0] != expected[1]
    async with workers(adapted.model_dir, EXACT | ON, EXACT | ON) as pair:
        for engine in (pair.one, pair.other):
            await load_all(engine, adapted)
        for item, own in zip(items, expected, strict=True):
            same(await handed_over(pair, item), own)


def tuned(name: str) -> Item:
    """An item with a prompt table."""
    rows = np.random.default_rng(1).normal(0, 0.15, (4, 64)).astype(np.float32)
    table = Tensor(pb.DATA_TYPE_FP32, rows.shape, rows.tobytes())
    output = replace(CONFIGS[name].output, prompt_log_probs=False)
    config = replace(CONFIGS[name], output=output, prompt_tuning=PromptTuning(table))
    return Item([*PROMPT[:20], 320, 321, *PROMPT[20:40], 323], config, 0)


@pytest.mark.parametrize("name", ["greedy", "beams"])
async def test_prompt_table(llama: Path, name: str) -> None:
    await check(llama, tuned(name))


@pytest.mark.parametrize("family", ["llama", "mistral"])
async def test_blocks_that_the_receiver_has_are_shared(family: str, model_dir: ModelDir) -> None:
    folder, item = model_dir(family), Item(PROMPT, GREEDY, 0)
    async with running(folder, **EXACT) as engine:
        expected = await play_alone(engine, item)
    hashes = chain(root_hash(), PROMPT, 16)
    async with workers(folder, EXACT, EXACT) as pair:
        await pair.other.ended(pair.other.submit([*PROMPT[:40], 9], configure(max_tokens=1)))
        await pair.one.ended(pair.one.submit(PROMPT[:20], configure(max_tokens=1)))
        same(await handed_over(pair, item, hashes), expected)
        (transfer,) = pair.transfers.values()
        assert transfer.reserved.present_tokens == 32
        # Whole, but for the block of the last token.
        same(await handed_over(pair, item, hashes), expected)
        whole = list(pair.transfers.values())[-1].reserved.present_tokens
        # The sender keeps too little before the window for a whole block.
        assert whole == (64 if family == "llama" else 32)


async def test_handed_over_blocks_are_reused_and_reported(llama: Path) -> None:
    async with workers(llama, EXACT, EXACT) as pair:
        await handed_over(pair, Item(PROMPT, GREEDY, 0))
        stored = {
            block_hash
            for output in pair.other.outputs
            for event in output.kv_events
            if isinstance(event, BlocksStored)
            for block_hash in event.block_hashes
        }
        assert stored >= set(chain(root_hash(), PROMPT, 16))
        (again,) = await pair.other.ended(pair.other.submit(PROMPT, GREEDY))
        assert again.end
        assert again.end.cached_prompt_tokens >= 64


async def test_layers_leave_before_the_later_ones_are_computed(llama: Path) -> None:
    async with workers(llama, {**EXACT, "layers_per_part": 1}, EXACT) as pair:
        seen = list[tuple[PartFinal, bool]]()
        memory = pair.one.backend.kv_memory()
        assert memory
        (shard,) = memory.shards
        later = (shard.offset(1, 0, 0, 0), shard.block_bytes)

        def look(output: StepOutput) -> None:
            pair.take(pair.one, output)
            for each in output.handoffs:
                if isinstance(each, PartFinal):
                    offered = pair.transfers[each.lease_id].offered
                    assert offered
                    blocks = offered.blocks[each.first_block : each.first_block + each.blocks]
                    found = np.zeros((len(blocks), later[1] - later[0]), dtype=np.uint8)
                    memory.read(0, blocks, later, found)
                    seen.append((each, bool(found.any())))

        pair.one.on_output = look
        await handed_over(pair, Item(PROMPT, GREEDY, 0))
        assert [(part.first_layer, written) for part, written in seen] == [(0, False), (1, True)]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[] if place % 2 == other else pytest.mark.soak)
        for other, family in enumerate(["llama", "mistral"])
        for place, name in enumerate(["greedy", "sampled", "penalised", "min_tokens"])
    ],
)
async def test_running_sequence_is_handed_over_at_any_token(
    family: str, name: str, model_dir: ModelDir
) -> None:
    folder, item = model_dir(family), Item(PROMPT, CONFIGS[name], 2)
    async with running(folder, **EXACT) as engine:
        expected = await play_alone(engine, item)
    async with workers(folder, EXACT, {**EXACT, "tokens_per_block": 8}) as pair:
        for count in (1, 5, 11):
            lease = await pair.reserve(pair.one, pair.other, len(PROMPT) + 12)
            before = await handed_over_after(pair, item, count, lease)
            assert before.end
            if count == 11:
                # The next token is the last.
                same([result_of(item, [before])], expected)
                assert news_of(pair.one, Offered, lease) is None
                pair.drop(lease)
                continue
            assert before.end.reason == pb.FINISH_REASON_HANDOFF
            assert len(before.token_ids) == count + 1
            rest = await pair.decode(
                pair.other, lease, PROMPT, before.token_ids, item.config, batch_index=2
            )
            (after,) = await pair.other.ended(rest)
            same([result_of(item, [before, after])], expected)


async def test_one_of_several_sequences_is_handed_over(llama: Path) -> None:
    config = CONFIGS["several"]
    async with running(llama, **EXACT) as engine:
        expected = await play_alone(engine, Item(PROMPT, config, 2))
    alone = replace(config, sampling=replace(config.sampling, num_return_sequences=1))
    async with workers(llama, EXACT, EXACT) as pair:
        lease = await pair.reserve(pair.one, pair.other, len(PROMPT) + 12)

        def take(output: StepOutput) -> None:
            pair.take(pair.one, output)
            if (1, 3) in zip(output.keys, output.token_offsets, strict=True):
                pair.one.backend.hand_over(1, lease)

        pair.one.on_output = take
        keys = pair.one.submit(PROMPT, config, batch_index=2)
        first, before, last = await pair.one.ended(keys)
        assert before.end
        assert before.end.reason == pb.FINISH_REASON_HANDOFF
        rest = await pair.decode(
            pair.other,
            lease,
            PROMPT,
            before.token_ids,
            alone,
            batch_index=2,
            sequence_index=1,
        )
        (after,) = await pair.other.ended(rest)
        item = Item(PROMPT, config, 2)
        same([result_of(item, legs) for legs in ([first], [before, after], [last])], expected)


async def handed_over_after(pair: Workers, item: Item, count: int, lease_id: str) -> Stream:
    """The first leg of an item that is handed over with the token after `count` tokens."""

    def take(output: StepOutput) -> None:
        pair.take(pair.one, output)
        if output.token_offsets == [count - 1]:
            pair.one.backend.hand_over(output.keys[0], lease_id)

    pair.one.on_output = take
    keys = pair.one.submit(item.prompt, item.config, batch_index=item.batch_index)
    (stream,) = await pair.one.ended(keys)
    return stream


async def play(pair: Workers, item: Item, dice: Random) -> list[Result]:
    """Hands an item over after its prefill, or not, and then back and forth; None of its results if it is cancelled."""
    sender, receiver = dice.sample([pair.one, pair.other], 2)
    config, several = item.config, is_shared(item.config)
    hashes = [] if config.prompt_tuning else hashes_of(item, receiver)
    tokens = len(item.prompt) - several + dice.choice([0, 0, 7])
    lease = await pair.reserve(sender, receiver, tokens, hashes)
    if not lease:
        keys = receiver.submit(item.prompt, config, batch_index=item.batch_index)
        return [result_of(item, [stream]) for stream in await receiver.ended(keys)]
    keys = sender.submit(item.prompt, config, batch_index=item.batch_index, sender_lease_id=lease)
    if item.cancelled_after == 0:
        await cancel(pair, sender, keys, lease, dice)
    before = await sender.ended(keys)
    if ended_otherwise(before):
        pair.drop(lease)
        return [result_of(item, [stream]) for stream in before]
    rest = config if several else told_before(config)
    emitted = before[0].token_ids
    keys = await pair.decode(
        receiver, lease, item.prompt, emitted, rest, batch_index=item.batch_index
    )
    if item.cancelled_after is not None:
        await some_tokens(receiver, keys[0], item.cancelled_after - 1)
        receiver.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
    elif item.moves_after and not several:
        return [await move(pair, receiver, sender, item, before, keys[0])]
    after = await receiver.ended(keys)
    return [result_of(item, legs) for legs in zip(before, after, strict=True)]


async def move(
    pair: Workers, at: Harness, other: Harness, item: Item, streams: list[Stream], key: int
) -> Result:
    """Hands the running sequence over at each of its planned tokens; without room, it stays."""
    config = told_before(item.config)
    for count in item.moves_after:
        emitted = sum(len(stream.token_ids) for stream in streams)
        await some_tokens(at, key, count - emitted)
        assert item.config.stopping.max_tokens
        most = len(item.prompt) + item.config.stopping.max_tokens
        lease = await pair.reserve(at, other, most)
        if not lease:
            continue
        at.backend.hand_over(key, lease)
        (stream,) = await at.ended([key])
        assert stream.end
        if isinstance(stream.end.error, HandoffFailed):
            # It was paused, and moves without its KV.
            pair.drop(lease)
            tokens = [token for each in [*streams, stream] for token in each.token_ids]
            (key,) = other.submit(item.prompt, config, emitted=tokens, batch_index=item.batch_index)
        elif ended_otherwise([stream]):
            pair.drop(lease)
            return result_of(item, [*streams, stream])
        else:
            tokens = [token for each in [*streams, stream] for token in each.token_ids]
            (key,) = await pair.decode(
                other, lease, item.prompt, tokens, config, batch_index=item.batch_index
            )
        streams = [*streams, stream]
        at, other = other, at
    return result_of(item, [*streams, *await at.ended([key])])


async def cancel(
    pair: Workers, sender: Harness, keys: Sequence[int], lease: str, dice: Random
) -> None:
    """Cancels an item somewhere in its prefill, with a release of its lease on both sides before or after."""
    for _ in range(dice.randint(0, 20)):
        await asyncio.sleep(0)
    first, second = dice.sample([True, False], 2)
    for releases in (first, second):
        if releases:
            pair.drop(lease)
        else:
            sender.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
    # A sequence that was handed over before has left its blocks to the lease.
    pair.drop(lease)


def ended_otherwise(streams: Sequence[Stream]) -> bool:
    return any(each.end and each.end.reason != pb.FINISH_REASON_HANDOFF for each in streams)


def told_before(config: GenerationConfig) -> GenerationConfig:
    """Without what the first worker has delivered."""
    return replace(
        config, output=replace(config.output, prompt_log_probs=False, context_logits=False)
    )


def hashes_of(item: Item, receiver: Harness) -> list[int]:
    root = root_hash(item.config.kv_cache.salt)
    return chain(root, item.prompt, receiver.info.tokens_per_block)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        rounds = metafunc.config.getoption("--combinations", default=None)
        metafunc.parametrize("number", range(rounds or len(FAMILIES)))


async def test_any_combination_equals_each_item_alone(number: int, model_dir: ModelDir) -> None:
    folder = model_dir(FAMILIES[number % len(FAMILIES)])
    async with running(folder, prefix_reuse=False, kv_cache_tokens=4096) as lonely:
        maker = Maker(number, await frequent(lonely))
        items = [maker.item(index) for index in range(6)]
        expected = [await play_alone(lonely, item) for item in items]
    dice = Random(number)
    one, other = maker.settings(), maker.settings()
    async with workers(folder, one, other) as pair:
        async with asyncio.timeout(120):
            results = await asyncio.gather(*(play(pair, item, dice) for item in items))
        assert any(each.handed_over for each in pair.transfers.values())
    for item, found, own in zip(items, results, expected, strict=True):
        try:
            compare(item, found, own)
        except AssertionError as error:
            raise AssertionError(f"{item}, with {one} and {other}") from error


@contextmanager
def failing_once(engine: Harness, fails: Callable[[int], bool]) -> Iterator[None]:
    """Lets one forward fail in the second layer, once for each number of tokens that `fails` names."""
    model: Any = engine.backend._loaded.engine._compute
    first = model._model.module.model.layers[1].input_layernorm
    failed = set[int]()

    def hook(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        tokens = len(given[0])
        if fails(tokens) and tokens not in failed:
            failed.add(tokens)
            raise RuntimeError("the layer fails")

    handle = first.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


async def test_handoff_fails_rather_than_announce_again(llama: Path) -> None:
    """The first layer was announced when the step failed; tried alone, the other item continues."""
    async with workers(llama, {**EXACT, "layers_per_part": 1}, EXACT) as pair:
        lease = await pair.reserve(pair.one, pair.other, len(PROMPT))
        with failing_once(pair.one, lambda tokens: tokens > len(PROMPT)):
            (other,) = pair.one.submit(PROMPT[:20], GREEDY)
            (key,) = pair.one.submit(PROMPT, GREEDY, sender_lease_id=lease)
            failed, regular = await pair.one.ended([key, other])
        assert failed.end
        assert isinstance(failed.end.error, HandoffFailed)
        assert len(regular.token_ids) == 12
        assert [part.first_layer for part in pair.transfers[lease].parts] == [0]
        assert news_of(pair.one, HandedOver, lease) is None
        pair.drop(lease)


async def test_failure_before_any_announcement_is_tried_again(llama: Path) -> None:
    async with running(llama, **EXACT) as engine:
        expected = await play_alone(engine, Item(PROMPT, GREEDY, 2))
    async with workers(llama, {**EXACT, "layers_per_part": 2}, EXACT) as pair:
        with failing_once(pair.one, lambda tokens: tokens == len(PROMPT)):
            same(await handed_over(pair, Item(PROMPT, GREEDY, 2)), expected)


@pytest.mark.parametrize("config", [CONFIGS["beams"], GREEDY], ids=["beam", "waiting"])
async def test_sequence_without_kv_of_its_own_is_not_handed_over(
    llama: Path, config: GenerationConfig
) -> None:
    async with running(llama, **EXACT, max_batch_size=3) as engine:
        with engine.gate.held():
            keys = engine.submit(PROMPT, CONFIGS["beams"])
            waiting = engine.submit(PROMPT, GREEDY)
            key = (keys if config is not GREEDY else waiting)[0]
            engine.backend.hand_over(key, "lease")
        streams = await engine.ended()
        refused = streams[key]
        assert refused.end
        assert isinstance(refused.end.error, HandoffFailed)
        assert engine.handoffs == []
        await check_free(engine)


async def test_one_of_several_sequences_is_stopped_in_the_prefill(llama: Path) -> None:
    config = CONFIGS["several"]
    async with running(llama, **EXACT) as engine:
        expected = await play_alone(engine, Item(PROMPT, config, 0))
    async with workers(llama, {**EXACT, "max_step_tokens": 8}, EXACT) as pair:
        lease = await pair.reserve(pair.one, pair.other, len(PROMPT) - 1)
        with pair.one.gate.held():
            keys = pair.one.submit(PROMPT, config, sender_lease_id=lease)
            pair.one.backend.stop(keys[:1], pb.FINISH_REASON_STOPPED)
        reasons = [each.end.reason for each in await pair.one.ended(keys) if each.end]
        handoff = pb.FINISH_REASON_HANDOFF
        assert reasons == [pb.FINISH_REASON_STOPPED, handoff, handoff]
        rest = await pair.decode(pair.other, lease, PROMPT, [], config)
        pair.other.backend.stop(rest[:1], pb.FINISH_REASON_STOPPED)
        found = await pair.other.ended(rest)
        assert [each.token_ids for each in found[1:]] == [each.token_ids for each in expected[1:]]


async def test_followers_inherit_the_blocks_of_a_first_sequence_that_was_stopped(
    llama: Path,
) -> None:
    config = CONFIGS["several"]
    async with running(llama, **EXACT) as engine:
        expected = await play_alone(engine, Item(PROMPT, config, 0))
    async with workers(llama, EXACT, EXACT) as pair:
        lease = await pair.reserve(pair.one, pair.other, len(PROMPT) - 1)
        await pair.one.ended(pair.one.submit(PROMPT, config, sender_lease_id=lease))
        keys = pair.other.submit(PROMPT, config, receiver_lease_id=lease)
        await told(pair.other, Awaiting, lease)
        pair.other.backend.stop(keys[:1], pb.FINISH_REASON_STOPPED)
        computed = pair.other.backend.stats().computed_prompt_tokens
        pair.other.backend.adopt(lease)
        pair.drop(lease)
        found = await pair.other.ended(keys)
        assert [each.token_ids for each in found[1:]] == [each.token_ids for each in expected[1:]]
        assert pair.other.backend.stats().computed_prompt_tokens <= computed + 2


async def test_sequence_whose_lease_is_dropped_or_unknown_fails(llama: Path) -> None:
    async with workers(llama, EXACT, EXACT) as pair:
        lease = await pair.reserve(pair.one, pair.other, len(PROMPT))
        keys = pair.other.submit(PROMPT, CONFIGS["several"], receiver_lease_id=lease)
        keys += pair.other.submit(PROMPT, CONFIGS["beams"], receiver_lease_id="unknown")
        await told(pair.other, Awaiting, lease)
        assert not any(pair.other.streams[key].end for key in keys[:3])
        pair.drop(lease)
        for stream in await pair.other.ended(keys):
            assert stream.end
            assert isinstance(stream.end.error, HandoffFailed)
            assert stream.token_ids == []


async def test_end_of_a_waiting_sequence_leaves_the_blocks_to_the_lease(llama: Path) -> None:
    async with workers(llama, EXACT, EXACT) as pair:
        lease = await pair.reserve(pair.one, pair.other, len(PROMPT))
        keys = pair.other.submit(PROMPT, GREEDY, receiver_lease_id=lease)
        await told(pair.other, Awaiting, lease)
        pair.other.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
        await pair.other.ended(keys)
        assert pair.other.backend.stats().used_blocks == 5
        pair.other.backend.adopt(lease)
        await pair.other.ended(pair.other.submit([5], configure(max_tokens=1)))
        assert pair.other.backend.stats().used_blocks == 5
        pair.drop(lease)


async def test_full_pool_refuses_a_reservation(llama: Path) -> None:
    async with running(llama, kv_cache_tokens=64) as engine:
        engine.backend.reserve("one", 48, ())
        engine.backend.reserve("other", 32, ())
        refused = await told(engine, Reserved, "other")
        assert isinstance(refused.error, QueueFull)
        assert refused.blocks == ()
        engine.backend.drop("one")
        engine.backend.reserve("again", 64, ())
        assert len((await told(engine, Reserved, "again")).blocks) == 4
        engine.backend.drop("again")
        await check_free(engine)


async def test_waiting_for_kv_takes_no_steps(llama: Path) -> None:
    async with workers(llama, EXACT, EXACT) as pair:
        lease = await pair.reserve(pair.one, pair.other, len(PROMPT))
        keys = pair.other.submit(PROMPT, CONFIGS["several"], receiver_lease_id=lease)
        await told(pair.other, Awaiting, lease)
        assert not pair.other.backend._loaded.engine.scheduler.has_work
        pair.other.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
        pair.drop(lease)
