"""What is measured of each answer, and how it is defined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trtmesh.tools.bench.record import Answer

STALL_MS = 1000.0
"""A longer gap is a stall."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of which each answer has a value, several or none; all together are its distribution."""

    tag: str
    """aiperf's, where it has the figure."""
    name: str
    unit: str
    definition: str
    of: Callable[[Answer], Sequence[float]]
    larger_is_better: bool = False


def first_token_ms(answer: Answer) -> Sequence[float]:
    return [1000 * (at - answer.planned_s) for at in answer.arrivals_s[:1]]


def second_token_ms(answer: Answer) -> Sequence[float]:
    return gaps_ms(answer)[:1]


def latency_ms(answer: Answer) -> Sequence[float]:
    """End to end, to the last token; to the end of an answer without content."""
    last = answer.arrivals_s[-1] if answer.arrivals_s else answer.ended_s
    return [1000 * (last - answer.planned_s)]


def decode_ms(answer: Answer) -> float:
    """From the first token to the last."""
    return 1000 * (answer.arrivals_s[-1] - answer.arrivals_s[0])


def tpot_ms(answer: Answer) -> Sequence[float]:
    tokens = answer.output_tokens or 0
    return [decode_ms(answer) / (tokens - 1)] if answer.arrivals_s and tokens > 1 else []


def itl_ms(answer: Answer) -> Sequence[float]:
    """A first chunk of unknown size counts as one token, as in aiperf."""
    if not answer.arrivals_s or answer.output_tokens is None:
        return []
    later = answer.output_tokens - (answer.tokens[0] or 1)
    return [decode_ms(answer) / later] if later > 0 and len(answer.arrivals_s) > 1 else []


def gaps_ms(answer: Answer) -> Sequence[float]:
    return [1000 * (after - before) for before, after in pairwise(answer.arrivals_s)]


def longest_gap_ms(answer: Answer) -> Sequence[float]:
    return [max(gaps)] if (gaps := gaps_ms(answer)) else []


def normalized_ms(answer: Answer) -> Sequence[float]:
    return [latency_ms(answer)[0] / answer.output_tokens] if answer.output_tokens else []


def chunk_tokens(answer: Answer) -> Sequence[float]:
    if not answer.output_tokens or not answer.arrivals_s:
        return []
    return [answer.output_tokens / len(answer.arrivals_s)]


def user_tokens_per_s(answer: Answer) -> Sequence[float]:
    return [1000 / each for each in itl_ms(answer) if each > 0]


def duration_s(answers: Sequence[Answer]) -> float:
    """From the first send to the last end."""
    if not answers:
        return 0.0
    return max(each.ended_s for each in answers) - min(each.sent_s for each in answers)


def _if_known(count: int | None) -> Sequence[float]:
    return [] if count is None else [count]


# fmt: off
TTFT = Measure("time_to_first_token", "TTFT", "ms", "first chunk with content minus planned time", first_token_ms)
E2E = Measure("request_latency", "E2E", "ms", "last chunk with content minus planned time", latency_ms)
TPOT = Measure(
    "time_per_output_token", "TPOT", "ms",
    "(E2E - TTFT) / (output tokens - 1) of each answer; answers of one token are left out", tpot_ms)
ITL = Measure(
    "inter_token_latency", "ITL", "ms",
    "(E2E - TTFT) / (output tokens - tokens of the first chunk) of each answer", itl_ms)
GAP = Measure(
    "inter_chunk_latency", "gap", "ms",
    "time between neighbouring chunks, the gaps of all answers together (vLLM's ITL)", gaps_ms)
LONGEST_GAP = Measure("longest_gap", "longest gap", "ms", "longest gap of each answer", longest_gap_ms)

MEASURES: Sequence[Measure] = (
    TTFT,
    Measure(
        "time_to_second_token", "second token", "ms", "second chunk with content minus the first", second_token_ms),
    E2E,
    TPOT,
    ITL,
    GAP,
    LONGEST_GAP,
    Measure(
        "normalized_time_per_output_token", "normalized", "ms", "E2E / output tokens of each answer", normalized_ms),
    Measure(
        "output_token_throughput_per_user", "per user", "tokens/sec/user", "1 / ITL of each answer",
        user_tokens_per_s, larger_is_better=True),
    Measure(
        "tokens_per_chunk", "tokens per chunk", "tokens", "output tokens / chunks with content of each answer",
        chunk_tokens, larger_is_better=True),
    Measure(
        "input_sequence_length", "input", "tokens", "prompt tokens of each answer",
        lambda each: _if_known(each.prompt_tokens)),
    Measure(
        "output_sequence_length", "output", "tokens", "output tokens of each answer",
        lambda each: _if_known(each.output_tokens)),
)
# fmt: on
