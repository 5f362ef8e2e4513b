"""The compared engines, each with a `decode`: greedy tokens of some prompts and their arrival times.

Every engine runs in its own process (`Remote`), as deployed: idle OpenMP threads of one engine slow down every other
engine in the same process.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers.generation
from transformers import AutoModelForCausalLM, StoppingCriteria
from trtmesh.chassis import vocabulary
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.service import tune_garbage_collector
from trtmesh.engine.adapters.arrays import write_arrays
from trtmesh.engine.adapters.lora import Lora, Module, Update
from trtmesh.engine.backend import AdapterLoad, StepOutput, Submission
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.memory.tensors import to_message
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

GAP_TOKENS = 4000
GAP_SECONDS = 5.0
PAGE_TOKENS = 256
"""The default of transformers' continuous batching; its setting was renamed between the versions in use."""
Prompts = list[list[int]]
SECONDS = 170.0


@dataclass(slots=True)
class Decoded:
    """An engine's tokens by prompt, with times of `time.perf_counter`."""

    started: float
    tokens: list[list[int]]
    arrivals: list[list[float]]

    @property
    def steady_rate(self) -> float:
        """Tokens a second while every sequence decodes: from the last first token to the first last one."""
        begin = max(times[0] for times in self.arrivals)
        end = min(times[-1] for times in self.arrivals)
        count = sum(begin < arrival <= end for times in self.arrivals for arrival in times)
        if end <= begin:
            raise SystemExit("no step in which all sequences decode; ask for more new tokens")
        return count / (end - begin)

    @property
    def whole_rate(self) -> float:
        """Tokens a second from the start to the last token."""
        end = max(times[-1] for times in self.arrivals)
        return sum(map(len, self.arrivals)) / (end - self.started)

    @property
    def first_token_seconds(self) -> float:
        return min(self.first_tokens_seconds)

    @property
    def first_tokens_seconds(self) -> list[float]:
        return [times[0] - self.started for times in self.arrivals]


class Remote:
    """A process with one engine at a time. Its errors end the benchmark."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds` is the longest time of a command."""
        self._seconds = seconds
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def open(self, kind: str, *arguments: Any, **named: Any) -> None:
        """Loads an engine of the class `kind`."""
        self._ask("open", kind, arguments, named)

    def call(self, method: str, *arguments: Any) -> Any:
        return self._ask("call", method, arguments, {})

    def decode(self, prompts: Prompts, new_tokens: int, *more: Any) -> Decoded:
        """`more` are further arguments of the engine's own."""
        decoded: Decoded = self.call("decode", prompts, new_tokens, *more)
        return decoded

    def close(self) -> None:
        """Unloads the engine."""
        self._ask("close", "", (), {})

    def end(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, *command: Any) -> Any:
        try:
            self._pipe.send(command)
            if self._pipe.poll(self._seconds):
                return self._pipe.recv()
            self._process.kill()
            raise SystemExit(f"an engine took more than {self._seconds:g} s for {command[:2]}")
        except (EOFError, ConnectionError):
            raise SystemExit(f"the process of an engine ended in {command[:2]}") from None


def _serve(pipe: Any) -> None:
    """Executes a Remote's commands until the pipe closes."""
    engine: Any = None
    while True:
        try:
            action, name, arguments, named = pipe.recv()
        except EOFError:
            return
        answer = None
        if action == "open":
            engine = globals()[name](*arguments, **named)
        elif action == "call":
            answer = getattr(engine, name)(*arguments)
        else:
            engine.close()
            engine = None
        pipe.send(answer)


