"""A mesh whose every connection is encrypted, with certificates on both sides."""

from __future__ import annotations

import asyncio
import datetime as dt
import shutil
import signal
import ssl
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from certificates import Authority, KeyPair
from e2e.mesh import DEMO, LASTING, PATIENT, SIMULATED, StreamReader, eventually, lasting
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import ServiceProcess, run_to_exit, service_process
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.errors import NotFound
from trtmesh.client import AdminClient, Client, ClientTls
from trtmesh.v1 import router_admin_pb2 as admin_pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_SECONDS = 60.0
LONG = list(range(100, 3100))


def flags(own: KeyPair, authorities: Path, /, **more: str) -> list[str]:
    """The TLS flags of a process that shows `own`, and trusts `authorities` on both sides."""
    given = {
        "certificate": own.certificate,
        "key": own.key,
        "client_ca": authorities,
        "ca": authorities,
        **more,
    }
    return [
        part
        for name, value in given.items()
        for part in (f"--tls-{name.replace('_', '-')}", str(value))
    ]


@dataclass
class SecureMesh:
    """Processes, and what clients show them."""

    authority: Authority
    strangers: Authority
    server: KeyPair
    client: KeyPair
    tokenizer: ServiceProcess
    engines: Mapping[str, ServiceProcess]
    router: ServiceProcess
    stack: AsyncExitStack

    @property
    def tls(self) -> ClientTls:
        return self.shown(self.client)

    @property
    def processes(self) -> Sequence[ServiceProcess]:
        return (self.router, self.tokenizer, *self.engines.values())

    def shown(self, pair: KeyPair | None, ca: Path | None = None) -> ClientTls:
        """What a client with this certificate gives."""
        ca = ca or self.authority.ca
        return ClientTls(ca, pair.certificate, pair.key) if pair else ClientTls(ca)

    async def start_router(self, own: KeyPair, ca: Path, *more: str) -> ServiceProcess:
        """Another router of the engines."""
        engines = ",".join(engine.address for engine in self.engines.values())
        tls = flags(own, ca, ca=str(self.authority.ca))
        return await self.stack.enter_async_context(
            service_process(
                *("router", "--port", "0", "--metrics-port", "0"),
                *("--engines", engines, *tls, *PATIENT, *more),
                *("--tokenizers", self.tokenizer.address),
            )
        )


async def ready(router: ServiceProcess, tls: ClientTls, workers: int) -> None:
    """Waits for workers, and a tokenizer."""
    async with AdminClient(router.admin_address, tls=tls) as admin:

        async def all_ready() -> bool:
            seen = await admin.list_workers()
            states = [each.state for each in seen.workers]
            states += [each.state for each in seen.tokenizers]
            return states.count(admin_pb.WORKER_STATE_READY) > workers

        await eventually(all_ready)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureMesh]:
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory / "own")
    server, client = authority.issue("server"), authority.issue("client")
    own = flags(server, authority.ca)
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    async with AsyncExitStack() as stack:

        async def start(name: str, role: str) -> ServiceProcess:
            kind = ("--worker", name, "--role", role, "--handoff-transports", "grpc")
            return await stack.enter_async_context(
                service_process(
                    *("engine", "--port", "0", "--metrics-port", "0"), *LASTING, *kind, *own
                )
            )

        reading = service_process(
            *("tokenizer", "--port", "0", "--metrics-port", "0", "--model-dir", str(DEMO)), *own
        )
        tokenizer, *started = await asyncio.gather(
            stack.enter_async_context(reading), *(start(*each) for each in roles.items())
        )
        engines = dict(zip(roles, started, strict=True))
        addresses = ",".join(engine.address for engine in started)
        router = await stack.enter_async_context(
            service_process(
                *("router", "--port", "0", "--metrics-port", "0", "--handoff-enabled", "always"),
                *("--engines", addresses, *own, *PATIENT),
                *("--tokenizers", tokenizer.address),
            )
        )
        strangers = Authority(directory / "strangers", "strangers")
        mesh = SecureMesh(authority, strangers, server, client, tokenizer, engines, router, stack)
        await ready(router, mesh.tls, 3)
        yield mesh


