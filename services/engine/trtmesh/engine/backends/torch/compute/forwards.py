"""The forward of a step, in which what cannot be computed costs its own sequence and no other."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from torch import Tensor
from trtmesh.chassis.errors import BackendFailed
from trtmesh.chassis.logs import request_id_bound
from trtmesh.engine.backends.torch.compute.runner import Runner
from trtmesh.engine.backends.torch.scheduling.chunk import Chunk

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Forward:
    """What came of the chunks of a step."""

    computed: list[Chunk] = field(default_factory=list)
    """Those whose KV is there."""
    results: list[tuple[list[Chunk], Tensor | None]] = field(default_factory=list)
    """Completing chunks with their logits [chunks, vocabulary]."""
    failures: list[tuple[Chunk, BackendFailed]] = field(default_factory=list)


class Forwards:
    """Computes with a runner, and knows whether the model can compute at all."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._broken: BackendFailed | None = None

    def compute(self, chunks: SequenceOf[Chunk]) -> Forward:
        """All chunks at once; where that fails, each on its own. Raises BackendFailed once the model was found
        broken."""
        if self._broken is not None:
            raise self._broken
        if not chunks:
            return Forward()
        try:
            return Forward(list(chunks), [self._runner.compute(chunks)])
        except Exception:
            log.exception("a step of %d sequences failed; trying each alone", len(chunks))
        # Not in the handler, where the exception still holds every tensor of the failed step.
        self._runner.release_memory()
        return self._compute_alone(chunks)

    def _compute_alone(self, chunks: SequenceOf[Chunk]) -> Forward:
        forward = Forward()
        for chunk in chunks:
            try:
                forward.results.append(self._runner.compute([chunk]))
            except Exception as error:
                # Broad on purpose: whatever it is, it ends this sequence alone.
                with request_id_bound(chunk.sequence.request_id):
                    log.exception("item %d fails alone too", chunk.sequence.batch_index)
                forward.failures.append((chunk, BackendFailed(f"the model failed: {error}")))
            else:
                forward.computed.append(chunk)
        return forward

    def is_broken(self) -> bool:
        """Tells a model that cannot compute from items that cannot be computed."""
        if self._broken is None:
            try:
                self._runner.check()
            except Exception as error:  # noqa: BLE001 - the next step raises it
                self._broken = BackendFailed(
                    f"the model cannot compute a single token any more: {error}"
                )
        return self._broken is not None
