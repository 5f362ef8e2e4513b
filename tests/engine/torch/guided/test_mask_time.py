"""Rows whose masks take longer than their step has sit out, and all others go on."""

from __future__ import annotations

import asyncio
import math
import threading
import time
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
from engine.torch.drafts.drafters import FixedLengths, Knowing, Measuring, draft
from engine.torch.guided.guides import guided
from engine.torch.guided.lateness import Held, SomeLate
from engine.torch.harness import configure, running
from oracle import tiny_models
from tokenizers import Tokenizer
from trtmesh.chassis.vocabulary import Draft, GuidedDecoding
from trtmesh.engine.backend import StepOutput
from trtmesh.engine.backends.torch import loading
from trtmesh.engine.backends.torch.guided.grammars import (
    FIRST_SECONDS,
    Check,
    Grammar,
    Grammars,
    Guide,
    GuideCounts,
    Matcher,
)
from trtmesh.engine.backends.torch.guided.guidance import compiler_for
from trtmesh.engine.backends.torch.preparation import PartLease
from trtmesh.engine.backends.torch.sampling import mask_time
from trtmesh.engine.backends.torch.sampling.mask_time import (
    STEP_SECONDS,
    Masks,
    MaskThreads,
    MaskTime,
)
from trtmesh.v1 import generation_pb2 as pb

PROMPT = [9, 40, 41, 42, 9, 43]


class Row:
    """A sequence whose masks take so many seconds each."""

    def __init__(self, key: int, seconds: float) -> None:
        self.key, self.took = key, seconds
        self.token_rules, self.tokens = SimpleNamespace(guided=True), list[int]()
        self.rule = SimpleNamespace(end_ids=())
        self.guide, self.problem, self.sat_out = self, "", 0
        self.seconds, self.last_seconds = 0.0, FIRST_SECONDS

    def makes(self, _tokens: Sequence[int], _end_ids: Iterable[int], _seconds: float) -> bool:
        self.seconds += self.took
        self.last_seconds = self.took
        return True


def steps(rows: Sequence[Any], count: int) -> list[tuple[set[int], float]]:
    """The rows with a mask in each step, and how long all masks of the step took."""
    time, found = MaskTime(GuideCounts()), []
    for _ in range(count):
        before = sum(row.seconds for row in rows)
        time.begin_step()
        late = time.late(rows)
        made = {row.key for row in rows} - late
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


def row_of(key: int, guide: Guide, tokens: Sequence[int] = ()) -> Any:
    return SimpleNamespace(
        key=key,
        tokens=list(tokens),
        rule=SimpleNamespace(end_ids=(0, 5)),
        guide=guide,
        history=True,
    )


def grammar_of(model: Path, kind: str, guide: str) -> Grammar:
    compile_guide = compiler_for(model, tiny_models.VOCABULARY_SIZE, (0,))
    assert compile_guide
    return Grammar(compile_guide(GuidedDecoding(pb.GuideType.Value(f"GUIDE_TYPE_{kind}"), guide)))


def none_late(masks: Masks, rows: Sequence[Any]) -> None:
    """However slow the machine."""
    while masks.late(rows):
        masks.begin_step()


def test_masks_made_by_threads_are_those_made_alone(llama: Path) -> None:
    numbers = '{"type": "array", "items": {"type": "number"}}'
    grammar = grammar_of(llama, "JSON_SCHEMA", numbers)
    rows, alone = ([row_of(key, Guide(grammar, 0)) for key in range(9)] for _ in range(2))
    dice, masks = Random(1), MaskThreads(GuideCounts(), 3)
    for _ in range(30):
        masks.begin_step()
        masks.begin(rows[:5])
        none_late(masks, rows)
        for row, own in zip(rows, alone, strict=True):
            own.guide.catch_up(row.tokens)
            expected = own.guide.mask((0, 5))
            assert row.guide.has_mask(row.tokens)
            assert (row.guide.mask((0, 5)) == expected).all()
            allowed = np.flatnonzero(np.unpackbits(expected, bitorder="little"))
            token = int(dice.choice(allowed))
            if token not in (0, 5):
                row.tokens.append(token)
    assert masks.counts.mask_seconds > 0
    masks.close()