async def health(address: str, tls: ClientTls | None) -> str:
    """The status that a gRPC port tells, or the status of the failed call."""
    async with open_channel(address, 2**20, 2.0, tls) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def http_status(address: str, path: str, tls: ClientTls | None) -> str:
    """The status that an HTTP port tells, or 'refused'."""

    def ask() -> str:
        context = None
        if tls is not None:
            context = ssl.create_default_context(cafile=str(tls.ca))
            if tls.certificate:
                context.load_cert_chain(tls.certificate, tls.key)
        scheme = "http" if tls is None else "https"
        try:
            with urllib.request.urlopen(
                f"{scheme}://{address}{path}", timeout=PATIENCE_SECONDS, context=context
            ) as response:
                return str(response.status)
        except OSError:
            return "refused"

    return await asyncio.to_thread(ask)


async def test_every_port_needs_a_valid_certificate(mesh: SecureMesh) -> None:
    expired = mesh.authority.issue("expired", valid=-dt.timedelta(hours=1))
    bad = (
        None,
        mesh.shown(None),
        mesh.shown(expired),
        mesh.shown(mesh.strangers.issue("client")),
        mesh.shown(mesh.client, mesh.strangers.ca),
    )
    processes = mesh.processes
    for address in (*(each.address for each in processes), mesh.router.admin_address):
        await until_status(address, mesh.tls, "SERVING")
        assert [await health(address, tls) for tls in bad] == ["UNAVAILABLE"] * len(bad)
    pages = [(f"127.0.0.1:{each.metrics_port}", "/metrics") for each in processes]
    pages += [
        (mesh.router.http_address, "/v2/health/live"),
        (mesh.router.admin_address, "/console"),
    ]
    for page in pages:
        assert await http_status(*page, mesh.tls) == "200"
        assert [await http_status(*page, tls) for tls in bad] == ["refused"] * len(bad)


async def test_keys_stand_in_no_log(mesh: SecureMesh) -> None:
    body = mesh.server.key.read_text().splitlines()[1]
    for process in mesh.processes:
        assert body not in process.stderr
        assert "Traceback" not in process.stderr


async def test_request_belongs_to_the_certificate_of_its_client(mesh: SecureMesh) -> None:
    """For bob, the id of alice's request is unknown and free."""
    alice, bob = (mesh.shown(mesh.authority.issue(name)) for name in ("alice", "bob"))
    async with (
        Client(mesh.router.address, tls=alice) as hers,
        Client(mesh.router.address, tls=bob) as his,
        AdminClient(mesh.router.admin_address, tls=mesh.tls) as admin,
    ):
        reader = StreamReader(hers, ["x"], request_id="hers", max_tokens=20_000)
        await reader.tokens_here(1)
        (live,) = (await admin.list_requests("hers")).requests
        assert live.owner == "certificate:alice"
        assert await his.stop("hers") == await his.stop("nobody's") == 0
        with pytest.raises(NotFound):
            await admin.explain("hers", owner="certificate:bob")
        async with open_channel(mesh.router.address, 2**20, 2.0, bob) as channel:
            request = router_pb2.GenerateRequest(request_id="hers")
            request.items.add().prompt.text = "y"
            request.config.stopping.max_tokens = 3
            stub = router_pb2_grpc.MeshServiceStub(channel)
            call = stub.Resume(router_pb2.ResumeRequest(request=request))
            events = [event async for response in call for event in response.events]
            assert events[-1].item_finished.usage.generated_tokens == 3
        assert not reader.is_over
        assert await hers.stop("hers") == 1
        await reader.result()


