"""Chooses and filters as on a CPU, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling
from trtmesh.engine.backends.torch.cpu.device import ORDERING
from trtmesh.engine.backends.torch.sampling.choice import Chooser
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.filters import Filters
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules

CHOOSER = Chooser(ORDERING)


def continuation(
    tokens: Sequence[int],
    config: GenerationConfig,
    prompt_tokens: int,
    *,
    end_ids: Sequence[int] = (),
) -> Continuation:
    rule = EndRule(config.stopping, end_ids, prompt_tokens, 1000)
    return Continuation(0, 0, 0, list(tokens), rule, TokenRules(config))


def chosen(sequences: Sequence[Continuation], logits: Tensor) -> list[int]:
    choice = CHOOSER.choose(sequences, logits)
    assert choice.read() == {}
    return choice.token_ids


def filtered_weights(
    configs: Sequence[Sampling], logits: Tensor, top_p: Sequence[float] | None = None
) -> Tensor:
    own = [1.0 if config.top_p is None else config.top_p for config in configs]
    return Filters(ORDERING).weights(configs, logits, top_p or own)