def test_a_mask_that_takes_long_delays_no_other(llama: Path) -> None:
    grammar, event = grammar_of(llama, "REGEX", "[a-z]*"), threading.Event()
    held = Grammar(Held(grammar.start, event))
    rows = [row_of(key, Guide(held if key == 3 else grammar, 0)) for key in range(6)]
    masks = MaskThreads(GuideCounts(), 2)
    for _ in range(5):
        masks.begin_step()
        assert eventually_late(masks, rows) == {3}
        assert all(row.guide.has_mask(row.tokens) for row in rows if row.key != 3)
        # What drafts would ask of it waits too.
        assert not rows[3].guide.forced(rows[3].tokens)
        allowed = np.unpackbits(rows[0].guide.mask((0, 5)), bitorder="little")
        for row in rows:
            row.tokens += [] if row.key == 3 else [int(np.flatnonzero(allowed)[-1])]
    # Neither ready nor awaited, beside rows without a guide.
    assert masks.late(rows[3:4], alone=False) == {3}
    threading.Timer(0.05, event.set).start()
    assert masks.late(rows[3:4]) == set()
    assert rows[3].guide.has_mask(())
    masks.close()


def test_quick_masks_wait_for_no_thread(llama: Path) -> None:
    """They are made where they are begun, unless another thread works in their automaton."""
    grammar = grammar_of(llama, "REGEX", "(ab){99}")
    rows = [row_of(key, Guide(grammar, 0)) for key in range(4)]
    alone, masks = Guide(grammar, 0), MaskThreads(GuideCounts(), 2)
    masks.begin_step()
    none_late(masks, rows)
    masks.close()
    for _ in range(8):
        expected = alone.mask((0, 5))
        token = int(np.flatnonzero(np.unpackbits(expected, bitorder="little"))[0])
        for row in rows:
            assert (row.guide.mask((0, 5)) == expected).all()
            row.tokens.append(token)
        alone.catch_up(rows[0].tokens)
        masks.begin_step()
        masks.begin(rows)
        assert all(row.guide.has_mask(row.tokens) for row in rows)
        assert masks.late(rows) == set()
    token = int(np.flatnonzero(np.unpackbits(alone.mask((0, 5)), bitorder="little"))[0])
    rows[0].tokens.append(token)
    with grammar.start.automaton:
        masks.begin_step()
        assert masks.late(rows, alone=False) == {0}


def test_a_mask_that_takes_long_after_a_narrow_one_is_the_last_on_this_thread(llama: Path) -> None:
    class Slow(Held):
        """Takes long after its first token."""

        def copy(self) -> Slow:
            return Slow(self._own.copy(), self.event)

        def fill(self, row: Any) -> str:
            until = time.thread_time() + (2 * FIRST_SECONDS if self.event.is_set() else 0)
            while time.thread_time() < until:
                pass
            return self._own.fill(row)

    event = threading.Event()
    grammar = Grammar(Slow(grammar_of(llama, "REGEX", "(ab){99}").start, event))
    guide, tokens = Guide(grammar, 0), list[int]()
    quick = list[bool]()
    for step in range(6):
        quick.append(guide.is_quick(tokens))
        assert guide.makes(tokens, (0, 5), STEP_SECONDS)
        row = np.unpackbits(guide.mask((0, 5)), bitorder="little")
        tokens.append(int(np.flatnonzero(row)[0]))
        event.set() if step == 2 else event.clear()
    assert quick == [False, True, True, True, False, False]


def eventually_late(masks: MaskThreads, rows: Sequence[Any]) -> set[int]:
    """However slow the machine: the rows whose masks are still not made once the others are."""
    late = masks.late(rows)
    while len(late) > 1:
        late = masks.late(rows)
    return late


def test_masks_that_take_long_leave_threads_to_others(llama: Path) -> None:
    grammar, event = grammar_of(llama, "REGEX", "[a-z]*"), threading.Event()
    held = Grammar(Held(grammar.start, event))
    rows = [row_of(key, Guide(held if key < 9 else grammar, 0)) for key in range(12)]
    for row in rows[:9]:
        row.guide.last_seconds = STEP_SECONDS
    masks = MaskThreads(GuideCounts(), 2)
    masks.begin_step()
    late = masks.late(rows)
    while len(late) > 9:
        late = masks.late(rows)
    assert late == set(range(9))
    event.set()
    none_late(masks, rows)
    masks.close()


def test_an_ended_sequence_has_no_mask(llama: Path) -> None:
    masks = MaskThreads(GuideCounts(), 1)
    row = row_of(1, Guide(grammar_of(llama, "REGEX", "[a-z]*"), 0), [40])
    row.history = None
    masks.begin_step()
    assert masks.late([row]) == set()
    assert not row.guide.has_mask(row.tokens)
    masks.close()


