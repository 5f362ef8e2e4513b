"""Writes arrivals and their placements to a bounded file."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.settings import Settings
from trtmesh.router.line_file import LineFile
from trtmesh.router.placement.place import DecisionRecord
from trtmesh.router.values.request import GenerationRequest

RECORDS = "records"
"""The content of the file, in metrics."""


class RecordSettings(Settings):
    """Recorded traffic, for `trtmesh replay`."""

    file: Path | None = None
    """File for a line per finished item, with block hashes instead of the prompt; unset records nothing. Each router
    needs its own; `trtmesh up` adds the name to that of further routers (`trace.router-1.jsonl`). At 256 MiB it
    replaces `<file>.1`."""


class Recorder(LineFile):
    """Writes one line per finished item: block hashes instead of the prompt."""

    def __init__(self, file: Path) -> None:
        """Raises SettingsError, as LineFile."""
        super().__init__(file, "router.record.file", RECORDS)
        self._to_unix = time.time() - time.monotonic()

    def note(
        self,
        *,
        request_id: str,
        batch_index: int,
        model: str,
        arrival_time: float,
        error: str,
        prompt_tokens: int | None,
        new_tokens: int | None = None,
        first: DecisionRecord | None = None,
        hashes: Sequence[int] = (),
    ) -> None:
        """Notes a finished item that arrived at a time of the event loop, with the reason word of its error or '', and
        its `first` placement if any. A text without ids has no `prompt_tokens`, and an item without a worker no new
        ones."""
        line = {
            "timestamp": round((arrival_time + self._to_unix) * 1000),
            "input_length": prompt_tokens,
            "output_length": new_tokens,
            "block_tokens": 1,
            "hash_ids": [*hashes],
            "request_id": request_id,
            "batch_index": batch_index,
            "model": model,
            "error": error,
        }
        if first is not None:
            decision = first.decision
            line |= {
                "input_length": decision.query.prompt_tokens,
                "block_tokens": decision.chosen.tokens_per_block or 1,
                "policy": decision.policy,
                "worker": decision.chosen.worker,
                "cause": first.cause,
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
                request_id=request.request_id,
                batch_index=item.batch_index,
                model=model,
                arrival_time=now,
                error=error.reason,
                prompt_tokens=item.told_prompt_tokens,
            )
