"""Translates log-probabilities, logits and metrics of the library. Tensors are those of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from trtmesh.chassis.errors import BackendFailed
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.engine.backend import PromptDetails, TopLogProbs, most_likely
from trtmesh.engine.ledger import SequenceTimes
from trtmesh.v1 import generation_pb2 as pb

_TYPES: Mapping[int, torch.dtype] = {
    pb.DATA_TYPE_FP32: torch.float32,
    pb.DATA_TYPE_FP16: torch.float16,
    pb.DATA_TYPE_BF16: torch.bfloat16,
}

Position = Mapping[int, Any] | float
"""Log-probabilities of one position: by token, or of the chosen token alone."""


def log_prob_of(position: Position, token: int) -> float:
    """The log-probability of the chosen token."""
    if not isinstance(position, Mapping):
        return float(position)
    found = position.get(token)
    if found is None:
        raise BackendFailed(f"the library returned no log-probability of token {token}")
    return float(found.logprob)


def top_of(position: Position, most: int) -> TopLogProbs:
    """The most likely tokens; the chosen one may be beyond them."""
    if not isinstance(position, Mapping):
        return [], []
    found = ((token, float(each.logprob)) for token, each in position.items())
    return most_likely(found, most)


def logits_of(logits: Any, rows: int, vocabulary_size: int, data_type: int, field: str) -> Tensor:
    """The first rows of logits as generation.proto has them, [rows, vocabulary]."""
    table = _table(logits, rows, vocabulary_size, field)
    kind = data_type or pb.DATA_TYPE_FP32
    stored = table.to(_TYPES[kind]).cpu().contiguous()
    return Tensor(kind, (rows, vocabulary_size), stored.view(torch.uint8).numpy().tobytes())


def prompt_details(
    key: int, logits: Any, prompt: Sequence[int], asked: Any, vocabulary_size: int
) -> PromptDetails:
    """What an item asks of its prompt; `asked` is vocabulary.Output."""
    details = PromptDetails(key)
    rows = len(prompt)
    table = _table(logits, rows, vocabulary_size, "context_logits")
    if asked.context_logits:
        details.context_logits = logits_of(
            table, rows, vocabulary_size, asked.logits_data_type, "context_logits"
        )
    if asked.prompt_log_probs and rows > 1:
        scores = table[:-1].float().log_softmax(-1)
        chosen = torch.tensor(list(prompt[1:]), device=scores.device)[:, None]
        details.log_probs = scores.gather(1, chosen)[:, 0].tolist()
        if asked.top_log_probs:
            values, ids = scores.topk(asked.top_log_probs)
            details.top_log_probs = list(zip(ids.tolist(), values.tolist(), strict=True))
    return details


def _table(logits: Any, rows: int, vocabulary_size: int, field: str) -> torch.Tensor:
    """[rows, vocabulary]; the library pads either."""
    if logits is None:
        raise BackendFailed(f"the library returned no {field}")
    table: torch.Tensor = logits.detach().reshape(-1, logits.shape[-1])
    if len(table) < rows or table.shape[1] < vocabulary_size:
        raise BackendFailed(
            f"the library returned {field} of shape {list(table.shape)}, not [{rows}, {vocabulary_size}]"
        )
    return table[:rows, :vocabulary_size]


def metrics_of(times: SequenceTimes, measured: Any) -> pb.PerfMetrics:
    """The worker's times with what the library measured: `measured` is its request_perf_metrics, or None."""
    metrics = times.perf_metrics()
    if measured is None:
        return metrics
    cache = getattr(measured, "kv_cache_metrics", None)
    drafts = getattr(measured, "speculative_decoding", None)
    metrics.first_scheduled_time_ns = _scheduled(times, measured)
    if cache is not None:
        metrics.kv_cache_alloc_new_blocks = int(getattr(cache, "num_new_allocated_blocks", 0))
        metrics.kv_cache_reused_blocks = int(getattr(cache, "num_reused_blocks", 0))
        metrics.kv_cache_alloc_total_blocks = int(getattr(cache, "num_total_allocated_blocks", 0))
    if drafts is not None:
        metrics.acceptance_rate = float(getattr(drafts, "acceptance_rate", 0.0))
        for name in ("total_accepted_draft_tokens", "total_draft_tokens"):
            setattr(metrics, name, int(getattr(drafts, name, 0)))
    return metrics


def _scheduled(times: SequenceTimes, measured: Any) -> int:
    """The library's clock has another zero, so its wait counts from the worker's arrival."""
    timing = getattr(measured, "timing_metrics", None)
    arrival = getattr(timing, "arrival_time", None)
    scheduled = getattr(timing, "first_scheduled_time", None)
    if arrival is None or scheduled is None:
        return times.scheduled_ns
    wait = scheduled - arrival
    seconds = wait.total_seconds() if hasattr(wait, "total_seconds") else float(wait)
    return times.arrival_ns + max(0, int(seconds * 1e9))
