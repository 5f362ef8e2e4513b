"""Prompt tuning: embeddings from the request, addressed by ids beyond the vocabulary.

The table extends the model's embedding matrix: id `vocabulary_size + n` is row n. The model treats these rows like
other embeddings (Gemma scales both), as in TensorRT-LLM.

A table has megabytes to digest, convert and check, so a separate thread reads the table (`preparation.py`).
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from trtmesh.chassis.errors import InvalidField, QueueFull
from trtmesh.chassis.vocabulary import PromptTuning
from trtmesh.engine.admission import table_rows
from trtmesh.engine.backends.torch.memory.tensors import FLOATS, from_message
from trtmesh.engine.backends.torch.preparation import Done, PartLease, Preparation
from trtmesh.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class PromptTable:
    rows: Tensor | None
    """[rows, hidden size] on the model's device, as the layers take them; None where the item has only extra ids."""
    digest: bytes
    """Covers everything besides token ids with an effect on the KV."""


class Embedding:
    """The embedding module of a model, applied to the model's rows or to rows of a request."""

    def __init__(self, module: torch.nn.Module, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._module = module
        self._bare = _bare(module)
        self._weight: Tensor = module.get_parameter("weight")

    @property
    def hidden_size(self) -> int:
        return int(self._weight.shape[1])

    def check(self, asked: PromptTuning, prompt_tokens: int) -> None:
        """Checks everything but the values of a table. Raises InvalidField."""
        if asked.extra_ids and len(asked.extra_ids) != prompt_tokens:
            raise InvalidField(
                f"has {len(asked.extra_ids)} ids but must have one for each of the {prompt_tokens} tokens of the"
                " prompt, or none",
                field="prompt_tuning.extra_ids",
                value=str(len(asked.extra_ids)),
                limit=f"0 or {prompt_tokens}",
            )
        tensor = asked.embedding_table
        if tensor is None:
            if asked.vocabulary_size is not None:
                field = "prompt_tuning.vocabulary_size"
                raise InvalidField("is set without an embedding table", field=field)
            return
        if tensor.data_type not in FLOATS:
            name = pb.DataType.Name(pb.DataType.ValueType(tensor.data_type))
            limit = ", ".join(pb.DataType.Name(each) for each in FLOATS)
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
        """Memory for a checked table, as received and as given to the layers."""
        tensor = asked.embedding_table
        row_bytes = self.hidden_size * self._weight.itemsize
        return len(tensor.data) + table_rows(asked) * row_bytes if tensor else 0

    def read(self, asked: PromptTuning) -> PromptTable:
        """Reads a checked table, at about 64 MiB a second. Raises InvalidField."""
        digest = blake2b(array("Q", asked.extra_ids).tobytes(), digest_size=32)
        tensor = asked.embedding_table
        if tensor is None:
            return PromptTable(None, digest.digest())
        digest.update(f"{tensor.data_type} {tensor.shape} ".encode())
        digest.update(tensor.data)
        given = from_message(tensor).to(self._weight)
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
        """Embeddings [tokens, hidden size] of a flat batch; `tables` gives ranges of tokens their prompt tables."""
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
    """The same code for weights from each call, without a padding row."""
    bare = copy.copy(module)
    bare._parameters = dict(module._parameters)
    bare.padding_idx = None
    return bare


MAX_PROMPT_TABLE_BYTES = 2**30
"""Most memory for the tables of all items, each counted as received and as computed with. One of 10,000 rows of 8,192
float32 takes 0.6 GiB."""


class PromptTables:
    """The tables of all items of a backend, in at most `most_bytes` of memory."""

    def __init__(self, embedding: Embedding, most_bytes: int) -> None:
        self.embedding = embedding
        self._most_bytes = most_bytes
        self._preparation = Preparation("prompt-tables", most_bytes)
        self.close = self._preparation.close

    @property
    def held_bytes(self) -> int:
        return self._preparation.held

    def read(self, request_id: str, asked: PromptTuning, holders: int, done: Done) -> PartLease:
        """Queues a checked table; `holders` sequences will hold the result.

        Raises QueueFull where memory is short for now, InvalidField where the table can never fit.
        """
        size = self.embedding.bytes_of(asked)
        if size > self._most_bytes:
            raise InvalidField(
                f"takes {size} bytes, as received and as computed with, but must take at most {self._most_bytes};"
                " send fewer rows",
                field="prompt_tuning.embedding_table",
                value=str(size),
                limit=f"at most {self._most_bytes} bytes",
            )
        what = "prompt table could not be read"
        lease = self._preparation.begin(
            request_id, what, lambda _: self.embedding.read(asked), size, holders, done
        )
        if lease is None:
            held = self.held_bytes
            raise QueueFull(
                f"the prompt tables of other items take {held} bytes of at most {self._most_bytes};"
                " try again later or elsewhere",
                value=str(held),
                limit=f"at most {self._most_bytes} bytes",
            )
        return lease
