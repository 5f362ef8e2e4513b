"""The executor of the stand-in: a thread that computes iterations over all requests, without a model.

The next token is a hash of all tokens so far, as with a model, so a request that continues another's tokens continues
its output; sampled ones depend on the seed and on the position in the request. Parameters come from the environment.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from tensorrt_llm._stand_in.results import RequestOutput, Response
from tensorrt_llm._stand_in.strict import RELEASE, is_greedy, made

FIRST_ID = 8
"""Lowest generated id: demo models have special tokens below."""
EXECUTORS: list[Executor] = []
"""Those of this process, for tests."""


def setting(name: str, default: float) -> float:
    return float(os.environ.get(f"TRTLLM_STAND_IN_{name}", default))


@dataclass(eq=False)
class Request:
    number: int
    prompt: list[int]
    params: Any
    arguments: dict[str, Any]
    result: RequestOutput = field(init=False)
    lanes: list[list[int]] = field(default_factory=list)
    """Generated tokens of each sequence."""
    sums: list[float] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    aborted: bool = False
    started: bool = False
    computed: int = 0
    """Prompt tokens computed."""
    max_tokens: int = 0
    cached_tokens: int = 0
    reused_blocks: int = 0
    arrival: float = field(default_factory=time.monotonic)

    @property
    def count(self) -> int:
        """Sequences that are computed."""
        return int(self.params.best_of)

    @property
    def salt(self) -> str:
        lora = self.arguments.get("lora_request")
        return f"{self.arguments.get('cache_salt') or ''}/{lora.adapter_id if lora else ''}"

    @property
    def phase(self) -> str:
        params = self.arguments.get("disaggregated_params")
        return (params.request_type if params else None) or "context_and_generation"


class Executor:
    """Implements what the LLM API asks of its executor."""

    def __init__(self, vocabulary_size: int, end_ids: list[int], arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.vocabulary_size = vocabulary_size
        self.end_ids = end_ids
        cache: Any = arguments.get("kv_cache_config")
        self.tokens_per_block = int(getattr(cache, "tokens_per_block", 32) or 32)
        self.total_blocks = int(setting("BLOCKS", 4096))
        if getattr(cache, "max_tokens", None):
            self.total_blocks = cache.max_tokens // self.tokens_per_block
        self.has_events = bool(getattr(cache, "event_buffer_max_size", 0))
        self.max_batch_size = int(arguments.get("max_batch_size") or 2048)
        self.max_seq_len = arguments.get("max_seq_len") or 2**20
        self.max_num_tokens = int(arguments.get("max_num_tokens") or 8192)
        self.rows: asyncio.Queue[dict[str, Any]] | None = None
        self.events: asyncio.Queue[dict[str, Any]] | None = None
        self.iteration = 0
        self.calls: list[dict[str, Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._cached: dict[int, int] = {}
        """Cached blocks: hash, and the hash above."""
        self._event_ids = itertools.count()
        self._wake = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="stand-in", daemon=True)
        self._thread.start()
        EXECUTORS.append(self)

    def submit(self, prompt: list[int], params: Any, arguments: dict[str, Any]) -> RequestOutput:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop and self._loop is None:
            self._loop, self.rows, self.events = loop, asyncio.Queue(), asyncio.Queue()
        request = Request(next(self._numbers), prompt, params, arguments)
        # Too many are cut with a warning.
        asked = params.max_tokens if params.max_tokens is not None else 2**30
        request.max_tokens = min(asked, self.max_seq_len - len(prompt))
        if request.phase == "context_only":
            request.max_tokens = params.max_tokens = 1
        request.lanes = [[] for _ in range(request.count)]
        request.sums = [0.0] * request.count
        request.result = RequestOutput(request, self, loop)
        with self._wake:
            self._waiting.append(request)
            self._wake.notify()
        return request.result

    def abort(self, request: Request) -> None:
        with self._wake:
            request.aborted = True
            self._wake.notify()

    def is_shutdown(self) -> bool:
        return self._over

    def shutdown(self) -> None:
        with self._wake:
            self._over = True
            self._wake.notify()

    def die(self) -> None:
        """As when a process of the model is killed."""
        with self._wake:
            lost, self._running, self._waiting = self._running + self._waiting, [], []
            self._over = True
            self._wake.notify()
        has_class = not RELEASE.startswith("1.2")
        kind: Any = made("EngineDeadError") if has_class else RuntimeError
        for request in lost:
            request.result.put(Response(0, error=kind("the engine died"), is_final=True))

    def _run(self) -> None:
        ends_at = time.monotonic()
        while True:
            with self._wake:
                while not (self._waiting or self._running or self._over):
                    self._wake.wait()
                    ends_at = time.monotonic()
                if self._over:
                    return
            step = setting("STEP_MS", 1.0) / 1000
            ends_at = max(ends_at + step, time.monotonic())
            time.sleep(max(0.0, ends_at - time.monotonic()))
            if self.iteration == setting("FREEZE_AFTER", -1):
                time.sleep(3600)
            if self.iteration == setting("DIE_AFTER", -1):
                self.die()
                return
            self._iterate()

    def _iterate(self) -> None:
        with self._wake:
            self.iteration += 1
            for request in [each for each in self._waiting + self._running if each.aborted]:
                (self._running if request in self._running else self._waiting).remove(request)
                for index in range(request.count):
                    last = index == request.count - 1
                    request.result.put(Response(index, finish_reason="cancelled", is_final=last))
            free = self.max_batch_size - sum(each.count for each in self._running)
            while self._waiting and self._waiting[0].count <= free:
                request = self._waiting.pop(0)
                free -= request.count
                self._running.append(request)
            running = list(self._running)
        budget = self.max_num_tokens
        for request in running:
            budget = self._advance(request, budget)
            if len(request.ended) == request.count:
                with self._wake:
                    if request in self._running:
                        self._running.remove(request)
        self._row()

    def _advance(self, request: Request, budget: int) -> int:
        if not request.started:
            chunk = min(budget, len(request.prompt) - request.computed)
            request.computed += chunk
            budget -= chunk
            if request.computed < len(request.prompt):
                return budget
            if not self._start(request):
                return budget
        beams = request.params.use_beam_search
        for index in range(request.count):
            if index not in request.ended:
                (self._step_beam if beams else self._step)(request, index)
        return budget

    def _start(self, request: Request) -> bool:
        """Refuses a request of which the executor has something to say, once its prompt is computed."""
        request.started = True
        problem = self._problem(request)
        if problem:
            request.ended = set(range(request.count))
            error = made("RequestError")(problem)
            request.result.put(Response(0, error=error, is_final=True))
            return False
        if request.phase == "generation_only":
            # The first output holds what the other worker chose.
            first = list(request.arguments["disaggregated_params"].first_gen_tokens)
            request.lanes[0] += first
            request.result.put(Response(0, first))
        else:
            self._reuse(request)
        return True

    def _problem(self, request: Request) -> str | None:
        failing = int(setting("FAIL_ITEM", 0))
        if failing and request.number == failing + 1:
            return "the request failed because FAIL_ITEM says so"
        if request.phase != "context_and_generation":
            return self._problem_of_handoff(request)
        width = int(request.params.best_of if request.params.use_beam_search else 1)
        most = int(self.arguments.get("max_beam_width") or 1)
        if self.arguments.get("flow") == "pytorch" and width not in (most, 1):
            return f"Request beam width {width} is not equal to max_beam_width {most}"
        return None

    def _problem_of_handoff(self, request: Request) -> str | None:
        transceiver: Any = self.arguments.get("cache_transceiver_config")
        if transceiver is None or transceiver.backend is None:
            return "kv_cache_transceiver is disabled"
        if request.phase == "context_only":
            if not self.arguments.get("disable_overlap_scheduler"):
                return (
                    "Context only requests are not supported in pytorch backend when overlap is"
                    " enabled."
                )
            return None
        try:
            state = json.loads(request.arguments["disaggregated_params"].opaque_state)
        except (TypeError, ValueError):
            return "the context phase params cannot be read"
        if state != {"prompt": _digest(repr((request.prompt, request.salt)).encode())}:
            return "the context phase params are those of another prompt"
        return None

    def _reuse(self, request: Request) -> None:
        """Finds the cached blocks of the prompt, and caches the others."""
        cached, reused, parent = 0, 0, _digest(request.salt.encode())
        stored: list[tuple[int, list[int]]] = []
        size = self.tokens_per_block
        root = above = parent
        # The last token is computed for its logits.
        for start in range(0, len(request.prompt) - 1 - size + 1, size):
            tokens = request.prompt[start : start + size]
            block = _digest(repr((parent, tokens)).encode())
            if block in self._cached and not stored:
                cached += size
                reused += 1
                above = block
            elif block not in self._cached:
                self._cached[block] = parent
                stored.append((block, tokens))
            parent = block
        if stored and self.has_events:
            self._event(
                type="stored",
                parent_hash=None if above == root else above,
                blocks=[_block(block, tokens) for block, tokens in stored],
            )
        while len(self._cached) > self.total_blocks:
            oldest = next(iter(self._cached))
            del self._cached[oldest]
            if self.has_events:
                self._event(type="removed", block_hashes=[oldest])
        request.cached_tokens, request.reused_blocks = cached, reused

    def _step(self, request: Request, index: int) -> None:
        params, lane = request.params, request.lanes[index]
        token = self._token(request, index)
        lane.append(token)
        scores = self._scores(request, index, token)
        log_prob = scores[token].logprob
        request.sums[index] += log_prob
        response = Response(index, [token], [scores] if params.logprobs else [])
        response.finish_reason = self._reason(request, lane)
        response.extra["cumulative_logprob"] = request.sums[index]
        response.extra["cached_tokens"] = request.cached_tokens
        if response.finish_reason:
            request.ended.add(index)
            response.extra |= self._last_words(request, lane)
        if not self._streams(request):
            if not response.finish_reason:
                return
            response.token_ids = list(lane)
            response.logprobs = self._all_scores(request, index) if params.logprobs else []
        response.is_final = len(request.ended) == request.count
        request.result.put(response)

    def _step_beam(self, request: Request, index: int) -> None:
        """Beams change places while they grow."""
        params, width = request.params, request.count
        length = len(request.lanes[index]) + 1
        final = length >= request.max_tokens
        place = index if final else (index + length // 3) % width
        stream = list(request.prompt)
        for _ in range(length):
            stream.append(self._next(stream, f"beam {place}"))
        tokens = stream[len(request.prompt) :]
        request.lanes[index] = tokens
        request.sums[index] = -1.0 * place - 0.1 * length
        scores = [{t: made("Logprob")(-0.1, 1)} for t in tokens] if params.logprobs else []
        response = Response(index, tokens, scores)
        response.extra["cumulative_logprob"] = request.sums[index]
        if final:
            request.ended.add(index)
            response.finish_reason = "length"
            response.extra |= self._last_words(request, tokens)
        response.is_final = len(request.ended) == request.count
        request.result.put(response)

    def _streams(self, request: Request) -> bool:
        return bool(request.arguments.get("streaming"))

    def _token(self, request: Request, index: int) -> int:
        """The next token; bans apply."""
        params, lane = request.params, request.lanes[index]
        draw = "" if is_greedy(params) else f"{params.seed} {index} {len(lane)} {_draws(params)}"
        lora = request.arguments.get("lora_request")
        tokens = [*request.prompt, *lane]
        banned = {word[-1] for word in params._get_bad_words() if _ends(tokens, word[:-1])}
        if len(lane) < (params.min_tokens or 0):
            banned.add(params.end_id)
        key = f"{draw} {lora.adapter_id if lora else ''}"
        for attempt in itertools.count():
            token = self._next(tokens, f"{key} {attempt}" if attempt else key)
            if token not in banned:
                return token
        raise AssertionError

    def _next(self, tokens: list[int], key: str) -> int:
        digest = _digest(repr((tokens[-64:], len(tokens), key)).encode())
        if digest % 1000 < setting("END_SHARE", 0.0) * 1000 and self.end_ids:
            return self.end_ids[digest // 1000 % len(self.end_ids)]
        return FIRST_ID + digest // 1000 % (self.vocabulary_size - FIRST_ID)

    def _reason(self, request: Request, lane: list[int]) -> str | None:
        params = request.params
        if not params.ignore_eos and lane[-1] == params.end_id:
            return "stop"
        tokens = [*request.prompt, *lane]
        if any(_ends(tokens, word) for word in params._get_stop_words()):
            return "stop_words"
        if request.phase == "context_only":
            return "not_finished"
        return "length" if len(lane) >= request.max_tokens else None

    def _scores(self, request: Request, index: int, token: int) -> dict[int, Any]:
        """The chosen token and the most likely ones."""
        logprob = made("Logprob")
        base = -0.25 - (token % 7) / 16
        found = {token: logprob(base, 1)}
        for rank in range(2, 1 + int(request.params.logprobs or 0)):
            found[(token + rank) % self.vocabulary_size] = logprob(base - rank, rank)
        return found

    def _all_scores(self, request: Request, index: int) -> list[dict[int, Any]]:
        return [self._scores(request, index, token) for token in request.lanes[index]]

    def _last_words(self, request: Request, lane: list[int]) -> dict[str, Any]:
        """What comes with the end of a sequence."""
        params, extra = request.params, dict[str, Any]()
        if request.phase == "context_only":
            state = {"prompt": _digest(repr((request.prompt, request.salt)).encode())}
            extra["disaggregated_params"] = made("DisaggregatedParams")(
                request_type="context_only",
                first_gen_tokens=list(lane),
                ctx_request_id=request.number,
                opaque_state=json.dumps(state).encode(),
            )
        if params.return_context_logits:
            extra["context_logits"] = self._logits(request.prompt)
        if params.return_generation_logits:
            extra["generation_logits"] = self._logits(lane)
        if params.return_perf_metrics or self.arguments.get("return_perf_metrics"):
            extra["request_perf_metrics"] = _metrics(request, self.tokens_per_block)
        return extra

    def _logits(self, tokens: list[int]) -> Any:
        import torch

        rows = torch.zeros(len(tokens), self.vocabulary_size)
        for row, token in enumerate(tokens):
            rows[row, token] = 5.0
            rows[row, (token + 1) % self.vocabulary_size] = 3.0
        return rows

    def _row(self) -> None:
        running, size = self._running, self.tokens_per_block
        used = sum(
            -(-(len(each.prompt) + len(lane)) // size) for each in running for lane in each.lanes
        )
        row = {
            "timestamp": "01-01-2026 00:00:00.000000",
            "iter": self.iteration,
            "numActiveRequests": len(running),
            "numQueuedRequests": len(self._waiting),
            "gpuMemUsage": 2**30,
            "pinnedMemUsage": 2**20,
            "kvCacheStats": {
                "maxNumBlocks": self.total_blocks,
                "usedNumBlocks": used,
                "freeNumBlocks": self.total_blocks - used,
                "tokensPerBlock": size,
            },
            "inflightBatchingStats": {"numPausedRequests": 0},
        }
        enabled = self.arguments.get("enable_iter_perf_stats") or self.arguments.get(
            "iter_stats_max_iterations"
        )
        if enabled:
            self._put(self.rows, row)

    def _event(self, **data: Any) -> None:
        event = {"event_id": next(self._event_ids), "data": data, "window_size": 2**20}
        self._put(self.events, event)

    def _put(self, queue: asyncio.Queue[dict[str, Any]] | None, row: dict[str, Any]) -> None:
        if queue is not None and self._loop and not self._loop.is_closed():
            # As JSON: rows come from another process.
            self._loop.call_soon_threadsafe(queue.put_nowait, json.loads(json.dumps(row)))


def _draws(params: Any) -> str:
    names = ("temperature", "top_k", "top_p", "min_p", "top_p_min", "top_p_decay")
    return repr([getattr(params, name) for name in names])


def _ends(tokens: list[int], word: list[int]) -> bool:
    return not word or tokens[-len(word) :] == list(word)


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "little")


def _block(block: int, tokens: list[int]) -> dict[str, Any]:
    unique = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in tokens]
    return {
        "type": "stored_block",
        "block_hash": block,
        "tokens": unique,
        "cache_level": 0,
        "priority": 35,
    }


def _metrics(request: Request, tokens_per_block: int) -> Any:
    from datetime import timedelta

    arrival = timedelta(seconds=request.arrival)
    blocks = -(-len(request.prompt) // tokens_per_block)
    reused = request.reused_blocks
    return SimpleNamespace(
        timing_metrics=SimpleNamespace(
            arrival_time=arrival, first_scheduled_time=arrival + timedelta(microseconds=250)
        ),
        kv_cache_metrics=SimpleNamespace(
            num_new_allocated_blocks=blocks - reused,
            num_reused_blocks=reused,
            num_total_allocated_blocks=blocks - reused,
        ),
        speculative_decoding=SimpleNamespace(
            acceptance_rate=0.0, total_accepted_draft_tokens=0, total_draft_tokens=0
        ),
    )
