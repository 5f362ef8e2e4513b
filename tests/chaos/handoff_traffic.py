"""Random requests whose KV moves between workers, each with an end of its own, compared with those of one undisturbed
worker."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import grpc
from chaos.fragile import contents
from chaos.handoff_cases import check_beginning
from chaos.handoff_mesh import FIRST_TOKEN, LAST_TOKEN, ROUTERS, WHOLE, HandoffMesh
from chaos.proxy import proxy_to
from e2e.mesh import StreamReader, eventually, scrape
from processes import ServiceProcess
from trtmesh.chassis.errors import DeadlineExceeded, Unavailable
from trtmesh.client import AdminClient, Client, FinishReason, GenerationPhase, HandoffConfig
from trtmesh.client.channel import typed_errors
from trtmesh.client.events import events_of
from trtmesh.client.options import build_config, build_items
from trtmesh.client.results import ItemResult, Results
from trtmesh.v1 import router_pb2, router_pb2_grpc

LANES = 12
"""Requests at a time."""

BUFFER_TOKENS = 64
"""Tokens that wait for a client before it is paused."""

PAUSE_SECONDS = 40.0
"""Less than a paused client may take."""

SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
"""A router may send hardly more than the client has asked for."""

ENDINGS: Mapping[str, int] = {
    "whole": 62,
    "cancel": 8,
    "stop": 7,
    "disconnect": 4,
    "deadline": 5,
    "pause": 6,
    "leave paused": 2,
    "halves": 5,
    "first half": 1,
}
"""Ways to end a request, and their weights."""

_PREFIXES = [
    random.Random(number).choices(range(FIRST_TOKEN, LAST_TOKEN), k=160) for number in range(4)
]
"""Beginnings of many prompts: workers have their blocks."""


@dataclass(frozen=True)
class Asked:
    """A request, drawn from its number alone."""

    name: str
    prompts: Sequence[Sequence[int]]
    options: Mapping[str, Any]
    ending: str
    draw: random.Random
    """For the details of its end."""


def asked(seed: int, number: int) -> Asked:
    draw = random.Random(f"{seed} {number}")
    (ending,) = draw.choices([*ENDINGS], [*ENDINGS.values()])
    is_single = ending in ("pause", "leave paused", "halves", "first half")
    prompts = [_prompt(draw) for _ in range(1 if is_single else draw.choice((1, 1, 2, 3)))]
    options: dict[str, Any] = {"max_tokens": draw.randint(2, 60), "temperature": 0.9}
    options |= {"seed": draw.getrandbits(32), "text": draw.random() < 0.7}
    if ending in ("pause", "leave paused"):
        options["max_tokens"] = 6 * BUFFER_TOKENS
    elif not is_single:
        match draw.choice(("greedy", "sampled", "several", "texts", "tokens")):
            case "greedy":
                options["temperature"] = 0.0
            case "several":
                options["num_return_sequences"] = draw.randint(2, 3)
            case "texts":
                options |= {"stop_texts": [draw.choice("etaoin")], "text": True}
            case "tokens":
                options["stop_token_ids"] = [
                    [token] for token in range(FIRST_TOKEN + draw.randrange(48), LAST_TOKEN, 48)
                ]
    return Asked(f"soak-{seed}-{number}", prompts, options, ending, draw)


def _prompt(draw: random.Random) -> list[int]:
    shared = draw.choice(_PREFIXES)[: draw.choice((0, 0, 64, 100, 160))]
    own = [draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(draw.randint(1, 260))]
    return [*shared, *own[:-1], WHOLE]


class Traffic:
    """The clients of a mesh, and of the worker that nothing disturbs."""

    def __init__(self, mesh: HandoffMesh, undisturbed: Client, seed: int) -> None:
        self.outcomes = Counter[str]()
        """Requests by end, and by what became of them."""
        self.worst_stall_seconds = 0.0
        """Longest wait for an event of a request that its client read to the end without pause."""
        self._mesh, self._undisturbed, self._seed = mesh, undisturbed, seed
        self._next = 0
        self._endings: Mapping[str, Callable[[Asked, list[ItemResult]], Awaitable[str]]] = {
            "whole": self._whole,
            "cancel": self._cancel,
            "stop": self._stop,
            "disconnect": self._disconnect,
            "deadline": self._deadline,
            "pause": self._pause,
            "leave paused": self._pause,
            "halves": self._halves,
            "first half": self._halves,
        }

    async def run(self, over: asyncio.Event) -> None:
        """Sends requests until `over`."""
        async with AsyncExitStack() as stack:
            self._clients = [
                await stack.enter_async_context(Client(order, resume_seconds=60))
                for order in (self._routers(), self._routers()[::-1])
            ]
            async with asyncio.TaskGroup() as group:
                for _ in range(LANES):
                    group.create_task(self._lane(over))

    async def _lane(self, over: asyncio.Event) -> None:
        while not over.is_set():
            self._next += 1
            request = asked(self._seed, self._next)
            try:
                await self._send(request)
            except Exception as error:
                raise AssertionError(f"{request.name}: {request.ending}") from error

    async def _send(self, request: Asked) -> None:
        expected = await self._undisturbed.complete(request.prompts, **request.options)
        assert not any(item.error for item in expected), expected
        outcome = await self._endings[request.ending](request, list(expected))
        self.outcomes[f"{request.ending}: {outcome}"] += 1

    def _routers(self) -> list[str]:
        return [self._mesh.routers[name].address for name in ROUTERS]

    @asynccontextmanager
    async def _reading(
        self, request: Asked, client: Client | None = None, **more: Any
    ) -> AsyncIterator[StreamReader]:
        options = {**request.options, "request_id": request.name, **more}
        own = client or request.draw.choice(self._clients)
        reader = StreamReader(own, request.prompts, **options)
        try:
            yield reader
        finally:
            await reader.cancel()

    async def _whole(self, request: Asked, expected: list[ItemResult]) -> str:
        async with self._reading(request) as reader:
            assert contents(await reader.result()) == contents(expected)
        stall = reader.worst_gap_seconds()
        self.worst_stall_seconds = max(self.worst_stall_seconds, stall)
        return "finished"

    async def _cancel(self, request: Asked, expected: list[ItemResult]) -> str:
        async with self._reading(request) as reader:
            await self._some_tokens(request, reader)
        check_beginning(reader.items, expected)
        return ended(reader.items)

    async def _stop(self, request: Asked, expected: list[ItemResult]) -> str:
        client = request.draw.choice(self._clients)
        async with self._reading(request, client) as reader:
            await self._some_tokens(request, reader)
            with suppress(Unavailable):
                # The one router is dead, and the other does not know the request yet.
                await client.stop(request.name)
            items = await reader.result()
        reasons = {sequence.reason for item in expected for sequence in item.sequences}
        found = {sequence.reason for item in items for sequence in item.sequences}
        assert found <= {*reasons, FinishReason.STOPPED}, items
        check_beginning(items, expected)
        return ended(items)

    async def _disconnect(self, request: Asked, expected: list[ItemResult]) -> str:
        address = request.draw.choice(self._routers())
        async with (
            proxy_to(address) as proxy,
            Client(proxy.address) as client,
            self._reading(request, client) as reader,
        ):
            await self._some_tokens(request, reader)
            proxy.cut()
            with suppress(Unavailable):
                await reader.result()
        check_beginning(reader.items, expected)
        return ended(reader.items)

    async def _deadline(self, request: Asked, expected: list[ItemResult]) -> str:
        seconds = request.draw.uniform(0.02, 0.6)
        async with self._reading(request, timeout_seconds=seconds) as reader:
            with suppress(DeadlineExceeded):
                await reader.result()
        check_beginning(reader.items, expected)
        return ended(reader.items)

    async def _some_tokens(self, request: Asked, reader: StreamReader) -> None:
        """Waits for a random number of tokens of the first item, or its end."""
        least = request.draw.choice((-1, 0, 1, 2, request.draw.randint(1, 40)))
        await reader.until(lambda each: each.tokens() >= least or each.items[0].reason)

    async def _pause(self, request: Asked, expected: list[ItemResult]) -> str:
        """Reads some tokens, lets the router pause the request, then reads the rest or leaves."""
        process = await self._ready_router(request.draw.choice(ROUTERS))
        message = router_pb2.GenerateRequest(
            items=build_items(request.prompts),
            config=build_config(None, request.options),
            request_id=request.name,
        )
        results, outcome = Results(1), "lost its router"
        async with grpc.aio.insecure_channel(process.address, options=SMALL_WINDOW) as channel:
            call = router_pb2_grpc.MeshServiceStub(channel).Generate(message)
            try:
                with typed_errors():
                    await _read(call, results, least=2)
                    await self._until_paused(process.admin_address, request.name)
                    if request.ending == "leave paused":
                        outcome = "left"
                    else:
                        await _read(call, results)
                        outcome = "finished"
            except Unavailable:
                # The client has no second router.
                assert await process.wait() == -signal.SIGKILL
            finally:
                call.cancel()
        if outcome == "finished":
            assert contents(results.items) == contents(expected)
        check_beginning(results.items, expected)
        return outcome

    async def _ready_router(self, name: str) -> ServiceProcess:
        """Waits until a router has workers: one that has just started refuses requests."""

        async def is_ready() -> bool:
            with suppress(OSError, HTTPException):
                samples = await scrape(self._mesh.process(name))
                return samples["trtmesh_router_ready_workers"] > 0
            return False

        await eventually(is_ready)
        return self._mesh.process(name)

    async def _until_paused(self, admin_address: str, request_id: str) -> None:
        """Waits until a request is paused, has all tokens, or is without its router; the failure names its stage."""
        stage = ""

        async def is_paused() -> bool:
            nonlocal stage
            try:
                found = (await admin.list_requests(request_id)).requests
            except DeadlineExceeded:
                return False
            stage = found[0].items[0].stage if found else "over"
            return stage in ("paused", "over")

        async with AdminClient(admin_address) as admin:
            with suppress(Unavailable):
                try:
                    await eventually(is_paused, PAUSE_SECONDS)
                except TimeoutError:
                    raise AssertionError(f"not paused, but {stage}") from None

    async def _halves(self, request: Asked, expected: list[ItemResult]) -> str:
        """Brings two halves together, or leaves the first alone."""
        context = HandoffConfig(phase=GenerationPhase.GENERATION_PHASE_CONTEXT_ONLY)
        async with self._reading(request, handoff=context) as reader:
            (first,) = await reader.result()
        assert first.error is None
        check_beginning([first], expected)
        finished = first.sequences[0].finished
        if finished is None or finished.handoff_state is None:
            return "finished by the first"
        if request.ending == "first half":
            return "left"
        generation = HandoffConfig(
            phase=GenerationPhase.GENERATION_PHASE_GENERATION_ONLY, state=finished.handoff_state
        )
        name = f"{request.name}-second"
        async with self._reading(request, handoff=generation, request_id=name) as reader:
            assert contents(await reader.result()) == contents(expected)
        return "finished"


async def _read(call: Any, results: Results, least: int | None = None) -> None:
    """Reads to the end, or at least so many messages."""
    while least is None or least > 0:
        response = await call.read()
        if not isinstance(response, router_pb2.GenerateResponse):
            return
        least = None if least is None else least - 1
        for event in events_of(response):
            results.add(event)


def ended(items: Sequence[ItemResult]) -> str:
    """Whether a request with an early end was over before it."""
    ends = {sequence.reason for item in items for sequence in item.sequences}
    early = {None, FinishReason.STOPPED, FinishReason.CANCELLED}
    return "finished" if ends and not ends & early else "ended early"
