"""From an item to the commands that start its sequences on a worker, or let them go on there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtmesh.router.fleet.fleet import Placed
from trtmesh.router.requests.encoding import EncodedItem
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.values.request import ItemRequest, worker_config
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from trtmesh.router.requests.live_request import LiveRequest

Submit = tuple[list[SequenceRun], engine_pb.SubmitCommand]


def dispatch(
    placed: Placed,
    live: LiveRequest,
    item: ItemRequest,
    encoded: EncodedItem,
    waiting: Sequence[SequenceRun],
) -> int:
    """Gives a worker the sequences of an item that no worker has; the seed that they go with."""
    prompt = encoded.token_ids
    config = worker_config(item, len(prompt), encoded.word_ids, live.drawn_seed)
    for runs, command in _submits(
        item,
        waiting,
        prompt,
        config,
        request_id=live.request_id,
        timeout_ms=live.remaining_ms(),
    ):
        placed.worker.submit(runs, command, placed.booking)
    return config.sampling.seed


def _submits(
    item: ItemRequest,
    runs: Sequence[SequenceRun],
    prompt: Sequence[int],
    config: pb.GenerationConfig,
    *,
    request_id: str,
    timeout_ms: int | None,
) -> list[Submit]:
    """One command for all sequences of an item that has not begun; else one for each of `runs`, which goes on after
    its own tokens. Beams depend on each other, so they begin again together."""
    command = engine_pb.SubmitCommand(
        request_id=request_id, batch_index=item.batch_index, timeout_ms=timeout_ms, config=config
    )
    if _begins(item, runs):
        command.token_ids.extend(prompt)
        return [(list(runs), command)]
    return [([run], _continued(run, prompt, command)) for run in runs]


def _begins(item: ItemRequest, runs: Sequence[SequenceRun]) -> bool:
    whole = len(runs) == item.config.sequences
    return item.config.beam_search.beam_width > 1 or (
        whole and not any(run.token_ids for run in runs)
    )


def _continued(
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
        # The first worker reported the prompt's data before these tokens.
        command.config.output.ClearField("prompt_log_probs")
        command.config.output.ClearField("context_logits")
    return command
