"""Prompt tuning: embeddings from the request, addressed by ids beyond the vocabulary.

The table extends the model's embedding matrix: id `vocabulary_size + n` is row n. The model treats these rows like
other embeddings (Gemma scales both), as in TensorRT-LLM.

A table has megabytes to digest, convert and check, so a separate thread reads the table: neither the event loop nor the
steps wait. Meanwhile the sequences of the item wait in the queue, and can be stopped like all others.
"""

from __future__ import annotations

import copy
import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from trtmesh.chassis.errors import BackendFailed, InvalidField, QueueFull, TrtmeshError
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.vocabulary import PromptTuning
from trtmesh.engine.admission import table_rows
from trtmesh.engine.backends.torch.memory.tensors import FLOATS, from_message
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptTable:
    """The prompt table of an item."""

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


Done = Callable[[PromptTable | TrtmeshError], None]
"""Takes the table or an error, on the reading thread."""


class TableLease:
    """Memory of a table, counted until all holders have returned theirs."""

    def __init__(self, size: int, holders: int, freed: Callable[[int], None]) -> None:
        self._size = size
        self._holders = holders
        self._freed = freed
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether there is a holder besides the caller."""
        return self._holders > 1

    def give_back(self) -> None:
        """Called once by each holder."""
        with self._lock:
            self._holders -= 1
            over = not self._holders
        if over:
            self._freed(self._size)


class PromptTables:
    """The tables of all items of a backend, in at most `most_bytes` of memory."""

    def __init__(self, embedding: Embedding, most_bytes: int) -> None:
        self.embedding = embedding
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self.held_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt-tables")

    def read(self, request_id: str, asked: PromptTuning, holders: int, done: Done) -> TableLease:
        """Queues a checked table; `holders` sequences will hold the result.

        Raises QueueFull where memory is short for now, InvalidField where the table can never fit.
        """
        size = self.embedding.bytes_of(asked)
        if size > self._most_bytes:
            raise InvalidField(
                f"takes {size} bytes, as received and as computed with, but must take at most {self._most_bytes}"
                " (limits.max_prompt_table_bytes); send fewer rows",
                field="prompt_tuning.embedding_table",
                value=str(size),
                limit=f"at most {self._most_bytes} bytes",
            )
        with self._lock:
            if self.held_bytes + size > self._most_bytes:
                raise QueueFull(
                    f"the prompt tables of other items take {self.held_bytes} bytes of at most {self._most_bytes}"
                    " (limits.max_prompt_table_bytes); try again later or elsewhere",
                    value=str(self.held_bytes),
                    limit=f"at most {self._most_bytes} bytes",
                    limit_field="limits.max_prompt_table_bytes",
                )
            self.held_bytes += size
        # The read is a holder too.
        lease = TableLease(size, holders + 1, self._free)
        self._thread.submit(self._read, request_id, asked, lease, done)
        return lease

    def close(self) -> None:
        """Waits for the current read and drops the queue."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, request_id: str, asked: PromptTuning, lease: TableLease, done: Done) -> None:
        if not lease.is_wanted:
            lease.give_back()
            return
        table: PromptTable | TrtmeshError
        try:
            table = self.embedding.read(asked)
        except TrtmeshError as error:
            table = error
        except Exception as error:
            with request_id_bound(request_id):
                log.exception("a prompt table could not be read")
            table = BackendFailed(f"the prompt table could not be read: {error}")
        # First: the count must be right when the item ends.
        lease.give_back()
        done(table)

    def _free(self, size: int) -> None:
        with self._lock:
            self.held_bytes -= size
