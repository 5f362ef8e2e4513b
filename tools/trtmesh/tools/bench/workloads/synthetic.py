"""Workloads of seeded distributions, and what any workload can be given: adapters and schemas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import orjson
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.bench.record import Plan
from trtmesh.tools.bench.workloads.files import read_whole
from trtmesh.tools.bench.workloads.lengths import TokenLengths
from trtmesh.tools.bench.workloads.rows import Part, Row
from trtmesh.tools.records import as_json


def drawn_rows(
    seed: int,
    requests: int,
    lengths: TokenLengths,
    *,
    prefix_groups: int = 0,
    prefix_tokens: int = 0,
    turns: int = 1,
) -> list[Row]:
    """Requests whose own texts have these lengths. With `turns` they are sessions of so many; all of a group begin
    with the same text, of a session the first one."""

    def row(number: int) -> Row:
        session, turn = divmod(number, turns)
        parts = [Part(f"request {number}", lengths.draw(Random(f"{seed} input {number}")))]
        if prefix_groups and not turn:
            group = Random(f"{seed} group {session}").randrange(prefix_groups)
            parts.insert(0, Part(f"prefix {group}", prefix_tokens))
        return Row(
            f"request {number}",
            parts=tuple(parts),
            session=f"session {session}" if turns > 1 else "",
        )

    return [row(number) for number in range(requests)]


def with_adapters(
    plans: Sequence[Plan], adapters: Sequence[str], skew: float, seed: int
) -> Iterator[Plan]:
    """Each session, and each request outside one, with an adapter: the n-th has the share 1 / n**skew (Zipf)."""
    weights = [*accumulate(rank**-skew for rank in range(1, len(adapters) + 1))]
    for plan in plans:
        draw = Random(f"{seed} adapter {plan.session or plan.prompts[0].index}")
        yield _with(plan, adapter=draw.choices(adapters, cum_weights=weights)[0])


def with_schemas(plans: Sequence[Plan], schemas: Sequence[str]) -> Iterator[Plan]:
    """Each request with a schema, in turn."""
    for number, plan in enumerate(plans):
        yield _with(plan, json_schema=schemas[number % len(schemas)])


def _with(plan: Plan, **given: Any) -> Plan:
    return replace(plan, prompts=tuple(replace(each, **given) for each in plan.prompts))


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
