"""Rows whose masks take longer than their step has sit out, and all others go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine.torch.drafts.drafters import FixedLengths, Knowing, draft
from engine.torch.guided.guides import guided
from engine.torch.harness import configure, running
from oracle import tiny_models
from tokenizers import Tokenizer
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backends.torch.guided.grammars import (
    FIRST_SECONDS,
    SHARERS,
    Grammar,
    Grammars,
    Guide,
    GuideCounts,
    Matcher,
)
from trtmesh.engine.backends.torch.guided.guidance import compiler_for, filling_together
from trtmesh.engine.backends.torch.preparation import PartLease
from trtmesh.engine.backends.torch.sampling import mask_time
from trtmesh.engine.backends.torch.sampling.mask_time import STEP_SECONDS, MaskTime
from trtmesh.v1 import generation_pb2 as pb

PROMPT = [9, 40, 41, 42, 9, 43]


class Row:
    """A sequence whose masks take so many seconds each."""

    def __init__(self, key: int, seconds: float) -> None:
        self.key, self.took = key, seconds
        self.token_rules, self.tokens = SimpleNamespace(guided=True), list[int]()
        self.rule = SimpleNamespace(end_ids=())
        self.guide, self.problem = self, ""
        self.seconds, self.last_seconds = 0.0, FIRST_SECONDS

    def makes(self, _tokens: Sequence[int], _end_ids: Iterable[int], _seconds: float) -> bool:
        self.seconds += self.took
        self.last_seconds = self.took
        return True


def steps(rows: Sequence[Any], count: int) -> list[tuple[set[int], float]]:
    """The rows with a mask in each step, and how long all masks of the step took."""
    time, waiting, found = MaskTime(GuideCounts()), list[Any](), []
    for _ in range(count):
        before = sum(row.seconds for row in rows)
        time.seconds_left = STEP_SECONDS
        late = time.late([row for row in rows if row not in waiting])
        waiting += [row for row in rows if row.key in late]
        still = time.late_again(waiting)
        waiting = [row for row in waiting if row.key in still]
        made = {row.key for row in rows if row not in waiting}
        found.append((made, sum(row.seconds for row in rows) - before))
    return found


def test_step_has_its_time_and_one_long_mask() -> None:
    cheap, dear = [Row(key, 1e-5) for key in range(16)], [Row(key, 0.03) for key in range(16, 32)]
    found = steps([*dear, *cheap], 40)
    assert max(seconds for _, seconds in found) <= STEP_SECONDS + 0.03
    # Once it is known what takes long, the others have theirs in each step.
    known = found[len(dear) + 1 :]
    assert all(made >= set(range(16)) for made, _ in known)
    # Those that take long have theirs in turn.
    turns = [key for made, _ in known for key in made - set(range(16))]
    assert len(turns) == len(known)
    assert len(set(turns[:16])) == 16


def test_masks_made_together_are_those_made_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slow moments of the machine do not count.
    monkeypatch.setattr(mask_time, "STEP_SECONDS", 60.0)
    compile_guide = compiler_for(llama, tiny_models.VOCABULARY_SIZE, (0,), 8)
    assert compile_guide
    asked = GuidedDecoding(
        pb.GUIDE_TYPE_JSON_SCHEMA, '{"type": "array", "items": {"type": "number"}}'
    )
    grammar = Grammar(compile_guide(asked, lambda: None))
    together, alone = ([Guide(grammar, 0) for _ in range(9)] for _ in range(2))
    sequences: list[Any] = [
        SimpleNamespace(
            key=key,
            token_rules=SimpleNamespace(guided=True),
            tokens=list[int](),
            rule=SimpleNamespace(end_ids=(0, 5)),
            guide=guide,
        )
        for key, guide in enumerate(together)
    ]
    dice, counts, filled = Random(1), GuideCounts(), list[int]()
    fill = filling_together(2)

    def counted(places: Sequence[Matcher], rows: Any) -> None:
        filled.append(len(places))
        fill(places, rows)

    time = MaskTime(counts, counted)
    for _ in range(30):
        time.seconds_left = STEP_SECONDS
        late = time.late(sequences)
        for sequence, guide in zip(sequences, alone, strict=True):
            guide.catch_up(sequence.tokens)
            row = guide.mask((0, 5))
            if sequence.key not in late:
                assert (sequence.guide.mask((0, 5)) == row).all()
                allowed = np.flatnonzero(np.unpackbits(row, bitorder="little"))
                sequence.tokens.append(int(dice.choice(allowed)))
                if sequence.tokens[-1] in (0, 5):
                    sequence.tokens.pop()
    assert sum(filled) > 90
    assert counts.mask_seconds > 0


def test_a_grammar_has_automata_for_its_sequences(llama: Path) -> None:
    """As many as fill masks at once, each at the same places."""
    compile_guide = compiler_for(llama, tiny_models.VOCABULARY_SIZE, (0,), 8)
    assert compile_guide
    grammars = Grammars(compile_guide, automata=4)
    asked = GuidedDecoding(pb.GUIDE_TYPE_JSON)

    def compiled(holders: int) -> tuple[Grammar, PartLease]:
        made = Future[Any]()
        lease = grammars.compile("", asked, holders, made.set_result)
        return made.result(), lease

    grammar, _ = compiled(1)
    assert not grammar.further
    same, lease = compiled(2 * SHARERS)
    assert same is grammar
    first = len(grammar.further)
    assert 1 <= first < 3
    for _ in range(2 * SHARERS):
        lease.give_back()
    compiled(1)
    assert len(grammar.further) == first
    compiled(20 * SHARERS)
    assert len(grammar.further) == 3
    assert grammars.counts.compiled == 4
    starts: list[Any] = [grammar.begin() for _ in range(8)]
    assert len({id(each.origin) for each in starts}) == 4
    guides = [Guide(grammar, 0) for _ in range(4)]
    (brace,) = Tokenizer.from_file(str(llama / "tokenizer.json")).encode("{").ids
    for tokens in ([], [brace]):
        for guide in guides:
            guide.catch_up(tokens)
            assert not guide.problem
        masks = {guide.mask((0,)).tobytes() for guide in guides}
        assert len(masks) == 1
    grammars.close()


def test_failing_guides_are_left_to_the_choice() -> None:
    """Others have their masks at once."""

    class Failing(Guide):
        def place(self, tokens: Sequence[int], seconds: float) -> Matcher | None:
            raise RuntimeError("a fault")

        makes: Any = place

    rows: list[Any] = [Row(key, 1e-5) for key in range(8)]
    for row in rows[::2]:
        row.guide = Failing.__new__(Failing)
        row.guide.seconds = row.guide.last_seconds = 0.0
        row.guide.problem = ""
    time = MaskTime(GuideCounts(), filling_together(2))
    time.seconds_left = STEP_SECONDS
    assert time.late(rows) == set()


class Ending:
    """Implements Matcher: meets a limit at its first token, or in the mask after it."""

    end_ids, mask_bytes, may_end, problem = (), 8, False, ""

    def __init__(self, accepted: int) -> None:
        self._accepted = accepted

    def copy(self) -> Ending:
        return Ending(self._accepted)

    def accept(self, _token_ids: Sequence[int]) -> int:
        return self._accepted

    def forced(self) -> Sequence[int]:
        return ()

    def fill(self, _row: Any) -> str:
        self.problem = "a limit"
        return self.problem


def filled_one_by_one(places: Sequence[Matcher], rows: Any) -> None:
    for place, row in zip(places, rows, strict=True):
        place.fill(row)


@pytest.mark.parametrize("accepted", [0, 1])
@pytest.mark.parametrize("together", [None, filled_one_by_one])
def test_guides_that_end_are_counted_once(together: Any, accepted: int) -> None:
    sequences: list[Any] = []
    for key in range(6):
        guide = Guide(Grammar(Ending(accepted)), 0)
        guide.last_seconds = 0.0
        sequences.append(
            SimpleNamespace(
                key=key,
                token_rules=SimpleNamespace(guided=True),
                tokens=[5],
                rule=SimpleNamespace(end_ids=(0,)),
                guide=guide,
            )
        )
    counts = GuideCounts()
    time = MaskTime(counts, together)
    time.seconds_left = STEP_SECONDS
    assert time.late(sequences) == set()
    assert [bool(each.guide.problem) for each in sequences] == [True] * 6
    assert counts.not_followed == 6


async def test_others_have_a_token_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_time, "STEP_SECONDS", 1e-9)
    async with running(tiny_models.build(tmp_path, "llama"), max_batch_size=16) as engine:
        with engine.gate.held():
            configs = [guided("REGEX", f"[a-z]{{9,{99 + n}}}", max_tokens=6) for n in range(6)]
            keys = [engine.submit(PROMPT, config)[0] for config in configs]
            (plain,) = engine.submit(PROMPT, configure(max_tokens=80))
        streams = await engine.ended(keys)
        assert all(len(stream.token_ids) == 6 for stream in streams)
        await engine.ended([plain])
        places = [place for place, out in enumerate(engine.outputs) if plain in out.keys]
        assert len(places) == 80
        assert all(later - before == 1 for before, later in pairwise(places))
        shared = [set(keys) & set(out.keys) for out in engine.outputs if plain in out.keys]
        assert max(map(len, shared)) == 1
        order = [key for keys in shared for key in keys]
        for key in keys:
            turns = [place for place, each in enumerate(order) if each == key]
            assert all(later - before <= 12 for before, later in pairwise(turns)), order


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("drafts", [0, 4])
async def test_steps_that_rows_sit_out_are_counted(
    rows: int, drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not drafts without a mask, nor rows that had theirs at the end of their step."""
    config = guided("REGEX", "[a-z]{9,99}", max_tokens=12)
    async with running(tiny_models.build(tmp_path, "llama"), drafts="ngram") as engine:
        (tokens,) = await engine.run([PROMPT], config)
        known = {(0, index): tokens for index in range(rows)}
        draft(engine, Knowing(known), FixedLengths(drafts))
        several = replace(config.sampling, num_return_sequences=rows)
        before = engine.backend.stats()
        monkeypatch.setattr(mask_time, "STEP_SECONDS", 1e-9)
        first = len(engine.outputs)
        # The sequences of one item begin in the same step, however long its grammar takes.
        keys = engine.submit(PROMPT, replace(config, sampling=several))
        await engine.ended(keys)
        after = engine.backend.stats()
        assert bool(drafts) == (after.draft_tokens > before.draft_tokens)
        outputs = [set(out.keys) for out in engine.outputs[first:] if out.keys]
        places = {key: [i for i, out in enumerate(outputs) if key in out] for key in keys}
        assert (rows > 1) == any(own[0] > 0 for own in places.values())
        sat_out = sum(own[-1] + 1 - len(own) for own in places.values())
        assert after.late_masks - before.late_masks == sat_out


async def test_only_late_rows_are_not_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_time, "STEP_SECONDS", 1e-9)
    async with running(tiny_models.build(tmp_path, "llama")) as engine:
        config = guided("REGEX", "[a-z]{9,99}", max_tokens=8)
        await engine.run([PROMPT] * 3, config)
        assert engine.backend.stats().preemptions == 0
