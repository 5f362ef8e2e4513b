"""The stack across container boundaries, run by `make compose-test`; prints a line for each scenario."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest
from deploy.load import MAX_TOKENS, PROMPTS, Load, ask, steady_load
from deploy.stack import MEMORY_GIB, ComposeStack, running
from prometheus_client.parser import text_string_to_metric_families
from trtmesh.chassis.errors import ModelNotFound, Unavailable
from trtmesh.client import AdminClient, Client
from trtmesh.client.options import build_config, build_items
from trtmesh.v1 import router_admin_pb2 as admin_pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

STREAMS = 32
CHANGE_SECONDS = 60.0
READY = admin_pb.WORKER_STATE_READY
TRTMESH = str(Path(sys.executable).with_name("trtmesh"))


def trtmesh(stack: ComposeStack, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The CLI of this machine, outside the containers."""
    environment = {
        **os.environ,
        "TRTMESH_ROUTER": stack.address,
        "TRTMESH_ADMIN": stack.admin_address,
    }
    return subprocess.run(
        [TRTMESH, *arguments], capture_output=True, text=True, check=False, env=environment
    )


async def until_ready(admin: AdminClient, workers: int, tokenizers: int) -> None:
    """Waits until the router knows exactly this many replicas, all ready."""

    async def reached() -> bool:
        try:
            status = await admin.list_workers()
        except Unavailable:
            # The router itself restarts.
            return False
        return [worker.state for worker in status.workers] == [READY] * workers and [
            tokenizer.state for tokenizer in status.tokenizers
        ] == [READY] * tokenizers

    async with asyncio.timeout(CHANGE_SECONDS):
        while not await reached():  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.2)


async def add_second_router(stack: ComposeStack) -> None:
    """Starts the second router unless running, and waits until serving."""
    if "second-router" not in stack.profiles:
        stack.profiles.append("second-router")
    await asyncio.to_thread(stack.up)
    async with asyncio.timeout(CHANGE_SECONDS), Client(stack.second_address) as client:
        while True:
            try:
                await ask(client, PROMPTS[0])
            except Unavailable:
                await asyncio.sleep(0.2)
            else:
                return


def answered(stack: ComposeStack, router: str) -> int:
    """The number of requests a router has answered; `router` is the prefix of its port names."""
    url = f"http://127.0.0.1:{stack.ports[router + 'METRICS_PORT']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
    (requests,) = [family for family in families if family.name == "trtmesh_router_requests"]
    return int(sum(sample.value for sample in requests.samples))


def tell(scenario: str, load: Load) -> None:
    print(
        f"\n{scenario}: {load.finished} streams whole, {load.refused} asked again,"
        f" longest silence of a stream {load.worst_gap_seconds:.1f} s"
    )


async def under_load(
    stack: ComposeStack,
    scenario: str,
    act: Callable[[AdminClient], Awaitable[None]],
    *,
    addresses: Sequence[str] = (),
    streams: int = STREAMS,
    tokens: int = MAX_TOKENS,
    may_be_refused: bool = False,
) -> None:
    """Acts on the stack under running streams, all of which must complete."""
    async with (
        steady_load(
            addresses or stack.address, streams, tokens=tokens, may_be_refused=may_be_refused
        ) as load,
        AdminClient(stack.admin_address) as admin,
    ):
        await act(admin)
    assert load.faults == []
    tell(scenario, load)


