"""Chats beside long prompts, on workers with and without roles: gaps between the chats' tokens, and throughput.

Chats follow each other without a pause in each stream. Long prompts arrive at fixed times, the same in every run. All
prompts differ, and are sent as ids.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from _doors import NATIVE
from _load import Stream, connections, gaps_ms
from _options import tell
from _stack import Fleet, fleet
from _turns import Figures
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.tools.bench.figures import percentile

ROLES = ("prefill", "decode", "decode")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Chats, and long prompts beside them."""

    chats: int = 32
    chat_tokens: int = 256
    chat_new_tokens: int = 200
    prompts: int = 30
    prompt_tokens: tuple[int, int] = (4096, 16384)
    prompt_new_tokens: int = 64
    prompts_per_second: float = 1.0
    highest_id: int = 30_000


@dataclass(frozen=True, slots=True)
class Setup:
    """Three workers: with `roles`, one for prefill and two for decode, else three for both."""

    name: str
    flags: tuple[str, ...]
    roles: bool = False

    def engines(self) -> list[list[str]]:
        roles = ROLES if self.roles else ("mixed",) * 3
        return [
            [*self.flags, "--role", role, "--worker", f"{role}-{number}"]
            for number, role in enumerate(roles)
        ]


@dataclass(slots=True)
class Client:
    """Sends the traffic and keeps the messages."""

    traffic: Traffic
    connection: ClientConnection
    seed: int
    chats: list[Stream] = field(default_factory=list)
    prompts: list[Stream] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    async def run(self) -> float:
        """Returns the seconds until the last long prompt has ended; chats under way then do not count."""
        traffic = self.traffic
        chats = [asyncio.create_task(self._chat()) for _ in range(traffic.chats)]
        dice, started, arrivals = Random(self.seed), time.perf_counter(), []
        at = 1.0
        for _ in range(traffic.prompts):
            arrivals.append((at, dice.randint(*traffic.prompt_tokens)))
            at += dice.expovariate(traffic.prompts_per_second)
        await asyncio.gather(*(self._prompt(started + at, tokens) for at, tokens in arrivals))
        seconds = time.perf_counter() - started
        for chat in chats:
            chat.cancel()
        for chat in chats:
            with suppress(asyncio.CancelledError):
                await chat
        return seconds

    async def _chat(self) -> None:
        traffic = self.traffic
        while True:
            request = self._request(traffic.chat_tokens, traffic.chat_new_tokens)
            await (stream := Stream()).receive(self.connection, NATIVE, request)
            self.chats.append(stream)

    async def _prompt(self, at: float, tokens: int) -> None:
        await asyncio.sleep(at - time.perf_counter())
        request = self._request(tokens, self.traffic.prompt_new_tokens)
        await (stream := Stream()).receive(self.connection, NATIVE, request)
        self.prompts.append(stream)

    def _request(self, tokens: int, new_tokens: int) -> bytes:
        dice = Random(f"{self.seed} {next(self._numbers)}")
        ids = dice.choices(range(100, self.traffic.highest_id), k=tokens)
        return NATIVE.request(ids, new_tokens, ignore_end_id=True)


async def run_once(setup: Setup, traffic: Traffic, seed: int) -> Figures:
    """The figures of one run of a fresh fleet, after a warm-up."""
    with fleet(setup.engines(), "--handoff-enabled", "auto") as mesh:
        async with connections(mesh.address, 1) as (connection,):
            short = replace(traffic, prompts=3)
            await Client(short, connection, seed + 1000).run()
            before = handoffs(mesh)
            client = Client(traffic, connection, seed)
            seconds = await client.run()
            after = handoffs(mesh)
    return figures(client, seconds) | handoff_figures(before, after)


def figures(client: Client, seconds: float) -> Figures:
    """Latencies in milliseconds; a missing or repeated token ends the bench."""
    traffic = client.traffic
    for streams, tokens in (
        (client.chats, traffic.chat_new_tokens),
        (client.prompts, traffic.prompt_new_tokens),
    ):
        for stream in streams:
            NATIVE.check(stream.messages, tokens)
    gaps = gaps_ms(stream.arrivals(NATIVE) for stream in client.chats)
    waits = [stream.first_seconds(NATIVE) * 1e3 for stream in client.prompts]
    generated = len(client.chats) * traffic.chat_new_tokens
    generated += len(client.prompts) * traffic.prompt_new_tokens
    return {
        "chat_gap_p50_ms": round(percentile(gaps, 50), 1),
        "chat_gap_p99_ms": round(percentile(gaps, 99), 1),
        "chat_gap_max_ms": round(max(gaps), 1),
        "prompt_ttft_p50_ms": round(percentile(waits, 50)),
        "prompt_ttft_p99_ms": round(percentile(waits, 99)),
        "generated_tokens_per_second": round(generated / seconds),
        "seconds": round(seconds, 1),
    }


Sums = dict[str, float]


def handoffs(mesh: Fleet) -> Sums:
    """Counters and sums of the handoffs so far."""
    sums: Sums = {}
    for port in (mesh.router_metrics_port, *mesh.engine_metrics_ports):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.rpartition(" ")
                if "handoff" in name and not line.startswith("#"):
                    sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def handoff_figures(before: Sums, after: Sums) -> Figures:
    """The transfers of a run: `exposed` is the time from the last token of the sender to the first of the receiver,
    which a transfer after the prefill would wholly be."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    moved = grown.get("trtmesh_router_handoff_seconds_count", 0.0)
    if not moved:
        return {"handoffs": 0}
    exposed = grown["trtmesh_router_handoff_seconds_sum"] / moved
    fetched = grown["trtmesh_engine_handoff_transfer_seconds_count"]
    transfer = grown["trtmesh_engine_handoff_transfer_seconds_sum"] / fetched
    sizes = {
        name.partition('transport="')[2].partition('"')[0]: value
        for name, value in grown.items()
        if name.startswith("trtmesh_engine_handoff_bytes_total{") and 'side="received"' in name
    }
    return {
        "handoffs": round(moved),
        "exposed_ms": round(exposed * 1e3, 1),
        "transfer_ms": round(transfer * 1e3, 1),
        "hidden_share": round(1 - min(1.0, exposed / transfer), 3),
        "mib": {name: round(size / 2**20, 1) for name, size in sizes.items() if size},
    }


async def compare(setups: Sequence[Setup], traffic: Traffic, rounds: int) -> Figures:
    """The runs of each setup in turns, and the run with the median gap of each."""
    runs: dict[str, list[Figures]] = {setup.name: [] for setup in setups}
    for number in range(rounds):
        for setup in setups:
            result = await run_once(setup, traffic, number)
            tell(setup.name, result)
            runs[setup.name].append(result)
    return {
        name: sorted(results, key=lambda result: result["chat_gap_p99_ms"])[len(results) // 2]
        for name, results in runs.items()
    }
