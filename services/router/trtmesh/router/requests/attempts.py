"""Counts an item's failed attempts and selects the workers to leave out."""

from __future__ import annotations

from typing import TypeAlias

from trtmesh.chassis.errors import (
    AdapterBroken,
    AdapterNotFound,
    AdaptersFull,
    QueueFull,
    TrtmeshError,
    WorkerLost,
)

Failures: TypeAlias = dict[str, TrtmeshError]
"""Latest error of each worker to leave out, by address."""


class Attempts:
    """Attempts of an item.

    A poisonous item could take down every worker in turn, so an item ends after `most` losses in a row without a new
    token. Progress between two losses acquits the item.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = 0
        self._moves = 0
        self._tokens_at_move = 0
        self.fruitless = 0
        self.loss: TrtmeshError | None = None
        """Latest loss of a worker."""
        self.failures: Failures = {}

    def note(self, address: str, error: TrtmeshError, generated_tokens: int) -> bool:
        """Counts a failed worker, once for all of the item's sequences there; False after the last attempt."""
        known = self.failures.get(address)
        self.failures[address] = error
        if error.row.back_pressure or (known is not None and not known.row.back_pressure):
            return True
        self.loss = error
        self.fruitless = 1 if generated_tokens > self._tokens else self.fruitless + 1
        self._tokens = generated_tokens
        return self.fruitless < self._most

    def moved_from(self, address: str, error: TrtmeshError, tokens: int) -> Failures:
        """Workers to leave out if an item of `tokens` tokens left the worker at `address`.

        Earlier failures are forgiven, since workers recover, but not after `most` moves without a new token: the item
        itself may stop the workers.
        """
        known = self.failures if self._moves_without_gain(tokens) >= self._most else {}
        return {**known, address: error}

    def move(self, failures: Failures, tokens: int) -> None:
        """Counts a move; `failures` comes from `moved_from`."""
        self._moves = self._moves_without_gain(tokens) + 1
        self._tokens_at_move = tokens
        self.failures = failures

    def _moves_without_gain(self, tokens: int) -> int:
        return 0 if tokens > self._tokens_at_move else self._moves

    @property
    def full(self) -> QueueFull | None:
        """Latest refusal by a full worker. A draining worker does not count, since a replacement may take the item."""
        found = [e for e in self.failures.values() if isinstance(e, QueueFull)]
        return found[-1] if found else None

    @property
    def crowded(self) -> AdaptersFull | None:
        """Latest refusal by a worker without memory for the adapter."""
        found = [e for e in self.failures.values() if isinstance(e, AdaptersFull)]
        return found[-1] if found else None

    @property
    def broken(self) -> AdapterBroken | None:
        """Latest refusal by a worker that cannot load the adapter, nor will later."""
        found = [e for e in self.failures.values() if isinstance(e, AdapterBroken)]
        return found[-1] if found else None

    def forgive(self) -> None:
        """Considers every worker again, after no other took the item."""
        self.failures.clear()


def too_many_losses(losses: int, error: TrtmeshError) -> WorkerLost:
    """The error of an item after the last attempt."""
    return WorkerLost(
        f"{losses} workers in a row were lost with this item (retries.max_attempts), the last one so: {error.message}",
        worker=error.worker,
    )


def unplaceable(loss: TrtmeshError | None, error: TrtmeshError) -> TrtmeshError:
    """The error of an item without a worker, after the `loss` of a former worker if any."""
    if loss is None:
        return error
    if isinstance(loss, AdapterNotFound):
        # Its workers are well, but evicted an adapter that nothing else has.
        return loss
    return WorkerLost(
        f"{loss.message}; and no worker continues the item: {error.message}",
        worker=loss.worker,
        retry_after_ms=error.retry_after_ms,
    )
