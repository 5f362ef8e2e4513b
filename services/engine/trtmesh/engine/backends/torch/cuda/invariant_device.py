"""A GPU without influence of the batch on the results for a token, to the last bit."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from transformers import PreTrainedModel
from trtmesh.engine.backends.torch.cuda.attention import GraphAttention, InvariantAttention
from trtmesh.engine.backends.torch.cuda.device import Cuda, fitted
from trtmesh.engine.backends.torch.cuda.experts import KernelExperts
from trtmesh.engine.backends.torch.cuda.invariant_layers import (
    InvariantLayerProducts,
    InvariantUpdates,
    make_invariant,
)
from trtmesh.engine.backends.torch.cuda.kernels.invariant_products import InvariantProducts
from trtmesh.engine.backends.torch.cuda.layers import (
    KernelLayer,
    KernelMlp,
    KernelNorm,
    KernelRotation,
)
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.fusing import fuse_experts, fuse_layers, fuse_norms
from trtmesh.engine.backends.torch.model.lora_layers import Products, UpdateTable
from trtmesh.engine.backends.torch.model.model import Fitted


class InvariantCuda(Cuda):
    """Every layer gives the same bits for any number of tokens."""

    adds_logs = False

    def __init__(self, name: torch.device) -> None:
        super().__init__(name)
        self._products = InvariantProducts(name)

    def fit(self, module: PreTrainedModel, dtype: torch.dtype) -> Fitted:
        products = InvariantLayerProducts(self._products)
        fuse_layers(module, KernelRotation(), KernelMlp, partial(KernelLayer, products))
        fuse_norms(module, KernelNorm)
        fuse_experts(module, partial(KernelExperts, most_pairs=None))
        make_invariant(module, self._products)
        return fitted(module, dtype)

    def products(self, tables: Collection[UpdateTable], max_tokens: int) -> Products:
        return InvariantUpdates(self._products, list(tables))

    def _attention(self, cache: KvCache, tables: BlockTables) -> GraphAttention:
        return InvariantAttention(cache, tables)
