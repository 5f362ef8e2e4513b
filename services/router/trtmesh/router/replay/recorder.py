"""Writes what came and what was decided to a file, beside the event loop and within a bound."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from pathlib import Path

from trtmesh.router.placement.decision_log import DecisionRecord

log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
MOST_WAITING = 20_000
"""Lines that wait to be written; beyond it the oldest are lost and counted."""


class Recorder:
    """One line for each item, when it is over. At `most_bytes` the file is moved to `<file>.1`, which is replaced, so
    that both together take at most twice as much.

    Prompts are not written; the hashes of their blocks are.
    """

    def __init__(self, file: Path, most_bytes: int) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)
        self._to_unix = time.time() - time.monotonic()
        self.lost = 0
        self.written = 0

    def note(
        self,
        record: DecisionRecord,
        *,
        model: str,
        arrival_time: float,
        block_tokens: int,
        hashes: list[int],
        new_tokens: int,
    ) -> None:
        """An item is over; `arrival_time` is of the event loop's clock."""
        if len(self._waiting) == MOST_WAITING:
            self.lost += 1
        decision = record.decision
        line = {
            "timestamp": round((arrival_time + self._to_unix) * 1000),
            "input_length": decision.query.prompt_tokens,
            "output_length": new_tokens,
            "block_tokens": block_tokens,
            "hash_ids": hashes,
            "request_id": record.request_id,
            "batch_index": record.batch_index,
            "model": model,
            "policy": decision.policy,
            "worker": decision.chosen.worker,
            "cause": record.cause,
            "cached_tokens": decision.cached_tokens,
        }
        self._waiting.append(json.dumps(line))

    async def run(self) -> None:
        """Writes for ever; what still waits when it is cancelled is written too."""
        try:
            while True:
                await asyncio.sleep(FLUSH_SECONDS)
                await asyncio.to_thread(self.flush)
        finally:
            self.flush()

    def flush(self) -> None:
        """Writes what waits. What cannot be written is lost, counted and logged; serving goes on."""
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not lines:
            return
        try:
            self._rotate()
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            self.lost += len(lines)
            log.warning("cannot write %d records to %s: %s", len(lines), self._file, error)
        else:
            self.written += len(lines)

    def _rotate(self) -> None:
        if self._file.exists() and self._file.stat().st_size >= self._most_bytes:
            self._file.replace(self._file.with_name(self._file.name + ".1"))
