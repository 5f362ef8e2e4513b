"""The halves of a prompt that a client brings together: context_only, then generation_only on any router."""

from __future__ import annotations

from trtmesh.chassis.errors import InvalidField
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.handoffs.live_handoff import EncodedPrompt
from trtmesh.router.handoffs.table import HandoffTable
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.values.handoff_state import FIELD, HandoffState, digest_of, write_state
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb

COMPLETE = frozenset(
    {
        *(pb.FINISH_REASON_HANDOFF, pb.FINISH_REASON_END_ID, pb.FINISH_REASON_STOP_WORD),
        pb.FINISH_REASON_LENGTH,
    }
)
"""Ends of a first half with a state. Only the first has KV; after the others the second half begins anew."""


def state_of(run: SequenceRun, prompt: EncodedPrompt, worker: str) -> bytes | None:
    """Returns the state for the client after the first half of a sequence, or None if it was stopped."""
    if run.reason not in COMPLETE:
        return None
    descriptor = run.ending.handoff if run.ending is not None else None
    return write_state(descriptor, worker, _digest(prompt))


def second_half(
    table: HandoffTable, model: str, item: ItemRequest, state: HandoffState, prompt: EncodedPrompt
) -> tuple[Worker, kv_pb.HandoffDescriptor] | None:
    """Returns the worker with the KV of `state`, and what to continue from, or None if the prompt must be computed
    again. Raises InvalidField for the state of another prompt."""
    if state.is_readable:
        state.check(_digest(prompt))
    sender = _worker_named(table, model, state.descriptor.worker) if state.has_kv else None
    if sender is None:
        return None
    _check_tokens(state, sender)
    if not _continues(item, state):
        table.discard(sender, state.descriptor.lease_id)
        return None
    return sender, _completed(state, sender)


def _digest(prompt: EncodedPrompt) -> bytes:
    return digest_of(prompt.token_ids, prompt.identity)


def _worker_named(table: HandoffTable, model: str, name: str) -> Worker | None:
    """The only worker of a name, if it hands KV over."""
    named = [worker for worker in table.fleet.workers.values() if worker.name == name]
    able = [
        w for w in named if w.ready and w.capabilities.has_leases and w.description.model == model
    ]
    return able[0] if len(named) == len(able) == 1 else None


def _check_tokens(state: HandoffState, sender: Worker) -> None:
    most = sender.description.vocabulary_size
    if most and any(token >= most for token in state.first_tokens):
        raise InvalidField("has a token outside of the vocabulary", field=FIELD)


def _continues(item: ItemRequest, state: HandoffState) -> bool:
    """Whether the item can continue from KV: no, if the item asks for data of computed tokens."""
    config, output = item.config, item.config.output
    several = config.sequences > 1
    if several is bool(state.first_tokens):
        return False
    asks = output.per_token or output.prompt_log_probs or output.context_logits
    return not asks and config.stopping.max_tokens != 1


def _completed(state: HandoffState, sender: Worker) -> kv_pb.HandoffDescriptor:
    """The descriptor as the fleet knows the sender. A client names no memory, so the bytes come in messages."""
    descriptor = kv_pb.HandoffDescriptor()
    descriptor.CopyFrom(state.descriptor)
    descriptor.ClearField("backend_state")
    shapes = sender.description.kv_shapes
    descriptor.shape.CopyFrom(shapes[0])
    descriptor.shards.extend(shapes)
    descriptor.transports.add(transport=kv_pb.KV_TRANSPORT_GRPC)
    return descriptor