async def test_owner_is_the_same_at_every_door(mesh: SecureMesh) -> None:
    carol = mesh.shown(mesh.authority.issue("carol"))
    context = ssl.create_default_context(cafile=str(carol.ca))
    assert carol.certificate
    context.load_cert_chain(carol.certificate, carol.key)
    url = f"https://{mesh.router.http_address}/v2/models/ensemble/generate_stream"
    body = {"text_input": "x", "max_tokens": 20_000, "stream": True, "id": "at the HTTP door"}
    async with (
        Client(mesh.router.address, tls=carol) as client,
        AdminClient(mesh.router.admin_address, tls=mesh.tls) as admin,
        aiohttp.ClientSession() as http,
        http.post(url, json=body, ssl=context) as streaming,
    ):
        assert b"text_output" in await streaming.content.readline()
        reader = StreamReader(client, ["y"], request_id="at the gRPC door", max_tokens=20_000)
        await reader.tokens_here(1)
        owners = {live.owner for live in (await admin.list_requests()).requests}
        assert owners == {"certificate:carol"}
        assert len((await admin.list_requests()).requests) == 2
        assert await client.stop("at the gRPC door") == 1
        await reader.result()


async def test_items_are_handed_over_between_engines(mesh: SecureMesh) -> None:
    async with (
        Client(mesh.router.address, tls=mesh.tls) as client,
        AdminClient(mesh.router.admin_address, tls=mesh.tls) as admin,
    ):

        async def consumed() -> dict[str, int]:
            workers = (await admin.list_workers()).workers
            return {each.worker: each.load.received_handoffs.consumed for each in workers}

        before = await consumed()
        (item,) = await client.complete([LONG], max_tokens=16, request_id="handed", seed=3)
        assert item.error is None
        assert len(item.sequences[0].token_ids) == 16
        (placement,) = (await admin.explain("handed")).placements
        assert placement.prefill_worker == "p0"

        async def told() -> bool:
            # Sequences of slow readers may move too.
            return (await consumed())[placement.worker] > before[placement.worker]

        await eventually(told)


async def test_tritons_clients_connect_unchanged(mesh: SecureMesh) -> None:
    def over_grpc() -> Sequence[int]:
        client = triton_grpc.InferenceServerClient(
            mesh.router.address,
            ssl=True,
            root_certificates=str(mesh.authority.ca),
            private_key=str(mesh.client.key),
            certificate_chain=str(mesh.client.certificate),
        )
        try:
            return _infer(client, triton_grpc)
        finally:
            client.close()

    def over_http() -> Sequence[int]:
        def context() -> Any:
            # The client runs on gevent, which has no types.
            made = import_module("gevent.ssl").create_default_context(cafile=str(mesh.authority.ca))
            made.load_cert_chain(mesh.client.certificate, mesh.client.key)
            return made

        client = triton_http.InferenceServerClient(
            mesh.router.http_address, ssl=True, ssl_context_factory=context
        )
        try:
            return _infer(client, triton_http)
        finally:
            client.close()

    first, second = await asyncio.to_thread(over_grpc), await asyncio.to_thread(over_http)
    assert list(first) == list(second)
    assert len(first) >= 8


