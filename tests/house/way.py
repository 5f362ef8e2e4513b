"""The way of a prompt through a router, a tokenizer and an engine, by `sys.setprofile` in the three processes."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from trtmesh.kserve import grpc_service_pb2 as kserve_pb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2

PROFILED = Path(__file__).with_name("profiled.py")
READY_SECONDS = 120.0
PROMPT = "def fibonacci(n):\n"
TOKENS, MORE_TOKENS = 3, 13
LIBRARIES = {"engine": "torch,transformers.modeling_utils"}
"""Large imports of the services."""

MODULES = {"all": "cli.one_process"}
"""Of the processes that are not called after their module."""

Entries = Mapping[str, int]
"""Entries of a file by its path below the folder of the services, in the order of the first."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Of a process, in a time: the entries of the event loop and of other threads, and the counts of the loop."""

    loop: Entries
    others: Entries
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Way:
    """The entries of files on one request's way, by process; `step` has those of a step of the engine's thread."""

    loops: Mapping[str, Entries]
    step: Entries

    @property
    def files(self) -> set[str]:
        """The files of the product on the way."""
        return {file for entries in self.loops.values() for file in entries} | self.step.keys()

    def entries_of(self, file: str) -> int:
        """How often control enters the file of a name, in any process."""
        return sum(
            count
            for entries in self.loops.values()
            for path, count in entries.items()
            if path.endswith(file)
        )


class Process:
    """A service under the profile."""

    def __init__(
        self, name: str, root: Path, control: str, flags: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.name = name
        self._root = str(root) + os.sep
        self._control = control
        module = f"trtmesh.{MODULES.get(name, name)}"
        profiled = (str(PROFILED), control, self._root, LIBRARIES.get(name, ""), module)
        command = [sys.executable, *profiled, "--log-level", "warning", *flags]
        self._child = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )

    def announced(self) -> str:
        """Waits for the address."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended before it announced itself")
        return str(json.loads(line)["address"])

    def stop(self) -> None:
        self._child.terminate()
        self._child.wait()

    async def begin(self) -> None:
        """Counts from now on, and lets nothing periodic happen."""
        await self._tell("begin")

    async def end(self) -> Taken:
        """What happened since `begin`."""
        return await self._tell("end")

    async def _tell(self, word: str) -> Taken:
        reader, writer = await asyncio.open_unix_connection(self._control, limit=2**20)
        writer.write(f"{word}\n".encode())
        found = json.loads(await reader.readline())
        writer.close()
        return Taken(self._named(found["loop"]), self._named(found["others"]), found["counts"])

    def _named(self, entries: Entries) -> Entries:
        """With paths as the reader knows them: services/router/trtmesh/router/router.py is router/router.py."""
        return {path.rpartition("/trtmesh/")[2]: count for path, count in entries.items()}


@contextmanager
def mesh(root: Path, *engine_flags: str, shape: str = "three processes") -> Iterator[list[Process]]:
    """A router, a tokenizer and an engine of the demo model, in one, two or three processes, the router's first. `root`
    is the folder of the services."""
    model = str(root.parent / "models" / "demo")
    of_engine = engine_flags or ("--model-dir", model)
    inside = {"TRTMESH_ROUTER_TOKENIZERS": "local", "TRTMESH_TOKENIZER_MODEL_DIR": model}
    of_router = ("--admin-port", "0", "--http-port", "none")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:

        def start(name: str, *flags: str, env: Mapping[str, str] = {}) -> Process:
            control = f"{folder}/{name}"
            process = Process(name, root, control, ("--port", "0", *flags), env)
            processes.callback(process.stop)
            return process

        if shape == "one process":
            names = (f"TRTMESH_ENGINE_{f[2:].replace('-', '_').upper()}" for f in of_engine[::2])
            inside |= dict(zip(names, of_engine[1::2], strict=True))
            yield [start("all", *of_router, "--engines", "", env=inside)]
            return
        engine = start("engine", *of_engine)
        if shape == "local tokenizer":
            yield [start("router", *of_router, "--engines", engine.announced(), env=inside), engine]
            return
        tokenizer = start("tokenizer", "--model-dir", model)
        peers = ("--engines", engine.announced(), "--tokenizers", tokenizer.announced())
        yield [start("router", *of_router, *peers), tokenizer, engine]


def native(tokens: int) -> tuple[str, bytes]:
    """A prompt by MeshService.Generate."""
    config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=tokens))
    item = router_pb2.GenerateItem(prompt=pb.Prompt(text=PROMPT))
    request = router_pb2.GenerateRequest(items=[item], config=config)
    return "/trtmesh.v1.MeshService/Generate", request.SerializeToString()


def ensemble(tokens: int) -> tuple[str, bytes]:
    """A stream of Triton's `ensemble`."""
    request = kserve_pb.ModelInferRequest(model_name="ensemble")
    text = PROMPT.encode()
    for name, data_type, data in (
        ("text_input", "BYTES", struct.pack("<I", len(text)) + text),
        ("max_tokens", "INT32", struct.pack("<i", tokens)),
        ("stream", "BOOL", b"\1"),
    ):
        request.inputs.add(name=name, datatype=data_type, shape=(1, 1))
        request.raw_input_contents.append(data)
    return "/inference.GRPCInferenceService/ModelStreamInfer", request.SerializeToString()


async def measure(root: Path, repeats: int) -> tuple[Way, Way]:
    """The ways of a native prompt and of an `ensemble` stream, each sent several times.

    The fewest entries of a file count, since messages arrive together or one by one.
    """
    with mesh(root) as processes:
        async with grpc.aio.insecure_channel(processes[0].announced()) as channel:
            await _until_served(channel)
            found = [
                await _way(channel, processes, door(TOKENS), repeats) for door in (native, ensemble)
            ]
            longer = await _way(channel, processes, native(MORE_TOKENS), repeats)
    step = {
        file: per_step
        for file, count in longer.step.items()
        if (per_step := (count - found[0].step.get(file, 0)) // (MORE_TOKENS - TOKENS))
    }
    whole = [Way({**way.loops, "engine's thread": way.step}, step) for way in found]
    return whole[0], whole[1]


async def _way(
    channel: grpc.aio.Channel,
    processes: Sequence[Process],
    request: tuple[str, bytes],
    repeats: int,
) -> Way:
    """The fewest entries of each file, among so many times; `step` has those of the engine's other threads."""
    loops: dict[str, list[Entries]] = {process.name: [] for process in processes}
    threads: list[Entries] = []
    await _ask(channel, *request)
    for _ in range(repeats):
        await asyncio.sleep(0.3)
        for process in processes:
            await process.begin()
        await _ask(channel, *request)
        # The engine's last word comes after the client's.
        await asyncio.sleep(0.05)
        for process in processes:
            taken = await process.end()
            loops[process.name].append(taken.loop)
            if process.name == "engine":
                threads.append(taken.others)
    return Way({name: _fewest(each) for name, each in loops.items()}, _fewest(threads))


def _fewest(found: Sequence[Entries]) -> Entries:
    first, *others = found
    return {
        file: min([count, *(each[file] for each in others)])
        for file, count in first.items()
        if all(file in each for each in others)
    }


async def _ask(channel: grpc.aio.Channel, method: str, request: bytes) -> None:
    open_call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
    call = open_call(iter([request]))
    async for _ in call:
        pass


async def _until_served(channel: grpc.aio.Channel) -> None:
    ends_at = time.monotonic() + READY_SECONDS
    while True:
        try:
            await _ask(channel, *native(1))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > ends_at:
                raise
            await asyncio.sleep(0.2)
        else:
            return
