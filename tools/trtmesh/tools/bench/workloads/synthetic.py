"""Workloads of seeded distributions, and what any workload can be given: adapters and schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random

import orjson
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.bench.record import Plan, Prompt
from trtmesh.tools.bench.workloads.files import read_whole
from trtmesh.tools.bench.workloads.lengths import TokenLengths
from trtmesh.tools.bench.workloads.rows import Part, Row
from trtmesh.tools.records import as_json


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests of drawn lengths. With `turns` they are sessions of so many requests each."""

    requests: int
    input_tokens: TokenLengths
    """Of each request's own text, without what it shares."""
    prefix_groups: int = 0
    prefix_tokens: int = 0
    """Of the text that all requests of a group begin with; of a session the first one."""
    turns: int = 1
    turn_delay_s: float = 0.0

    def rows(self, seed: int) -> list[Row]:
        return [self._row(seed, number) for number in range(self.requests)]

    def _row(self, seed: int, number: int) -> Row:
        session, turn = divmod(number, self.turns)
        length = self.input_tokens.draw(Random(f"{seed} input {number}"))
        parts = [Part(f"request {number}", length)]
        if self.prefix_groups and not turn:
            group = Random(f"{seed} group {session}").randrange(self.prefix_groups)
            parts.insert(0, Part(f"prefix {group}", self.prefix_tokens))
        return Row(
            f"request {number}",
            parts=tuple(parts),
            session=f"session {session}" if self.turns > 1 else "",
            delay_s=self.turn_delay_s if turn else 0.0,
        )


def with_adapters(
    plans: Sequence[Plan], adapters: Sequence[str], skew: float, seed: int
) -> tuple[Plan, ...]:
    """Each session, and each request outside one, with an adapter: the n-th has the share 1 / n**skew (Zipf)."""
    weights = [*accumulate(rank**-skew for rank in range(1, len(adapters) + 1))]

    def give(plan: Plan, prompt: Prompt) -> Prompt:
        draw = Random(f"{seed} adapter {plan.session or prompt.index}")
        return replace(prompt, adapter=draw.choices(adapters, cum_weights=weights)[0])

    return _each(plans, give)


def with_schemas(plans: Sequence[Plan], schemas: Sequence[str]) -> tuple[Plan, ...]:
    """Each prompt with a schema, in turn."""
    return _each(
        plans,
        lambda _, prompt: replace(prompt, json_schema=schemas[prompt.index % len(schemas)]),
    )


def _each(plans: Sequence[Plan], give: Callable[[Plan, Prompt], Prompt]) -> tuple[Plan, ...]:
    return tuple(
        replace(plan, prompts=tuple(give(plan, prompt) for prompt in plan.prompts))
        for plan in plans
    )


def read_schemas(path: Path) -> tuple[str, ...]:
    """A schema, or one a line in a file that ends in .jsonl. Raises InvalidRequest with file and line."""
    content = read_whole(path)
    by_line = path.suffix.lower() == ".jsonl"
    texts = [*enumerate(content.splitlines(), 1)] if by_line else [(1, content)]
    schemas = tuple(_schema(text, f"{path}:{number}") for number, text in texts if text.strip())
    if not schemas:
        raise InvalidRequest("has no schema", field=str(path))
    return schemas


def _schema(text: bytes, where: str) -> str:
    schema = as_json(where, text)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("is JSON, but no schema: it must be an object", field=where)
    return orjson.dumps(schema).decode()
