"""Messages of TrtllmService."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, repeat

from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from trtmesh.engine.backend import SequenceEnd, TopLogProbs
from trtmesh.engine.gateways.trtllm.request import AskedGeneration
from trtmesh.engine.gateways.trtllm.sequence import SequenceOutput
from trtmesh.v1 import generation_pb2 as pb

FINISH_REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_END_ID: "stop",
    pb.FINISH_REASON_STOP_WORD: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_STOPPED: "cancelled",
    pb.FINISH_REASON_CANCELLED: "cancelled",
}
"""The contract's words; gateways pass on others as they are."""


class PromptOutput:
    """The requested data of the prompt. Arrives in pieces with the first sequence, and belongs to every last answer."""

    def __init__(self) -> None:
        self.log_probs: list[float] = []
        self.top_log_probs: list[TopLogProbs] = []
        self.logits = bytearray()


def chunk(sequence: SequenceOutput, prompt_tokens: int) -> tpb.GenerateResponse:
    """The certain and unsent tokens."""
    first, end = sequence.sent, sequence.sendable
    cached = sequence.end.cached_prompt_tokens if sequence.end else 0
    answer = tpb.GenerateStreamChunk(
        token_ids=sequence.token_ids[first:end],
        sequence_index=sequence.index,
        prompt_tokens=prompt_tokens,
        completion_tokens=end,
        cached_tokens=cached,
        logprobs=_log_probs(sequence, first, end),
    )
    return tpb.GenerateResponse(request_id=sequence.asked.request_id, chunk=answer)


def complete(
    sequence: SequenceOutput, end: SequenceEnd, prompt: PromptOutput
) -> tpb.GenerateResponse:
    asked, kept = sequence.asked, sequence.sendable
    answer = tpb.GenerateComplete(
        output_token_ids=sequence.token_ids[:kept],
        sequence_index=sequence.index,
        finish_reason=_finish_reason(sequence, end),
        prompt_tokens=end.prompt_tokens,
        completion_tokens=sequence.generated,
        cached_tokens=end.cached_prompt_tokens,
        logprobs=_log_probs(sequence, 0, kept),
    )
    if sequence.stop_text is not None:
        answer.matched_stop_str = sequence.stop_text
    elif end.reason == pb.FINISH_REASON_STOP_WORD and end.stop_token_ids:
        # The model's own end id is no stop of the client.
        answer.matched_token_id = end.stop_token_ids[-1]
    if asked.prompt_logprobs is not None:
        answer.prompt_logprobs.extend(_prompt_log_probs(asked, prompt))
    if asked.command.config.output.context_logits:
        answer.context_logits = bytes(prompt.logits)
    if asked.command.config.output.generation_logits:
        answer.generation_logits = bytes(sequence.logits[: kept * asked.logits_row_bytes])
    if end.perf_metrics:
        answer.spec_accepted_tokens = end.perf_metrics.total_accepted_draft_tokens
        answer.spec_draft_tokens = end.perf_metrics.total_draft_tokens
        answer.perf_metrics.CopyFrom(_metrics(end.perf_metrics, asked.arrival_time))
    return tpb.GenerateResponse(request_id=asked.request_id, complete=answer)


def _finish_reason(sequence: SequenceOutput, end: SequenceEnd) -> str:
    return "stop" if sequence.stop_text is not None else FINISH_REASONS[end.reason]


def _log_probs(sequence: SequenceOutput, first: int, end: int) -> Iterator[tpb.TokenLogprob]:
    most = sequence.asked.logprobs
    if most is None:
        return
    for token, log_prob, top in zip(
        sequence.token_ids[first:end],
        sequence.log_probs[first:end],
        sequence.top_log_probs[first:end],
        strict=True,
    ):
        yield _log_prob(token, log_prob, top, most)


def _prompt_log_probs(asked: AskedGeneration, prompt: PromptOutput) -> Iterator[tpb.TokenLogprob]:
    """An entry for each prompt token. The first token has no log-probability, only an entry. Returns None where the
    item ended before the prompt was computed."""
    tokens = asked.command.token_ids
    if len(prompt.log_probs) < len(tokens) - 1:
        return
    yield tpb.TokenLogprob(token_id=tokens[0])
    alternatives: Iterable[TopLogProbs] = prompt.top_log_probs or repeat(([], []))
    for token, log_prob, top in zip(
        islice(tokens, 1, None), prompt.log_probs, alternatives, strict=False
    ):
        yield _log_prob(token, log_prob, top, asked.prompt_logprobs or 0)


def _log_prob(token: int, log_prob: float, top: TopLogProbs, most: int) -> tpb.TokenLogprob:
    alternatives = (
        tpb.TopLogprob(token_id=other, logprob=of_other)
        for other, of_other in islice(zip(*top, strict=True), most)
    )
    return tpb.TokenLogprob(token_id=token, logprob=log_prob, top_logprobs=alternatives)


def _metrics(metrics: pb.PerfMetrics, arrival_time: float | None) -> tpb.PerfMetrics:
    """Seconds of the Unix clock. The client may have given the arrival."""
    return tpb.PerfMetrics(
        arrival_time=metrics.arrival_time_ns / 1e9 if arrival_time is None else arrival_time,
        first_scheduled_time=metrics.first_scheduled_time_ns / 1e9,
        first_token_time=metrics.first_token_time_ns / 1e9,
        last_token_time=metrics.last_token_time_ns / 1e9,
    )
