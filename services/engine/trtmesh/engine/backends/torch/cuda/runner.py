"""A step: decoding sequences as a captured graph, chunks of prompts as others, and all else operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.compute.device import Batch, Forward
from trtmesh.engine.backends.torch.compute.runner import Runner
from trtmesh.engine.backends.torch.cuda.capturing import Rows
from trtmesh.engine.backends.torch.cuda.choice import KernelChooser, are_plain
from trtmesh.engine.backends.torch.cuda.chunk_graphs import ChunkGraphs
from trtmesh.engine.backends.torch.cuda.decode_graphs import DecodeGraphs
from trtmesh.engine.backends.torch.model.attention import StepTokens
from trtmesh.engine.backends.torch.sampling.choice import Ranking, TokenChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sequence import Chunk


class GraphRunner:
    """Implements Compute."""

    def __init__(
        self,
        runner: Runner,
        graphs: DecodeGraphs,
        chunks: ChunkGraphs,
        chooser: KernelChooser,
        device: torch.device,
    ) -> None:
        """`runner` computes all that no graph can."""
        self._runner = runner
        self._graphs = graphs
        self._chunks = chunks
        self._chooser = chooser
        self._nothing = _nothing(device)
        # Of the last step, if computed whole by graphs.
        self._rows: Rows | None = None
        self.may_follow = False
        self.captured_steps = 0
        self.move = runner.move
        self.synchronize = runner.synchronize
        self.check = runner.check
        self.release_memory = runner.release_memory

    def prepare(self, chunks: SequenceOf[Chunk]) -> Batch:
        decoding = [chunk for chunk in chunks if self._graphs.takes(chunk)]
        if len(decoding) == len(chunks):
            return replace(self._nothing, decoding=decoding)
        taken = {chunk.sequence.key for chunk in decoding}
        rest = [chunk for chunk in chunks if chunk.sequence.key not in taken]
        if self._chunks.takes(rest):
            return replace(self._nothing, decoding=decoding, prefilling=rest)
        return replace(self._runner.prepare(rest), decoding=decoding)

    def forward(self, batch: Batch, written: Callable[[int], None] | None = None) -> Forward:
        self._rows, self.may_follow = None, False
        decoding = list(batch.decoding)
        rows = self._graphs.launch(decoding) if decoding else None
        if len(batch.token_ids):
            rest = self._runner.forward(batch, written)
            if rows is None:
                return rest
            logits = torch.cat((rows.logits.float(), rest.logits))
            return Forward(decoding + rest.completing, logits, rest.given)
        self.captured_steps += 1
        completing = [chunk for chunk in batch.prefilling if chunk.completes]
        if batch.prefilling:
            rows = self._graphs.with_more(rows, self._chunks.launch(batch.prefilling))
        assert rows
        self._rows = rows
        return Forward(decoding + completing, rows.logits, [])

    def follow(self, chunks: SequenceOf[Chunk], rows: SequenceOf[int]) -> Forward:
        self._rows, self.may_follow = self._graphs.follow(chunks, rows), False
        self.captured_steps += 1
        return Forward(list(chunks), self._rows.logits, [])

    def choose(self, sequences: SequenceOf[Continuation], logits: Tensor) -> TokenChoice:
        tokens = self._rows.tokens if self._rows and logits is self._rows.logits else None
        is_plain = tokens is not None and are_plain(sequences)
        self.may_follow = is_plain and self._graphs.are_captured
        if not is_plain:
            logits = logits.float()
        return self._chooser.choose(sequences, logits, tokens)

    def rank(self, lanes: SequenceOf[Continuation], logits: Tensor) -> Ranking:
        # The next step overwrites a graph's logits.
        is_graphs = self._rows is not None and logits is self._rows.logits
        return self._chooser.rank(lanes, logits.to(torch.float32, copy=is_graphs))


def _nothing(device: torch.device) -> Batch:
    """A batch without chunks."""
    none = np.zeros(0, dtype=np.int64)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return Batch(
        token_ids=empty,
        positions=empty,
        step=StepTokens(none, none, none, 0, empty),
        tables=[],
        kept_rows=empty,
        completing=[],
        drafted=[],
        reading=[],
        adapters=[],
    )
