"""Runs the torch engine in this process, without the service."""

from __future__ import annotations

import time

from trtmesh.engine.backends.torch.engine import Engine, Launched


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


def decode_ahead(engine: Engine, batch: int) -> tuple[float, int]:
    """The same on a device that computes steps launched ahead, in seconds that pass, from the first token of the last
    sequence to the first end. A sequence may sit steps out."""
    seconds, tokens, before, seen, has_end = 0.0, 0, 0.0, set[int](), False
    while engine.scheduler.has_work:
        step: Launched | None = engine.launch()
        while step:
            following = engine.launch_next(step)
            output = engine.collect(step)
            now, has_end = time.perf_counter(), has_end or bool(output.ends)
            if len(seen) == batch and not has_end:
                seconds += now - before
                tokens += len(output.token_ids)
            before = now
            seen.update(output.keys)
            assert not any(end.error for end in output.ends)
            step = following
    return seconds, tokens
