"""`trtmesh doctor` finds planted faults, with their severity and a remedy, and nothing where nothing is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from certificates import Authority, KeyPair
from cli.commands import trtmesh
from e2e.mesh import DEMO, PATIENT, SIMULATED, Mesh, eventually, running_mesh
from processes import ServiceProcess, service_process
from router.scripted import ScriptedEngine, serving_engine
from trtmesh.chassis.process_facts import unix_ms
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.client import AdminClient
from trtmesh.tools.checkup.config_checks import CONFIG_CHECKS
from trtmesh.tools.checkup.config_facts import collect_config
from trtmesh.tools.checkup.findings import exit_status
from trtmesh.tools.checkup.rules import told
from trtmesh.tools.doctor import NAME_SECONDS
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import process_pb2
from trtmesh.v1 import router_admin_pb2 as admin_pb
from trtmesh.v1.generation_pb2 import DATA_TYPE_FP16

YEAR = timedelta(days=365)
UNKNOWN_HOST = "no-such-host.invalid"


class Report(NamedTuple):
    """The answer of the command."""

    status: int
    findings: Sequence[Mapping[str, str]]
    text: str


def doctor(*arguments: str, env: Mapping[str, str] | None = None) -> Report:
    result = trtmesh("doctor", "--json", *arguments, env=env)
    assert result.stdout, result.stderr
    answer = json.loads(result.stdout)
    assert answer["schema_version"] == 1
    assert answer["exit_status"] == result.returncode
    return Report(result.returncode, answer["findings"], result.stdout)


class Fault(NamedTuple):
    """A planted fault: the check that finds it, how bad it is, where, and words of finding and remedy."""

    check: str
    severity: str
    where: str
    what: str
    remedy: str


class LateEngine(ScriptedEngine):
    """A worker whose clock is an hour ahead, of another release, on a full machine, with blocks in quarantine."""

    async def send(self, *events: epb.EngineEvent) -> None:
        for event in events:
            if event.HasField("welcome"):
                event.welcome.unix_ms = unix_ms() + 3_600_000
            if event.HasField("load"):
                event.load.quarantined_blocks = 12
                event.load.host_memory_bytes = 95 << 20
        await super().send(*events)


def late_engine() -> ScriptedEngine:
    engine = LateEngine(
        worker="late", model="m1", resumes_exactly=False, backend="torch", data_type=DATA_TYPE_FP16
    )
    process = process_pb2.ProcessFacts(release="0.0.1", memory_limit_bytes=100 << 20)
    engine.description.process.CopyFrom(process)
    engine.description.max_quarantined_blocks = 8
    engine.description.computation["device"] = "cuda"
    return engine


IN_A_MESH = (
    Fault("open-admin", "error", "router", "without a key", "token_file"),
    Fault("open-port", "warning", "router", "grpc port", "api_keys.file"),
    Fault("plain-text", "warning", "router", "plain text", "tls.certificate"),
    Fault("files", "warning", "router", "900000 connections", "ulimit"),
    Fault("names", "error", "router", UNKNOWN_HOST, "router.engines"),
    Fault("no-tokenizer", "error", "router", "knows no tokenizer", "start a tokenizer"),
    Fault("unreachable", "warning", "HALF_OPEN", "not connected", "look at its process"),
    Fault(
        "unreachable",
        "warning",
        "TLS_ENGINE",
        "closed the connection",
        "certificates of one authority",
    ),
    Fault("model-fingerprint", "error", "model m1", "weights", "same files"),
    Fault("computation", "warning", "model m1", "device=cuda", "exactness"),
    Fault("blocks", "warning", "model m1", "16: blocks", "tokens_per_block"),
    Fault("stalled", "error", "worker frozen", "", "restart"),
    Fault("refused", "error", "REVISION", "schema revision", "upgrading.md"),
    Fault("handoff", "error", "model m2", "no common transport", "transports"),
    Fault("no-role", "error", "model m3", "none decode", "other role"),
    Fault("drained", "warning", "worker alike", "nothing is left", "resume"),
    Fault("clock", "warning", "worker late", "3600 s ahead", "chrony"),
    Fault("release", "note", "mesh", "0.0.1: worker late", "upgrade"),
    Fault("quarantine", "warning", "worker late", "12 KV blocks", "receiver died"),
    Fault("memory-full", "warning", "worker late", "95 of 100 MiB", "grant more"),
    Fault("hedging", "warning", "model m1", "late take no copies", "batch_invariant"),
)


@pytest.fixture(scope="module")
def mesh_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Mapping[str, str]]:
    return asyncio.run(_faulty_mesh(tmp_path_factory.mktemp("tls")))


async def _faulty_mesh(folder: Path) -> tuple[Report, Mapping[str, str]]:
    """Has every fault of IN_A_MESH. Returns what is found, and addresses by the names in the table."""
    pair = Authority(folder).issue("engine", valid=YEAR)
    async with AsyncExitStack() as stack:

        async def engine(model: str, name: str, *flags: str) -> ServiceProcess:
            own = ("--backend", "simulated", "--port", "0", "--model", model, "--worker", name)
            return await stack.enter_async_context(service_process("engine", *own, *flags))

        starts = {
            "alike": engine("m1", "alike"),
            "other": engine("m1", "other", "--simulated-vocabulary-size", "5000"),
            "blocks": engine("m1", "blocks", "--simulated-kv-cache-tokens-per-block", "16"),
            "frozen": engine("m4", "frozen"),
            "prefill": engine("m2", "p", "--role", "prefill", "--handoff-transports", "grpc"),
            "decode": engine("m2", "d", "--role", "decode", "--handoff-transports", "shared_memory"),
            "lone": engine("m3", "lone", "--role", "prefill"),
            "tls": engine("m4", "tls", "--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)),
        }  # fmt: skip
        engines = dict(zip(starts, await asyncio.gather(*starts.values()), strict=True))
        late = await stack.enter_async_context(serving_engine(late_engine()))
        revision = ScriptedEngine(worker="revision", schema_revision=SCHEMA_REVISION + 2)
        far = await stack.enter_async_context(serving_engine(revision))
        half_open = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        half = f"127.0.0.1:{half_open.getsockname()[1]}"
        listed = [late, far, half, f"{UNKNOWN_HOST}:9101"]
        listed += [each.address for each in engines.values()]
        flags: tuple[str, ...] = (
            "--host",
            "0.0.0.0",
            "--admin-host",
            "0.0.0.0",
            "--hedge-share",
            "0.02",
        )
        # A frozen worker is stalled after so long. Its connection is lost after 15 s at the earliest.
        flags += (
            "--deadlines-silence-seconds",
            "4",
            "--connections-max-open",
            "900000",
            "--engines",
            ",".join(listed),
        )
        router = await stack.enter_async_context(service_process("router", "--port", "0", *flags))
        admin = router.admin_address.replace("0.0.0.0", "127.0.0.1")
        await _planted(stack, admin, engines)
        report = await asyncio.to_thread(doctor, "--admin", admin)
        return report, {
            "HALF_OPEN": half, "REVISION": far, "TLS_ENGINE": engines["tls"].address
        }  # fmt: skip


async def _planted(
    stack: AsyncExitStack, admin: str, engines: Mapping[str, ServiceProcess]
) -> None:
    """Freezes and drains, and waits until the router knows of everything."""
    client = await stack.enter_async_context(AdminClient(admin))

    async def states() -> Mapping[str, int]:
        return {worker.address: worker.state for worker in (await client.list_workers()).workers}

    async def all_known() -> bool:
        seen = await states()
        ready = [a.address for name, a in engines.items() if name != "tls"]
        fit = all(seen.get(address) == admin_pb.WORKER_STATE_READY for address in ready)
        return fit and admin_pb.WORKER_STATE_REFUSED in seen.values()

    await eventually(all_known)
    engines["frozen"].signal(signal.SIGSTOP)
    await client.drain_worker(engines["alike"].address)

    async def is_stalled() -> bool:
        answer = await client.list_workers()
        frozen = (await states())[engines["frozen"].address]
        return frozen == admin_pb.WORKER_STATE_STALLED and bool(answer.discovery_problems)

    await eventually(is_stalled)


@pytest.mark.parametrize("fault", IN_A_MESH, ids=lambda fault: f"{fault.check}-{fault.where}")
def test_fault_of_a_running_mesh_is_found(
    fault: Fault, mesh_report: tuple[Report, Mapping[str, str]]
) -> None:
    report, addresses = mesh_report
    check_found(fault._replace(where=addresses.get(fault.where, fault.where)), report)


def check_found(fault: Fault, report: Report) -> None:
    matching = [
        found
        for found in report.findings
        if found["check"] == fault.check
        and fault.where in found["where"]
        and fault.what in found["what"]
    ]
    assert matching, [*map(dict, report.findings)]
    assert {found["severity"] for found in matching} == {fault.severity}
    assert all(fault.remedy in found["remedy"] for found in matching)


def test_worst_comes_first_and_is_the_status(
    mesh_report: tuple[Report, Mapping[str, str]],
) -> None:
    severities = [found["severity"] for found in mesh_report[0].findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert mesh_report[0].status == 6


Service = Callable[[Path], Sequence[str]]


def router(*flags: str) -> str:
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    defaults = {"--engines": "127.0.0.1:9101", "--tokenizers": "127.0.0.1:9001"}
    return " ".join(["router", *(part for pair in (defaults | given).items() for part in pair)])


def engine(*flags: str) -> str:
    return " ".join(["engine", "--backend", "simulated", *flags])


def torch(*flags: str) -> str:
    return " ".join(["engine", "--model-dir", str(DEMO), *flags])


def tls(pair: KeyPair, ca: Path | None = None, *flags: str) -> tuple[str, ...]:
    own = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    return (*own, *(("--tls-ca", str(ca)) if ca else ()), *flags)


def write(file: Path, text: str, mode: int = 0o600) -> str:
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def pipe(file: Path) -> str:
    """Nobody writes to it: whoever reads it waits."""
    os.mkfifo(file)
    return str(file)


def issued(folder: Path, name: str = "own", **options: Any) -> tuple[Authority, KeyPair]:
    authority = Authority(folder, name)
    pair = authority.issue(f"{name}-mesh", **({"valid": YEAR} | options))
    pair.key.chmod(0o600)
    return authority, pair


def mismatched(folder: Path) -> Sequence[str]:
    authority, pair = issued(folder)
    other = authority.issue("another", valid=YEAR)
    other.key.chmod(0o600)
    return [engine(*tls(KeyPair(pair.certificate, other.key)))]


def other_authority(folder: Path) -> Sequence[str]:
    ours, own = issued(folder)
    _, other = issued(folder, "other")
    return [router(*tls(own, ours.ca)), engine(*tls(other))]


def other_name(folder: Path) -> Sequence[str]:
    authority, pair = issued(folder)
    return [router(*tls(pair, authority.ca, "--tls-peer-name", "trtmesh.internal")), engine(*tls(pair))]  # fmt: skip


def readable_key(folder: Path) -> Sequence[str]:
    _, pair = issued(folder)
    pair.key.chmod(0o644)
    return [engine(*tls(pair))]


IN_A_CONFIGURATION: Sequence[tuple[Fault, Service]] = (
    (Fault("settings", "error", "engine", "--rol", "docs/settings.md"), lambda _: [engine("--rol", "decode")]),
    (Fault("settings", "error", "router --help", "starts nothing", "docs/settings.md"), lambda _: ["router --help"]),
    (Fault("settings", "error", "engine", "tls.ca", "docs/settings.md"),
     lambda at: [engine("--tls-ca", pipe(at / "ca"))]),
    (Fault("settings", "error", "router", "admin.token_file", "docs/settings.md"),
     lambda at: [router("--admin-token-file", pipe(at / "token"))]),
    (Fault("file", "error", "model_dir", "cannot be read", "name a file"),
     lambda at: [f"tokenizer --model-dir {at}/none"]),
    (Fault("file", "error", "model_dir", "not set", "name a file"), lambda _: ["engine"]),
    (Fault("key-mismatch", "error", "engine", "not the key of", "tls.key"), mismatched),
    (Fault("certificate", "error", "engine", "expired", "replace the files"),
     lambda at: [engine(*tls(issued(at, valid=timedelta(days=-1))[1]))]),
    (Fault("certificate-ends", "warning", "engine", "ends on", "replace the files"),
     lambda at: [engine(*tls(issued(at, valid=timedelta(days=3))[1]))]),
    (Fault("tls-link", "error", "router", "cannot connect to engine", "one authority"), other_authority),
    (Fault("tls-link", "error", "router", "ostname mismatch", "tls.peer_name"), other_name),
    (Fault("tls-link", "error", "router", "plain text", "one authority"),
     lambda at: [router(), engine(*tls(issued(at)[1]))]),
    (Fault("secret", "warning", "tls.key", "mode 644", "chmod 600"), readable_key),
    (Fault("secret", "warning", "admin.token_file", "mode 644", "chmod 600"),
     lambda at: [router("--admin-token-file", write(at / "t", "x" * 32, 0o644))]),
    (Fault("weak-token", "warning", "router", "6 characters", "urandom"),
     lambda at: [router("--admin-token-file", write(at / "t", "secret"))]),
    (Fault("expired-key", "note", "router", "alice", "keys"),
     lambda at: [router("--api-keys-file", write(at / "k", f"alice sha256:{'a' * 64} expires=2020-01-31"))]),
    (Fault("no-keys", "error", "router", "all calls are refused", "keys add"),
     lambda at: [router("--api-keys-file", write(at / "k", "# none yet"))]),
    (Fault("file", "error", "api_keys.file", "line 1", "name a file"),
     lambda at: [router("--api-keys-file", write(at / "k", "alice not-a-digest"))]),
    (Fault("open-admin", "error", "router", "admin port", "token_file"),
     lambda _: [router("--admin-host", "0.0.0.0")]),
    (Fault("open-port", "warning", "router", "without keys", "api_keys.file"),
     lambda _: [router("--host", "0.0.0.0")]),
    (Fault("open-inside", "note", "engine", "without certificates", "private network"),
     lambda _: [engine("--host", "0.0.0.0")]),
    (Fault("names", "error", UNKNOWN_HOST, "", "name server"), lambda _: [router("--engines", f"{UNKNOWN_HOST}:9101")]),
    (Fault("memory", "error", "router", "max_request_bytes", "lower them"),
     lambda _: [router("--admission-max-request-bytes", str(2**50))]),
    (Fault("files", "warning", "engine", "open files", "ulimit"),
     lambda _: [engine("--connections-max-open", "1000000")]),
    (Fault("port", "warning", "port of engine", "port 9101", "port of its own"),
     lambda _: [engine("--port", "9101"), engine("--port", "9101", "--worker", "b")]),
    (Fault("handoff", "error", "engine", "torch.dtype", "dtype"),
     lambda _: [torch("--role", "prefill", "--torch-dtype", "bfloat16"), torch("--role", "decode")]),
    (Fault("blocks", "warning", "engine", "tokens_per_block", "same"),
     lambda _: [torch("--role", "prefill", "--torch-kv-cache-tokens-per-block", "32"), torch("--role", "decode")]),
    (Fault("no-role", "error", "engine", "prefill", "other role"), lambda _: [engine("--role", "prefill")]),
    (Fault("hedging", "warning", "router", "inexact", "batch_invariant"),
     lambda _: [router("--hedge-share", "0.02"), torch("--torch-dtype", "bfloat16")]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "services"), IN_A_CONFIGURATION, ids=lambda each: getattr(each, "check", "")
)
async def test_fault_of_a_configuration_is_found(
    fault: Fault, services: Service, tmp_path: Path
) -> None:
    facts = await collect_config(None, services(tmp_path), {}, NAME_SECONDS)
    findings = told(each for check in CONFIG_CHECKS for each in check(facts))
    report = Report(exit_status(findings), [each._asdict() for each in findings], "")
    check_found(fault, report)
    alone = [found for found in report.findings if found["severity"] != "note"]
    assert all(found["check"] in (fault.check, "plain-text") for found in alone), alone
    assert report.status == {"error": 6, "warning": 5, "note": 0}[fault.severity]


def test_no_secret_is_shown(tmp_path: Path) -> None:
    secret, pasted = "hunter-2", "trtmesh_pasted-key"
    token, keys = write(tmp_path / "t", secret, 0o666), write(tmp_path / "k", f"{pasted} x")
    line = router("--admin-token-file", token, "--api-keys-file", keys)
    report = doctor("--service", line)
    assert report.status == 6
    assert secret not in report.text
    assert pasted not in report.text


def test_healthy_configuration_has_no_finding(tmp_path: Path) -> None:
    authority, pair = issued(tmp_path)
    both = f"{{certificate: {pair.certificate}, key: {pair.key}, ca: {authority.ca}, client_ca: {authority.ca}}}"
    file = tmp_path / "mesh.yaml"
    file.write_text(
        f"router: {{engines: '127.0.0.1:9101', tokenizers: '127.0.0.1:9001', tls: {both}}}\n"
        f"tokenizer: {{model_dir: {DEMO}, tls: {both}}}\n"
        f"engine: {{model_dir: {DEMO}, port: 9101, tls: {both}}}\n"
    )
    report = doctor("--config", str(file))
    assert (report.status, report.findings) == (0, [])


def test_healthy_configuration_of_a_stack_has_no_finding(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(
        "mesh: {engines: 2}\nrouter: {hedge_share: 0.02}\nengine: {torch: {batch_invariant: true}}\n"
        "tokenizer: {log_level: debug}\n"
    )
    report = doctor("--config", str(file))
    assert (report.status, report.findings) == (0, [])
    file.write_text("mesh: {engines: 2}\n")
    assert trtmesh("doctor", "--config", str(file)).returncode == 2


async def test_healthy_mesh_has_no_finding() -> None:
    async with running_mesh(engines=2, router_flags=PATIENT) as mesh:
        report = await asyncio.to_thread(doctor, "--admin", mesh.router.admin_address)
        assert (report.status, report.findings) == (0, [])
        plain = await asyncio.to_thread(trtmesh, "doctor", "--admin", mesh.router.admin_address)
        assert (plain.returncode, plain.stdout) == (0, "nothing is wrong\n")


async def test_name_of_a_service_that_is_not_started_is_a_note_while_others_serve() -> None:
    async def start(mesh: Mesh) -> None:
        await asyncio.gather(mesh.start_tokenizer(), mesh.start_engine(*SIMULATED))
        named = f"{mesh.engines[0].address},{UNKNOWN_HOST}:9101"
        await mesh.start_router("--engines", named, *PATIENT)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:

        async def is_found() -> bool:
            report = await asyncio.to_thread(doctor, "--admin", mesh.router.admin_address)
            return report.status == 0 and [
                (found["severity"], found["check"], UNKNOWN_HOST in found["what"])
                for found in report.findings
            ] == [("note", "names-spare", True)]

        await eventually(is_found)


async def test_healthy_mesh_with_tls_keys_and_roles_has_no_finding(tmp_path: Path) -> None:
    authority, pair = issued(tmp_path)
    flags = tls(pair, authority.ca, "--tls-client-ca", str(authority.ca))
    keys = write(tmp_path / "keys", f"alice sha256:{'a' * 64}")
    token = write(tmp_path / "token", "t" * 32)
    async with _secured(flags, ("--api-keys-file", keys, "--admin-token-file", token)) as admin:
        files = (
            "--ca",
            str(authority.ca),
            "--cert",
            str(pair.certificate),
            "--cert-key",
            str(pair.key),
        )
        asked = ("--admin", admin, *files, "--token-file", token)
        report = await asyncio.to_thread(doctor, *asked)
        assert (report.status, report.findings) == (0, [])
        without = await asyncio.to_thread(doctor, "--admin", admin, *files)
        check_found(Fault("router-silent", "error", "router", "token", "token"), without)


@asynccontextmanager
async def _secured(flags: Sequence[str], of_router: Sequence[str]) -> AsyncIterator[str]:
    """A mesh of prefill and decode that proves itself on every port; yields its admin address."""
    async with AsyncExitStack() as stack:

        async def start(service: str, *own: str) -> ServiceProcess:
            return await stack.enter_async_context(service_process(service, *flags, *own))

        starts: list[Awaitable[ServiceProcess]] = [
            start("engine", "--port", "0", *SIMULATED, "--role", role) for role in ("prefill", "decode")
        ]  # fmt: skip
        starts.append(start("tokenizer", "--port", "0", "--model-dir", str(DEMO)))
        *engines, tokenizer = await asyncio.gather(*starts)
        listed = ",".join(each.address for each in engines)
        peers = ("--port", "0", "--engines", listed, "--tokenizers", tokenizer.address)
        running = await start("router", *peers, *of_router)
        await eventually(lambda: asyncio.to_thread(_is_served, running))
        yield running.admin_address


def _is_served(router: ServiceProcess) -> bool:
    return "chassis.health: serving" in router.stderr


async def test_frozen_and_dead_routers_are_told_within_a_bound() -> None:
    async with service_process("router", "--port", "0", "--engines", "127.0.0.1:1") as router:
        router.signal(signal.SIGSTOP)
        report = await asyncio.to_thread(doctor, "--admin", router.admin_address, "--timeout", "1")
        router.signal(signal.SIGCONT)
    check_found(Fault("router-silent", "error", "router", "", "start the router"), report)
    dead = doctor("--admin", "127.0.0.1:1", "--timeout", "1")
    check_found(
        Fault("router-silent", "error", "router", "nothing listens", "start the router"), dead
    )
    assert (report.status, dead.status) == (6, 6)


def test_wrong_usage_is_status_2() -> None:
    assert trtmesh("doctor", "--service", "oven --hot").returncode == 2
    assert trtmesh("doctor", "--service", "router 'open").returncode == 2
    assert trtmesh("doctor", "--admin", "nowhere").returncode == 2


def test_pipe_is_no_configuration(tmp_path: Path) -> None:
    result = trtmesh("doctor", "--config", pipe(tmp_path / "mesh.yaml"))
    assert result.returncode == 2
    assert "no regular file" in result.stderr


def test_option_of_a_running_mesh_is_refused_for_a_configuration() -> None:
    environment = {"TRTMESH_ADMIN": "127.0.0.1:8003"}
    assert trtmesh("doctor", "--service", engine(), env=environment).returncode == 0
    result = trtmesh("doctor", "--service", engine(), "--admin", "127.0.0.1:8003")
    assert result.returncode == 2
    assert "--admin" in result.stderr
