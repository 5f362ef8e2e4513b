"""From an item to the commands that start its sequences on a worker, or let them go on there."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.router.request import ItemRequest
from trtmesh.router.sequence import SequenceRun
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb

Submit = tuple[list[SequenceRun], engine_pb.SubmitCommand]


def submits(
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
    if run.prompt_told:
        command.config.output.ClearField("prompt_log_probs")
        command.config.output.ClearField("context_logits")
    return command