class Trtmesh:
    """Our backend, through its own protocol."""

    def __init__(self, folder: Path, dtype: str, threads: int, **settings: Any) -> None:
        given = {"dtype": dtype, "threads": threads, **settings}
        self.backend = TorchBackend(folder, TorchSettings.model_validate(given))
        self._runner = asyncio.Runner()
        self._runner.run(self.backend.start(self._deliver, self._fail))
        # As a service does: a collection of PyTorch's own objects takes as long as a hundred steps.
        tune_garbage_collector()
        self._shape = json.loads((folder / "config.json").read_text())
        self._versions: dict[int, str] = {}
        self._awaited: dict[int, str] = {}
        self._started = 0.0
        # Sorted by sequence later: this is the engine's thread, which is to be measured.
        self._came: list[tuple[float, list[int], list[int]]] = []
        self._left = 0
        self._next_key = 0
        self._later = Later()
        self._ended = threading.Event()
        # Per step: the sequences with a new token, and the seconds since the previous step.
        self._step_seconds: list[tuple[int, float]] = []
        self._last = 0.0
        # The same in seconds of CPU of the engine's thread, which other processes hardly stretch.
        self._step_cpu_seconds: list[tuple[int, float]] = []
        self._used = 0.0

    def load(self, ranks: list[int], first: int = 1) -> None:
        """Loads an adapter of random weights for each rank, under the numbers from `first` on."""
        self._load(adapters_of(self._shape, ranks), first)
        self._wait_for_loads()

    def content_bytes(self, rank: int) -> int:
        """The size of such an adapter."""
        (content,) = adapters_of(self._shape, [rank])
        return content.size_bytes

    def gaps(self, prompts: Prompts, ranks: list[int], first: int = 1) -> tuple[list[float], float]:
        """Seconds between the steps of running sequences, while adapters load if there are `ranks`, and the seconds of
        these loads."""
        contents = adapters_of(self._shape, ranks)
        self._begin(prompts, GAP_TOKENS, [0] * len(prompts))
        while sum(self._first + len(prompts) - 1 in keys for _, keys, _ in self._came) < 5:
            time.sleep(0.01)
        self._step_seconds.clear()
        started = time.perf_counter()
        self._load(contents, first)
        if contents:
            self._wait_for_loads()
        else:
            time.sleep(GAP_SECONDS)
        took = time.perf_counter() - started
        found = [seconds for count, seconds in self._step_seconds if count == len(prompts)]
        self._runner.run(self._stop(len(prompts)))
        return found, took

    async def _stop(self, count: int) -> None:
        keys = range(self._first, self._first + count)
        self.backend.stop(list(keys), pb.FINISH_REASON_CANCELLED)
        self._ended.wait(SECONDS)

    def _load(self, contents: list[AdapterContent], first: int) -> None:
        self._awaited = {number: content.version for number, content in enumerate(contents, first)}
        self._versions |= self._awaited
        for number, content in enumerate(contents, first):
            identity = vocabulary.Adapter(number, version=content.version)
            self.backend.load_adapter(AdapterLoad(identity, content))

    def _wait_for_loads(self) -> None:
        deadline = time.perf_counter() + SECONDS
        while self._awaited:
            if time.perf_counter() > deadline:
                raise SystemExit("the adapters did not load")
            time.sleep(0.005)

    def decode(
        self,
        prompts: Prompts,
        new_tokens: int,
        numbers: list[int] | None = None,
        configs: list[vocabulary.GenerationConfig] | None = None,
    ) -> Decoded:
        """`numbers` are those of the adapters, 0 for none; `configs` are greedy without extras by default."""
        self._begin(prompts, new_tokens, numbers or [0] * len(prompts), configs=configs)
        if not self._ended.wait(SECONDS):
            raise SystemExit("the engine did not finish")
        decoded = Decoded(self._started, [[] for _ in prompts], [[] for _ in prompts])
        for came, keys, token_ids in self._came:
            for key, token in zip(keys, token_ids, strict=True):
                decoded.tokens[key - self._first].append(token)
                decoded.arrivals[key - self._first].append(came)
        return decoded

    def step_cpu_seconds(self, prompts: Prompts, new_tokens: int, numbers: list[int]) -> float:
        """The CPU time of the engine's thread in a step in which every sequence decodes, the median."""
        self._step_cpu_seconds.clear()
        self.decode(prompts, new_tokens, numbers)
        found = [used for count, used in self._step_cpu_seconds if count == len(prompts)]
        # The first may have completed a prompt.
        return statistics.median(found[1:])

    def joined(
        self, prompts: Prompts, new_tokens: int, joining: Prompts, every: int
    ) -> list[float]:
        """Seconds of the steps in which all `prompts` decode. After each `every` of them one of `joining` is submitted,
        for a token."""
        self._step_seconds.clear()
        self._begin(prompts, new_tokens, [0] * len(prompts), joining, every)
        if not self._ended.wait(SECONDS):
            raise SystemExit("the engine did not finish")
        return [seconds for count, seconds in self._step_seconds if count >= len(prompts)]

    def _begin(
        self,
        prompts: Prompts,
        new_tokens: int,
        numbers: list[int],
        joining: Sequence[list[int]] = (),
        every: int = 0,
        configs: list[vocabulary.GenerationConfig] | None = None,
    ) -> None:
        self._ended.clear()
        first, self._next_key = self._next_key, self._next_key + len(prompts) + len(joining)
        self._first = first
        self._left = len(prompts) + len(joining)
        self._started = time.perf_counter()
        self._came.clear()
        stopping = vocabulary.Stopping(max_tokens=new_tokens, ignore_end_id=True)
        config = vocabulary.GenerationConfig(stopping=stopping)
        once = replace(config, stopping=replace(stopping, max_tokens=1))
        self._later = Later(
            deque(
                Submission((first + place,), "", 0, 0, prompt, 0, once)
                for place, prompt in enumerate(joining, len(prompts))
            ),
            len(prompts),
            every,
        )
        given = configs or [config] * len(prompts)
        for place, (prompt, number) in enumerate(zip(prompts, numbers, strict=True)):
            lora = vocabulary.Lora(number, version=self._versions[number]) if number else None
            own = replace(given[place], stopping=stopping, lora=lora)
            self.backend.submit(Submission((first + place,), "", 0, 0, prompt, 0, own))

    def overhead(self, prompts: Prompts, new_tokens: int) -> float:
        """Median share of a decoding step outside the model: all but the forward, plus its grouping of sequences and
        their masks."""
        engine: Any = self.backend._loaded.engine
        runner = engine._compute
        grouping = runner._attention._grouping
        model, groups = runner._model, grouping.groups
        forward, grouped = Timed(model.logits), Timed(groups)
        runner._model, grouping.groups = Forward(forward), grouped
        try:
            self._step_seconds.clear()
            self.decode(prompts, new_tokens)
        finally:
            runner._model, grouping.groups = model, groups
        steps = zip(self._step_seconds, forward.seconds, grouped.seconds, strict=True)
        shares = [
            1 - (inside - ours) / whole
            for (count, whole), inside, ours in steps
            if count == len(prompts)
        ]
        # The first step may have completed a prompt.
        return statistics.median(shares[1:])

    def path(self) -> str:
        """How most steps were computed so far."""
        stats = self.backend.stats()
        if 2 * stats.captured_steps < stats.step_count:
            return "operation by operation"
        engine: Any = self.backend._loaded.engine
        return "fused" if engine._compute._runner._model.plain else "graphs of transformers' layers"

    def close(self) -> None:
        self._runner.run(self.backend.close())
        self._runner.close()

    def _deliver(self, output: StepOutput) -> None:
        now = time.perf_counter()
        self._step_seconds.append((len(output.keys), now - self._last))
        self._last = now
        used = time.thread_time()
        self._step_cpu_seconds.append((len(output.keys), used - self._used))
        self._used = used
        for held in output.adapters:
            if held.error:
                raise held.error
            if held.place:
                self._awaited.pop(held.adapter.id, None)
        self._came.append((now, output.keys, output.token_ids))
        for end in output.ends:
            if end.error:
                raise end.error
        self._left -= len(output.ends)
        if output.ends and not self._left:
            self._ended.set()
        if joining := self._later.after(len(output.keys)):
            self.backend.submit(joining)

    def _fail(self, error: BaseException) -> None:
        raise SystemExit(f"the engine failed: {error}")


