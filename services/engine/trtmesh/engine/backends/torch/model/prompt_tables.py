"""Reads prompt tables on a thread of their own, so that neither the event loop nor the steps wait.

A table has megabytes to digest, convert and check. Meanwhile the sequences of its item wait in the queue, where they
can be stopped like all others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import BackendFailed, InvalidField, QueueFull, TrtmeshError
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.vocabulary import PromptTuning

if TYPE_CHECKING:
    from trtmesh.engine.backends.torch.model.prompt_table import Embedding, PromptTable

log = logging.getLogger(__name__)

Done = Callable[["PromptTable | TrtmeshError"], None]
"""Takes the table or an error, on the reading thread."""


class Lease:
    """Memory of a table, counted until all holders have returned it."""

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
        self._embedding = embedding
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt-tables")

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def read(self, request_id: str, asked: PromptTuning, holders: int, done: Done) -> Lease:
        """Queues a checked table; `holders` sequences will hold the result.

        Raises QueueFull where memory is short for now, InvalidField where the table can never fit.
        """
        size = self._embedding.bytes_of(asked)
        if size > self._most_bytes:
            raise InvalidField(
                f"takes {size} bytes, as received and as computed with, but must take at most {self._most_bytes}"
                " (prompt_tables_bytes); send fewer rows",
                field="prompt_tuning.embedding_table",
            )
        with self._lock:
            if self._held_bytes + size > self._most_bytes:
                raise QueueFull(
                    f"the prompt tables of other items take {self._held_bytes} bytes of at most {self._most_bytes}"
                    " (prompt_tables_bytes); try again later or elsewhere"
                )
            self._held_bytes += size
        # The read itself is a holder too.
        lease = Lease(size, holders + 1, self._free)
        self._thread.submit(self._read, request_id, asked, lease, done)
        return lease

    def close(self) -> None:
        """Waits for the current read and drops the queue."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, request_id: str, asked: PromptTuning, lease: Lease, done: Done) -> None:
        if not lease.is_wanted:
            lease.give_back()
            return
        table: PromptTable | TrtmeshError
        try:
            table = self._embedding.read(asked)
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
            self._held_bytes -= size
