"""Reading prompt tables beside the steps: neither the event loop nor a batch mate waits for it.

A table has megabytes that must be digested, converted and looked through. One thread does that, table after table; the
sequences of the item meanwhile wait in their places of the queue, where they may be stopped like any other.
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
"""Takes the table, or what is wrong with it, on the reading thread."""


class Lease:
    """Memory of one table, counted until each of its holders has given it back."""

    def __init__(self, size: int, holders: int, freed: Callable[[int], None]) -> None:
        self._size = size
        self._holders = holders
        self._freed = freed
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether anybody holds it beside the one who asks."""
        return self._holders > 1

    def give_back(self) -> None:
        """To be called by each holder, once."""
        with self._lock:
            self._holders -= 1
            over = not self._holders
        if over:
            self._freed(self._size)


class PromptTables:
    """The tables of all items of a backend, in `most_bytes` of memory at most."""

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
        """Has a table of a request read that `Embedding.check` found good; `holders` sequences will hold what comes of
        it.

        Raises QueueFull where there is no memory for it now, InvalidField where there never is.
        """
        size = self._embedding.bytes_of(asked)
        if size > self._most_bytes:
            raise InvalidField(
                f"prompt_tuning.embedding_table takes {size} bytes, as it came and as the model computes with it, but"
                f" must take at most {self._most_bytes} (prompt_tables_bytes); send fewer rows"
            )
        with self._lock:
            if self._held_bytes + size > self._most_bytes:
                raise QueueFull(
                    f"the prompt tables of other items take {self._held_bytes} bytes and at most"
                    f" {self._most_bytes} may be taken (prompt_tables_bytes); try again later or elsewhere"
                )
            self._held_bytes += size
        # The reading is a holder too.
        lease = Lease(size, holders + 1, self._free)
        self._thread.submit(self._read, request_id, asked, lease, done)
        return lease

    def close(self) -> None:
        """Returns when nothing is read any more; what had not begun never is."""
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
        # Before anybody may see the item end, so that nothing is counted by then.
        lease.give_back()
        done(table)

    def _free(self, size: int) -> None:
        with self._lock:
            self._held_bytes -= size
