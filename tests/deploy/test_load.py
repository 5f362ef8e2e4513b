"""The steady load reports every fault of a stream and nothing else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import pytest_asyncio
from deploy.load import steady_load
from e2e.mesh import PATIENT, SIMULATED, Mesh, eventually, running_mesh
from processes import ServiceProcess
from trtmesh.chassis.errors import Unavailable
from trtmesh.client import Client

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAMS, TOKENS = 4, 24
GENERATE = "/trtmesh.v1.MeshService/Generate"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    flags = (*SIMULATED, "--simulated-timing-step-ms", "10")
    async with running_mesh(engine_flags=flags, router_flags=PATIENT) as mesh:
        yield mesh


class Unreliable:
    """A proxy of a router that, once told to, breaks every third stream after its beginning."""

    def __init__(self, router: grpc.aio.Channel) -> None:
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        self._generate = router.unary_stream(GENERATE)
        self._begun = 0
        self.leaves_by: grpc.StatusCode | None = None
        """OK ends the stream early; UNKNOWN leaves it silent."""

    async def generate(
        self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        self._begun += 1
        leaves = self._begun % 3 == 0
        told = 0
        async for response in self._generate(request):
            told += 1
            # The second message: on a busy machine all others may come in it.
            if leaves and told > 1 and self.leaves_by is not None:
                if self.leaves_by is grpc.StatusCode.UNKNOWN:
                    await asyncio.Event().wait()
                if self.leaves_by is not grpc.StatusCode.OK:
                    await context.abort(self.leaves_by, "left")
                return
            yield response


@asynccontextmanager
async def unreliable(mesh: Mesh) -> AsyncIterator[tuple[Unreliable, str]]:
    proxy = Unreliable(mesh.channel)
    _, service, method = GENERATE.split("/")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]]
    handlers = {method: grpc.unary_stream_rpc_method_handler(proxy.generate)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield proxy, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def another_router(mesh: Mesh, address: str = "127.0.0.1:0") -> ServiceProcess:
    links = ("--engines", mesh.engines[0].address, "--tokenizers", mesh.tokenizers[0].address)
    router = await mesh.start("router", *links, "--port", address.split(":")[1], *PATIENT)

    async def serves() -> bool:
        try:
            await client.complete(["ready?"], max_tokens=1)
        except Unavailable:
            return False
        return True

    async with Client(router.address) as client:
        await eventually(serves)
    return router


@pytest.mark.parametrize(
    ("leaves_by", "fault"),
    [
        (grpc.StatusCode.INTERNAL, "InternalError"),
        (grpc.StatusCode.UNAVAILABLE, "Unavailable"),
        (grpc.StatusCode.OK, "StreamIncomplete"),
    ],
)
async def test_load_reports_a_stream_that_breaks_off(
    mesh: Mesh, leaves_by: grpc.StatusCode, fault: str
) -> None:
    async with unreliable(mesh) as (router, address):
        async with steady_load(address, STREAMS, tokens=TOKENS, may_be_refused=True) as seen:
            router.leaves_by = leaves_by
        assert seen.faults
        assert {told.split(":")[0] for told in seen.faults} == {fault}


async def test_load_reports_a_stream_that_hangs(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unreliable(mesh) as (router, address):
        with pytest.raises(AssertionError, match="streams did not finish within 2 s"):  # noqa: PT012
            async with steady_load(address, STREAMS, tokens=TOKENS):
                router.leaves_by = grpc.StatusCode.UNKNOWN
                monkeypatch.setattr("deploy.load.PATIENCE_SECONDS", 2.0)


async def test_load_survives_a_draining_router(mesh: Mesh) -> None:
    router = await another_router(mesh)
    async with steady_load(router.address, STREAMS, tokens=TOKENS, may_be_refused=True) as seen:
        assert await router.stop() == 0
        await another_router(mesh, router.address)
    assert seen.faults == []


async def test_load_reports_the_streams_of_a_killed_router(mesh: Mesh) -> None:
    router = await another_router(mesh)
    async with steady_load(router.address, STREAMS, tokens=TOKENS, may_be_refused=True) as seen:

        async def all_begun() -> bool:
            return all(lane.begun for lane in seen.lanes)

        # Without tokens no stream ends before the router.
        mesh.engines[0].signal(signal.SIGSTOP)
        await eventually(all_begun)
        router.signal(signal.SIGKILL)
        mesh.engines[0].signal(signal.SIGCONT)
        await router.wait()
        await another_router(mesh, router.address)
    assert "Unavailable" in {told.split(":")[0] for told in seen.faults}


async def test_load_reports_an_unexpected_refusal(mesh: Mesh) -> None:
    router = await another_router(mesh)
    async with steady_load(router.address, STREAMS, tokens=TOKENS) as seen:
        assert await router.stop() == 0
    assert {told.split(":")[0] for told in seen.faults} == {"Refused"}
