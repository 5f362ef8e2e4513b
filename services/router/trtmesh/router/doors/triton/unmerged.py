"""Tokens that were merged on their way, taken apart: for clients that count one response a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtmesh.router.streams.client_stream import Waiting, WaitingTokens
from trtmesh.router.streams.details import TokenDetailBuffer


class Unmerged:
    """Takes the entries of one request apart, without a beam search, which rewrites its tokens."""

    def __init__(self) -> None:
        self._details: dict[tuple[int, int], TokenDetailBuffer] = {}
        """By sequence: the sum of log-probabilities goes on from message to message."""

    def parts(self, waiting: Sequence[Waiting]) -> Iterator[Sequence[Waiting]]:
        """The entries in groups with one token each, and with the events that follow it."""
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
        """An entry for each token. The text of all comes with the first: nobody knows which token has what part."""
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
