"""The rules of `trtmesh doctor`: how bad each finding is, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trtmesh.tools.checkup.findings import Diagnosis, Severity, Symptom

ERROR, WARNING, NOTE = Severity


class Rule(NamedTuple):
    """Severity and remedy."""

    severity: Severity
    remedy: str


RULES: Mapping[str, Rule] = {
    # A running mesh
    "router-silent": Rule(ERROR, "start the router; name its admin address with --admin, and give its token and TLS"),
    "router-drains": Rule(WARNING, "send clients to another router"),
    "no-worker": Rule(ERROR, "start an engine, and list it in router.engines"),
    "no-tokenizer": Rule(ERROR, "start a tokenizer, and list it in router.tokenizers, or set that to `local`"),
    "refused": Rule(ERROR, "make it fit the mesh, or remove it"),
    "stalled": Rule(ERROR, "look at its process and device, and restart it if it stays so; its streams have moved"),
    "unreachable": Rule(WARNING, "start it, or take its address out of the router's settings"),
    "at-rest": Rule(ERROR, "compare its hardware, settings and files with the others'; then `trtmesh workers resume`"),
    "drained": Rule(WARNING, "stop it, or `trtmesh workers resume`"),
    "breaker": Rule(WARNING, "read its log; the router tries it again by itself"),
    "model-fingerprint": Rule(ERROR, "give all workers of a model the same files: streams that move change otherwise"),
    "tokenizer-fingerprint": Rule(ERROR, "serve the same model directory from engines and tokenizers"),
    "computation": Rule(WARNING, "give all the same, or other model names: tokens may differ (docs/exactness.md)"),
    "blocks": Rule(WARNING, "give all the same kv_cache.tokens_per_block: KV that moves is repacked otherwise"),
    "adapters": Rule(NOTE, "set adapters.host_bytes of their backends alike"),
    "no-role": Rule(ERROR, "start a worker of the other role, or `trtmesh workers role NAME mixed`"),
    "handoff": Rule(ERROR, "give both the same backend and dtype, and a common one of engine.handoff.transports"),
    "quarantine": Rule(WARNING, "a receiver died while it read: they return once it is gone, or at a restart"),
    "hedging": Rule(WARNING, "set engine.torch.batch_invariant, or leave router.hedge off (docs/exactness.md)"),
    "copies-differ": Rule(ERROR, "find the worker in the router's log, drain it and compare its hardware and files"),
    "release": Rule(NOTE, "finish the upgrade (docs/upgrading.md)"),
    "clock": Rule(WARNING, "synchronise the clocks (chrony): keys, certificates, logs and traces depend on them"),
    "names": Rule(ERROR, "correct router.engines or router.tokenizers, the file, or the name server"),
    "names-spare": Rule(NOTE, "start it, or correct router.engines or router.tokenizers; others serve meanwhile"),
    "memory-full": Rule(WARNING, "grant more, or lower its KV, host cache and adapters: the kernel kills it otherwise"),
    "contract": Rule(ERROR, "read the router's log: the peer is of another release, or defective"),
    # Both
    "files": Rule(WARNING, "raise its hard limit of files (ulimit -Hn, LimitNOFILE), or lower connections.max_open"),
    "open-admin": Rule(ERROR, "set router.admin.token_file or TRTMESH_ADMIN_TOKEN, or router.admin.host 127.0.0.1"),
    "open-port": Rule(WARNING, "set router.api_keys.file (docs/keys.md), or tls.client_ca"),
    "open-inside": Rule(NOTE, "keep it in a private network, or set tls.client_ca (docs/security.md)"),
    "plain-text": Rule(WARNING, "set tls.certificate and tls.key (docs/tls.md)"),
    "certificate-ends": Rule(WARNING, "replace the files of tls.certificate and tls.key; they are read again"),
    "tls-link": Rule(ERROR, "give both certificates of one authority, with tls.peer_name in them (docs/tls.md)"),
    # A configuration
    "settings": Rule(ERROR, "correct it: the service would not start (docs/settings.md)"),
    "file": Rule(ERROR, "name a file that the service's user can read"),
    "key-mismatch": Rule(ERROR, "name a certificate in tls.certificate and in tls.key the key that belongs to it"),
    "certificate": Rule(ERROR, "replace the files of tls.certificate and tls.key; they are read again"),
    "secret": Rule(WARNING, "chmod 600 the file"),
    "weak-token": Rule(WARNING, "draw one of 20 characters or more: head -c 24 /dev/urandom | base64"),
    "expired-key": Rule(NOTE, "`trtmesh keys remove` it, or `add` one with a later --expires"),
    "no-keys": Rule(ERROR, "`trtmesh keys add NAME --file FILE`"),
    "memory": Rule(ERROR, "lower them, or grant more memory"),
    "port": Rule(WARNING, "give each a port of its own, unless they run on other machines or in other containers"),
}  # fmt: skip
"""By the name of the check in the JSON."""

BY_WORDS: Mapping[str, str] = {
    r"schema revision": "release",
    r"broke the contract": "contract",
    r"tokenizer|fingerprint|chat templates": "tokenizer-fingerprint",
    r"no SETTINGS|silent": "stalled",
    r"certificate|TLS|plain text|closed the connection before": "tls-link",
    r"resolved|DNS": "names",
}
"""The rule with the remedy for a peer's problem, by words of the problem."""


def told(found: Iterable[Symptom]) -> Sequence[Diagnosis]:
    """The findings with severity and remedy, each once, the worst first."""
    findings = {
        Diagnosis(
            RULES[each.rule].severity,
            each.rule,
            each.where,
            each.what,
            each.remedy or RULES[each.rule].remedy,
        ): None
        for each in found
    }
    order = [*Severity]
    return sorted(findings, key=lambda finding: order.index(finding.severity))
