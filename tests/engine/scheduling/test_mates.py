"""Sequences admitted and paused only together, such as the lanes of a beam search."""

from __future__ import annotations

from random import Random

import pytest
from engine.scheduling.paper_engine import (
    PaperEngine,
    PaperSequence,
    continued,
    least_blocks,
)
from engine.torch.harness import configure
from trtmesh.chassis.vocabulary import TokenRangeRetention


def mates(
    engine: PaperEngine, prompt: list[int], new_tokens: int, count: int
) -> list[PaperSequence]:
    group = [engine.sequence(prompt, new_tokens) for _ in range(count)]
    together = list(group)
    for each in group:
        each.mates = together
        each.leader = group[0] if each is not group[0] else None
    engine.add(*group)
    return group


@pytest.mark.parametrize("prompt_tokens", [8, 10])
@pytest.mark.parametrize("never_pause", [False, True])
def test_mates_run_only_all_together(never_pause: bool, prompt_tokens: int) -> None:
    engine = PaperEngine(
        blocks=22, batch=7, step_tokens=64, chunk_tokens=64, never_pause=never_pause
    )
    groups = [mates(engine, [number] * prompt_tokens, 14, 3) for number in range(4)]
    single = [engine.sequence([50 + number] * 10, 20) for number in range(4)]
    engine.add(*single)
    branch = 0
    while engine.scheduler.has_work:
        done = engine.step()
        for sequence in single:
            if sequence in done:
                engine.advance(sequence)
        for group in groups:
            running = [each for each in group if each.slot >= 0]
            if len(running) < 3 or any(each.num_computed < len(each.tokens) for each in group):
                continue
            # The mates part with each other after the prompt.
            for each in group:
                branch += 1
                each.append(branch % 97, 0)
            if group[0].generated_tokens == 14:
                for each in group:
                    engine.scheduler.remove(each)
    assert all(each.generated_tokens == 14 for group in groups for each in group)
    assert all(each.tokens == continued(each.tokens[:10], 20) for each in single)
    assert (engine.scheduler.preemptions == 0) == never_pause
    assert engine.pool.used_blocks == 0


def test_mates_that_await_each_other_make_room() -> None:
    """Two groups have started one sequence each and lack room for the rest: one group gives way."""
    engine = PaperEngine(blocks=8, batch=8)
    first, second = mates(engine, [1] * 3, 10, 2), mates(engine, [2] * 3, 10, 2)
    steps = 0
    while engine.scheduler.has_work:
        engine.step()
        steps += 1
        assert steps < 100
        for group in (first, second):
            if all(each.slot >= 0 and each.num_computed == len(each.tokens) for each in group):
                for number, each in enumerate(group):
                    each.append(number, 0)
                if len(group[0].tokens) == 13:
                    for each in group:
                        engine.scheduler.remove(each)
    assert engine.pool.used_blocks == 0


def goes_on_together(group: list[PaperSequence]) -> bool:
    return all(each.slot >= 0 and each.num_computed == len(each.tokens) for each in group)


def step_together(engine: PaperEngine, group: list[PaperSequence]) -> None:
    """Runs a step; afterwards all sequences of the group get a token, or none does."""
    engine.step()
    if goes_on_together(group):
        for number, each in enumerate(group):
            each.append(number, 0)


@pytest.mark.parametrize("never_pause", [False, True])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("new_tokens", [1, 4, 6])
@pytest.mark.parametrize("prompt_tokens", range(11, 18))
def test_mates_that_have_the_pool_to_themselves_go_on(
    prompt_tokens: int, new_tokens: int, window: int | None, never_pause: bool
) -> None:
    """In the smallest admissible pool, without cached blocks."""
    engine = PaperEngine(
        blocks=least_blocks(prompt_tokens, new_tokens, 3),
        step_tokens=64,
        chunk_tokens=64,
        reuse=False,
        window=window,
        never_pause=never_pause,
    )
    group = mates(engine, list(range(prompt_tokens)), new_tokens, 3)
    for _ in range(3 * (new_tokens + 1)):
        step_together(engine, group)
        if group[0].generated_tokens == new_tokens:
            break
    assert group[0].generated_tokens == new_tokens
    assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("generated", range(6))
