"""The generating sequences in parallel lists, so that a step costs a few list operations and no Python loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from trtmesh.engine.backend import StepOutput
from trtmesh.engine.backends.simulated.sequence import Sequence


class Batch:
    """Gives every member one token per step and visits a member only at the end of its run."""

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        self._keys: list[int] = []
        self._first_steps: list[int] = []
        self._tokens: list[Iterator[int]] = []
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self.members)

    def join(self, sequence: Sequence, step: int) -> None:
        """Adds a sequence that generates from `step` on."""
        sequence.slot = len(self.members)
        # The (virtual) step of its token 0.
        sequence.first_step = step - sequence.emitted_tokens
        self.members.append(sequence)
        self._keys.append(sequence.key)
        self._first_steps.append(sequence.first_step)
        run = sequence.next_run()
        self._tokens.append(iter(run))
        self._due[step + len(run) - 1].append(sequence)

    def step(self, step: int, output: StepOutput) -> None:
        """Adds the tokens of one step to `output`."""
        output.keys += self._keys
        output.token_offsets += [step - first for first in self._first_steps]
        output.token_counts += [1] * len(self._keys)
        output.token_ids += map(next, self._tokens)

    def finished(self, step: int) -> list[Sequence]:
        """Returns the members with their last token in `step`; starts the next run of the others that need one."""
        finished = []
        for sequence in self._due.pop(step, ()):
            if sequence.slot < 0:
                continue
            if sequence.ending:
                finished.append(sequence)
            else:
                run = sequence.next_run()
                self._tokens[sequence.slot] = iter(run)
                self._due[step + len(run)].append(sequence)
        return finished

    def leave(self, sequence: Sequence) -> None:
        """Removes a member; the last member takes its place."""
        slot = sequence.slot
        sequence.slot = -1
        last = self.members.pop()
        key, first_step, tokens = self._keys.pop(), self._first_steps.pop(), self._tokens.pop()
        if last is not sequence:
            self.members[slot], self._keys[slot] = last, key
            self._first_steps[slot], self._tokens[slot] = first_step, tokens
            last.slot = slot
