"""What a workload asks, before it is text: files and distributions give rows, and rows become plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.bench.record import Plan, Prompt
from trtmesh.tools.bench.workloads.lengths import TokenLengths
from trtmesh.tools.bench.workloads.words import Count, Words

MOST_TEXT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """Text to be drawn: equal keys give equal text, so that prefixes are really shared."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One request: a text, token ids, or parts in place of both."""

    where: str
    """File and line, for errors."""
    text: str = ""
    ids: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    output_tokens: int | None = None
    answer: str = ""
    """The recorded answer, whose length stands in for `output_tokens`."""
    at_s: float | None = None
    session: str = ""
    delay_s: float = 0.0
    adapter: str = ""


async def plans_of(
    rows: Sequence[Row],
    words: Words,
    *,
    seed: int,
    output_tokens: TokenLengths | None = None,
    count: Count | None = None,
) -> tuple[Plan, ...]:
    """The requests in order of time, numbered, the first at 0 s. `output_tokens` come before those of rows; `count`
    measures recorded answers. Raises InvalidRequest with file and line."""
    first = min((row.at_s for row in rows if row.at_s is not None), default=0.0)
    lengths = await _output_lengths(rows, seed, output_tokens, count)
    order = sorted(range(len(rows)), key=lambda place: rows[place].at_s or 0.0)
    turns, plans, size = Counter[str](), [], 0
    for index, place in enumerate(order):
        row = rows[place]
        text = row.text or _drawn(row, words, seed)
        if (size := size + len(text)) > MOST_TEXT_BYTES:
            raise InvalidRequest(
                f"the prompts up to here hold more than {MOST_TEXT_BYTES} bytes; send fewer (--requests)",
                field=row.where,
            )
        prompt = Prompt(
            index,
            text=None if row.ids else text,
            ids=row.ids,
            max_tokens=lengths[place],
            seed=Random(f"{seed} seed {index}").getrandbits(31),
            adapter=row.adapter,
            # The model of drawn text may end wherever it likes, and lengths are what is asked for.
            ignore_end_id=bool(row.parts),
        )
        planned = None if row.at_s is None else row.at_s - first
        plans.append(Plan((prompt,), planned, row.session, turns[row.session], row.delay_s))
        turns[row.session] += bool(row.session)
    return tuple(plans)


def _drawn(row: Row, words: Words, seed: int) -> str:
    """Special tokens belong to the length, so the first part is that much shorter."""
    texts, special = [], words.special
    for part in row.parts:
        tokens = max(1, part.tokens - special) if special else part.tokens
        texts.append(words.text(Random(f"{seed} {part.key}"), tokens))
        special = 0
    return " ".join(texts)


async def _output_lengths(
    rows: Sequence[Row], seed: int, asked: TokenLengths | None, count: Count | None
) -> list[int]:
    if asked:
        return [asked.draw(Random(f"{seed} output {place}")) for place in range(len(rows))]
    unknown = [row for row in rows if row.output_tokens is None]
    for row in unknown:
        if not row.answer or not count:
            why = "names no output length" if not row.answer else "has an answer of unknown length"
            remedy = " or --tokenizer" if row.answer else ""
            raise InvalidRequest(f"{why}; give --output-tokens{remedy}", field=row.where)
    counted = iter(await count([row.answer for row in unknown])) if count and unknown else iter(())
    return [max(1, next(counted) if (n := row.output_tokens) is None else n) for row in rows]
