"""Runs thousands of random requests with cancellations through the torch engine and looks for leaks.

Requests of all kinds (shared prefixes, sampling by every rule, several sequences, beams, adapters, priorities, prompt
tables, prompt and token logits, migrated sequences, refused prompts and tables) pass a small KV cache with a small host
cache, so that sequences wait, pause and evict one another; a third is stopped at a random point. The run regularly
empties the engine and counts its contents. At the end every sequence must have ended exactly once, every block, slot,
key and prompt table must be free, no container may exceed the engine's own size, and process memory may not have grown
since the warm-up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import random
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _engines import adapters_of
from _models import SHAPES, build
from _options import options_of
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.vocabulary import (
    Adapter,
    BeamSearch,
    GenerationConfig,
    KvCache,
    Lora,
    Output,
    PromptTuning,
    Sampling,
    Stopping,
    Tensor,
)
from trtmesh.engine.backend import AdapterLoad, StepOutput, Submission
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

VOCABULARY = 320
BLOCKS = 100
HOST_BLOCKS = 60
TOKENS_PER_BLOCK = 4
HIDDEN = SHAPES["tiny"]["hidden_size"]
TABLE_ROWS = 8
BATCH = 16
QUEUE = 64
RANKS = (4, 8, 16)
"""Of the adapters, for fewer slots."""
WARM_UP_PART = 0.6
"""Long enough to meet every step size, for each of which a library caches something."""
CONTAINER_LIMIT = BLOCKS + HOST_BLOCKS + BATCH + QUEUE + 128
"""Above the legitimate size of any container of the engine, and far below one entry per request."""
GROWTH_BYTES = 16 * 2**20
SETTINGS = {
    "threads": 1,
    "kv_cache": {"tokens": TOKENS_PER_BLOCK * BLOCKS, "tokens_per_block": TOKENS_PER_BLOCK},
    # 512 bytes a token: float32 keys and values of two layers with two heads of 16.
    "host_cache": {"bytes": 512 * TOKENS_PER_BLOCK * HOST_BLOCKS},
    "limits": {"max_batch_size": BATCH, "max_queue_size": QUEUE},
    "batching": {"max_step_tokens": 64},
    "adapters": {"host_bytes": 2**26, "max_batch_adapters": len(RANKS) - 1},
}


class Soak:
    """The client of one backend, with an account of every sequence."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.requests = self.refused = self.stopped = 0
        self.sequences = 0
        self.given = Counter[str]()
        """Sequences by the kind of their request."""
        self.open: set[int] = set()
        self.faults: list[str] = []
        self.adapters: list[Lora] = []
        """Those that are loaded."""
        self._prefixes = [self._ids(48) for _ in range(6)]
        self._tables = [self._table(self.draw.uniform(-0.2, 0.2)) for _ in range(3)]
        self._not_numbers = self._table(math.nan)
        self._changed = threading.Condition()

    def deliver(self, output: StepOutput) -> None:
        with self._changed:
            self.faults += [f"tokens for {key}" for key in output.keys if key not in self.open]
            for held in output.adapters:
                if held.error:
                    self.faults.append(f"an adapter did not load: {held.error}")
                own = Lora(held.adapter.id, version=held.adapter.version)
                if own not in self.adapters:
                    self.adapters.append(own)
            self.given["prompt_log_probs"] += sum(bool(each.log_probs) for each in output.prompts)
            self.given["context_logits"] += sum(
                each.context_logits is not None for each in output.prompts
            )
            self.given["generation_logits"] += sum(
                each.generation_logits is not None for each in output.details
            )
            for end in output.ends:
                if end.key not in self.open:
                    self.faults.append(f"a second end of {end.key}")
                if end.error and "embedding_table holds values" in end.error.message:
                    self.given["bad_table"] += 1
                elif end.error:
                    self.faults.append(f"{end.key} failed: {end.error}")
                self.open.discard(end.key)
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.faults.append(f"the engine failed: {error}")
            self.open.clear()
            self._changed.notify()

    def act(self, backend: TorchBackend) -> None:
        """Makes one submission or a few stops."""
        if self.open and self.draw.random() < 0.3:
            with self._changed:
                keys = self.draw.sample(sorted(self.open), min(len(self.open), 2))
            self.stopped += len(keys)
            backend.stop(keys, pb.FINISH_REASON_CANCELLED)
            return
        self.requests += 1
        submission = self._submission()
        with self._changed:
            self.open.update(submission.keys)
        try:
            backend.submit(submission)
        except TrtmeshError:
            self.refused += 1
            with self._changed:
                self.open.difference_update(submission.keys)

    def load(self, backend: TorchBackend, shape: dict[str, Any]) -> None:
        for number, content in enumerate(adapters_of(shape, [*RANKS]), 1):
            identity = Adapter(number, version=content.version)
            backend.load_adapter(AdapterLoad(identity, content))
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.adapters) == len(RANKS), 120):
                raise SystemExit("the adapters did not load")

    def wait(self, at_most: int) -> None:
        """Waits until at most so many sequences are open."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.open) <= at_most, 120):
                raise SystemExit(f"{len(self.open)} sequences did not end")

    def _submission(self) -> Submission:
        draw = self.draw
        prompt = draw.choice([[], *self._prefixes])[: draw.randint(0, 48)] + self._ids(
            draw.randint(1, 24)
        )
        if draw.random() < 0.02:
            prompt = draw.choice([[], [VOCABULARY + 5], [1] * 5000])
        config = self._config()
        if draw.random() < 0.2:
            config = self._tuned(prompt, config)
        first = self.sequences
        self.sequences += config.sequences
        # Tokens from other workers.
        emitted = self._emitted(config)
        return Submission(
            keys=tuple(range(first, self.sequences)),
            request_id=f"request-{first}",
            batch_index=0,
            sequence_index=0,
            token_ids=prompt + emitted,
            emitted_tokens=len(emitted),
            config=config,
        )

    def _config(self) -> GenerationConfig:
        draw = self.draw
        stopping = Stopping(
            max_tokens=draw.choice([1, 4, 8, 60]),
            ignore_end_id=draw.random() < 0.5,
            stop_token_ids=((draw.randrange(VOCABULARY),),) if draw.random() < 0.3 else (),
        )
        kind = draw.choice(["greedy", "sampled", "several", "penalised", "beams"])
        sampling = {
            "greedy": Sampling(),
            "sampled": dataclasses.replace(self._ruled(), temperature=1.2),
            "several": Sampling(temperature=0.8, num_return_sequences=3, seed=5),
            "penalised": dataclasses.replace(self._ruled(), repetition_penalty=1.2),
            "beams": Sampling(),
        }[kind]
        stopping = dataclasses.replace(
            stopping,
            min_tokens=draw.choice([0, 0, 1]),
            bad_token_ids=tuple(
                tuple(self._ids(length)) for length in draw.choice([(), (), (1, 1), (1, 2)])
            ),
        )
        lora = draw.choice([None, None, None, *self.adapters])
        self.given["adapted"] += lora is not None
        return dataclasses.replace(
            GenerationConfig(),
            stopping=stopping,
            sampling=sampling,
            beam_search=BeamSearch(beam_width=3 if kind == "beams" else 1),
            output=Output(
                log_probs=draw.random() < 0.2,
                top_log_probs=draw.choice([0, 0, 0, 3]),
                prompt_log_probs=draw.random() < 0.1,
                context_logits=draw.random() < 0.1,
                generation_logits=draw.random() < 0.1 and kind != "beams",
                perf_metrics=draw.random() < 0.1,
            ),
            kv_cache=KvCache(reuse=draw.random() < 0.8, salt=draw.choice(["", "", "other"])),
            priority=draw.randint(-2, 2),
            lora=lora,
        )

    def _ruled(self) -> Sampling:
        """Any of the rules that apply to a lone sequence."""
        draw = self.draw
        rules: dict[str, Any] = {
            "top_k": draw.choice([1, 40, 300]),
            "top_p": draw.choice([0.1, 0.9]),
            "min_p": 0.02,
            "presence_penalty": draw.uniform(-1, 1),
            "frequency_penalty": 0.3,
            "prompt_ignore_length": draw.randint(0, 20),
            "no_repeat_ngram_size": 3,
            "embedding_bias_token_ids": (tuple(self._ids(2)),),
        }
        rules = {name: value for name, value in rules.items() if draw.random() < 0.3}
        if "embedding_bias_token_ids" in rules:
            rules["embedding_bias_weights"] = (draw.choice([-math.inf, 2.0]),)
        if "top_p" in rules and draw.random() < 0.2:
            rules["top_p_decay"] = 0.9
        return Sampling(seed=draw.getrandbits(60), **rules)

    def _tuned(self, prompt: list[int], config: GenerationConfig) -> GenerationConfig:
        """The config with a prompt table, and the prompt with ids of it."""
        draw = self.draw
        for place in draw.sample(range(len(prompt)), len(prompt) // 3):
            prompt[place] = VOCABULARY + draw.randrange(TABLE_ROWS)
        table = draw.choice(self._tables) if draw.random() < 0.9 else self._not_numbers
        extra_ids = (draw.randint(0, 1),) * len(prompt) if draw.random() < 0.3 else ()
        # Ids of a table have no log-probabilities.
        output = dataclasses.replace(config.output, prompt_log_probs=False)
        tuning = PromptTuning(table, extra_ids=extra_ids)
        return dataclasses.replace(config, prompt_tuning=tuning, output=output)

    def _emitted(self, config: GenerationConfig) -> list[int]:
        several = config.sequences > 1 or config.beam_search.beam_width > 1
        return [] if several or self.draw.random() < 0.8 else self._ids(self.draw.randint(1, 3))

    def _table(self, value: float) -> Tensor:
        data = array("f", [value] * (TABLE_ROWS * HIDDEN)).tobytes()
        return Tensor(pb.DATA_TYPE_FP32, (TABLE_ROWS, HIDDEN), data)

    def _ids(self, count: int) -> list[int]:
        return [self.draw.randrange(2, VOCABULARY) for _ in range(count)]


def sizes(root: object) -> dict[str, int]:
    """The length of every container reachable from `root` through objects of trtmesh, by path."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping | list | set | frozenset | deque):
            found[path] = len(value)
        elif type(value).__module__.startswith("trtmesh."):
            todo += [(f"{path}.{name}", each) for name, each in _attributes(value)]
    return found


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    names = set(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        names.update(getattr(kind, "__slots__", ()))
    for name in sorted(names):
        if hasattr(value, name):
            yield name, getattr(value, name)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def judge(backend: TorchBackend, soak: Soak, before: int, after: int) -> list[str]:
    """Lists the leaks and errors once every sequence has ended."""
    wrong = list(soak.faults)
    stats = backend.stats()
    held = {
        "used_blocks": stats.used_blocks,
        "running_sequences": stats.running_sequences,
        "waiting_sequences": stats.waiting_sequences,
        "pending_prompt_tokens": stats.pending_prompt_tokens,
    }
    wrong += [f"{name} is {count}, not 0" for name, count in held.items() if count]
    held_bytes = backend._loaded.tables.held_bytes
    if held_bytes:
        wrong.append(f"prompt tables are counted with {held_bytes} bytes, not 0")
    scheduler = backend._loaded.engine.scheduler
    if scheduler.tables.free_slots != BATCH:
        wrong.append(f"{BATCH - scheduler.tables.free_slots} slots are not free")
    for path, size in sizes(backend).items():
        if size > CONTAINER_LIMIT:
            wrong.append(f"{path} holds {size} entries")
    if after - before > GROWTH_BYTES:
        wrong.append(f"the process grew by {(after - before) / 2**20:.1f} MiB")
    return wrong


def main(
    *, seconds: float = 120.0, requests: float = math.inf, seed: int = 1, device: str = "cpu"
) -> int:
    """Ends after so many seconds or requests."""
    soak = Soak(seed)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        backend = TorchBackend(
            build(Path(folder) / "tiny", "tiny"),
            TorchSettings.model_validate({**SETTINGS, "device": device, "dtype": "float32"}),
        )
        runner.run(backend.start(soak.deliver, soak.fail))
        soak.load(backend, json.loads((Path(folder) / "tiny" / "config.json").read_text()))
        started = time.monotonic()
        before = 0
        done = 0.0
        while done < 1 and not soak.faults:
            for _ in range(200):
                soak.act(backend)
                soak.wait(QUEUE // 2)
            soak.wait(0)
            passed = time.monotonic() - started
            done = max(passed / seconds, soak.requests / requests)
            if done > WARM_UP_PART:
                before = before or resident_bytes()
        soak.wait(0)
        after = resident_bytes()
        wrong = judge(backend, soak, before or after, after)
        figures = {
            "requests": soak.requests,
            "sequences": soak.sequences,
            "refused": soak.refused,
            "stopped": soak.stopped,
            "preemptions": backend._loaded.engine.scheduler.preemptions,
            "used_host_blocks": backend.stats().used_host_blocks,
            "given": dict(soak.given),
            "largest_containers": dict(
                sorted(sizes(backend).items(), key=lambda each: -each[1])[:5]
            ),
            "grown_bytes": after - (before or after),
            "torch": torch.__version__,
            "wrong": wrong,
        }
        runner.run(backend.close())
    print(json.dumps(figures))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(**options_of(main)))
