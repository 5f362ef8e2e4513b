"""Where one item was tried in vain, and when that is enough."""

from __future__ import annotations

from typing import TypeAlias

from trtmesh.chassis.errors import NoWorker, QueueFull, TrtmeshError, WorkerLost

Failures: TypeAlias = dict[str, TrtmeshError]
"""Latest error of each worker, by address, that is left out for now."""


class Attempts:
    """Counts workers that were lost with an item, and remembers which to leave out for now.

    What kills one worker may kill every worker: an item that gained no token between so many losses ends with an error
    before it takes the fleet with it. An item that goes on between two losses is not the cause.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = 0
        self._moves = 0
        self._tokens_at_move = 0
        self.fruitless = 0
        self.loss: TrtmeshError | None = None
        """How the worker was lost that was lost last."""
        self.failures: Failures = {}

    def note(self, address: str, error: TrtmeshError, generated_tokens: int) -> bool:
        """Notes a worker that does not go on with the item; False when that is enough.

        A worker that had several sequences of the item counts once.
        """
        known = self.failures.get(address)
        self.failures[address] = error
        if error.row.back_pressure or (known is not None and not known.row.back_pressure):
            return True
        self.loss = error
        self.fruitless = 1 if generated_tokens > self._tokens else self.fruitless + 1
        self._tokens = generated_tokens
        return self.fruitless < self._most

    def moved_from(self, address: str, error: TrtmeshError, tokens: int) -> Failures:
        """Whom an item of so many tokens would leave out if it left a worker because of `error`.

        Only that one: whoever failed before may be well again. But the item may be what stops its workers, so it does
        not come back to them as often as it likes without gaining a token.
        """
        known = self.failures if self._moves_without_gain(tokens) >= self._most else {}
        return {**known, address: error}

    def move(self, failures: Failures, tokens: int) -> None:
        """The item leaves a worker; `failures` is what `moved_from` said."""
        self._moves = self._moves_without_gain(tokens) + 1
        self._tokens_at_move = tokens
        self.failures = failures

    def _moves_without_gain(self, tokens: int) -> int:
        return 0 if tokens > self._tokens_at_move else self._moves

    @property
    def full(self) -> QueueFull | None:
        """What a worker said that stays and is full; None when none did. One that drains leaves, and the item may wait
        for what comes in its place."""
        found = [e for e in self.failures.values() if isinstance(e, QueueFull)]
        return found[-1] if found else None

    def forgive(self) -> None:
        """Leaves no worker out any more: the others did not take the item either."""
        self.failures.clear()


def too_many_losses(losses: int, error: TrtmeshError) -> WorkerLost:
    """Ends an item that was lost too often, the last time by `error`."""
    return WorkerLost(
        f"{losses} workers in a row were lost with this item (max_attempts), the last one so: {error.message}",
        worker=error.worker,
    )


def nobody_goes_on(loss: TrtmeshError | None, error: NoWorker) -> TrtmeshError:
    """Ends an item that nobody takes, after `loss` where a worker had it before."""
    if loss is None:
        return error
    return WorkerLost(
        f"{loss.message}; and nobody went on with the item: {error.message}",
        worker=loss.worker,
        retry_after_ms=error.retry_after_ms,
    )