async def test_three_prompts_stream_to_a_client_outside(stack: ComposeStack) -> None:
    done = await asyncio.to_thread(
        trtmesh, stack, "generate", "--json", "--max-tokens", "16", *PROMPTS[:3]
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    tokens = {0: 0, 1: 0, 2: 0}
    for event in events:
        if event["event"] == "tokens":
            assert event["token_offset"] == tokens[event["batch_index"]]
            tokens[event["batch_index"]] += len(event["token_ids"])
    assert all(tokens.values())
    print(f"\nthree prompts outside the containers: {tokens} tokens")


async def test_http_and_metrics_are_published(stack: ComposeStack) -> None:
    url = f"http://127.0.0.1:{stack.ports['HTTP_PORT']}/v2/models/ensemble/generate"
    body = json.dumps({"text_input": PROMPTS[0], "max_tokens": 8}).encode()

    def post() -> bytes:
        with urllib.request.urlopen(url, data=body, timeout=60) as answer:
            whole: bytes = answer.read()
            return whole

    before = answered(stack, "")
    assert json.loads(await asyncio.to_thread(post))["text_output"].startswith(PROMPTS[0])
    assert answered(stack, "") == before + 1
    print("\nHTTP and metrics: reached from outside")


async def test_every_service_names_its_release(stack: ComposeStack) -> None:
    """In its metrics: code that is copied into an image knows no release by itself."""
    read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8002/metrics').read().decode())"
    for service in ("router", "tokenizer", "engine"):
        (container,) = stack.containers(service)
        page = stack.execute(container, "python", "-c", read)
        assert page.returncode == 0, page.stderr
        (build,) = (
            sample
            for family in text_string_to_metric_families(page.stdout)
            for sample in family.samples
            if sample.name == "trtmesh_build_info"
        )
        assert (build.labels["service"], build.labels["version"]) == (service, version("trtmesh"))
    print(f"\nrouter, tokenizer, engine: release {version('trtmesh')}")


async def test_doctor_finds_only_what_the_compose_file_chooses(stack: ComposeStack) -> None:
    """Names of services of other profiles, and an admin port that is open to the other containers."""
    outside = await asyncio.to_thread(trtmesh, stack, "doctor", "--json")
    (router,) = stack.containers("router")
    inside = stack.execute(router, "python", "-m", "trtmesh.cli", "doctor", "--json")
    for done in (outside, inside):
        findings = json.loads(done.stdout)["findings"]
        errors = {each["check"] for each in findings if each["severity"] == "error"}
        assert errors == {"names", "open-admin"}, (findings, done.stderr)
    print("\ndoctor, outside and inside: no other errors than those of the compose file's choice")


async def test_router_image_has_neither_torch_nor_transformers(stack: ComposeStack) -> None:
    for service, absent in (
        ("router", ("torch", "transformers", "tokenizers", "trtmesh.engine", "trtmesh.tokenizer")),
        ("tokenizer", ("torch", "trtmesh.engine", "trtmesh.router", "trtmesh.kserve")),
        ("engine", ("trtmesh.router", "trtmesh.tokenizer", "trtmesh.kserve")),
    ):
        for module in absent:
            done = stack.inside(service, "python", "-c", f"import {module}")
            assert "ModuleNotFoundError" in done.stderr, (service, module, done.stderr)
        assert stack.inside(service, "id", "-u").stdout.strip() == "10001"
    print("\nimages: each has its own service alone, and runs without root")


async def test_containers_are_confined_as_the_compose_file_says(stack: ComposeStack) -> None:
    for service, memory in MEMORY_GIB.items():
        (container,) = stack.containers(service)
        known = stack.inspect(container.id)
        host = known["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["Memory"] == memory * 2**30, service
        assert host["RestartPolicy"]["Name"] == "unless-stopped", service
        assert "no-new-privileges" in str(host["SecurityOpt"]), service
        assert known["Config"]["User"] == "10001", service
        # In effect, not only requested: no privileges, writes to memory only, ports published by the router only.
        written = stack.execute(container, "touch", "/app/file")
        assert "Read-only file system" in written.stderr, service
        assert stack.execute(container, "touch", "/tmp/file").returncode == 0, service
        assert stack.execute(container, "id", "-u").stdout.strip() == "10001", service
        ports = [port for port, outside in known["NetworkSettings"]["Ports"].items() if outside]
        assert bool(ports) == (service == "router"), (service, ports)
        assert ("OMP_WAIT_POLICY=passive" in known["Config"]["Env"]) == (service == "engine")
    print("\nrouter, tokenizer, engine: limits, policies and privileges as told")


async def test_model_of_a_mounted_directory_is_served(stack: ComposeStack, tmp_path: Path) -> None:
    """Runs in a stack of its own."""
    copy = shutil.copytree(stack.model_dir, tmp_path / "mine")
    own = ComposeStack(project="trtmesh-test-model", model_dir=copy, model_name="mine")
    with running(own):
        await own.until_it_answers()
        for service in ("tokenizer", "engine"):
            (container,) = own.containers(service)
            assert str(copy) in [m["Source"] for m in own.inspect(container.id)["Mounts"]]
        async with Client(own.address) as client, Client(stack.address) as demo:
            (item,) = await client.complete(PROMPTS[:1], model="mine", max_tokens=16)
            (known,) = await demo.complete(PROMPTS[:1], model="model", max_tokens=16)
            assert item.error is None
            assert item.token_ids == known.token_ids
            with pytest.raises(ModelNotFound):
                await client.complete(PROMPTS[:1], model="model", max_tokens=16)
    print("\nMODEL_DIR and MODEL_NAME: served under its own name alone")


async def test_engines_of_a_model_are_scaled_and_killed_under_load(stack: ComposeStack) -> None:
    async def act(admin: AdminClient) -> None:
        await asyncio.to_thread(stack.up, engine=2)
        await until_ready(admin, 2, 1)
        stack.crash(stack.containers("engine")[0])
        await asyncio.sleep(5)
        await asyncio.to_thread(stack.up, engine=2)
        await until_ready(admin, 2, 1)
        await asyncio.to_thread(stack.up, engine=1)
        await until_ready(admin, 1, 1)

    # Few and short: a model step on a CPU is slow.
    scenario = "the demo model: engine 1-2-1, and kill -9 of one of the two"
    await under_load(stack, scenario, act, streams=4, tokens=24)


async def test_engines_give_way_to_simulated_ones(stack: ComposeStack) -> None:
    """Switches to a simulated model: the remaining scenarios need no real one."""
    async with AdminClient(stack.admin_address) as admin:
        await asyncio.to_thread(stack.up, engine=0, simulated=1)
        await until_ready(admin, 1, 1)
    print("\nengine 1-0, simulated 0-1: the router followed")


async def test_engines_and_tokenizers_are_scaled_under_load(stack: ComposeStack) -> None:
    async def act(admin: AdminClient) -> None:
        for engines, tokenizers in ((3, 1), (1, 1), (1, 2), (1, 1)):
            await asyncio.to_thread(stack.up, simulated=engines, tokenizer=tokenizers)
            await until_ready(admin, engines, tokenizers)

    await under_load(stack, "engine 1-3-1 and tokenizer 1-2-1", act)


@pytest.mark.parametrize("service", ["simulated", "tokenizer"])
async def test_killed_container_costs_no_token(stack: ComposeStack, service: str) -> None:
    async def act(admin: AdminClient) -> None:
        scale = {"simulated": 1, "tokenizer": 1} | {service: 2}
        await asyncio.to_thread(stack.up, **scale)
        await until_ready(admin, scale["simulated"], scale["tokenizer"])
        stack.crash(stack.containers(service)[0])
        await asyncio.sleep(5)
        await asyncio.to_thread(stack.up, **scale)
        await until_ready(admin, scale["simulated"], scale["tokenizer"])
        await asyncio.to_thread(stack.up, **{service: 1})

    await under_load(stack, f"kill -9 of one {service} of two", act)


async def test_lost_network_costs_no_token(stack: ComposeStack) -> None:
    async def act(admin: AdminClient) -> None:
        await asyncio.to_thread(stack.up, simulated=2)
        await until_ready(admin, 2, 1)
        # Last, because compose would replace the first container and remove the second.
        lost = stack.containers("simulated")[-1]
        stack.disconnect(lost)
        await asyncio.sleep(8)
        stack.remove(lost)
        await asyncio.to_thread(stack.up, simulated=1)
        await until_ready(admin, 1, 1)

    await under_load(stack, "network of one engine of two disconnected", act)


@pytest.mark.parametrize("service", ["simulated", "tokenizer", "router"])
async def test_rolling_restart_costs_no_token(stack: ComposeStack, service: str) -> None:
    async def act(admin: AdminClient) -> None:
        scale = {"simulated": 2, "tokenizer": 2}
        await asyncio.to_thread(stack.up, **scale)
        await until_ready(admin, 2, 2)
        for container in stack.containers(service):
            await asyncio.to_thread(stack.restart, container)
            await until_ready(admin, 2, 2)
        await asyncio.to_thread(stack.up, simulated=1, tokenizer=1)

    await under_load(
        stack, f"rolling restart of every {service}", act, may_be_refused=service == "router"
    )


async def test_health_checks_report_every_container_healthy(stack: ComposeStack) -> None:
    for service in ("router", "tokenizer", "simulated"):
        for container in stack.containers(service):
            assert stack.health(container) == ""
    print("\nhealth checks of the images: ready")


async def test_killed_router_of_two_costs_no_token(stack: ComposeStack) -> None:
    async def act(admin: AdminClient) -> None:
        stack.crash(stack.containers("router")[0])
        await asyncio.sleep(5)
        await asyncio.to_thread(stack.up)
        await until_ready(admin, 1, 1)

    await add_second_router(stack)
    await under_load(
        stack, "kill -9 of one router of two", act, addresses=[stack.address, stack.second_address]
    )


async def test_grpc_balances_requests_over_two_routers(stack: ComposeStack) -> None:
    await add_second_router(stack)
    before = [answered(stack, router) for router in ("", "SECOND_")]
    async with grpc.aio.insecure_channel(
        f"ipv4:{stack.address},{stack.second_address}",
        options=[("grpc.lb_policy_name", "round_robin")],
    ) as channel:
        stub = router_pb2_grpc.MeshServiceStub(channel)
        for _ in range(8):
            request = router_pb2.GenerateRequest(
                items=build_items(PROMPTS[:1]), config=build_config(None, {"max_tokens": 2})
            )
            async for _ in stub.Generate(request, wait_for_ready=True):
                pass
    shares = [
        answered(stack, router) - begun
        for router, begun in zip(("", "SECOND_"), before, strict=True)
    ]
    assert sum(shares) == 8
    assert min(shares) > 0
    print(f"\neight requests over one round_robin channel: {shares}")


async def test_cli_outside_the_containers_administers_the_stack(stack: ComposeStack) -> None:
    listed = await asyncio.to_thread(trtmesh, stack, "workers", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    (worker,) = [json.loads(line) for line in listed.stdout.splitlines()]
    for act in ("drain", "resume"):
        done = await asyncio.to_thread(trtmesh, stack, "workers", act, worker["address"])
        assert done.returncode == 0, done.stderr
    async with Client(stack.address) as client:
        await ask(client, PROMPTS[0])
    print(f"\nworkers list, drain and resume from outside: {worker['worker']}")


async def test_stack_gives_the_same_tokens_at_the_end(stack: ComposeStack) -> None:
    async with Client(stack.address) as client:
        first, second = [[await ask(client, prompt) for prompt in PROMPTS] for _ in range(2)]
    assert [item.token_ids for item in first] == [item.token_ids for item in second]