def test_a_grammar_has_automata_for_its_sequences(llama: Path) -> None:
    """As many as fill masks at once, each at the same places."""
    compile_guide = compiler_for(llama, tiny_models.VOCABULARY_SIZE, (0,))
    assert compile_guide
    grammars = Grammars(compile_guide, automata=4)
    asked = GuidedDecoding(pb.GUIDE_TYPE_JSON)

    def compiled(holders: int, asked: GuidedDecoding = asked) -> tuple[Grammar, PartLease]:
        made = Future[Any]()
        lease = grammars.compile("", asked, holders, made.set_result)
        return made.result(), lease

    def end(lease: PartLease) -> None:
        while lease.holders:
            lease.give_back()

    grammar, alone = compiled(1)
    assert not grammar.further
    same, lease = compiled(2)
    assert same is grammar
    first = len(grammar.further)
    assert 1 <= first < 3
    end(lease)
    _, again = compiled(1)
    assert len(grammar.further) == first
    _, many = compiled(20)
    assert len(grammar.further) == 3
    assert grammars.counts.compiled == 4
    guides = [Guide(grammar, 0) for _ in range(4)]
    (brace,) = Tokenizer.from_file(str(llama / "tokenizer.json")).encode("{").ids
    for tokens in ([], [brace]):
        for guide in guides:
            guide.catch_up(tokens)
            assert not guide.problem
        masks = {guide.mask((0,)).tobytes() for guide in guides}
        assert len(masks) == 1
    for lease in (alone, again):
        end(lease)
    number = GuidedDecoding(pb.GUIDE_TYPE_REGEX, "[0-9]+")
    compiled(1, number)
    assert len(grammar.further) == 3
    # Their automata may be large. The grammar is kept.
    end(many)
    compiled(1, number)
    assert not grammar.further
    assert compiled(1)[0] is grammar
    grammars.close()


MAKERS = [MaskTime, lambda counts: MaskThreads(counts, 2)]


@pytest.mark.parametrize("make", MAKERS, ids=["alone", "threads"])
def test_failing_guides_are_left_to_the_choice(make: Any, llama: Path) -> None:
    """Others have their masks at once."""

    class Failing(Guide):
        def makes(self, tokens: Sequence[int], end_ids: Iterable[int], seconds: float) -> bool:
            raise RuntimeError("a fault")

    grammar = grammar_of(llama, "REGEX", "[a-z]*")
    rows = [row_of(key, (Failing if key % 2 else Guide)(grammar, 0)) for key in range(8)]
    masks: Masks = make(GuideCounts())
    masks.begin_step()
    none_late(masks, rows)
    assert [row.guide.has_mask(()) for row in rows] == [True, False] * 4
    masks.close()


class Ending:
    """Implements Matcher: meets a limit at its first token, or in the mask after it."""

    end_ids, mask_bytes, may_end, problem = (), 8, False, ""

    def __init__(self, accepted: int) -> None:
        self._accepted, self.automaton = accepted, threading.Lock()

    def copy(self) -> Ending:
        return Ending(self._accepted)

    def accept(self, _token_ids: Sequence[int]) -> int:
        return self._accepted

    def forced(self) -> Sequence[int]:
        return ()

    def fill(self, _row: Any) -> str:
        self.problem = "a limit"
        return self.problem


@pytest.mark.parametrize("accepted", [0, 1])
@pytest.mark.parametrize("make", MAKERS, ids=["alone", "threads"])
def test_guides_that_end_are_counted_once(make: Any, accepted: int) -> None:
    rows = [row_of(key, Guide(Grammar(Ending(accepted)), 0), [5]) for key in range(6)]
    masks: Masks = make(GuideCounts())
    masks.begin_step()
    none_late(masks, rows)
    assert [bool(row.guide.problem) for row in rows] == [True] * 6
    assert masks.counts.not_followed == 6
    masks.close()


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
        # Of several rows, those with drafts sit out.
        assert (drafts > 0 and rows == 1) == (after.draft_tokens > before.draft_tokens)
        outputs = [set(out.keys) for out in engine.outputs[first:] if out.keys]
        places = {key: [i for i, out in enumerate(outputs) if key in out] for key in keys}
        assert (rows > 1) == any(own[0] > 0 for own in places.values())
        sat_out = sum(own[-1] + 1 - len(own) for own in places.values())
        assert after.late_masks - before.late_masks == sat_out


@pytest.mark.parametrize("seed", range(3))
async def test_drafts_without_a_mask_are_neither_counted_nor_held_against_others(
    seed: int, llama: Path
) -> None:
    """Each accepted draft is a token more of its step, as the router counts on."""
    config = guided("REGEX", "[a-z]{9,99}", max_tokens=30, perf_metrics=True)
    async with running(llama, drafts="ngram") as engine:
        (tokens,) = await engine.run([PROMPT], config)
        lengths = Measuring(4)
        draft(engine, Knowing({(0, 0): tokens}), lengths)
        loaded = engine.backend._loaded.engine
        loaded._masks = masks = SomeLate(loaded._masks, seed, all_may_be=True)
        before, first = engine.backend.stats(), len(engine.outputs)
        (stream,) = await engine.ended(engine.submit(PROMPT, config))
        after = engine.backend.stats()
    assert stream.token_ids == tokens
    assert masks.sat_out > 5
    steps = sum(bool(out.keys) for out in engine.outputs[first:])
    drafts, accepted = (
        getattr(after, name) - getattr(before, name) for name in ("drafts", "accepted_draft_tokens")
    )
    assert 0 < drafts < steps
    assert accepted == len(tokens) - steps
    assert stream.end
    assert stream.end.perf_metrics
    assert stream.end.perf_metrics.total_accepted_draft_tokens == accepted
    drafted = after.draft_tokens - before.draft_tokens
    assert stream.end.perf_metrics.total_draft_tokens == drafted
    assert sum(step.drafts for step in lengths.steps if step.is_typical) == drafted