def _infer(client: Any, kind: Any) -> Sequence[int]:
    """The token ids of `tensorrt_llm` for a prompt, once the mesh is ready: on a busy machine a worker may be late."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not client.is_server_ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    values: Mapping[str, Any] = {
        "input_ids": np.array([[5, 6, 7]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[8]], np.int32),
        "random_seed": np.array([[3]], np.uint64),
    }
    inputs = []
    for name, value in values.items():
        kinds = {"int32": "INT32", "uint64": "UINT64"}
        given = kind.InferInput(name, list(value.shape), kinds[str(value.dtype)])
        given.set_data_from_numpy(value)
        inputs.append(given)
    answer = client.infer("tensorrt_llm", inputs)
    return list(answer.as_numpy("output_ids").flatten())


async def until_status(address: str, tls: ClientTls, status: str) -> None:
    async def as_wanted() -> bool:
        return await health(address, tls) == status

    await lasting(as_wanted)


@dataclass
class Replaceable:
    """The files of a router, to be replaced while it runs."""

    own: KeyPair
    client_ca: Path

    def take(self, own: KeyPair, client_ca: Path) -> None:
        shutil.copy(own.certificate, self.own.certificate)
        shutil.copy(own.key, self.own.key)
        shutil.copy(client_ca, self.client_ca)


async def test_certificates_change_under_load(mesh: SecureMesh, tmp_path: Path) -> None:
    """Streams continue, new connections meet the new certificate, and clients of the old authority are refused."""
    old, new = Authority(tmp_path / "old", "old"), Authority(tmp_path / "new", "new")
    first = mesh.authority.issue("any", ("first.example",), file="first")
    second = mesh.authority.issue("any", ("second.example",), file="second")
    files = Replaceable(mesh.authority.issue("live"), tmp_path / "client_ca.pem")
    files.take(first, old.ca)
    router = await mesh.start_router(files.own, files.client_ca)
    before = replace(mesh.shown(old.issue("client")), server_name="first.example")
    after = replace(mesh.shown(new.issue("client")), server_name="second.example")
    await ready(router, before, 3)
    assert await health(router.address, after) == "UNAVAILABLE"

    async with Client(router.address, tls=before) as client:
        stream = StreamReader(client, [[n] for n in range(5, 13)], max_tokens=20_000, seed=1)
        await stream.tokens_here(5)
        files.take(second, new.ca)
        await until_status(router.address, after, "SERVING")
        page = (f"127.0.0.1:{router.metrics_port}", "/metrics")
        for refused in (before, replace(before, server_name="second.example")):
            assert await health(router.address, refused) == "UNAVAILABLE"
            assert await health(router.admin_address, refused) == "UNAVAILABLE"
        assert await http_status(*page, before) == "refused"
        assert await http_status(*page, after) == "200"
        # On the connection from before, which the stop takes too.
        items = await stream.stopped_at(stream.tokens() + 20)
    assert [item.error for item in items] == [None] * 8


async def test_unusable_new_files_leave_the_former_ones(mesh: SecureMesh, tmp_path: Path) -> None:
    good = mesh.authority.issue("good")
    files = Replaceable(mesh.authority.issue("changing"), tmp_path / "client_ca.pem")
    shutil.copy(mesh.authority.ca, files.client_ca)
    router = await mesh.start_router(files.own, files.client_ca)
    await until_status(router.address, mesh.tls, "SERVING")
    for broken, why in (
        (lambda: files.own.certificate.write_text("nothing"), "it has no certificate in PEM"),
        (files.own.certificate.unlink, "No such file or directory"),
        (lambda: shutil.copy(good.certificate, files.own.certificate), "is not the key of"),
    ):
        broken()

        async def said() -> bool:
            return why in router.stderr  # noqa: B023 - awaited in this turn of the loop

        await eventually(said)
        assert await health(router.address, mesh.tls) == "SERVING"
    assert router.stderr.count("the former certificates stay in use") == 3
    shutil.copy(good.key, files.own.key)

    async def taken() -> bool:
        return "took the changed certificates" in router.stderr

    await eventually(taken)
    assert await health(router.address, mesh.tls) == "SERVING"


async def test_a_wrong_file_ends_the_start(tmp_path: Path) -> None:
    own, other = (Authority(tmp_path).issue(name) for name in ("own", "other"))
    given = flags(own, Authority(tmp_path).ca, key=str(other.key))
    ended = await run_to_exit("engine", *SIMULATED, *given)
    assert ended.status == 2
    assert f"--tls-key is {other.key}, which cannot be used: it is not the key" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_sequence_migrates_to_another_engine(mesh: SecureMesh) -> None:
    """The last test of the mesh: it kills an engine."""
    async with (
        Client(mesh.router.address, tls=mesh.tls) as client,
        AdminClient(mesh.router.admin_address, tls=mesh.tls) as admin,
    ):
        stream = StreamReader(client, [[5, 6, 7]], max_tokens=20_000, seed=1)
        await stream.tokens_here(5)
        (placement,) = (await admin.explain(stream.request_id)).placements
        mesh.engines[placement.worker].signal(signal.SIGKILL)
        (item,) = await stream.stopped_at(stream.tokens() + 50)
    assert item.error is None
