"""What the requests of a batch ask for, as people mix it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.chassis.vocabulary import GenerationConfig, Output, Sampling

RANK = 16
ADAPTERS = 16
UNEQUAL = (4, 8, 32, 64)
SLOTS = ADAPTERS + len(UNEQUAL)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Fields of requests, and adapters by number, in turn."""

    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    output: Output = Output()  # noqa: RUF009 - frozen
    adapters: Sequence[int] = ()
    is_one: bool = False
    """Whether only the first row has these, among greedy ones."""

    def configs(self, rows: int) -> list[GenerationConfig]:
        plain = GenerationConfig()
        own = GenerationConfig(sampling=self.sampling, output=self.output)
        return [plain if self.is_one and row else own for row in range(rows)]

    def numbers(self, rows: int) -> list[int]:
        """Of the adapter of each row, 0 for none."""
        if not self.adapters:
            return [0] * rows
        turns = len(self.adapters)
        return [0 if self.is_one and row else self.adapters[row % turns] for row in range(rows)]


def _drawn(**fields: float) -> Sampling:
    return Sampling(**{"temperature": 0.8, "seed": 1, **fields})  # type: ignore[arg-type]  # each field has its own type


NUCLEUS = _drawn(top_p=0.9)
TOP_LOG_PROBS = Output(log_probs=True, top_log_probs=5)

CHOICES = {
    "top_p": Mixture(NUCLEUS),
    "one_top_p": Mixture(NUCLEUS, is_one=True),
    "repetition_penalty": Mixture(_drawn(repetition_penalty=1.1)),
    "log_probs_5": Mixture(output=TOP_LOG_PROBS),
    "one_log_probs": Mixture(output=TOP_LOG_PROBS, is_one=True),
    "temperature": Mixture(_drawn()),
    "top_k_top_p": Mixture(_drawn(top_k=40, top_p=0.9)),
    "frequency_penalty": Mixture(_drawn(frequency_penalty=0.3)),
    "min_p": Mixture(_drawn(min_p=0.05)),
}
"""Mixtures of an engine without adapters, the most telling first."""
ADAPTED = {
    "one_adapter": Mixture(adapters=(1,)),
    "one_row_with_an_adapter": Mixture(adapters=(1,), is_one=True),
    "adapters_16": Mixture(adapters=range(1, 1 + ADAPTERS)),
    "adapters_of_unequal_ranks": Mixture(adapters=range(1 + ADAPTERS, 1 + SLOTS)),
    "no_adapter": Mixture(),
}
"""Those of an engine with adapters, of the ranks of `RANKS`."""
RANKS = [RANK] * ADAPTERS + list(UNEQUAL)
