"""Beam search by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from oracle import tiny_models
from transformers import PreTrainedModel
from trtmesh.v1 import generation_pb2 as pb

TOKENS = 12

STOPPING = {
    pb.EARLY_STOPPING_FIRST_COMPLETE: True,
    pb.EARLY_STOPPING_HEURISTIC: False,
    pb.EARLY_STOPPING_EXHAUSTIVE: "never",
}
"""transformers' names for the three."""

Beams = list[tuple[list[int], float]]


def expected(
    model: PreTrainedModel,
    prompt: Sequence[int],
    width: int,
    *,
    early_stopping: int = pb.EARLY_STOPPING_FIRST_COMPLETE,
    length_penalty: float = 0.0,
    end_id: int | list[int] | None = None,
    tokens: int = TOKENS,
) -> Beams:
    """The sequences of `generate`, best first, and their scores."""
    ids = torch.tensor([prompt])
    generate: Any = model.generate
    with torch.inference_mode():
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            early_stopping=STOPPING[pb.EarlyStopping.ValueType(early_stopping)],
            length_penalty=length_penalty,
            eos_token_id=end_id,
            pad_token_id=tiny_models.PAD_ID,
            output_scores=True,
            return_dict_in_generate=True,
        )
    ends = [end_id] if isinstance(end_id, int) else end_id or []
    found = []
    for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        generated = row[len(prompt) :]
        last = next((at for at, token in enumerate(generated) if token in ends), len(generated))
        found.append((generated[: last + 1], score))
    return found
