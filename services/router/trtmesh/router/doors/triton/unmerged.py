"""Takes merged tokens apart, for clients that count a response for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtmesh.router.streams.client_stream import Waiting, WaitingTokens
from trtmesh.router.streams.details import TokenDetailBuffer


class Unmerged:
    """Takes the entries of a request apart, except for beam searches, which rewrite tokens."""

    def __init__(self) -> None:
        self._details: dict[tuple[int, int], TokenDetailBuffer] = {}
        """By sequence: the sum of log-probabilities goes on from message to message."""

    def parts(self, waiting: Sequence[Waiting]) -> Iterator[Sequence[Waiting]]:
        """Yields the entries in groups, with a token and the following events each."""
        part: list[Waiting] = []
        has_tokens = False
        for entry in waiting:
            if not isinstance(entry, WaitingTokens):
                part.append(entry)
                continue
            for each in self._apart(entry):
                if has_tokens:
                    yield part
                    part = []
                part.append(each)
                has_tokens = True
        if part:
            yield part

    def _apart(self, entry: WaitingTokens) -> Iterator[WaitingTokens]:
        """Returns an entry for each token. The whole text comes with the first entry: nobody knows the parts of the
        tokens."""
        details = entry.details
        buffer = None
        if details is not None:
            key = (entry.batch_index, entry.sequence_index)
            buffer = self._details.setdefault(key, TokenDetailBuffer())
            buffer.add(details)
        if not entry.token_ids:
            yield entry
        for index, token in enumerate(entry.token_ids):
            yield WaitingTokens(
                entry.batch_index,
                entry.sequence_index,
                entry.token_offset + index,
                [token],
                [] if index else entry.texts,
                buffer.pop(1) if buffer else None,
                0,
            )
