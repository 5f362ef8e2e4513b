"""The logits sent by clients with their drafts."""

from __future__ import annotations

import torch
from trtmesh.chassis.errors import InvalidField, QueueFull
from trtmesh.chassis.vocabulary import BeamSearch, Draft
from trtmesh.engine.backends.torch.memory.tensors import FLOATS, from_message
from trtmesh.engine.backends.torch.preparation import Done, PartLease, Preparation
from trtmesh.engine.backends.torch.sampling.continuation import GivenDrafts
from trtmesh.v1 import generation_pb2 as pb

LOGITS = "draft.logits"


class DraftLogits:
    """The logits of all items of a backend, in at most `most_bytes` of memory."""

    def __init__(self, vocabulary_size: int, most_bytes: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._most_bytes = most_bytes
        self._preparation = Preparation("draft-logits", most_bytes)
        self.close = self._preparation.close

    def check(self, draft: Draft, beams: BeamSearch) -> None:
        """Raises InvalidField for drafts with unusable logits."""
        if draft.logits is None:
            if draft.acceptance_threshold is not None:
                raise InvalidField(
                    "applies to drafts with logits, which are not set; set them, or leave it out",
                    field="draft.acceptance_threshold",
                    limit_field=LOGITS,
                )
            return
        if beams.beam_width > 1:
            raise InvalidField(
                f"are set with a beam width of {beams.beam_width}, but beams are ranked, not drawn; leave"
                " them out",
                field=LOGITS,
                limit_field="beam_search.beam_width",
            )
        tensor = draft.logits
        if tensor.data_type not in FLOATS:
            limit = f"one of {', '.join(map(pb.DataType.Name, FLOATS))}"
            name = pb.DataType.Name(pb.DataType.ValueType(tensor.data_type))
            raise InvalidField.of(f"{LOGITS}.data_type", name, limit)
        rows, size = len(draft.token_ids), self._vocabulary_size
        if len(tensor.shape) != 2 or not 1 <= tensor.shape[0] <= rows or tensor.shape[1] != size:
            limit = f"[1 to {rows}, {size}], the drafts and the vocabulary"
            raise InvalidField.of(f"{LOGITS}.shape", list(tensor.shape), limit)
        if len(tensor.data) > self._most_bytes:
            raise InvalidField.of(
                LOGITS,
                f"{len(tensor.data)} bytes",
                f"at most {self._most_bytes} bytes",
            )

    def read(self, request_id: str, draft: Draft, holders: int, done: Done) -> PartLease:
        """Queues checked logits; `holders` sequences will hold the result. Raises QueueFull where memory is short."""
        assert draft.logits
        what, size = "logits of drafts could not be read", len(draft.logits.data)
        lease = self._preparation.begin(
            request_id, what, lambda _: _read(draft), size, holders, done
        )
        if lease is None:
            held = self._preparation.held
            raise QueueFull(
                f"the logits of other items' drafts take {held} bytes of at most {self._most_bytes};"
                " try again later or elsewhere",
                value=str(held),
                limit=f"at most {self._most_bytes} bytes",
            )
        return lease


def _read(draft: Draft) -> GivenDrafts:
    assert draft.logits
    logits = from_message(draft.logits)
    if not bool(torch.isfinite(logits.amax(dim=1)).all()):
        raise InvalidField("hold a row whose highest is not a finite number", field=LOGITS)
    return GivenDrafts(list(draft.token_ids), logits, draft.acceptance_threshold)
