"""Runs the torch engine in this process, without the service."""

from __future__ import annotations

import time

from trtmesh.engine.backends.torch.engine import Engine


def decode(engine: Engine, batch: int) -> tuple[float, int]:
    """Runs to the end. Returns CPU seconds of this process and tokens of the steps in which all `batch` sequences
    decode."""
    seconds, tokens = 0.0, 0
    while engine.scheduler.has_work:
        running = engine.scheduler.running
        decodes = len(running) == batch and all(
            len(each.tokens) == each.num_computed + 1 for each in running
        )
        started = time.process_time()
        output = engine.collect(engine.launch())
        if decodes:
            seconds += time.process_time() - started
            tokens += len(output.token_ids)
        assert not any(end.error for end in output.ends)
    return seconds, tokens
