"""The generating sequences of a simulated backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from trtmesh.engine.backend import StepOutput
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence


class GeneratingBatch:
    """Parallel lists: a step costs a few list operations and no Python loop.

    Every member gets one token per step and is visited only at the end of its run.
    """

    def __init__(self) -> None:
        self.members: list[SimulatedSequence] = []
        self._keys: list[int] = []
        self._first_steps: list[int] = []
        self._tokens: list[Iterator[int]] = []
        self._due: defaultdict[int, list[SimulatedSequence]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self.members)

    def join(self, sequence: SimulatedSequence, step: int) -> None:
        """Adds a sequence with a run, whose first token comes with `step`."""
        sequence.place = len(self.members)
        sequence.first_step = step - sequence.generated_tokens
        self.members.append(sequence)
        self._keys.append(sequence.key)
        self._first_steps.append(sequence.first_step)
        self._tokens.append(iter(()))
        self.follow(sequence, step)

    def follow(self, sequence: SimulatedSequence, step: int) -> None:
        """Lets a member continue with its next run from `step` on."""
        self._tokens[sequence.place] = iter(sequence.run)
        self._due[step + len(sequence.run) - 1].append(sequence)

    def step(self, step: int, output: StepOutput) -> None:
        """Adds the tokens of one step to `output`."""
        output.keys += self._keys
        output.token_offsets += [step - first for first in self._first_steps]
        output.token_counts += [1] * len(self._keys)
        output.token_ids += map(next, self._tokens)

    @property
    def next_end(self) -> int:
        """The step with which the next run ends; one of a member that left counts too."""
        return min(self._due, default=0)

    def skip(self, steps: int) -> None:
        """Passes over the tokens of steps in which no run ends."""
        for tokens in self._tokens:
            next(islice(tokens, steps - 1, None))

    def finished(self, step: int) -> list[SimulatedSequence]:
        """The members whose run ends with `step`."""
        return [each for each in self._due.pop(step, ()) if each.place >= 0]

    def leave(self, sequence: SimulatedSequence) -> None:
        """Removes a member; the last member takes its place."""
        place, sequence.place = sequence.place, -1
        last = self.members.pop()
        key, first_step, tokens = self._keys.pop(), self._first_steps.pop(), self._tokens.pop()
        if last is not sequence:
            self.members[place], self._keys[place] = last, key
            self._first_steps[place], self._tokens[place] = first_step, tokens
            last.place = place
