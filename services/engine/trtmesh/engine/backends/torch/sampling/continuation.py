"""Tokens that are being continued, as the choice of the next one sees them: no KV, no blocks, no schedule."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.engine.backends.torch.sampling.history import History
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.stopping import EndRule


@dataclass(slots=True, eq=False)
class Continuation:
    """Tokens, the rules of their item, and the coordinates of their draws."""

    key: int
    batch_index: int
    sequence_index: int
    tokens: list[int]
    """Prompt and generated tokens."""
    rule: EndRule
    token_rules: TokenRules
    history: History | None = None
    """Memory of the rules; None until needed, and again when `tokens` is replaced."""
    cumulative_log_prob: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.rule.prompt_tokens

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.rule.prompt_tokens

    def remember(self) -> None:
        """Brings the history up to date with the tokens."""
        if self.history is None:
            self.history = History(self.token_rules, self.prompt_tokens)
        self.history.catch_up(self.tokens)

    @property
    def top_p(self) -> float:
        """The `top_p` of the next token."""
        if self.history is not None and self.history.top_p is not None:
            return self.history.top_p.value
        top_p = self.token_rules.sampling.top_p
        return 1.0 if top_p is None else top_p

    def add_log_probs(self, log_probs: list[float]) -> float | None:
        """Adds log-probabilities of new tokens; returns the new sum, or None without any."""
        if log_probs:
            self.cumulative_log_prob = (self.cumulative_log_prob or 0.0) + sum(log_probs)
        return self.cumulative_log_prob
