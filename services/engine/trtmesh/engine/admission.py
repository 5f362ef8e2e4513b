"""Admits items against the limits of a backend, the same way for every backend."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from trtmesh.chassis.errors import (
    InvalidField,
    OutOfBlocks,
    PromptEmpty,
    PromptTooLong,
    QueueFull,
    TokenOutOfVocabulary,
)
from trtmesh.chassis.parsing import ELEMENT_BYTES
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, KvCache, PromptTuning
from trtmesh.engine.backend import BackendInfo, Submission
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import FILTERS

MAX_LOGITS_BYTES = 2**30
"""Most bytes of logits of an item, and of those of all items' drafts: 2,000 rows of 128,000 ids in float32."""


def admit(item: Submission, info: BackendInfo) -> EndRule:
    """Returns the end rule of the item's sequences. Raises InvalidRequest or OutOfBlocks for an impossible item."""
    prompt_tokens = item.prompt_tokens
    _check_prompt(prompt_tokens, info)
    _check_retention(item.config.kv_cache)
    _check_ids(item, info.vocabulary_size)
    if item.config.beam_search.beam_width > 1:
        _check_beams(item.config, info)
    limit = _limit(item, info)
    _check_logits(item, limit, info)
    # An end id without a logit can neither come nor be banned.
    known = (*info.end_ids, *item.end_ids)
    end_ids = [token for token in known if token < info.vocabulary_size]
    return EndRule(item.config.stopping, end_ids, prompt_tokens, limit, item.stop_vocabulary)


def check_queue(item: Submission, info: BackendInfo, present: int, running: int) -> None:
    """Raises QueueFull without room for the item, InvalidField if there never is; `present` counts waiting and running
    sequences."""
    asked = max(len(item.keys), item.config.beam_search.beam_width)
    most = info.max_queue_size
    if asked > most + info.max_batch_size:
        # Beams were checked against the batch alone.
        limit = f"at most {most + info.max_batch_size}, the worker's sequences of a batch and of its queue"
        raise InvalidField.of("sampling.num_return_sequences", asked, limit)
    if present + asked > most + info.max_batch_size:
        waiting = max(0, present - running)
        raise QueueFull.of(
            most,
            f"{waiting} sequences wait and at most {most} may (limits.max_queue_size) beyond those with a place in the"
            " batch",
        )


def table_rows(asked: PromptTuning | None) -> int:
    """Number of prompt ids above the vocabulary with a meaning."""
    if asked is None or asked.embedding_table is None:
        return 0
    return (
        asked.embedding_table.shape[0] if asked.vocabulary_size is None else asked.vocabulary_size
    )


def _check_prompt(prompt_tokens: int, info: BackendInfo) -> None:
    if prompt_tokens < 1:
        raise PromptEmpty("the prompt has no tokens; send at least one")
    if prompt_tokens >= info.max_sequence_tokens:
        raise PromptTooLong(
            f"has {prompt_tokens} tokens, but with at least one new token a sequence has at most"
            f" {info.max_sequence_tokens}; shorten it",
            field="prompt",
            value=str(prompt_tokens),
            limit=f"below {info.max_sequence_tokens}",
        )
    longest = info.max_prompt_tokens
    if longest is not None and prompt_tokens > longest:
        raise PromptTooLong(
            f"has {prompt_tokens} tokens, but without chunked context it must fit a step, which has {longest}; shorten"
            " it, or raise the worker's batching.max_step_tokens or set its batching.chunked_context",
            field="prompt",
            value=str(prompt_tokens),
            limit=f"at most {longest}",
        )


def _check_retention(wishes: KvCache) -> None:
    for index, each in enumerate(wishes.token_ranges):
        if each.token_end is not None and each.token_end <= each.token_start:
            raise InvalidField.of(
                f"kv_cache.token_ranges[{index}].token_end",
                each.token_end,
                f"above token_start, {each.token_start}",
            )
    if wishes.decode_duration_ms is not None and wishes.decode_priority is None:
        raise InvalidField(
            "is set, but the priority whose duration it is is not set",
            field="kv_cache.decode_duration_ms",
            limit_field="kv_cache.decode_priority",
        )


def _check_ids(item: Submission, vocabulary_size: int) -> None:
    _check_prompt_ids(item, vocabulary_size)
    if item.config.output.prompt_log_probs and max(item.token_ids) >= vocabulary_size:
        raise InvalidField(
            "is set, but the prompt has ids of its embedding table, which have no log-probabilities; leave it out",
            field="output.prompt_log_probs",
        )
    for field, ids in _ids_of(item.config):
        highest = max(ids, default=0)
        if highest >= vocabulary_size:
            raise InvalidField.of(field, highest, f"below the vocabulary size, {vocabulary_size}")
    bias = len(item.config.sampling.embedding_bias)
    if bias not in (0, vocabulary_size):
        raise InvalidField(
            f"has {bias} values but must have one for each of the {vocabulary_size} ids of the vocabulary, or none",
            field="sampling.embedding_bias",
        )


