"""Translates an item into one call of the library."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from trtmesh.chassis.errors import HandoffFailed, InvalidField, InvalidRequest, UnsupportedField
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, GuidedDecoding, IdSequence
from trtmesh.engine import admission
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.tensorrt_llm.fields import PLAIN
from trtmesh.engine.backends.tensorrt_llm.handoff import context_params, generation_params
from trtmesh.engine.backends.tensorrt_llm.library import Library
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings
from trtmesh.engine.guides import check_new, plain
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import FILTERS

MAX_SALT_BYTES = 256
"""As in releases from 1.3 on, which check it late."""
NO_END_ID = -1
LOGIT_BYTES = 4
DEFAULT_PRIORITY = 35
"""Retention of blocks without a wish."""

_DRAWS = {"sampling.temperature": 1.0, "sampling.top_k": 0, "sampling.top_p": 1.0}
"""Values for sampled items: unset together they mean greedy to the library, and an unset top_p may."""

_GUIDES: Mapping[int, str] = {
    pb.GUIDE_TYPE_JSON_SCHEMA: "json",
    pb.GUIDE_TYPE_REGEX: "regex",
    pb.GUIDE_TYPE_EBNF_GRAMMAR: "grammar",
    pb.GUIDE_TYPE_STRUCTURAL_TAG: "structural_tag",
}


class Reading(Enum):
    """How the results of a call become output."""

    STREAMED = auto()
    """Tokens are added as they come."""
    WHOLE = auto()
    """Everything comes with the end: logits, and the best of several sequences."""
    BEAMS = auto()
    """Any token may change until the end."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as the library takes it."""

    name: str
    number: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of `generate_async`, and how its results are read."""

    arguments: dict[str, Any]
    reading: Reading
    shares_output: bool
    """Whether one output serves all sequences: greedy ones are equal, and the library refuses several."""


class Translator:
    """Makes calls for the items of a worker."""

    def __init__(
        self, library: Library, vocabulary_size: int, settings: TensorRtLlmSettings
    ) -> None:
        self._library = library
        self._computes_context_alone = not settings.overlaps
        self._max_beam_width = settings.limits.max_beam_width
        self._vocabulary_size = vocabulary_size

    def call(self, item: Submission, rule: EndRule, adapter: AdapterFiles | None) -> Call:
        """Raises InvalidRequest or UnsupportedField for what the library cannot do."""
        try:
            return self._call(item, rule, adapter)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the library refuses the request: {error}") from error

    def _call(self, item: Submission, rule: EndRule, adapter: AdapterFiles | None) -> Call:
        config = item.config
        width, widest = config.beam_search.beam_width, self._max_beam_width
        if width > widest:
            limit = f"at most {widest}"
            raise InvalidField.of("beam_search.beam_width", width, limit, "limits.max_beam_width")
        if config.output.prompt_log_probs:
            self._check_logits(item)
        if not item.handoff_state:
            # The library's own handoff brings its grammar past the first token.
            check_new(config.guided_decoding, item.emitted_tokens)
        reading = Reading.WHOLE if item.sender_lease_id else _reading(config)
        shares_output = config.beam_search.beam_width == 1 and config.sampling.greedy
        # The last token of a handed-over item is its first token here, which another worker chose.
        prompt = item.token_ids[:-1] if item.handoff_state else item.token_ids
        arguments: dict[str, Any] = {
            "inputs": {"prompt_token_ids": list(prompt)},
            "sampling_params": self._sampling(item, rule, shares_output=shares_output),
            "streaming": reading is not Reading.WHOLE,
        }
        if item.sender_lease_id:
            arguments["disaggregated_params"] = self._context_half(item)
        if item.handoff_state:
            arguments["disaggregated_params"] = generation_params(
                item.handoff_state, item.token_ids[-1], self._library
            )
        if adapter:
            arguments["lora_request"] = self._library.adapter(
                adapter.name, adapter.number, adapter.directory
            )
        if salt := _salt(config):
            arguments["cache_salt"] = salt
        if retention := self._retention(config):
            arguments["kv_cache_retention_config"] = retention
        if "priority" in config.fields_set:
            arguments["priority"] = 0.5 + max(-100, min(config.priority, 100)) / 200
        return Call(arguments, reading, shares_output)

    def _check_logits(self, item: Submission) -> None:
        """The library makes log-probabilities of the prompt from all its logits, in FP32 whatever is asked."""
        rows, most = item.prompt_tokens, admission.MAX_LOGITS_BYTES
        if (size := rows * self._vocabulary_size * LOGIT_BYTES) > most:
            raise InvalidField(
                f"of {rows} tokens over {self._vocabulary_size} ids takes {size} bytes of logits but must take at most"
                f" {most}; shorten the prompt",
                field="output.prompt_log_probs",
                value=str(size),
                limit=f"at most {most} bytes",
            )

    def _context_half(self, item: Submission) -> Any:
        if not self._computes_context_alone:
            raise HandoffFailed(
                "the library hands no prompt over while it overlaps steps; set disable_overlap_scheduler in"
                " engine.tensorrt_llm.options"
                " on workers that compute prompts for others"
            )
        return context_params(item.sender_lease_id, self._library)

    def _sampling(self, item: Submission, rule: EndRule, *, shares_output: bool) -> Any:
        config = item.config
        words = self._stop_words(item, rule)
        bad = self._bad_words(config)
        values = {
            **self._ends(item, rule, words),
            **_plain(config),
            **_penalised(item),
            **_counts(item, shares_output=shares_output),
            **_outputs(config),
            "detokenize": False,
        }
        if singles := [word[0] for word in bad if len(word) == 1]:
            values["bad_token_ids"] = singles
        bias = self._bias(config)
        if bias is not None:
            values["embedding_bias"] = bias
        if not config.sampling.greedy and config.beam_search.beam_width == 1:
            values["seed"] = _seed(item)
        if config.guided_decoding:
            values["guided_decoding"] = self._guide(config.guided_decoding)
        return self._library.sampling(
            values,
            [word for word in words if len(word) > 1],
            [word for word in bad if len(word) > 1],
        )

    def _ends(self, item: Submission, rule: EndRule, words: list[IdSequence]) -> dict[str, Any]:
        """Where the library ends; the worker applies the same rule to what it delivers."""
        stopping = item.config.stopping
        end_ids = sorted(rule.end_ids)
        open_tokens = max(0, stopping.min_tokens - item.emitted_tokens)
        # The library counts a handed-over token.
        handed_over = 1 if item.handoff_state else 0
        values: dict[str, Any] = {
            "max_tokens": rule.limit - len(item.token_ids) + handed_over,
            "end_id": end_ids[0] if end_ids else NO_END_ID,
            "ignore_eos": not end_ids,
        }
        if open_tokens:
            values["min_tokens"] = open_tokens + handed_over
        # The library bans its one end id below min_tokens, but would stop at the others.
        others = [] if open_tokens else end_ids[1:]
        if singles := [*others, *(word[0] for word in words if len(word) == 1)]:
            values["stop_token_ids"] = singles
        if words or singles:
            values["include_stop_str_in_output"] = True
        return values

    def _stop_words(self, item: Submission, rule: EndRule) -> list[IdSequence]:
        """The stop words for the library. It knows no minimum for them and may find the beginning of one in the prompt:
        then the worker alone looks for it, and aborts."""
        stopping, beams = item.config.stopping, item.config.beam_search.beam_width > 1
        words = list(dict.fromkeys(stopping.stop_token_ids))
        too_early = stopping.min_tokens > item.emitted_tokens
        if beams and words and too_early:
            raise UnsupportedField(
                "are not supported together by TensorRT-LLM in a beam search; leave one out",
                fields=("stopping.stop_token_ids", "stopping.min_tokens"),
            )
        if beams and not self._library.takes_stop_ids and any(len(word) > 1 for word in words):
            raise UnsupportedField(
                f"has words of several ids, which TensorRT-LLM {self._library.release} does not take in a beam search",
                field="stopping.stop_token_ids",
            )
        if too_early:
            return []
        return [
            word
            for word in words
            if len(word) == 1
            or beams
            or (self._library.takes_stop_ids and not _begins_in(item.token_ids, word))
        ]

    def _bad_words(self, config: GenerationConfig) -> list[IdSequence]:
        words = list(dict.fromkeys(config.stopping.bad_token_ids))
        if not self._library.takes_bad_ids and any(len(word) > 1 for word in words):
            raise UnsupportedField(
                f"has words of several ids, of which TensorRT-LLM {self._library.release} takes none; send words of one"
                " id",
                field="stopping.bad_token_ids",
            )
        return words

    def _bias(self, config: GenerationConfig) -> Any:
        sampling = config.sampling
        if not sampling.embedding_bias and not sampling.embedding_bias_token_ids:
            return None
        given = sampling.embedding_bias
        bias = np.array(given or np.zeros(self._vocabulary_size), dtype=np.float32)
        weights = sampling.embedding_bias_weights
        for ids, weight in zip(sampling.embedding_bias_token_ids, weights, strict=True):
            for token in ids:
                bias[token] += weight
        return bias

    def _guide(self, asked: GuidedDecoding) -> Any:
        asked = plain(asked)
        if asked.guide_type == pb.GUIDE_TYPE_JSON:
            return self._library.guide(json_object=True)
        return self._library.guide(**{_GUIDES[asked.guide_type]: asked.guide})

    def _retention(self, config: GenerationConfig) -> Any:
        wishes = config.kv_cache
        if not wishes.token_ranges and wishes.decode_priority is None:
            return None
        ranges = [
            (each.token_start, each.token_end, each.priority, each.duration_ms)
            for each in wishes.token_ranges
        ]
        priority = DEFAULT_PRIORITY if wishes.decode_priority is None else wishes.decode_priority
        return self._library.retention(ranges, priority, wishes.decode_duration_ms)


def _reading(config: GenerationConfig) -> Reading:
    output, sampling = config.output, config.sampling
    logits = output.generation_logits or output.context_logits or output.prompt_log_probs
    if logits or (sampling.best_of or 1) > config.sequences:
        return Reading.WHOLE
    return Reading.BEAMS if config.beam_search.beam_width > 1 else Reading.STREAMED


def _plain(config: GenerationConfig) -> dict[str, Any]:
    """The values that the library takes as they are."""
    sampling, beams = config.sampling, config.beam_search.beam_width > 1
    # Harmless values of filters were admitted with beams, which are ranked, not drawn.
    left_out = {f"sampling.{name}" for name in FILTERS} if beams else set[str]()
    values = {
        PLAIN[path]: value
        for path in sorted((config.fields_set & PLAIN.keys()) - left_out)
        if (value := _value(config, path)) is not None
    }
    if beams:
        return values | _beams(config)
    if sampling.greedy:
        given = [values.pop(PLAIN[path], None) for path in _DRAWS]
        return values | ({"top_k": 1} if any(each is not None for each in given) else {})
    defaults = {PLAIN[path]: value for path, value in _DRAWS.items()}
    return {**defaults, **values}


def _penalised(item: Submission) -> dict[str, int]:
    """The library counts the whole prompt unless told not to."""
    sampling = item.config.sampling
    if not (sampling.presence_penalty or sampling.frequency_penalty):
        return {}
    return {"prompt_ignore_length": sampling.ignored_prompt(item.prompt_tokens)}


def _value(config: GenerationConfig, path: str) -> Any:
    group, name = path.split(".")
    return getattr(getattr(config, group), name)


def _beams(config: GenerationConfig) -> dict[str, Any]:
    asked = config.beam_search
    values = {
        "use_beam_search": True,
        "length_penalty": asked.length_penalty,
        "beam_search_diversity_rate": asked.diversity_rate,
        # Triton's numbers, one below the enumeration's.
        "early_stopping": asked.early_stopping - 1 if asked.early_stopping else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _counts(item: Submission, *, shares_output: bool) -> dict[str, int]:
    """How many sequences are computed, and how many come back."""
    if shares_output:
        return {"n": 1}
    config, count = item.config, len(item.keys)
    if config.beam_search.beam_width > 1:
        return {"n": count, "best_of": config.beam_search.beam_width}
    best_of = config.sampling.best_of
    return {"n": count, "best_of": best_of} if best_of and best_of > count else {"n": count}


def _outputs(config: GenerationConfig) -> dict[str, Any]:
    output = config.output
    values: dict[str, Any] = {}
    if output.log_probs or output.top_log_probs:
        # 0 would mean none, also of the token itself.
        values["logprobs"] = max(1, output.top_log_probs)
    if output.context_logits or output.prompt_log_probs:
        values["return_context_logits"] = True
    if output.generation_logits:
        values["return_generation_logits"] = True
    if output.perf_metrics:
        values["return_perf_metrics"] = True
    return values


def _salt(config: GenerationConfig) -> str:
    """Blocks with a salt of their own are shared with nobody: the library cannot switch reuse off for one request, and
    leaves out the logits of reused tokens."""
    salt, output = config.kv_cache.salt or "", config.output
    size = len(salt.encode())
    if size > MAX_SALT_BYTES:
        raise InvalidField.of("kv_cache.salt", f"{size} bytes", f"at most {MAX_SALT_BYTES} bytes")
    if not config.kv_cache.reuse or output.context_logits or output.prompt_log_probs:
        return secrets.token_hex(16)
    return salt


def _seed(item: Submission) -> int:
    """The seed of the item's draws: that of the request for its first item, and another for each other item and for a
    continuation, whose draws the library numbers from 0 again."""
    seed = item.config.sampling.seed or 0
    place = (item.batch_index, item.sequence_index, item.emitted_tokens)
    if place == (0, 0, 0):
        return seed
    digest = blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _begins_in(prompt: Any, word: IdSequence) -> bool:
    """Whether the end of a prompt is a beginning of the word."""
    tail = tuple(prompt[-len(word) + 1 :])
    return any(tail[-size:] == word[:size] for size in range(1, min(len(word), len(tail) + 1)))
