"""Writes arrivals and their placements to a bounded file."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.settings import Settings
from trtmesh.router.line_file import MAX_BYTES, LineFile
from trtmesh.router.placement.place import DecisionRecord
from trtmesh.router.values.request import GenerationRequest

RECORDS = "records"
"""The content of the file, in metrics."""


@dataclass(frozen=True, slots=True)
class RecordedItem:
    """A finished item."""

    request_id: str
    batch_index: int
    model: str
    arrival_time: float
    """Time of the event loop."""
    error: str
    """Reason word of a failed item, else ''."""
    prompt_tokens: int | None
    """None for a text without ids."""
    new_tokens: int | None = None
    """None without a worker."""
    first: DecisionRecord | None = None
    """The first placement, if any."""
    block_tokens: int = 1
    hashes: Sequence[int] = ()


class RecordSettings(Settings):
    """Recorded traffic, for `trtmesh replay`."""

    file: Path | None = None
    """File for a line per finished item, with block hashes instead of the prompt; unset records nothing. Each router
    needs its own; `trtmesh up` adds the name to that of further routers (`trace.router-1.jsonl`). At 256 MiB it
    replaces `<file>.1`."""


class Recorder(LineFile):
    """Writes one line per finished item: block hashes instead of the prompt."""

    def __init__(self, file: Path, max_bytes: int = MAX_BYTES) -> None:
        """Raises SettingsError, as LineFile."""
        super().__init__(file, "router.record.file", RECORDS, max_bytes)
        self._to_unix = time.time() - time.monotonic()

    def note(self, item: RecordedItem) -> None:
        line = {
            "timestamp": round((item.arrival_time + self._to_unix) * 1000),
            "input_length": item.prompt_tokens,
            "output_length": item.new_tokens,
            "block_tokens": item.block_tokens,
            "hash_ids": [*item.hashes],
            "request_id": item.request_id,
            "batch_index": item.batch_index,
            "model": item.model,
            "error": item.error,
        }
        if item.first is not None:
            decision = item.first.decision
            line |= {
                "policy": decision.policy,
                "worker": decision.chosen.worker,
                "cause": item.first.cause,
                "cached_tokens": decision.cached_tokens,
            }
            if need := decision.query.adapter:
                name = need.adapter.name or str(need.adapter.id)
                line |= {"adapter": name, "adapter_rank": need.rank}
        self.put(json.dumps(line))

    def note_refused(self, request: GenerationRequest, model: str, error: TrtmeshError) -> None:
        """Notes every item of a request that admission refused."""
        now = asyncio.get_running_loop().time()
        for item in request.items:
            self.note(
                RecordedItem(
                    request_id=request.request_id,
                    batch_index=item.batch_index,
                    model=model,
                    arrival_time=now,
                    error=error.reason,
                    prompt_tokens=item.told_prompt_tokens,
                )
            )
