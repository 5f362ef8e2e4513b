"""Runs the torch engine in this process, without the service."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.admission import admit
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.torch.engine import Engine, Launched
from trtmesh.engine.backends.torch.guided.grammars import Grammar
from trtmesh.engine.backends.torch.loading import Loaded, load_engine
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.preparation import PartLease
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import sequences_of
from trtmesh.engine.backends.torch.settings import TorchSettings


class Lab:
    """A loaded engine, whose prompts decode together."""

    def __init__(self, model: Path, device: str, threads: int = 1, **settings: Any) -> None:
        own = {"kv_cache": {"prefix_reuse": False}, "limits": {"max_batch_size": 64}}
        given = {"device": device, "threads": threads, **own, **settings}
        asked = TorchSettings.model_validate(given)
        self.loaded: Loaded = load_engine(model, weight_files(model), asked)
        self._decode = decode if device == "cpu" else decode_ahead
        self._keys = count()

    def add(
        self,
        prompt: list[int],
        batch_index: int,
        config: GenerationConfig,
        grammar: Grammar | None = None,
        lease: PartLease | None = None,
    ) -> None:
        item = Submission((next(self._keys),), "", batch_index, 0, prompt, 0, config)
        rule = admit(item, self.loaded.info)
        sequences = sequences_of(item, item.keys, rule, TokenRules(config))
        for sequence in sequences:
            sequence.grammar = grammar
            sequence.leases += [lease] if lease else []
        self.loaded.engine.add(item.keys, sequences)

    def decode(self, batch: int) -> tuple[float, int]:
        """Seconds and tokens of the steps in which all decode."""
        return self._decode(self.loaded.engine, batch)


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