def _check_prompt_ids(item: Submission, vocabulary_size: int) -> None:
    rows = table_rows(item.config.prompt_tuning)
    bound = vocabulary_size + rows
    if max(item.token_ids) < bound and min(item.token_ids) >= 0:
        return
    position, token = next(
        (position, token) for position, token in enumerate(item.token_ids) if not 0 <= token < bound
    )
    sizes = f"the vocabulary size, {vocabulary_size}"
    if rows:
        sizes = f"{bound}, the vocabulary size and the {rows} rows of the embedding table"
    raise TokenOutOfVocabulary(
        f"has id {token} at position {position} but ids must be below {sizes}",
        field="prompt.token_ids",
        value=str(token),
        limit=f"below {bound}",
    )


def _ids_of(config: GenerationConfig) -> list[tuple[str, Iterable[int]]]:
    """The token ids in the config, by field."""
    stopping, sampling = config.stopping, config.sampling
    found: list[tuple[str, Iterable[int]]] = []
    if stopping.end_id is not None:
        found.append(("stopping.end_id", (stopping.end_id,)))
    if sampling.top_p_reset_id is not None:
        found.append(("sampling.top_p_reset_id", (sampling.top_p_reset_id,)))
    found.append(("stopping.stop_token_ids", chain.from_iterable(stopping.stop_token_ids)))
    found.append(("stopping.bad_token_ids", chain.from_iterable(stopping.bad_token_ids)))
    if config.draft is not None:
        found.append(("draft.token_ids", config.draft.token_ids))
    bias_ids = chain.from_iterable(sampling.embedding_bias_token_ids)
    found.append(("sampling.embedding_bias_token_ids", bias_ids))
    return found


def _check_beams(config: GenerationConfig, info: BackendInfo) -> None:
    """Beam search ranks and draws nothing, and the output may change until the end."""
    width, sampling = config.beam_search.beam_width, config.sampling
    most = min(info.max_sequences_per_item, info.max_batch_size)
    if width > most:
        limit = f"at most {most}, the fewer of the worker's sequences of an item and of a batch"
        raise InvalidField.of("beam_search.beam_width", width, limit)
    drawing = [
        # Clients that send every field send values that change nothing.
        *((f"sampling.{name}", getattr(sampling, name), FILTERS[name]) for name in FILTERS),
        ("output.normalize_log_probs", config.output.normalize_log_probs, (None, True)),
    ]
    for field, value, harmless in drawing:
        if value not in harmless:
            raise InvalidField(
                f"is {value!r} with a beam width of {width}, but beams are ranked, not drawn; leave it unset",
                field=field,
                value=repr(value),
                limit_field="beam_search.beam_width",
            )


def _limit(item: Submission, info: BackendInfo) -> int:
    """Most tokens of each sequence, prompt included."""
    prompt_tokens, beams = item.prompt_tokens, item.config.beam_search.beam_width
    capacity = _capacity(prompt_tokens, beams, info)
    max_tokens = item.config.stopping.max_tokens
    longest = info.max_sequence_tokens
    if max_tokens is None:
        limit = min(longest, capacity)
        wanted = prompt_tokens + 1
    else:
        limit = wanted = min(longest, prompt_tokens + max_tokens)
    if wanted > capacity:
        shared = _shared_blocks(prompt_tokens, beams, info)
        # The last token's KV is never computed.
        blocks = -(-(wanted - 1) // info.tokens_per_block)
        needed = shared + beams * (blocks - shared)
        new = f"{wanted - prompt_tokens} new ones" + (
            f" in each of {beams} beams" if beams > 1 else ""
        )
        raise OutOfBlocks(
            f"a sequence of {prompt_tokens} prompt tokens and {new} needs {needed} KV blocks, but the pool has"
            f" {info.total_blocks}",
            value=str(needed),
            limit=f"at most {info.total_blocks}",
        )
    return limit


def _capacity(prompt_tokens: int, beams: int, info: BackendInfo) -> int:
    """Most tokens of each beam with the pool to the item alone; without beam search, of each sequence."""
    if not info.total_blocks:
        return info.max_sequence_tokens
    shared = _shared_blocks(prompt_tokens, beams, info)
    # The last token's KV is never needed, so full blocks hold one token more.
    return (shared + (info.total_blocks - shared) // beams) * info.tokens_per_block + 1


def _shared_blocks(prompt_tokens: int, beams: int, info: BackendInfo) -> int:
    """Beams share the prompt's full blocks except the last, computed by each beam for the logits."""
    return (prompt_tokens - 1) // info.tokens_per_block if beams > 1 else 0


def _check_logits(item: Submission, limit: int, info: BackendInfo) -> None:
    output, most = item.config.output, MAX_LOGITS_BYTES
    row_bytes = info.vocabulary_size * ELEMENT_BYTES[output.logits_data_type or pb.DATA_TYPE_FP32]
    wanted = []
    if output.context_logits:
        wanted.append(("output.context_logits", item.prompt_tokens, "shorten the prompt"))
    if output.generation_logits:
        # Beam search keeps the logits of all beams until its end, however few come back.
        sequences = max(len(item.keys), item.config.beam_search.beam_width)
        rows = (limit - item.prompt_tokens) * sequences
        wanted.append(("output.generation_logits", rows, "ask for fewer tokens"))
    for field, rows, remedy in wanted:
        if rows * row_bytes > most:
            raise InvalidField(
                f"of {rows} tokens over {info.vocabulary_size} ids takes {rows * row_bytes} bytes but must take at"
                f" most {most}; {remedy} or for a smaller data type",
                field=field,
                value=str(rows * row_bytes),
                limit=f"at most {most} bytes",
            )
