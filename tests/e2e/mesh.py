"""A mesh of real processes (routers, tokenizers, engines) on real sockets, and a client."""

from __future__ import annotations

import asyncio
import math
import re
import time
import urllib.request
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from process_constants import constants
from processes import ONE_PROCESS, ServiceProcess, service_process
from prometheus_client.samples import Sample
from tokenizers import Tokenizer
from trtmesh.client import (
    Accepted,
    AdminClient,
    Client,
    Event,
    FinishReason,
    ItemResult,
    SequenceFinished,
    Tokens,
)
from trtmesh.client.results import Results, SequenceResult
from trtmesh.v1 import router_admin_pb2 as admin_pb

NOTHING: Mapping[str, str] = MappingProxyType({})

PATIENCE_SECONDS = 240.0
"""Upper bound of a wait; no test depends on the actual time."""

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.04
LASTING_PAUSE_SECONDS = 0.2
"""Longest pause before another look for what stays, once it is there: a page of metrics takes a service 10 ms."""

SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
"""Parts of a page of metrics. The parser of prometheus_client takes five times as long."""

DEMO = Path(__file__).parents[2] / "models" / "demo"
DEMO_VOCABULARY = 6144

DEMO_DRAFT = DEMO.with_name("demo-draft")
SMALL = ("--model-dir", str(DEMO_DRAFT), "--model", "demo")
"""Engine flags: an eighth of the demo model's weights behind its tokenizer, for tests of streams and faults."""

INSIDE = {"TRTMESH_ROUTER_TOKENIZERS": "local", "TRTMESH_TOKENIZER_MODEL_DIR": str(DEMO)}
"""Variables of a router with a tokenizer inside."""

SIMULATED = (
    *("--backend", "simulated", "--model", "demo"),
    *("--simulated-vocabulary-size", str(DEMO_VOCABULARY)),
    *("--simulated-timing-step-ms", "4"),
)
"""Engine flags: simulates the demo model."""

LASTING = (*SIMULATED, "--simulated-timing-step-ms", "20")
"""Engine flags: the longest streams last minutes, few tokens outlast what a test does meanwhile, and waiting costs
little."""

WIDE_TOKENS = (
    "--simulated-vocabulary-first-token-id",
    "8",
    "--simulated-vocabulary-last-token-id",
    "6143",
)
"""Engine flags: token ids span the demo vocabulary, parts of characters included."""

ENDLESS = 20_000
"""Tokens of a request to be stopped: more than a test can wait for."""

PATIENT = (
    *("--deadlines-silence-seconds", "60", "--deadlines-step-gap-seconds", "60"),
    *constants(sibling_wait_seconds=60, handoff_reserve_seconds=60),
)
"""Router flags for tests without frozen workers: a slow moment neither moves items nor excludes the worker."""

BUSY_GAUGES = (
    "live_requests",
    "live_items",
    "worker_bookings",
    "worker_sequences",
    "decode_sequences",
)


async def eventually(
    condition: Callable[[], Awaitable[object]],
    seconds: float = PATIENCE_SECONDS,
    longest_pause: float = LONGEST_PAUSE_SECONDS,
) -> None:
    """Polls `condition` until it holds, more and more seldom: a look at a process takes milliseconds of its time."""
    pause = SHORTEST_PAUSE_SECONDS
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, longest_pause)


async def lasting(
    condition: Callable[[], Awaitable[object]], seconds: float = PATIENCE_SECONDS
) -> None:
    """Waits for what stays once it is there, such as a count or an idle process, with few looks."""
    await eventually(condition, seconds, LASTING_PAUSE_SECONDS)


@cache
def tokenizer_of(model_dir: Path = DEMO) -> Tokenizer:
    """Its file takes 40 ms."""
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def decode(token_ids: Sequence[int], model_dir: Path = DEMO) -> str:
    """Decodes all ids at once, without special tokens."""
    return str(tokenizer_of(model_dir).decode(list(token_ids), skip_special_tokens=True))


async def samples_of(process: ServiceProcess) -> Sequence[Sample]:
    """The metric samples of a process."""
    return samples_in(await page_of(process))


def samples_in(page: str) -> Sequence[Sample]:
    return [
        Sample(name, dict(LABEL.findall(labels)), float(value))
        for name, labels, value in SAMPLE.findall(page)
    ]


async def page_of(process: ServiceProcess) -> str:
    """The page of metrics of a process."""
    return await asyncio.to_thread(_read, f"http://127.0.0.1:{process.metrics_port}/metrics")


async def scrape(process: ServiceProcess, **labels: str) -> Mapping[str, float]:
    """The metric samples of a process with `labels`, summed by name."""
    values: dict[str, float] = {}
    for sample in await samples_of(process):
        if not math.isnan(sample.value) and labels.items() <= sample.labels.items():
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def _read(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read(), "utf-8")