@dataclass(slots=True)
class Later:
    """Submissions that join others while these decode."""

    submissions: deque[Submission] = field(default_factory=deque)
    decoding: int = 0
    """The others."""
    every: int = 0
    """Their steps between two submissions."""
    _steps: int = 0

    def after(self, sequences: int) -> Submission | None:
        """What to submit after a step with so many sequences."""
        if not self.submissions or sequences < self.decoding:
            return None
        self._steps += 1
        return None if self._steps % self.every else self.submissions.popleft()


def adapters_of(shape: dict[str, Any], ranks: list[int]) -> list[AdapterContent]:
    """Adapters of all linear layers of a Llama."""
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    layers = {
        Module.ATTN_Q: (hidden, heads), Module.ATTN_K: (hidden, kv_heads),
        Module.ATTN_V: (hidden, kv_heads), Module.ATTN_DENSE: (heads, hidden),
        Module.MLP_H_TO_4H: (hidden, inner), Module.MLP_GATE: (hidden, inner),
        Module.MLP_4H_TO_H: (inner, hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(len(ranks))
    contents = []
    for rank in ranks:
        updates = {
            (layer, module): Update(
                torch.randn(rank, inputs, generator=generator) / 16,
                torch.randn(outputs, rank, generator=generator) / 16,
            )
            for layer in range(shape["num_hidden_layers"])
            for module, (inputs, outputs) in layers.items()
        }
        weights, config = write_arrays(Lora(updates), torch.float32)
        tensors = (
            to_message(weights, pb.DATA_TYPE_FP32),
            vocabulary.Tensor(pb.DATA_TYPE_INT32, tuple(config.shape), config.numpy().tobytes()),
        )
        contents.append(AdapterContent.of_arrays(*tensors))
    return contents


class Timed:
    """A function that records the duration of its calls."""

    def __init__(self, function: Any) -> None:
        self.seconds: list[float] = []
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = self._function(*arguments)
        self.seconds.append(time.perf_counter() - started)
        return result


@dataclass(slots=True)
class Forward:
    """Stands in for a model and times its steps."""

    logits: Timed


class Generate:
    """transformers' `generate` with all prompts as one static batch."""

    def __init__(self, folder: Path, dtype: str, threads: int, device: str = "cpu") -> None:
        self._model = _transformers_model(folder, dtype, threads, device)

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        clock = Clock()
        ids = torch.tensor(prompts, device=self._model.device)
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=1,
                stopping_criteria=[clock],
            )
        tokens = output[:, ids.shape[1] :].tolist()
        return Decoded(started, tokens, [list(clock.times) for _ in prompts])

    def close(self) -> None:
        del self._model


class Clock(StoppingCriteria):
    """Records the end of each step of `generate` and stops none."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class ContinuousBatching:
    """transformers' own continuous batching."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        threads: int,
        device: str = "cpu",
        *,
        step_tokens: int = 512,
        graphs: bool = False,
    ) -> None:
        """`graphs` are those of CUDA, with which it also prepares a step while the one before runs."""
        self._model = _transformers_model(folder, dtype, threads, device)
        self._step_tokens = step_tokens
        self._graphs = graphs

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        # Untyped, or not exported to type checkers.
        library: Any = transformers.generation
        generation = library.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=1
        )
        length = len(prompts[0]) + new_tokens
        pages = -(-length // PAGE_TOKENS) * len(prompts)
        config = library.ContinuousBatchingConfig(
            # Its scheduler takes no further prompt once a part of the blocks is in use.
            num_blocks=pages * 4 // 3 + 8,
            max_batch_tokens=max(self._step_tokens, len(prompts)),
            use_cuda_graph=self._graphs,
            use_async_batching=self._graphs,
        )
        with self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=False
        ) as manager:
            if self._graphs:
                # Captured where they are first needed.
                self._run(manager, prompts, new_tokens)
            return self._run(manager, prompts, new_tokens)

    def _run(self, manager: Any, prompts: Prompts, new_tokens: int) -> Decoded:
        started = time.perf_counter()
        keys = manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True)
        outputs: dict[str, Any] = {}
        for output in manager:
            if output.error:
                raise SystemExit(f"continuous batching failed: {output.error}")
            outputs[output.request_id] = output
            if len(outputs) == len(prompts):
                break
        results = [outputs[key] for key in keys]
        return Decoded(
            started,
            [list(result.generated_tokens) for result in results],
            [list(result.timestamps) for result in results],
        )

    def close(self) -> None:
        del self._model


