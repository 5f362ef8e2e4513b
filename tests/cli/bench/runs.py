"""Runs of known answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from trtmesh.tools.bench.record import Answer, AnswerOutcome, Header, Load, Run

HEADER = Header(
    target="grpc://127.0.0.1:8001",
    protocol="grpc",
    load=Load("closed", concurrency=4),
    workload="known answers",
    seed=7,
)


def answer(index: int, arrivals_s: Sequence[float], **fields: Any) -> Answer:
    """An answer of one token a chunk, sent and planned at 0 unless `fields` say otherwise."""
    planned = fields.pop("planned_s", 0.0)
    tokens = fields.pop("tokens", (1,) * len(arrivals_s))
    known: dict[str, Any] = {
        "batch_index": 0,
        "request_id": str(index),
        "sent_s": planned,
        "ended_s": arrivals_s[-1] if arrivals_s else planned,
        "outcome": AnswerOutcome.OK,
        "output_tokens": sum(tokens),
        "prompt_tokens": 8,
        "text_sha256": f"text {index}",
    }
    return Answer(
        index=index,
        planned_s=planned,
        arrivals_s=tuple(arrivals_s),
        tokens=tuple(tokens),
        **(known | fields),
    )


def drawn(seed: int, answers: int = 200, slower: float = 1.0, tokens: int = 8) -> Run:
    """Prompts whose own cost is the same in every run, each answer with noise of its own; one after the other."""
    noise, now, found = random.Random(seed), 0.0, []
    for index in range(answers):
        cost = random.Random(index).uniform(0.5, 2.0) * slower
        first = now + 0.1 * cost * noise.lognormvariate(0, 0.3)
        arrivals = [first]
        for _ in range(tokens - 1):
            arrivals.append(arrivals[-1] + 0.01 * cost * noise.lognormvariate(0, 0.3))
        found.append(answer(index, arrivals, planned_s=now))
        now = arrivals[-1]
    return Run(HEADER, tuple(found))
