"""Attention of a flat batch over the cache: what does not depend on how keys and values are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad
from trtmesh.engine.backends.torch.memory.kvcache import KvCache
from trtmesh.engine.backends.torch.model.attention import Rule, StepTokens


class CachedAttention(ABC):
    """Implements Attention, save for `attend_tokens`."""

    turns = False

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self._step: StepTokens | None = None
        self._written: Callable[[int], None] | None = None

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        self._step = step
        self._written = written
        self._forget_groups()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        kv = torch.cat((self._per_token(key), self._per_token(value)), dim=1)
        output = self.attend_tokens(layer, self._per_token(query), kv, rule)
        return output[None, ..., : value.shape[-1]]

    @abstractmethod
    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor: ...

    @abstractmethod
    def _forget_groups(self) -> None:
        """Drops the groups of the last step."""

    def _write(self, layer: int, kv: Tensor) -> StepTokens:
        """Writes the step's keys and values of a layer to the cache; returns the step."""
        if self._step is None:
            raise RuntimeError("attention ran outside a step")
        self.cache.write(layer, self._step.token_rows, kv)
        if self._written:
            self._written(layer)
        return self._step

    def _per_token(self, tensor: Tensor) -> Tensor:
        """[1, heads, tokens, size] as [tokens, heads, head_dim], padded with zeros to the size of the cache."""
        per_token = tensor[0].transpose(0, 1)
        missing = self.cache.shape.head_dim - tensor.shape[-1]
        return pad(per_token, (0, missing)) if missing else per_token