def test_mates_that_were_paused_anywhere_start_again(window: int | None, generated: int) -> None:
    """After the sequences have parted, with exactly the blocks needed at the end."""
    prompt_tokens, new_tokens = 13, 7
    engine = PaperEngine(
        blocks=least_blocks(prompt_tokens, new_tokens, 3),
        step_tokens=64,
        chunk_tokens=64,
        reuse=False,
        window=window,
    )
    group = mates(engine, list(range(prompt_tokens)), new_tokens, 3)
    paused = False
    for _ in range(6 * (new_tokens + 1)):
        step_together(engine, group)
        if group[0].generated_tokens == new_tokens:
            break
        if group[0].generated_tokens == generated and not paused:
            engine.scheduler._preempt(group[0])
            paused = True
    assert paused
    assert group[0].generated_tokens == new_tokens


class Crowd:
    """Groups of mates, items of several sequences and single sequences, in a pool with room for each alone."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Random(seed)
        blocks = dice.randint(5, 30)
        never_pause = dice.random() < 0.3
        step_tokens = dice.choice([4, 16, 64])
        self.engine = PaperEngine(
            blocks=blocks,
            batch=dice.randint(4, 8),
            step_tokens=step_tokens,
            chunk_tokens=dice.choice([None, 3, step_tokens]),
            never_pause=never_pause,
            static_batch=never_pause and dice.random() < 0.3,
            reuse=dice.random() < 0.7,
            partial_reuse=dice.random() < 0.7,
            window=dice.choice([None, None, 6, 9]),
            host_blocks=dice.choice([0, 0, 6]),
        )
        stems = [[dice.randrange(97) for _ in range(30)] for _ in range(2)]
        self.items: list[list[PaperSequence]] = []
        while len(self.items) < 7:
            count = dice.choice([1, 1, 2, 3, 4])
            prompt = dice.choice(stems)[: dice.randint(1, 30)]
            new_tokens = dice.randint(1, 12)
            together = count > 1 and dice.random() < 0.7
            if least_blocks(len(prompt), new_tokens, count if together else 1) <= blocks:
                self.items.append(self._item(prompt, new_tokens, count, together=together))

    def _item(
        self, prompt: list[int], new_tokens: int, count: int, *, together: bool
    ) -> list[PaperSequence]:
        dice = self.dice
        wishes = TokenRangeRetention(dice.randint(0, 20), dice.randint(21, 40), dice.randint(0, 99))
        config = configure(
            token_ranges=(wishes,) if dice.random() < 0.5 else (), priority=dice.randint(-1, 1)
        )
        item = [self.engine.sequence(prompt, new_tokens, config) for _ in range(count)]
        mates = list(item) if together else []
        for each in item:
            each.leader = item[0] if each is not item[0] else None
            each.mates = mates
        return item

    def play(self, most_steps: int) -> None:
        """Until all have ended, some by being stopped."""
        dice, engine = self.dice, self.engine
        to_come = list(self.items)
        steps = 0
        while to_come or engine.scheduler.has_work:
            if to_come and dice.random() < 0.3:
                engine.add(*to_come.pop())
            completing = engine.step()
            steps += 1
            assert steps < most_steps
            for item in self.items:
                living = [each for each in item if each.lives]
                if not living:
                    continue
                if dice.random() < 0.01:
                    self._remove(living if living[0].mates else living[:1])
                elif living[0].mates:
                    if goes_on_together(living):
                        self._part(living)
                else:
                    for each in set(completing) & set(living):
                        engine.advance(each)
        assert engine.pool.used_blocks == 0
        assert engine.tables.free_slots == len(engine.tables.rows)

    def _part(self, group: list[PaperSequence]) -> None:
        parents = [self.dice.choice(group) for _ in group]
        tokens = [[*parent.tokens, self.dice.randrange(97)] for parent in parents]
        self.engine.scheduler.reassign(list(zip(group, parents, strict=True)))
        for each, own in zip(group, tokens, strict=True):
            each.tokens[:] = own
        if len(group[0].tokens) >= group[0].rule.limit:
            self._remove(group)

    def _remove(self, sequences: list[PaperSequence]) -> None:
        for each in sequences:
            self.engine.scheduler.remove(each)


@pytest.mark.parametrize("seed", range(60))
def test_every_admitted_sequence_ends(seed: int) -> None:
    Crowd(seed).play(most_steps=1500)


def test_reused_key_of_an_ended_leader_blocks_no_follower() -> None:
    engine = PaperEngine(blocks=30, batch=1)
    first, leader, follower = (engine.sequence(range(20), 3) for _ in range(3))
    follower.leader = leader
    engine.add(first, leader, follower)
    engine.step()
    engine.scheduler.remove(leader)
    other = engine.sequence([7] * 9, 40)
    other.key = leader.key
    engine.add(other)
    for _ in range(12):
        for each in engine.step():
            engine.advance(each)
    assert not follower.lives
