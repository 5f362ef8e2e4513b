"""What must hold between the answers to one case."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from compat.differential.cases import Case
from compat.differential.clients import BLS, CORE, Clients
from compat.differential.reference import NEAR, Reference
from compat.differential.results import Generated, Row, require

ENSEMBLE = "ensemble"


class Relations:
    """Asks for a case in every way and compares. Raises Disagreement."""

    def __init__(self, clients: Clients, reference: Reference) -> None:
        self._clients, self._reference = clients, reference

    async def check(self, case: Case) -> None:
        if case.is_text:
            await self._check_text(case)
        else:
            await self._check_ids(case)

    async def _check_text(self, case: Case) -> None:
        clients = self._clients
        whole = await clients.apart(ENSEMBLE, case)
        check_rows(case, whole)
        one, other = (ENSEMBLE, BLS) if case.number % 2 else (BLS, ENSEMBLE)
        apart, unary, streamed = await asyncio.gather(
            clients.apart(BLS, case), clients.unary(one, case), clients.streamed(other, case)
        )
        compare(case, whole, apart, BLS)
        compare(case, whole, unary, f"unary {one}")
        compare(case, whole, streamed, f"streamed {other}", without_prompt=True)
        await self._alone(BLS, case, whole)
        await self._beside_a_bad_row(ENSEMBLE, case, whole)
        await self._http(ENSEMBLE, case, whole)
        free = case.without("stop_words")
        core, rows = await clients.by_hand(free)
        await asyncio.to_thread(self._reference.check, core, rows)
        if free == case:
            compare(case, whole, rows, "by hand")
        elif not case.has_beams:
            check_cuts(case, whole, rows)

    async def _check_ids(self, case: Case) -> None:
        clients = self._clients
        whole = await clients.apart(CORE, case)
        check_rows(case, whole)
        unary, streamed = await asyncio.gather(
            clients.unary(CORE, case), clients.streamed(CORE, case)
        )
        compare(case, whole, unary, "unary")
        compare(case, whole, streamed, "streamed", without_prompt=True)
        await self._alone(CORE, case, whole)
        await self._beside_a_bad_row(CORE, case, whole)
        await self._http(CORE, case, whole)
        if not case.tables:
            await asyncio.to_thread(self._reference.check, case, whole)

    async def _beside_a_bad_row(self, model: str, case: Case, whole: Sequence[Row]) -> None:
        if case.number % 2:
            rows = await self._clients.beside_a_bad_row(model, case)
            compare(case, whole, rows, "beside a bad row")

    async def _alone(self, model: str, case: Case, whole: Sequence[Row]) -> None:
        if len(case.prompts) == 1:
            return
        for at in range(len(case.prompts)):
            alone = case.alone(at)
            compare(
                alone,
                whole[at : at + 1],
                await self._clients.unary(model, alone),
                f"row {at} alone",
            )

    async def _http(self, model: str, case: Case, whole: Sequence[Row]) -> None:
        if len(case.prompts) > 1 or case.tables:
            # JSON without shapes has no batch of lists and no tables.
            return
        # The logits of the prompt come in every event.
        if case.number % 2 or case.has_beams or "return_context_logits" in case.flags:
            await self._generated(model, case, whole[0])
        else:
            await self._generated_stream(model, case, whole[0])

    async def _generated(self, model: str, case: Case, row: Row) -> None:
        reply = await self._clients.generated(model, case)
        if case.is_text:
            same(listed(reply["text_output"]), [s.text for s in row.sequences], "HTTP text")
        else:
            longest = max(len(sequence.ids) for sequence in row.sequences)
            ids = [i for s in row.sequences for i in [*s.ids, *[-1] * (longest - len(s.ids))]]
            same(listed(reply["output_ids"]), ids, "HTTP ids")
        if "return_log_probs" in case.flags:
            sums = [sequence.cum_log_prob for sequence in row.sequences]
            close(listed(reply["cum_log_probs"]), sums, "HTTP cum_log_probs")

    async def _generated_stream(self, model: str, case: Case, row: Row) -> None:
        events = await self._clients.generated_stream(model, case)
        for index, sequence in enumerate(row.sequences):
            own = [event for event in events if event.get("sequence_index", 0) == index]
            if case.is_text:
                text = "".join(event["text_output"] for event in own)
                same(text, new_text(case, 0, sequence), "HTTP stream")
            else:
                ids = [i for event in own for i in listed(event["output_ids"])]
                same(ids, new_ids(case, 0, sequence), "HTTP stream")


def same(given: Any, expected: Any, what: str) -> None:
    require(given == expected, what, repr(given), "not", repr(expected))


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def new_text(case: Case, at: int, sequence: Generated) -> str:
    """The text of a whole output without the prompt."""
    prompt = case.prompts[at]
    assert isinstance(prompt, str)
    if case.rows[at].get("exclude_input_in_output"):
        return sequence.text
    require(sequence.text.startswith(prompt), "the text lacks the prompt:", repr(sequence.text))
    return sequence.text.removeprefix(prompt)


def new_ids(case: Case, at: int, sequence: Generated) -> list[int]:
    prompt = case.prompts[at]
    return (
        sequence.ids
        if case.rows[at].get("exclude_input_in_output")
        else sequence.ids[len(prompt) :]
    )


def check_rows(case: Case, rows: Sequence[Row]) -> None:
    """One answer by itself."""
    for at, row in enumerate(rows):
        if "return_log_probs" in case.flags:
            for sequence in row.sequences:
                close(
                    [sequence.cum_log_prob],
                    [sum(sequence.log_probs)],
                    "cum_log_probs against the sum",
                )
        if case.has_beams:
            check_beams(case, at, row)
        elif case.is_greedy:
            texts = {(sequence.text, tuple(sequence.ids)) for sequence in row.sequences}
            require(len(texts) == 1, "greedy sequences of one prompt differ:", texts)
        check_numbers(case, row)


def check_beams(case: Case, at: int, row: Row) -> None:
    if not case.is_text or "return_log_probs" in case.flags:
        told = {(s.text, tuple(s.ids), s.cum_log_prob, tuple(s.log_probs)) for s in row.sequences}
        require(len(told) == len(row.sequences), "beams are equal:", told)
    if "return_log_probs" in case.flags:
        penalty = case.rows[at].get("length_penalty", 0.0)
        scores = [
            (s.cum_log_prob or 0.0) / max(1, len(s.log_probs)) ** penalty for s in row.sequences
        ]
        require(all(a >= b - NEAR for a, b in pairwise(scores)), "beams are not sorted:", scores)


def check_numbers(case: Case, row: Row) -> None:
    numbers = row.numbers
    if "return_perf_metrics" not in case.flags:
        return
    names = (
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
    )
    times = [numbers[name] for name in names]
    require(times[0] > 0 and times == sorted(times), "times", times)
    require(numbers["kv_cache_alloc_total_blocks"] == numbers["kv_cache_alloc_new_blocks"], numbers)
    require(numbers["kv_cache_alloc_new_blocks"] + numbers["kv_cache_reused_blocks"] > 0, numbers)


def check_cuts(case: Case, cut: Sequence[Row], free: Sequence[Row]) -> None:
    """Each text is the text without stop words up to the end of the first. With min_tokens it may be that of a later
    one, as a text does not say where its tokens end, and is the whole text where it has no more tokens."""
    for at, (row, other) in enumerate(zip(cut, free, strict=True)):
        options = case.rows[at]
        least = options.get("min_tokens", 0)
        for sequence, endless in zip(row.sequences, other.sequences, strict=True):
            given, text = new_text(case, at, sequence), new_text(case, at, endless)
            ends = sorted(end for word in options["stop_words"] for end in ends_of(word, text))
            if least >= options["max_tokens"]:
                ends = []
            cuts = [text[:end] for end in ends]
            allowed = [*cuts, text] if least else [*cuts[:1], text][:1]
            require(given in allowed, "stopped at", repr(given), "not in", allowed)


def ends_of(word: str, text: str) -> Iterator[int]:
    return (at + len(word) for at in range(len(text)) if text.startswith(word, at))


def compare(
    case: Case,
    whole: Sequence[Row],
    rows: Sequence[Row],
    kind: str,
    *,
    without_prompt: bool = False,
) -> None:
    """Two answers to one case."""
    for at, (a, b) in enumerate(zip(whole, rows, strict=True)):
        for index, (one, other) in enumerate(zip(a.sequences, b.sequences, strict=True)):
            where = f"{kind}: row {at} sequence {index}:"
            text, ids = one.text, one.ids
            if without_prompt:
                text = new_text(case, at, one) if case.is_text else ""
                ids = ids if case.is_text else new_ids(case, at, one)
            require(
                text == other.text or not case.is_text, where, repr(other.text), "not", repr(text)
            )
            require(ids == other.ids or case.is_text, where, other.ids, "not", ids)
            close(other.log_probs, one.log_probs, f"{where} output_log_probs")
            if one.cum_log_prob is not None:
                close([other.cum_log_prob], [one.cum_log_prob], f"{where} cum_log_probs")
            if one.logits is not None:
                require(other.logits is not None, where, "generation_logits are missing")
                close(other.logits, one.logits, f"{where} generation_logits")
        if a.context_logits is not None:
            close(b.context_logits, a.context_logits, f"{kind}: row {at} context_logits")
        require(counts(a) == counts(b), kind, counts(b), "not", counts(a))


def counts(row: Row) -> tuple[int, int]:
    """Tokens of the prompt, and of all sequences."""
    apart = sum(sequence.tokens for sequence in row.sequences)
    return row.numbers.get("num_input_tokens", 0), apart or row.numbers.get("num_output_tokens", 0)


def close(given: Any, expected: Any, what: str) -> None:
    given, expected = np.asarray(given, float), np.asarray(expected, float)
    require(
        given.shape == expected.shape, what, "has the shape", given.shape, "not", expected.shape
    )
    worst = float(np.abs(given - expected).max(initial=0.0))
    require(worst < NEAR, what, "differs by", worst)
