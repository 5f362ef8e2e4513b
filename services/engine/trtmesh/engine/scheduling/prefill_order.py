"""The order of prompts on a prefill worker, the same way for every backend: the shortest first, with aging.

A sequence goes by its step of arrival plus the steps that its prompt is predicted to take, times PATIENCE. So a prompt
is overtaken by shorter ones only as long as that, however many follow.
"""

from __future__ import annotations

PATIENCE = 4
"""Time for which shorter prompts may overtake one, in durations of its own prefill."""


def patience_steps(uncomputed_tokens: int, tokens_per_step: int) -> int:
    """Steps for which later prompts may overtake, if they are shorter by more steps than they are later."""
    return PATIENCE * uncomputed_tokens // tokens_per_step