class StreamReader:
    """Reads a request in the background and checks the order of events."""

    def __init__(self, client: Client, prompts: Sequence[Any], **options: Any) -> None:
        self.events: list[Event] = []
        self._results = Results(len(prompts))
        self._client = client
        self._arrived = asyncio.Condition()
        self._times = {index: [time.monotonic()] for index in range(len(prompts))}
        self._task = asyncio.create_task(self._read_all(client, prompts, options))

    @property
    def items(self) -> Sequence[ItemResult]:
        return self._results.items

    @property
    def request_id(self) -> str:
        """The id in the router's first event."""
        accepted = self.events[0]
        assert isinstance(accepted, Accepted)
        return accepted.request_id

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended."""
        return self._task.done()

    def tokens(self, batch_index: int = 0) -> int:
        """The number of tokens received of an item, over all sequences."""
        return sum(map(_length, self.items[batch_index].sequences))

    def positions(self, batch_index: int) -> list[int]:
        """The number of tokens received of each known sequence of an item."""
        return list(map(_length, self.items[batch_index].sequences))

    async def until(self, condition: Callable[[StreamReader], object]) -> None:
        """Waits until `condition` holds or the stream ends."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._arrived:
            await self._arrived.wait_for(lambda: condition(self) or self._task.done())

    async def tokens_here(self, least: int) -> None:
        """Waits for `least` tokens of the first item; fails at an earlier end."""
        await self.until(lambda reader: reader.tokens() >= least)
        assert self.tokens() >= least, self.items[0]

    async def result(self) -> Sequence[ItemResult]:
        """Waits for the end; raises the error of the call."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.shield(self._task)
        return self.items

    async def stopped_at(self, least: int, sequences: int = 1) -> Sequence[ItemResult]:
        """Stops the request once every sequence has `least` tokens, and waits for the end."""

        def all_there(reader: StreamReader) -> bool:
            return all(
                len(item.sequences) == sequences
                and all(_length(sequence) >= least for sequence in item.sequences)
                for item in reader.items
            )

        await self.until(all_there)
        assert all_there(self), self.items
        assert await self._client.stop(self.request_id) == len(self.items)
        return await self.result()

    def worst_gap_seconds(self) -> float:
        """The longest gap before an event of an item, the first included; for printing only."""
        return max(b - a for times in self._times.values() for a, b in pairwise(times))

    def stall_seconds(self, since: float) -> float:
        """The longest gap before an event of an item after `since`; for printing only."""
        later = [
            [since, *(time for time in times if time > since)] for times in self._times.values()
        ]
        return max((b - a for times in later for a, b in pairwise(times)), default=0.0)

    async def cancel(self) -> None:
        """Cancels the call."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read_all(
        self, client: Client, prompts: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        check = OrderCheck(rewrites=options.get("beam_width", 1) > 1)
        events = client.generate(prompts, **options)
        try:
            async for event in events:
                check.see(event)
                self.events.append(event)
                self._times[event.batch_index].append(time.monotonic())
                self._results.add(event)
                async with self._arrived:
                    self._arrived.notify_all()
        finally:
            await events.aclose()
            async with self._arrived:
                self._arrived.notify_all()
        check.finish(len(self.items))


def _length(sequence: SequenceResult) -> int:
    """The number of tokens of a sequence, without joining chunks."""
    last = sequence.chunks[-1] if sequence.chunks else None
    return last.token_offset + len(last.token_ids) if last else 0


def check_beginning(items: Sequence[ItemResult], whole: Sequence[ItemResult]) -> None:
    """Checks that stopped items begin as `whole` does."""
    for item, expected in zip(items, whole, strict=True):
        assert item.error is None
        assert item.reason is FinishReason.STOPPED
        for sequence, undisturbed in zip(item.sequences, expected.sequences, strict=True):
            count = len(undisturbed.token_ids)
            assert sequence.token_ids[:count] == undisturbed.token_ids
            assert sequence.text == decode(sequence.token_ids)
        assert item.usage.prompt_tokens == expected.usage.prompt_tokens
        generated = sum(len(sequence.token_ids) for sequence in item.sequences)
        assert item.usage.generated_tokens == generated


