"""Whether an item can be taken: all that is asked of it before the engine sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from trtmesh.chassis.errors import (
    InvalidField,
    OutOfBlocks,
    PromptEmpty,
    PromptTooLong,
    TokenOutOfVocabulary,
)
from trtmesh.chassis.parsing import ELEMENT_BYTES, refuse_unsupported
from trtmesh.chassis.vocabulary import GenerationConfig, KvCache, PromptTuning
from trtmesh.engine.backend import BackendInfo, Submission
from trtmesh.engine.backends.torch.stopping import EndRule
from trtmesh.v1 import generation_pb2 as pb


def admit(
    item: Submission, info: BackendInfo, *, max_logits_bytes: int, longest_prompt: int | None
) -> EndRule:
    """When the item's sequences end; `longest_prompt` is that of a step, if a step bounds it.

    Raises InvalidRequest, UnsupportedField or OutOfBlocks.
    """
    refuse_unsupported(item.config, info.supported_fields, "the torch backend")
    prompt_tokens = len(item.token_ids) - item.emitted_tokens
    if prompt_tokens < 1:
        raise PromptEmpty("the prompt has no tokens; send at least one")
    if prompt_tokens >= info.max_sequence_tokens:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens, but with at least one new token a sequence has at most"
            f" {info.max_sequence_tokens}; shorten the prompt"
        )
    if longest_prompt is not None and prompt_tokens > longest_prompt:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens, but without chunked context it must fit a step, which has"
            f" {longest_prompt}; shorten it, or raise the worker's max_step_tokens or set its chunked_context"
        )
    _check_retention(item.config.kv_cache)
    _check_ids(item, info.vocabulary_size)
    if item.config.beam_search.beam_width > 1:
        _check_beams(item, info)
    if len(item.keys) > info.max_sequences_per_item:
        most = f"at most {info.max_sequences_per_item}"
        raise InvalidField.of("sampling.num_return_sequences", len(item.keys), most)
    limit = _limit(item, prompt_tokens, info)
    _check_logits(item, prompt_tokens, limit, info.vocabulary_size, max_logits_bytes)
    # An end id that the model has no logit for can neither come nor be held back.
    end_ids = [token for token in info.end_ids if token < info.vocabulary_size]
    return EndRule(item.config.stopping, end_ids, prompt_tokens, limit)


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
            "kv_cache.decode_duration_ms is set without kv_cache.decode_priority; it is how long that holds"
        )


def _check_ids(item: Submission, vocabulary_size: int) -> None:
    rows = table_rows(item.config.prompt_tuning)
    bound = vocabulary_size + rows
    if max(item.token_ids) >= bound or min(item.token_ids) < 0:
        position, token = next(
            (position, token)
            for position, token in enumerate(item.token_ids)
            if not 0 <= token < bound
        )
        sizes = f"the vocabulary size, {vocabulary_size}"
        if rows:
            sizes = (
                f"{bound}, the vocabulary size and the {rows} rows of prompt_tuning.embedding_table"
            )
        raise TokenOutOfVocabulary(
            f"token id {token} at position {position} of the prompt is not below {sizes}"
        )
    if item.config.output.prompt_log_probs and max(item.token_ids) >= vocabulary_size:
        raise InvalidField(
            "output.prompt_log_probs is asked for, but the prompt has ids of prompt_tuning.embedding_table, which have"
            " no log-probabilities; leave it out"
        )
    for name, ids in _ids_of(item.config):
        highest = max(ids, default=0)
        if highest >= vocabulary_size:
            limit = f"below the vocabulary size, {vocabulary_size}"
            raise InvalidField.of(name, highest, limit)
    bias = len(item.config.sampling.embedding_bias)
    if bias not in (0, vocabulary_size):
        raise InvalidField(
            f"sampling.embedding_bias has {bias} values but must have one for each of the {vocabulary_size} ids of"
            " the vocabulary, or none"
        )


def _ids_of(config: GenerationConfig) -> Iterator[tuple[str, Iterable[int]]]:
    """Ids that the config speaks of, by the field that has them."""
    stopping, sampling = config.stopping, config.sampling
    if stopping.end_id is not None:
        yield "stopping.end_id", (stopping.end_id,)
    if sampling.top_p_reset_id is not None:
        yield "sampling.top_p_reset_id", (sampling.top_p_reset_id,)
    yield "stopping.stop_token_ids", chain.from_iterable(stopping.stop_token_ids)
    yield "stopping.bad_token_ids", chain.from_iterable(stopping.bad_token_ids)
    bias_ids = chain.from_iterable(sampling.embedding_bias_token_ids)
    yield "sampling.embedding_bias_token_ids", bias_ids


def table_rows(asked: PromptTuning | None) -> int:
    """How many ids after the vocabulary mean something in the prompt."""
    if asked is None or asked.embedding_table is None:
        return 0
    return (
        asked.embedding_table.shape[0] if asked.vocabulary_size is None else asked.vocabulary_size
    )


def _check_logits(
    item: Submission, prompt_tokens: int, limit: int, vocabulary_size: int, most_bytes: int
) -> None:
    output = item.config.output
    row_bytes = vocabulary_size * ELEMENT_BYTES[output.logits_data_type or pb.DATA_TYPE_FP32]
    wanted = []
    if output.context_logits:
        wanted.append(("output.context_logits", prompt_tokens, "shorten the prompt"))
    if output.generation_logits:
        # A search has them of all its beams until it is over, whichever come back then.
        rows = (limit - prompt_tokens) * max(len(item.keys), item.config.beam_search.beam_width)
        wanted.append(("output.generation_logits", rows, "lower stopping.max_tokens"))
    for name, rows, remedy in wanted:
        if rows * row_bytes > most_bytes:
            raise InvalidField(
                f"{name} of {rows} tokens over {vocabulary_size} ids come to {rows * row_bytes} bytes but must be at"
                f" most {most_bytes} (max_logits_bytes); {remedy} or ask for a smaller output.logits_data_type"
            )


def _check_beams(item: Submission, info: BackendInfo) -> None:
    """A search chooses by rank and draws nothing, and what it tells may change until it is over."""
    config, width = item.config, item.config.beam_search.beam_width
    sampling, output = config.sampling, config.output
    most = min(info.max_sequences_per_item, info.max_batch_size)
    if width > most:
        limit = f"at most {most}, the fewer of the worker's sequences of an item and of a batch"
        raise InvalidField.of("beam_search.beam_width", width, limit)
    drawing = (
        # Values that forbid or change nothing are sent by clients that send every field.
        ("sampling.top_k", sampling.top_k, (None, 0, 1)),
        ("sampling.top_p", sampling.top_p, (None, 0, 1)),
        ("sampling.min_p", sampling.min_p, (None, 0)),
        ("sampling.top_p_min", sampling.top_p_min, (None,)),
        ("sampling.top_p_decay", sampling.top_p_decay, (None, 1)),
        ("sampling.top_p_reset_id", sampling.top_p_reset_id, (None,)),
        ("output.normalize_log_probs", output.normalize_log_probs, (None, True)),
    )
    for name, value, harmless in drawing:
        if value not in harmless:
            raise InvalidField(
                f"{name} is {value!r}, which means nothing with beam_search.beam_width {width}: beams are ranked, not"
                " drawn; leave it unset"
            )


def _limit(item: Submission, prompt_tokens: int, info: BackendInfo) -> int:
    """Most tokens of each sequence, prompt included."""
    capacity = _capacity(prompt_tokens, item.config.beam_search.beam_width, info)
    max_tokens = item.config.stopping.max_tokens
    longest = info.max_sequence_tokens
    if max_tokens is None:
        limit = min(longest, capacity)
        wanted = prompt_tokens + 1
    else:
        limit = wanted = min(longest, prompt_tokens + max_tokens)
    if wanted > capacity:
        new = f"{wanted - prompt_tokens} new ones"
        blocks = f"needs {-(-(wanted - 1) // info.tokens_per_block)} KV blocks"
        if item.config.beam_search.beam_width > 1:
            blocks = f"in each of {item.config.beam_search.beam_width} beams needs more KV blocks"
        raise OutOfBlocks(
            f"a sequence of {prompt_tokens} prompt tokens and {new} {blocks}, but the pool has {info.total_blocks}"
        )
    return limit


def _capacity(prompt_tokens: int, beams: int, info: BackendInfo) -> int:
    """Most tokens of each of an item's beams if it has the pool to itself; a sequence on its own is one beam."""
    size = info.tokens_per_block
    # Whole blocks of the prompt are shared, but for the last, which each computes for its logits.
    shared = (prompt_tokens - 1) // size if beams > 1 else 0
    # The last token's KV is never needed, so full blocks hold one token more.
    return (shared + (info.total_blocks - shared) // beams) * size + 1