class LlamaCpp:
    """llama.cpp by its C interface, one batch a step, greedy by numpy."""

    def __init__(self, file: Path, threads: int, sequences: int, tokens: int) -> None:
        library: Any = importlib.import_module("llama_cpp")
        self._library = library
        quiet = library.llama_log_callback(lambda *_: None)
        library.llama_log_set(quiet, None)
        self._quiet = quiet
        self._model = library.llama_model_load_from_file(
            str(file).encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {file}")
        parameters = library.llama_context_default_params()
        parameters.n_ctx = tokens * sequences
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, parameters)
        vocabulary_ = library.llama_model_get_vocab(self._model)
        self._vocabulary_size = library.llama_vocab_n_tokens(vocabulary_)
        self._batch = library.llama_batch_init(512, 0, 1)

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        library = self._library
        memory = library.llama_get_memory(self._context)
        library.llama_memory_clear(memory, True)  # noqa: FBT003 - a C function
        decoded = Decoded(time.perf_counter(), [[] for _ in prompts], [[] for _ in prompts])
        for number, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), 512):
                part = prompt[begin : begin + 512]
                rows = [(token, begin + place, number) for place, token in enumerate(part)]
                last = begin + len(part) == len(prompt)
                logits = self._compute(rows, [len(part) - 1] if last else [])
            self._note(decoded, [number], logits)
        for step in range(new_tokens - 1):
            rows = [
                (tokens[-1], len(prompts[number]) + step, number)
                for number, tokens in enumerate(decoded.tokens)
            ]
            logits = self._compute(rows, list(range(len(rows))))
            self._note(decoded, list(range(len(prompts))), logits)
        return decoded

    def close(self) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def _note(self, decoded: Decoded, numbers: list[int], logits: Any) -> None:
        chosen = logits.argmax(axis=1)
        now = time.perf_counter()
        for number, token in zip(numbers, chosen, strict=True):
            decoded.tokens[number].append(int(token))
            decoded.arrivals[number].append(now)

    def _compute(self, rows: list[tuple[int, int, int]], wanted: list[int]) -> Any:
        """Logits [wanted, vocabulary] after tokens of (id, position, sequence)."""
        library, batch = self._library, self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = False
        for row in wanted:
            batch.logits[row] = True
        if library.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp failed to decode")
        pointer = library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (max(1, len(wanted)), self._vocabulary_size))


def _transformers_model(folder: Path, dtype: str, threads: int, device: str) -> Any:
    loader: Any = AutoModelForCausalLM
    # One thread for loading: idle OpenMP threads of the loader would slow down the decoding thread.
    torch.set_num_threads(1)
    model = loader.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    torch.nn.Module.to(model, device)
    torch.nn.Module.eval(model)
    torch.set_num_threads(threads)
    return model
