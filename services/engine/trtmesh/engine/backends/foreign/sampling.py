"""How sampling is said to an engine whose unset values do not mean what ours do: every value is always set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from trtmesh.chassis.errors import InvalidField, UnsupportedField
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling
from trtmesh.engine.backend import Submission

MOST_BIAS = 100.0
"""Largest bias of an id, either way: engines clamp or refuse others."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The filters of a draw, all of them; temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    """0 means off."""
    min_p: float

    @classmethod
    def of(cls, sampling: Sampling) -> Draws:
        if sampling.greedy:
            return cls(0.0, 1.0, 0, 0.0)
        asked = sampling.temperature
        return cls(
            1.0 if asked is None else asked,
            1.0 if sampling.top_p is None else sampling.top_p,
            sampling.top_k or 0,
            sampling.min_p or 0.0,
        )


def seed_of(item: Submission, sequence_index: int) -> int:
    """64 bits for the draws of one call. A migrated sequence must not repeat the draws of its first tokens; one that
    was handed over must, since the receiver draws the last of its tokens again."""
    drawn = item.emitted_tokens - bool(item.handoff_state)
    parts = (item.config.sampling.seed or 0, item.batch_index, sequence_index, drawn)
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def int32_of(seed: int) -> int:
    """A seed for contracts with 32 bits: not negative, which engines refuse."""
    return (seed ^ seed >> 32) & 0x7FFFFFFF


def bias_of(config: GenerationConfig) -> Mapping[int, float]:
    """The bias of each id. Raises UnsupportedField for sequences of ids, or InvalidField for a bias out of range."""
    sampling, bias = config.sampling, dict[int, float]()
    for ids, weight in zip(
        sampling.embedding_bias_token_ids, sampling.embedding_bias_weights, strict=True
    ):
        for token in ids:
            bias[token] = bias.get(token, 0.0) + weight
    for weight in bias.values():
        if not -MOST_BIAS <= weight <= MOST_BIAS:
            limit = f"from {-MOST_BIAS:g} to {MOST_BIAS:g} for each id on this engine"
            raise InvalidField.of("sampling.embedding_bias_weights", weight, limit)
    return bias


def check_counted(item: Submission) -> None:
    """Raises UnsupportedField for penalties that count the prompt, of engines that count generated tokens alone."""
    sampling = item.config.sampling
    ignored = sampling.ignored_prompt(item.prompt_tokens)
    if (sampling.presence_penalty or sampling.frequency_penalty) and ignored < item.prompt_tokens:
        raise UnsupportedField(
            f"is {sampling.prompt_ignore_length}, but the presence and frequency penalties of this engine count"
            f" generated tokens alone; send at least {item.prompt_tokens}, the length of the prompt",
            field="sampling.prompt_ignore_length",
            value=repr(sampling.prompt_ignore_length),
            limit=f"at least {item.prompt_tokens}",
        )


def bad_ids_of(config: GenerationConfig) -> tuple[int, ...]:
    """The banned ids. Raises UnsupportedField for a banned sequence of several."""
    words = config.stopping.bad_token_ids
    if any(len(word) != 1 for word in words):
        longest = max(words, key=len)
        raise UnsupportedField(
            f"has a word of {len(longest)} ids, but this engine bans single ids only; leave it out, or"
            " send ids as stopping.bad_token_ids",
            field="stopping.bad_token_ids",
            value=repr(longest),
        )
    return tuple(word[0] for word in words)


def banning(bias: Mapping[int, float], bad_ids: tuple[int, ...]) -> dict[int, float]:
    """Biases with the bans of an engine that has no other word for them."""
    return {**bias, **dict.fromkeys(bad_ids, -MOST_BIAS)}