@dataclass
class OrderCheck:
    """Checks invariants of every event stream: order, contiguous offsets, one terminal event an item.

    A beam search `rewrites` its sequences, so their offsets may return to 0.
    """

    rewrites: bool = False
    kinds: dict[int, list[str]] = field(default_factory=dict)
    _offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    _accepted: bool = False

    def see(self, event: Event) -> None:
        kind = type(event).__name__
        if not self._accepted:
            assert kind == "Accepted", f"{kind} came first"
            self._accepted = True
            return
        before = self.kinds.setdefault(event.batch_index, [])
        assert not {"ItemFinished", "ItemFailed"} & set(before), f"{kind} after the terminal event"
        if kind in ("Tokens", "SequenceFinished", "PromptDetails", "SequenceStarted"):
            assert "ItemStarted" in before, f"{kind} before ItemStarted"
        if kind == "ItemStarted":
            assert not before, f"ItemStarted after {before}"
        before.append(kind)
        key = (event.batch_index, event.sequence_index)
        if isinstance(event, Tokens):
            known = self._offsets.get(key, 0)
            if self.rewrites and event.token_offset == 0:
                known = 0
            assert event.token_offset == known, f"{key}: {event.token_offset} after {known}"
            self._offsets[key] = known + len(event.token_ids)
        if isinstance(event, SequenceFinished):
            assert event.generated_tokens == self._offsets.get(key, 0)
            self._offsets[key] = 2**62
        if kind == "ItemFinished":
            ended = [n for (b, _), n in self._offsets.items() if b == event.batch_index]
            assert all(n >= 2**62 for n in ended), "the item finished before its sequences"

    def finish(self, items: int) -> None:
        for index in range(items):
            kinds = self.kinds.get(index, [])
            terminal = [kind for kind in kinds if kind in ("ItemFinished", "ItemFailed")]
            assert len(terminal) == 1, f"item {index}: {kinds}"


