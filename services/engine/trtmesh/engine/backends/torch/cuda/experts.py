"""The experts of a mixture by kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from trtmesh.engine.backends.torch.cuda.kernels.experts import experts

MOST_PAIRS = 2048
"""Most pairs of a token and an expert for the kernels. Beyond, transformers' own products read weights less often."""


class KernelExperts(nn.Module):
    """Gated MLPs, a few for each token."""

    def __init__(self, own: Any, most_pairs: int | None = MOST_PAIRS) -> None:
        """`own`, the replaced layer, computes more than `most_pairs`, if given."""
        super().__init__()
        self.gate_up_proj = own.gate_up_proj
        self.down_proj = own.down_proj
        # The bound method, so that the replaced layer is no submodule.
        self._own = own.forward
        self._most_pairs = most_pairs

    def forward(self, hidden: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        if self._most_pairs is not None and ids.numel() > self._most_pairs:
            output: Tensor = self._own(hidden, ids, factors)
            return output
        return experts(hidden, self.gate_up_proj, self.down_proj, ids, factors)
