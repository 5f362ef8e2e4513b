"""Compares the paged engine with the model's own forward, once at load.

Many architectures take a flat batch without complaint and answer wrongly: bidirectional models, hybrids with state
outside the KV, layers that attend twice. The logits show this: suitable models differ by rounding, all others by a good
part of the logits' spread.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, Stopping
from trtmesh.engine.backends.torch.compute.device import Device
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model import attention
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence

CHUNKS = (7, 9, 1, 1, 5)
MATE_CHUNKS = (3, 1, 1, 4, 2)
LONG_CHUNKS = ((1, 70, 1, 1, 131, 5, 1, 1), (90, 1, 1, 3, 1, 1, 40, 2))
"""Chunks to compare bit by bit, also with the whole prompts."""
MATES = 15
"""Short prompts beside them: more sequences than a GPU computes as a graph of chunks."""
TOKENS_PER_BLOCK = 4
LONGEST_WINDOW = 512
"""Longer windows are trusted: crossing them would take long."""
SEED = 20
EXACT = 1e-3
"""Largest difference of logits in float32, as a share of their standard deviation."""
ROUNDED = 0.35
"""The same for half precision, as root mean square. Random models amplify rounding most: with 32 layers in bfloat16,
transformers is off by 0.22 from float32, and this engine by 0.17."""

Parts = SequenceOf[SequenceOf[int]]
"""The sizes of each prompt's chunks."""


def check_model(model: Model, device: Device) -> None:
    """Raises ModelUnusable where paged chunks with a batch mate differ from the model's own full forward."""
    chunks = (_window_tokens(model) + CHUNKS[0], *CHUNKS[1:])
    generator = torch.Generator().manual_seed(SEED)
    prompts = [
        torch.randint(model.vocabulary_size, (sum(parts),), generator=generator).tolist()
        for parts in (chunks, MATE_CHUNKS)
    ]
    if sum(chunks) > model.max_positions:
        raise ModelUnusable(
            f"the model has {model.max_positions} positions, too few to check it with {sum(chunks)} tokens"
        )
    expected = _own(model, prompts, (chunks, MATE_CHUNKS), device)
    got = _paged(model, prompts, (chunks, MATE_CHUNKS), device)
    difference = (got - expected).abs()
    spread = float(expected.std())
    worst = float(
        difference.max() if model.dtype == torch.float32 else difference.square().mean().sqrt()
    )
    limit = EXACT if model.dtype == torch.float32 else ROUNDED
    # Refuses NaN too.
    if not worst <= limit * spread:
        raise ModelUnusable(
            f"model type {model.module.config.model_type} is refused: computed in chunks with a batch mate, its"
            f" logits differ by {worst:.3g} from its own full forward, where {limit * spread:.3g} is allowed"
        )


def check_invariance(model: Model, device: Device) -> None:
    """Raises ModelUnusable where any bit of the logits depends on chunks or batch mates.

    A device may compute a few chunks, many chunks and single tokens in different ways: all of these occur.
    """
    share = min(1.0, model.max_positions / sum(LONG_CHUNKS[0]))
    chunks = [[max(1, int(share * part)) for part in parts] for parts in LONG_CHUNKS]
    generator = torch.Generator().manual_seed(SEED)
    prompts = [
        torch.randint(model.vocabulary_size, (sum(parts),), generator=generator).tolist()
        for parts in chunks
    ]
    alone = [_paged(model, [prompt], [[len(prompt)]], device) for prompt in prompts]
    together = _paged(model, prompts, [[len(prompt)] for prompt in prompts], device)
    ends = len(chunks[0])
    crowd = [*prompts, *(prompts[place % 2][:ends] for place in range(MATES))]
    crowded = _paged(model, crowd, [[len(prompt)] for prompt in crowd], device)
    in_chunks = _paged(model, crowd, [*chunks, *[[1] * ends] * MATES], device)
    last = in_chunks[ends - 1 :: ends]
    if not (
        torch.equal(together, torch.cat(alone))
        and torch.equal(crowded[: len(prompts)], together)
        and torch.equal(last, crowded)
    ):
        raise ModelUnusable(
            f"batch_invariant is refused: on {device.name}, the logits of model type"
            f" {model.module.config.model_type} depend on the batch"
        )


def _window_tokens(model: Model) -> int:
    """Tokens to add for crossing a short sliding window."""
    window: Any = getattr(model.module.config.get_text_config(), "sliding_window", None)
    return window if isinstance(window, int) and 0 < window <= LONGEST_WINDOW else 0


def _ends(chunks: SequenceOf[int]) -> list[int]:
    return [sum(chunks[: count + 1]) - 1 for count in range(len(chunks))]


def _own(model: Model, prompts: list[list[int]], chunks: Parts, device: Device) -> Tensor:
    """Logits at the chunk ends [ends of all prompts, vocabulary], by the model's own attention."""
    model.module.set_attn_implementation("eager")
    attention.attach(model.module, None)
    rows = []
    with torch.inference_mode():
        for prompt, parts in zip(prompts, chunks, strict=True):
            ids = torch.tensor([prompt], device=device.name)
            try:
                logits = model.module(input_ids=ids, use_cache=False).logits
            except Exception as error:
                raise ModelUnusable(f"the model cannot run: {error}") from error
            rows.append(logits[0, _ends(parts), : model.vocabulary_size].float())
    model.module.set_attn_implementation(attention.NAME)
    return torch.cat(rows)


def _paged(model: Model, prompts: list[list[int]], chunks: Parts, device: Device) -> Tensor:
    """The same by the engine: both sequences step by step in a batch, with interleaved blocks."""
    width = -(-max(len(prompt) for prompt in prompts) // TOKENS_PER_BLOCK)
    tables = BlockTables(len(prompts), width)
    cache = KvCache(
        model.kv_shape,
        blocks=len(prompts) * width,
        tokens_per_block=TOKENS_PER_BLOCK,
        dtype=model.dtype,
        device=device.name,
    )
    sequences = [_sequence(key, prompt) for key, prompt in enumerate(prompts)]
    for sequence in sequences:
        sequence.slot = tables.take()
        blocks = [sequence.key + 1 + len(prompts) * place for place in range(width)]
        tables.put(sequence.slot, 0, blocks)
    most_tokens = sum(max(counts) for counts in chunks)
    compute = device.compute(model, cache, tables, most_tokens)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for part in zip(*chunks, strict=True):
        step = []
        for sequence, prompt, count in zip(sequences, prompts, part, strict=True):
            start = len(sequence.tokens)
            sequence.tokens += prompt[start : start + count]
            step.append(Chunk(sequence, start, count))
        try:
            forward = compute.forward(step)
        except Exception as error:
            raise ModelUnusable(f"the model cannot be paged: {error}") from error
        for chunk, row in zip(forward.completing, forward.logits, strict=True):
            # A copy: a device may compute the next step into the same memory.
            logits[chunk.sequence.key].append(row.to(torch.float32, copy=True))
    return torch.stack([row for rows in logits for row in rows])


def _sequence(key: int, prompt: list[int]) -> Sequence:
    rule = EndRule(Stopping(), (), len(prompt), len(prompt))
    config = GenerationConfig()
    return Sequence(
        key=key,
        batch_index=0,
        sequence_index=0,
        tokens=[],
        rule=rule,
        token_rules=TokenRules(config),
        config=config,
        submitted_tokens=len(prompt),
    )