class Mesh:
    """The processes of a mesh, killed at the end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.tokenizers: list[ServiceProcess] = []
        self.engines: list[ServiceProcess] = []
        """As their starts were asked for, whichever is up first."""
        self._starts = 0
        self._turns: dict[int, int] = {}
        """Places of processes in the order of starts, by pid."""
        self.router: ServiceProcess
        self.client: Client
        self.admin: AdminClient
        self.channel: grpc.aio.Channel
        """A channel to the router, for calls without a client method."""

    async def start(
        self, service: str, *flags: str, env: Mapping[str, str] | None = None
    ) -> ServiceProcess:
        shared = ("--metrics-port", "0", "--log-level", "warning")
        turn = self._starts = self._starts + 1
        process = await self._stack.enter_async_context(
            service_process(service, *shared, *flags, env=env)
        )
        self._turns[process.pid] = turn
        return process

    def _add(self, process: ServiceProcess, processes: list[ServiceProcess]) -> None:
        insort(processes, process, key=lambda each: self._turns[each.pid])

    async def start_tokenizer(
        self,
        model_dir: Path = DEMO,
        port: int = 0,
        tool_format: str = "auto",
        env: Mapping[str, str] | None = None,
    ) -> ServiceProcess:
        flags = ("--model-dir", str(model_dir), "--port", str(port), "--tool-format", tool_format)
        process = await self.start("tokenizer", *flags, env=env)
        self._add(process, self.tokenizers)
        return process

    async def start_engine(
        self, *flags: str, port: int = 0, env: Mapping[str, str] | None = None
    ) -> ServiceProcess:
        process = await self.start("engine", "--port", str(port), *flags, env=env)
        self._add(process, self.engines)
        return process

    async def start_router(self, *flags: str, env: Mapping[str, str] | None = None) -> None:
        """Starts a router of the processes started before, with clients."""
        tokenizers = ",".join(process.address for process in self.tokenizers)
        peers = ["--engines", ",".join(process.address for process in self.engines)]
        if tokenizers:
            peers += ["--tokenizers", tokenizers]
        await self._reach(await self.start("router", "--port", "0", *peers, *flags, env=env))

    async def start_one_process(
        self, *engine_flags: str, router_flags: Sequence[str] = (), env: Mapping[str, str]
    ) -> None:
        """Starts a router with a tokenizer and an engine inside, as `trtmesh up --one-process` does, with clients."""
        given = dict(zip(engine_flags[::2], engine_flags[1::2], strict=True))
        names = {flag: flag.removeprefix("--").replace("-", "_").upper() for flag in given}
        inside = {f"TRTMESH_ENGINE_{names[flag]}": value for flag, value in given.items()}
        flags = ("--port", "0", "--engines", "", *router_flags)
        process = await self.start(ONE_PROCESS, *flags, env={**INSIDE, **inside, **env})
        self.engines.append(process)
        await self._reach(process)

    async def _reach(self, router: ServiceProcess) -> None:
        self.router = router
        self.client = await self._stack.enter_async_context(Client(self.router.address))
        admin = AdminClient(self.router.admin_address)
        self.admin = await self._stack.enter_async_context(admin)
        channel = grpc.aio.insecure_channel(self.router.address)
        self.channel = await self._stack.enter_async_context(channel)

    def open(self, prompts: Sequence[Any], **options: Any) -> StreamReader:
        """Opens a request, read in the background."""
        reader = StreamReader(self.client, prompts, **options)
        self._stack.push_async_callback(reader.cancel)
        return reader

    async def status(self) -> admin_pb.ListWorkersResponse:
        return await self.admin.list_workers()

    async def stages(self) -> list[str]:
        """The stages of the live items."""
        answer = await self.admin.list_requests()
        return [item.stage for request in answer.requests for item in request.items]

    async def has_stage(self, stage: str) -> bool:
        return stage in await self.stages()

    async def ready(
        self, workers: int, tokenizers: int = 0, seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Waits until this many workers and tokenizers are ready."""

        async def all_ready() -> bool:
            status = await self.status()
            ready = [w for w in status.workers if w.state == admin_pb.WORKER_STATE_READY]
            able = [t for t in status.tokenizers if t.state == admin_pb.WORKER_STATE_READY]
            return len(ready) >= workers and len(able) >= tokenizers

        await lasting(all_ready, seconds)

    async def only_ready(self, *names: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until exactly these workers are ready."""

        async def only_these() -> bool:
            workers = (await self.status()).workers
            ready = {w.worker for w in workers if w.state == admin_pb.WORKER_STATE_READY}
            return ready == set(names)

        await lasting(only_these, seconds)

    async def counted(self, name: str, least: float) -> None:
        """Waits until a counter of the router, summed over labels, reaches `least`."""

        async def so_far() -> bool:
            samples = await scrape(self.router)
            return samples.get(f"trtmesh_router_{name}_total", 0.0) >= least

        await lasting(so_far)

    async def gauges(self) -> Mapping[str, float]:
        """The router's gauges of resources in use."""
        samples = await scrape(self.router)
        return {name: samples[f"trtmesh_router_{name}"] for name in BUSY_GAUGES}

    async def used_blocks(self) -> float:
        """KV blocks in use on the living engines."""
        living = [engine for engine in self.engines if engine.exit_status is None]
        samples = await asyncio.gather(*(scrape(engine) for engine in living))
        return sum(sample["trtmesh_engine_used_blocks"] for sample in samples)

    async def idle(self) -> None:
        """Waits until nothing is in use anywhere."""

        async def nothing_in_use() -> bool:
            return not any((await self.gauges()).values()) and await self.used_blocks() == 0

        try:
            await lasting(nothing_in_use)
        except TimeoutError:
            left = await self.gauges(), await self.used_blocks()
            raise AssertionError(f"still in use: {left}") from None


@asynccontextmanager
async def running_mesh(
    *,
    tokenizers: int = 1,
    engines: int = 1,
    engine_flags: Sequence[str] = SIMULATED,
    router_flags: Sequence[str] = (),
    router_env: Mapping[str, str] = NOTHING,
    model_dir: Path = DEMO,
    start: Callable[[Mesh], Awaitable[None]] | None = None,
) -> AsyncIterator[Mesh]:
    """Starts a mesh and waits until ready, or lets `start` do so; kills the processes on exit."""

    async def start_as_told(mesh: Mesh) -> None:
        starts = [mesh.start_tokenizer(model_dir) for _ in range(tokenizers)]
        starts += [mesh.start_engine(*engine_flags) for _ in range(engines)]
        await asyncio.gather(*starts)
        await mesh.start_router(*router_flags, env=router_env)
        await mesh.ready(engines, 1 if router_env is INSIDE else tokenizers)

    async with AsyncExitStack() as stack:
        mesh = Mesh(stack)
        await (start or start_as_told)(mesh)
        yield mesh


@asynccontextmanager
async def mesh_in_one_process(
    *engine_flags: str, router_flags: Sequence[str] = (), env: Mapping[str, str] = NOTHING
) -> AsyncIterator[Mesh]:
    """Starts a mesh in one process and waits until ready; kills the process on exit."""

    async def start(mesh: Mesh) -> None:
        await mesh.start_one_process(*engine_flags, router_flags=router_flags, env=env)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


@asynccontextmanager
async def router_before(peers: Mesh, *flags: str) -> AsyncIterator[Mesh]:
    """A mesh of the tokenizers and engines of another, with a patient router of its own."""

    async def start(mesh: Mesh) -> None:
        mesh.tokenizers, mesh.engines = peers.tokenizers, peers.engines
        await mesh.start_router(*PATIENT, *flags)
        await mesh.ready(len(peers.engines), len(peers.tokenizers))

    async with running_mesh(start=start) as mesh:
        yield mesh
