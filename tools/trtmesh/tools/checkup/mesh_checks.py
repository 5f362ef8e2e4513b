"""What may be wrong with a running mesh: pure functions over its facts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import gmtime, strftime

from trtmesh.tools.checkup.findings import Symptom
from trtmesh.tools.checkup.mesh_facts import MeshFacts, is_loopback
from trtmesh.tools.checkup.rules import BY_WORDS, RULES
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1.generation_pb2 import DATA_TYPE_FP32
from trtmesh.v1.process_pb2 import ProcessFacts

SKEW_MS = 5_000
"""Largest difference of two clocks; on busy machines a message takes a second."""
CERTIFICATE_SECONDS = 14 * 86400
FULL_MEMORY = 0.9
SPARE_FILES = 256
"""Files of a process besides the connections of a port."""

PREFILL, DECODE = epb.WORKER_ROLE_PREFILL, epb.WORKER_ROLE_DECODE
CONNECTED = (pb.WORKER_STATE_READY, pb.WORKER_STATE_DRAINING)


def router_itself(facts: MeshFacts) -> Iterator[Symptom]:
    if facts.silence:
        yield Symptom("router-silent", facts.router, facts.silence)
        return
    if facts.seen.draining:
        yield Symptom("router-drains", facts.router, "it drains: it refuses new requests")
    peers_by_kind = (("worker", facts.seen.workers), ("tokenizer", facts.seen.tokenizers))
    # Services that are not started have no name: compose profiles, pools of no replica.
    serves = all(
        any(peer.state == pb.WORKER_STATE_READY for peer in peers) for _, peers in peers_by_kind
    )
    rule = "names-spare" if serves else "names"
    yield from (Symptom(rule, facts.router, problem) for problem in facts.seen.discovery_problems)
    for kind, peers in peers_by_kind:
        if not any(peer.state == pb.WORKER_STATE_READY for peer in peers):
            known = f"none of its {len(peers)} {kind}s is ready" if peers else f"it knows no {kind}"
            yield Symptom(f"no-{kind}", facts.router, known)
    shown = facts.certificate
    if shown and shown.ends and shown.ends - facts.now < CERTIFICATE_SECONDS:
        yield Symptom("certificate-ends", facts.router, ends_on(shown.ends))


def unready_peers(facts: MeshFacts) -> Iterator[Symptom]:
    for where, peer in _peers(facts):
        words = (rule for text, rule in BY_WORDS.items() if re.search(text, peer.problem))
        remedy = next((RULES[rule].remedy for rule in words), "")
        match peer.state:
            case pb.WORKER_STATE_REFUSED:
                yield Symptom("refused", where, peer.problem, remedy)
            case pb.WORKER_STATE_STALLED:
                yield Symptom("stalled", where, peer.problem or "it makes no progress")
            case pb.WORKER_STATE_CONNECTING | pb.WORKER_STATE_GONE:
                yield Symptom("unreachable", where, f"not connected: {peer.problem}", remedy)


def drained_workers(facts: MeshFacts) -> Iterator[Symptom]:
    for worker in facts.seen.workers:
        load = worker.load
        if worker.state != pb.WORKER_STATE_DRAINING:
            continue
        if "contradict" in worker.problem:
            yield Symptom("at-rest", _name(worker), worker.problem)
        elif not (worker.items or load.running_sequences or load.waiting_sequences):
            what = f"drained ({worker.problem}), and nothing is left on it, but it has not gone"
            yield Symptom("drained", _name(worker), what)


def failing_workers(facts: MeshFacts) -> Iterator[Symptom]:
    for worker in facts.seen.workers:
        load, engine = worker.load, worker.engine
        if worker.breaker == pb.BREAKER_STATE_OPEN:
            what = f"its breaker is open after {worker.faults} faults: {worker.problem}"
            yield Symptom("breaker", _name(worker), what)
        if load.quarantined_blocks:
            what = f"{load.quarantined_blocks} KV blocks wait for reads of ended handoffs"
            most = engine.max_quarantined_blocks
            yield Symptom("quarantine", _name(worker), f"{what}; beyond {most} it reserves none")
        used, granted = load.host_memory_bytes, engine.process.memory_limit_bytes
        if granted and used > FULL_MEMORY * granted:
            what = f"it uses {used >> 20} of {granted >> 20} MiB"
            yield Symptom("memory-full", _name(worker), what)


def unlike_workers(facts: MeshFacts) -> Iterator[Symptom]:
    """Workers of a model that compute something else, or by other settings."""
    kinds: Mapping[str, tuple[str, Callable[[epb.GetEngineResponse], object]]] = {
        "model-fingerprint": ("weights or configurations", lambda e: e.model_fingerprint[:12]),
        "tokenizer-fingerprint": ("tokenizers", lambda e: e.tokenizer_fingerprint[:12]),
        "computation": ("devices or settings that tokens depend on", _computation),
        "blocks": ("numbers of tokens in a KV block", lambda e: e.tokens_per_block),
        "adapters": ("support for adapters", lambda e: "some" if e.max_adapters else "none"),
    }
    for model, workers in _pools(facts).items():
        for rule, (what, value) in kinds.items():
            groups: dict[object, list[str]] = defaultdict(list)
            for worker in workers:
                if found := value(worker.engine):
                    groups[found].append(worker.worker)
            if len(groups) > 1:
                told = "; ".join(f"{key}: {', '.join(names)}" for key, names in groups.items())
                yield Symptom(rule, f"model {model}", f"its workers have other {what} ({told})")


def roles_apart(facts: MeshFacts) -> Iterator[Symptom]:
    for model, workers in _pools(facts).items():
        where = f"model {model}"
        roles = {_role(worker) for worker in workers}
        if roles in ({PREFILL}, {DECODE}):
            role, other = ("prefill", "decode") if PREFILL in roles else ("decode", "prefill")
            yield Symptom("no-role", where, f"its workers have the role {role}, and none {other}")
        receivers = [worker.engine for worker in workers if _role(worker) == DECODE]
        for sender in (worker.engine for worker in workers if _role(worker) == PREFILL):
            problems = [_why_apart(sender, receiver) for receiver in receivers]
            if problems and all(problems):
                what = f"{sender.worker} hands KV over to no decode worker: {problems[0]}"
                yield Symptom("handoff", where, what)


def hedging(facts: MeshFacts) -> Iterator[Symptom]:
    if not facts.seen.HasField("hedging"):
        return
    for model, workers in _pools(facts).items():
        if inexact := [worker.worker for worker in workers if not _is_exact(worker.engine)]:
            what = f"hedging is on, and {', '.join(inexact)} take no copies: inexact"
            yield Symptom("hedging", f"model {model}", what)
    if copies := facts.seen.hedging.differences:
        yield Symptom("copies-differ", facts.router, f"{copies} copies had other tokens")


def releases_and_clocks(facts: MeshFacts) -> Iterator[Symptom]:
    releases: dict[str, list[str]] = defaultdict(list)
    for where, process in _processes(facts):
        releases[process.release].append(where)
    releases.pop("", None)
    if len(releases) > 1:
        told = "; ".join(f"{name}: {', '.join(who)}" for name, who in sorted(releases.items()))
        yield Symptom("release", "mesh", f"several releases run ({told})")
    for where, peer in _peers(facts):
        if peer.HasField("clock_ahead_ms") and abs(peer.clock_ahead_ms) > SKEW_MS:
            what = f"its clock was {_seconds(peer.clock_ahead_ms)} the router's when it connected"
            yield Symptom("clock", where, what)
    if abs(facts.clock_ahead_ms) > SKEW_MS:
        what = f"its clock is {_seconds(facts.clock_ahead_ms)} this machine's"
        yield Symptom("clock", facts.router, what)


def ports_and_files(facts: MeshFacts) -> Iterator[Symptom]:
    for where, process in _processes(facts):
        files, connections = process.max_open_files, process.max_connections
        if files and files < connections + SPARE_FILES:
            what = f"it may open {files} files, and have {connections} connections a port"
            yield Symptom("files", where, what)
        for each in process.listeners:
            port = f"its {each.purpose} port {each.address} is open to the network"
            if is_loopback(each.address):
                continue
            is_door = where == facts.router and each.purpose != "metrics"
            if each.open:
                rule = "open-port" if is_door else "open-inside"
                rule = "open-admin" if each.purpose == "admin" else rule
                yield Symptom(rule, where, f"{port}, without a key, token or certificate")
            if is_door and not each.tls:
                yield Symptom("plain-text", where, f"{port} in plain text")


MESH_CHECKS: Sequence[Callable[[MeshFacts], Iterator[Symptom]]] = (
    router_itself,
    unready_peers,
    drained_workers,
    failing_workers,
    unlike_workers,
    roles_apart,
    hedging,
    releases_and_clocks,
    ports_and_files,
)


def ends_on(ends: float) -> str:
    return f"the certificate ends on {strftime('%Y-%m-%d %H:%M UTC', gmtime(ends))}"


def _peers(facts: MeshFacts) -> Iterator[tuple[str, pb.Worker | pb.TokenizerReplica]]:
    yield from ((_name(worker), worker) for worker in facts.seen.workers)
    yield from ((f"tokenizer {each.address}", each) for each in facts.seen.tokenizers)


def _processes(facts: MeshFacts) -> Iterator[tuple[str, ProcessFacts]]:
    yield facts.router, facts.seen.process
    yield from ((_name(worker), worker.engine.process) for worker in facts.seen.workers)
    yield from ((f"tokenizer {each.address}", each.process) for each in facts.seen.tokenizers)


def _pools(facts: MeshFacts) -> Mapping[str, Iterable[pb.Worker]]:
    """The connected workers by model."""
    pools: dict[str, list[pb.Worker]] = defaultdict(list)
    for worker in facts.seen.workers:
        if worker.engine.model and worker.state in CONNECTED:
            pools[worker.engine.model].append(worker)
    return pools


def _why_apart(one: epb.GetEngineResponse, other: epb.GetEngineResponse) -> str:
    """Why two workers cannot hand over, or ''."""
    if one.handoff_kind or other.handoff_kind:
        return "" if one.handoff_kind == other.handoff_kind else "they have other kinds of states"
    if not (one.kv_shapes and other.kv_shapes):
        return "one of them hands nothing over"
    if one.kv_compatibility_hash != other.kv_compatibility_hash:
        return "they have other models or forms of KV"
    if {s.data_type for s in one.kv_shapes} != {s.data_type for s in other.kv_shapes}:
        return "their KV has other dtypes"
    return "" if {*one.kv_transports} & {*other.kv_transports} else "no common transport"


def _computation(engine: epb.GetEngineResponse) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(engine.computation.items()))


def _is_exact(engine: epb.GetEngineResponse) -> bool:
    """Whether routers hedge with the worker."""
    in_full = engine.backend == "torch" and engine.data_type == DATA_TYPE_FP32
    return engine.resumes_exactly or in_full


def _role(worker: pb.Worker) -> int:
    return worker.load.role or worker.engine.role


def _name(worker: pb.Worker) -> str:
    return f"worker {worker.worker} {worker.address}" if worker.worker else worker.address


def _seconds(ahead_ms: int) -> str:
    return f"{abs(ahead_ms) / 1000:.0f} s {'ahead of' if ahead_ms > 0 else 'behind'}"