@pytest.mark.parametrize("rows", [1, 4])
async def test_rows_get_no_drafts_after_a_step_that_they_sat_out(
    rows: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have them in all other steps, even where no draft has its mask in time."""
    config = guided("REGEX", "[a-z]{9,99}", max_tokens=12)
    asked = list[tuple[int, int]]()

    class Asked(Knowing):
        def propose(self, wishes: Sequence[Any]) -> list[list[int]]:
            asked.extend((each.sequence_index, len(each.tokens)) for each, _ in wishes)
            return super().propose(wishes)

    async with running(llama, drafts="ngram") as engine:
        (tokens,) = await engine.run([PROMPT], config)
        draft(engine, Asked({(0, index): tokens for index in range(rows)}), FixedLengths(4))
        monkeypatch.setattr(mask_time, "STEP_SECONDS", 1e-9)
        # Garbage may be collected during a mask.
        monkeypatch.setattr(mask_time, "LONG_SECONDS", math.inf)
        several = replace(config.sampling, num_return_sequences=rows)
        await engine.ended(engine.submit(PROMPT, replace(config, sampling=several)))
        assert (rows > 1) == (engine.backend.stats().late_masks > 0)
    # Each has drafts after any of its tokens but the last two, once.
    assert sorted(asked) == [
        (row, len(PROMPT) + count) for row in range(rows) for count in range(1, len(tokens) - 1)
    ]


async def test_only_late_rows_are_not_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_time, "STEP_SECONDS", 1e-9)
    async with running(tiny_models.build(tmp_path, "llama")) as engine:
        config = guided("REGEX", "[a-z]{9,99}", max_tokens=8)
        await engine.run([PROMPT] * 3, config)
        assert engine.backend.stats().preemptions == 0


async def test_a_row_whose_mask_takes_long_holds_up_no_other(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have all their tokens first; then it goes on, and each has the text that it has alone."""
    texts = ["[a-z]{9,99}", "[0-9 ]*", "(ab|cde)*", "[a-f]*"]
    configs = [
        guided("REGEX", text, max_tokens=9 + n, temperature=1.2, seed=n)
        for n, text in enumerate(texts)
    ]
    configs.append(configure(max_tokens=30, ignore_end_id=True))
    async with running(llama) as engine:
        expected = [(await engine.run([PROMPT], config))[0] for config in configs]
    # None are computed in vain.
    configs[0] = replace(configs[0], draft=Draft(tuple(expected[0])))
    monkeypatch.setattr(loading, "_mask_threads", lambda _: 2)
    async with running(llama) as engine:
        found: Any = engine.backend._loaded.grammars
        own, event = found._compile_guide, threading.Event()

        def compile_guide(asked: GuidedDecoding, check: Check) -> Matcher:
            matcher: Matcher = own(asked, check)
            return Held(matcher, event) if asked.guide == texts[0] else matcher

        found._compile_guide = compile_guide
        begun = set[int]()

        def have_begun(output: StepOutput) -> bool:
            begun.update(output.keys)
            return len(begun) == len(configs) - 1

        # It joins the others in mid-stream: alone in a step, it would be awaited.
        with engine.held_at(have_begun):
            others = [engine.submit(PROMPT, config)[0] for config in configs[1:]]
            await engine.until(lambda: len(begun) == len(others))
            first = engine.submit(PROMPT, configs[0])
            # The item, and its grammar.
            while len(engine.backend._inbox) < 2:  # noqa: ASYNC110 - a list sets no event
                await asyncio.sleep(0.01)
        streams = await engine.ended(others)
        assert [stream.token_ids for stream in streams] == expected[1:]
        assert not engine.streams[first[0]].token_ids
        before = engine.backend.stats()
        assert before.late_masks > 1
        event.set()
        (stream,) = await engine.ended(first)
        assert stream.token_ids == expected[0]
        stats = engine.backend.stats()
        assert stats.accepted_draft_tokens
        assert not before.draft_tokens
        assert stats.guide_mask_seconds > 0
    assert not any("masks-" in thread.name for thread in threading.enumerate())
