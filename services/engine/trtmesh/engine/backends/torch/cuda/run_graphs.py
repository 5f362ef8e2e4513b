"""New tokens together with drafts of those that follow, as captured graphs.

A draft is a row like a new token, at the position after the last token or draft of its sequence. The keys and values
of all rows are stored before any is attended to. Draft rows come after those of the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from trtmesh.engine.backends.torch.compute.device import Drafted
from trtmesh.engine.backends.torch.cuda.capturing import Rows, needs_only_tokens
from trtmesh.engine.backends.torch.cuda.choice import GraphChoice
from trtmesh.engine.backends.torch.cuda.decode_graphs import DecodeGraphs
from trtmesh.engine.backends.torch.sequence import Chunk

MOST_ROWS = 128
"""Most tokens and drafts of a step together."""
MOST_OF_SEQUENCE = 9
"""Rows of a sequence in a step: a token, and the most drafts that a source makes."""


def most_rows(sequences: int) -> int:
    """The most rows of a step with up to `sequences` sequences."""
    return min(MOST_ROWS, MOST_OF_SEQUENCE * sequences)


class RunGraphs(DecodeGraphs):
    """Chooses at each draft as if all before it held."""

    def takes(self, chunk: Chunk) -> bool:
        return (
            self.are_captured
            and chunk.known_end == chunk.start + 1
            and chunk.completes
            and needs_only_tokens(chunk, adapted=self.take_adapters)
        )

    @property
    def most_rows(self) -> int:
        return self._sizes[-1]

    @torch.inference_mode()
    def launch_runs(self, chunks: SequenceOf[Chunk]) -> tuple[Rows, list[Drafted]]:
        """Returns the rows of the sequences, and their drafts with the logits after them."""
        rows = [Chunk(chunk.sequence, chunk.start, 1) for chunk in chunks]
        token_ids = [chunk.sequence.tokens[chunk.start] for chunk in chunks]
        drafted = [chunk for chunk in chunks if chunk.drafts]
        for chunk in drafted:
            first, count = chunk.known_end, len(chunk.drafts)
            rows += [Chunk(chunk.sequence, at, 1) for at in range(first, first + count)]
            token_ids += chunk.drafts
        starts = np.array([row.start for row in rows], dtype=np.int64)
        lengths = np.array([len(row.sequence.tokens) for row in rows], dtype=np.int64)
        before = starts + 1 - lengths
        size = self._size(len(rows))
        found, count = self._replay(size, rows, token_ids, before), len(chunks)
        depends = self._inputs.rules.find([chunk.sequence for chunk in drafted]).depends
        log_probs = found.log_probs
        choice = GraphChoice(
            [row.sequence for row in rows[count:]],
            range(len(rows) - count),
            found.tokens[count:],
            None if log_probs is None else log_probs[count:],
        )
        drafts, first = [], count
        for chunk, is_open in zip(drafted, depends, strict=True):
            last = first + len(chunk.drafts)
            chosen = None if is_open else (choice, first - count)
            drafts.append(Drafted(chunk, found.logits[first:last], chosen))
            first = last
        own = None if log_probs is None else log_probs[:count]
        return Rows(found.logits[:count], found.tokens[:count], own), drafts
