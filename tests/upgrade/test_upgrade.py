"""A rolling upgrade from another revision to this tree, and back, under load: no stream is lost, none differs.

`make upgrade-test BEFORE=REV` names the revision.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from e2e.mesh import DEMO, SIMULATED, eventually
from otlp_receiver import Received, by_grpc
from router.adapters.contents_of import content
from trtmesh.chassis.tracing.spans import TraceContext, new_span_id, new_trace_id
from trtmesh.client import AdminClient, Client
from trtmesh.v1 import router_admin_pb2 as admin_pb
from upgrade.trees import ROOT, Tree, TreeProcess

TOKENS = 60
PROMPTS = [f"def function_{number}(path):" for number in range(6)]
ORDERS = (
    ("engine", "router", "tokenizer"),
    ("router", "tokenizer", "engine"),
    ("tokenizer", "engine", "router"),
)
ENGINE = (*SIMULATED, "--simulated-adapters-slots", "2", "--simulated-adapters-host-adapters", "2")
MESH = (
    *(("engine", *ENGINE, "--role", role) for role in ("mixed", "mixed", "prefill", "decode")),
    *(("tokenizer", "--model-dir", str(DEMO)) for _ in range(2)),
)
NATIVE: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "traced": {},
    "adapter": {"adapter": "a"},
    "drawn": {"num_return_sequences": 2, "temperature": 0.8, "seed": 7, "adapter": "a"},
}
"""Options of the streams of the native API."""
DOORS = (*NATIVE, "triton", "openai")
SERVICES = {"trtmesh-router", "trtmesh-tokenizer", "trtmesh-engine"}


class RollingMesh:
    """Two routers, two tokenizers and four engines, replaced one by one while streams run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[TreeProcess] = []
        self.routers: list[TreeProcess] = []
        """Those to which clients send new requests."""
        self.expected: dict[str, str] = {}
        self.streams = Counter[str]()
        self.failures: list[str] = []
        self._adapters: set[str] = set()

    async def start(self, tree: Tree) -> None:
        self.processes += await asyncio.gather(*(tree.start(*each) for each in MESH))
        self._list()
        await asyncio.gather(*(self._start_router(tree) for _ in range(2)))
        async with AdminClient(self.routers[0].announced["admin_address"]) as admin:
            await admin.upload_adapter(admin_pb.AddAdapterRequest(name="a"), content())
        self._adapters.add("a")
        await self._all_known()

    async def close(self) -> None:
        for process in self.processes:
            await process.kill()

    async def replace_all(self, tree: Tree, order: Sequence[str]) -> None:
        """Replaces the services of each kind, one by one: the new one starts, then the old one drains."""
        for service in order:
            for old in [each for each in self.processes if each.service == service]:
                await self._replace(old, tree)

    async def _replace(self, old: TreeProcess, tree: Tree) -> None:
        before = self.streams.copy()
        if old.service == "router":
            await self._start_router(tree)
            self.routers.remove(old)
        else:
            self.processes.append(await tree.start(old.service, *old.flags))
            self._list()
        await self._all_known()
        await self._every_door_since(before)
        await old.drain()
        self.processes.remove(old)
        self._list()
        await self._every_door_since(self.streams.copy())

    async def _start_router(self, tree: Tree) -> None:
        peers = ["--engines", f"file:{self._file('engine')}"]
        peers += ["--tokenizers", f"file:{self._file('tokenizer')}"]
        peers += ["--adapters-directory", str(self._folder / "registry")]
        ports = ("--http-port", "0", "--admin-port", "0", "--min-drain-seconds", "2")
        router = await tree.start("router", *peers, *ports)
        self.processes.append(router)
        await self._knows_all(router)
        self.routers.append(router)

    def _file(self, service: str) -> Path:
        return self._folder / f"{service}s"

    def _list(self) -> None:
        for service in ("engine", "tokenizer"):
            listed = [each.address for each in self.processes if each.service == service]
            self._file(service).write_text("".join(f"{address}\n" for address in listed))

    async def _all_known(self) -> None:
        for router in self.routers:
            await self._knows_all(router)

    async def _knows_all(self, router: TreeProcess) -> None:
        """Waits until a router has every engine, tokenizer and adapter."""
        wanted = {each.address for each in self.processes if each.service != "router"}
        async with AdminClient(router.announced["admin_address"]) as admin:

            async def all_ready() -> bool:
                seen = await admin.list_workers()
                peers = {worker.address: worker.state for worker in seen.workers}
                peers |= {each.address: each.state for each in seen.tokenizers}
                adapters = {each.name for each in (await admin.list_adapters()).adapters}
                are_ready = all(peers.get(a) == admin_pb.WORKER_STATE_READY for a in wanted)
                return are_ready and adapters >= self._adapters

            await eventually(all_ready)

    async def _every_door_since(self, before: Mapping[str, int]) -> None:
        """Waits until each door has answered two streams more, or any failed."""

        async def answered() -> bool:
            more = all(self.streams[door] >= before.get(door, 0) + 2 for door in DOORS)
            return more or bool(self.failures)

        await eventually(answered)
        assert not self.failures, self.failures

    async def stream(self, door: str, prompt: str) -> str:
        """The text of a stream. Raises an exception for one that is incomplete."""
        router = self.routers[sum(self.streams.values()) % len(self.routers)]
        if (options := NATIVE.get(door)) is not None:
            caller = TraceContext(new_trace_id(), new_span_id(), sampled=door == "traced")
            metadata = [("traceparent", str(caller))]
            async with Client(router.address) as client:
                (item,) = await client.complete(
                    [prompt], max_tokens=TOKENS, ignore_end_id=True, metadata=metadata, **options
                )
            assert item.error is None, item.error
            assert {len(each.token_ids) for each in item.sequences} == {TOKENS}
            return " | ".join(each.text for each in item.sequences)
        base = f"http://{router.announced['http_address']}"
        if door == "triton":
            body = {"text_input": prompt, "max_tokens": TOKENS, "stream": True}
            url = f"{base}/v2/models/ensemble/generate_stream"
            return "".join([each["text_output"] async for each in _events(url, body)])
        # Unless it has a seed, each answer of this door is drawn anew.
        body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "stream": True, "seed": 7}
        choices = [each["choices"][0] async for each in _events(f"{base}/v1/completions", body)]
        assert choices[-1]["finish_reason"] == "length", choices[-1:]
        return "".join(choice["text"] for choice in choices)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Streams through every door, without a pause, until the block ends."""
        loops = [asyncio.create_task(self._loop(door, n)) for door in DOORS for n in range(2)]
        self._going = True
        try:
            yield
        finally:
            self._going = False
            await asyncio.gather(*loops)

    async def _loop(self, door: str, first: int) -> None:
        prompts = cycle(PROMPTS[first:] + PROMPTS[:first])
        for number, prompt in zip(count(), prompts, strict=False):
            if not self._going and number:
                return
            try:
                text = await self.stream(door, prompt)
            except Exception as error:  # noqa: BLE001 - every lost stream counts
                self.failures.append(f"{door}: {type(error).__name__}: {error}")
                return
            if text != self.expected.setdefault(f"{door} {prompt}", text):
                self.failures.append(
                    f"{door}: {text!r} in place of {self.expected[f'{door} {prompt}']!r}"
                )
            self.streams[door] += 1


async def _events(url: str, body: Mapping[str, object]) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. Raises an exception for any other, and for one that reports an error."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            _, mark, data = line.decode().strip().partition("data:")
            if mark and data.strip() != "[DONE]":
                event = json.loads(data)
                assert "error" not in event, event
                yield event


@pytest.mark.upgrade
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order[0]}s first")
async def test_rolling_upgrade_and_downgrade_lose_no_stream(
    order: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with by_grpc(Received()) as collector:
        for name, value in collector.variables.items():
            monkeypatch.setenv(name, value)
        # Unless their callers trace them.
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        await _upgrade(order, tmp_path)
        traces: dict[bytes, set[str]] = defaultdict(set)
        for span in collector.received.spans:
            traces[span.trace_id].add(collector.received.service_of(span))
        assert any(services >= SERVICES for services in traces.values())


async def _upgrade(order: Sequence[str], tmp_path: Path) -> None:
    before = Tree.of_revision(os.environ["BEFORE"], tmp_path / "before")
    now = Tree("this tree", ROOT)
    for tree in (before, now):
        tree.check()
    mesh = RollingMesh(tmp_path)
    try:
        await mesh.start(before)
        for prompt in PROMPTS:
            for door in DOORS:
                mesh.expected[f"{door} {prompt}"] = await mesh.stream(door, prompt)
        async with mesh.load():
            await mesh.replace_all(now, order)
            await mesh.replace_all(before, order)
        assert mesh.failures == []
        print(
            f"\n{os.environ['BEFORE']} and back, {order}: {dict(mesh.streams)} streams, all alike"
        )
    finally:
        await mesh.close()
