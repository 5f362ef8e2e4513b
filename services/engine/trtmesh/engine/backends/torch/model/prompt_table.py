"""Prompt tuning: embeddings from the request, addressed by ids beyond the vocabulary.

The table extends the model's embedding matrix: id `vocabulary_size + n` is row n. The model treats these rows like its
own (Gemma scales them), as in TensorRT-LLM.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from trtmesh.chassis import vocabulary
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import PromptTuning
from trtmesh.engine.admission import table_rows
from trtmesh.v1 import generation_pb2 as pb

DTYPES = {
    pb.DATA_TYPE_FP32: torch.float32,
    pb.DATA_TYPE_FP16: torch.float16,
    pb.DATA_TYPE_BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class PromptTable:
    """The prompt table of an item."""

    rows: Tensor | None
    """[rows, hidden size] on the model's device, as the layers take them; None where the item has only extra ids."""
    digest: bytes
    """Covers everything besides token ids that changes the KV."""


class Embedding:
    """The embedding module of a model, applied to its own rows or to rows of a request."""

    def __init__(self, module: torch.nn.Module, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._module = module
        self._bare = _bare(module)
        self._weight: Tensor = module.get_parameter("weight")

    @property
    def hidden_size(self) -> int:
        return int(self._weight.shape[1])

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self._weight.itemsize

    def check(self, asked: PromptTuning, prompt_tokens: int) -> None:
        """Checks everything but the values of a table. Raises InvalidField."""
        if asked.extra_ids and len(asked.extra_ids) != prompt_tokens:
            raise InvalidField(
                f"has {len(asked.extra_ids)} ids but must have one for each of the {prompt_tokens} tokens of the"
                " prompt, or none",
                field="prompt_tuning.extra_ids",
            )
        tensor = asked.embedding_table
        if tensor is None:
            if asked.vocabulary_size is not None:
                field = "prompt_tuning.vocabulary_size"
                raise InvalidField("is set without an embedding table", field=field)
            return
        if tensor.data_type not in DTYPES:
            name = pb.DataType.Name(pb.DataType.ValueType(tensor.data_type))
            limit = ", ".join(pb.DataType.Name(each) for each in DTYPES)
            raise InvalidField.of(
                "prompt_tuning.embedding_table.data_type", name, f"one of {limit}"
            )
        if len(tensor.shape) != 2 or not tensor.shape[0] or tensor.shape[1] != self.hidden_size:
            limit = f"[rows, {self.hidden_size}], the size of the model's embeddings"
            raise InvalidField.of("prompt_tuning.embedding_table.shape", list(tensor.shape), limit)
        count = tensor.shape[0] if asked.vocabulary_size is None else asked.vocabulary_size
        if not 1 <= count <= tensor.shape[0]:
            limit = f"in [1, {tensor.shape[0]}]"
            source = "prompt_tuning.embedding_table"
            raise InvalidField.of("prompt_tuning.vocabulary_size", count, limit, source)

    def bytes_of(self, asked: PromptTuning) -> int:
        """Memory for a checked table, as received and as the layers take it."""
        tensor = asked.embedding_table
        return len(tensor.data) + table_rows(asked) * self.row_bytes if tensor else 0

    def read(self, asked: PromptTuning) -> PromptTable:
        """Reads a checked table, at about 64 MiB a second. Raises InvalidField."""
        digest = blake2b(array("Q", asked.extra_ids).tobytes(), digest_size=32)
        tensor = asked.embedding_table
        if tensor is None:
            return PromptTable(None, digest.digest())
        digest.update(f"{tensor.data_type} {tensor.shape} ".encode())
        digest.update(tensor.data)
        given = _tensor(tensor).to(self._weight)
        if not bool(torch.isfinite(given).all()):
            raise InvalidField(
                f"holds values that are not finite numbers in {given.dtype}, the type of the model",
                field="prompt_tuning.embedding_table",
            )
        with torch.inference_mode():
            indexes = torch.arange(table_rows(asked), device=given.device)
            rows: Tensor = functional_call(self._bare, {"weight": given}, (indexes,))
        return PromptTable(rows, digest.digest())

    def inputs(self, token_ids: Tensor, tables: Sequence[tuple[slice, PromptTable]]) -> Tensor:
        """Embeddings [tokens, hidden size] of a flat batch; `tables` gives ranges of its tokens their prompt tables."""
        if not tables:
            given: Tensor = self._module(token_ids)
            return given
        own = token_ids < self.vocabulary_size
        embedded: Tensor = self._module(token_ids.where(own, 0)).clone()
        for tokens, table in tables:
            if table.rows is not None:
                ids, foreign = token_ids[tokens], ~own[tokens]
                embedded[tokens][foreign] = table.rows[ids[foreign] - self.vocabulary_size]
        return embedded


def _bare(module: Any) -> Any:
    """The same code for weights that come with each call, without a padding row."""
    bare = copy.copy(module)
    bare._parameters = dict(module._parameters)
    bare.padding_idx = None
    return bare


def _tensor(tensor: vocabulary.Tensor) -> Tensor:
    # A copy, because PyTorch warns of read-only memory; numpy copies without the GIL.
    data = np.frombuffer(tensor.data, dtype=np.uint8).copy()
    dtype = DTYPES[pb.DataType.ValueType(tensor.data_type)]
    return torch.from_numpy(data).view(dtype).view(tensor.shape)
