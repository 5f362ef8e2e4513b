"""Sends an item's sequences to a worker, from their start or from where they stopped."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.router.fleet.plan import Leg
from trtmesh.router.handoffs.live_handoff import NO_LEASE, Lease
from trtmesh.router.requests.context import RequestContext
from trtmesh.router.requests.encoding import EncodedItem
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.values.request import ItemRequest, worker_config
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb

Submit = tuple[list[SequenceRun], engine_pb.SubmitCommand]


def dispatch(
    leg: Leg,
    context: RequestContext,
    item: ItemRequest,
    encoded: EncodedItem,
    waiting: Sequence[SequenceRun],
    lease: Lease = NO_LEASE,
) -> None:
    """Submits the sequences without a worker."""
    config = worker_config(
        item,
        len(encoded.token_ids),
        encoded.word_ids,
        encoded.spelled_ids,
        context.drawn_seed,
        encoded.identity,
    )
    if item.is_context_only:
        _end_after_first_token(config, is_handed_over=bool(lease.sender))
    for runs, command in _submits(context, item, waiting, encoded, config):
        if lease is not NO_LEASE:
            command.sender_lease_id, command.receiver_lease_id = lease.sender, lease.receiver
            command.lease_expires_in_ms = round(lease.seconds * 1000)
        if lease.state is not None:
            command.handoff.CopyFrom(lease.state)
        leg.worker.submit(runs, command, leg.booking)


def _end_after_first_token(config: pb.GenerationConfig, *, is_handed_over: bool) -> None:
    """Makes the item end with its handoff, whatever its limit; or after a token, where nothing can be handed over."""
    if is_handed_over:
        config.handoff.phase = pb.GENERATION_PHASE_CONTEXT_ONLY
        if config.stopping.HasField("max_tokens"):
            config.stopping.max_tokens = max(2, config.stopping.max_tokens)
    else:
        config.stopping.max_tokens = 1


def _submits(
    context: RequestContext,
    item: ItemRequest,
    runs: Sequence[SequenceRun],
    encoded: EncodedItem,
    config: pb.GenerationConfig,
) -> list[Submit]:
    """A single command for sequences at the start, else a command per sequence with the emitted tokens.

    Beams depend on each other, so they restart together.
    """
    command = engine_pb.SubmitCommand(
        request_id=context.request_id,
        batch_index=item.batch_index,
        timeout_ms=context.remaining_ms(),
        config=config,
        draw_index=item.draw_index,
        stop_vocabulary=encoded.stop_vocabulary,
        end_ids=encoded.end_ids,
    )
    prompt = encoded.token_ids
    if starts(item, runs):
        command.token_ids.extend(prompt)
        return [(list(runs), command)]
    return [([run], _resumed(run, prompt, command)) for run in runs]


def starts(item: ItemRequest, runs: Sequence[SequenceRun]) -> bool:
    """Whether a worker gets all sequences together, from their start."""
    whole = len(runs) == item.config.sequences
    return item.config.beam_search.beam_width > 1 or (
        whole and not any(run.token_ids for run in runs)
    )


def _resumed(
    run: SequenceRun, prompt: Sequence[int], whole: engine_pb.SubmitCommand
) -> engine_pb.SubmitCommand:
    command = engine_pb.SubmitCommand()
    command.CopyFrom(whole)
    command.token_ids.extend(prompt)
    command.token_ids.extend(run.token_ids)
    command.emitted_tokens = len(run.token_ids)
    command.sequence_index = run.sequence_index
    command.config.sampling.ClearField("num_return_sequences")
    if run.token_ids:
        # The former worker reported the prompt's data before the first token.
        command.config.output.ClearField("prompt_log_probs")
        command.config.output.ClearField("context_logits")
    return command
