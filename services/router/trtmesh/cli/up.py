"""`trtmesh up`: the local stack."""

from __future__ import annotations

import asyncio
import json

from trtmesh.cli.child import Child
from trtmesh.cli.mesh_settings import Flags, takes_mesh_flags
from trtmesh.cli.output import put
from trtmesh.cli.session import run
from trtmesh.cli.stack import Stack
from trtmesh.cli.supervisor import supervise

GENERATE_ARGUMENTS = "--max-tokens 96 'def fibonacci(n):'"
CURL_BODY = '{"text_input": "def fibonacci(n):", "max_tokens": 32}'


@takes_mesh_flags
def up(flags: Flags) -> None:
    """Start routers, tokenizers and engines on this machine and serve until Ctrl-C.

    Ended processes are restarted. Each option is also the variable TRTMESH_MESH_<OPTION> and mesh.<option> in the file.

    Exit status: 0 stopped while serving, 1 a process ended for good, 2 wrong setting, 3 port in use, 4 unusable model,
    130 Ctrl-C during the start or twice.
    """
    run(supervise(flags, _serve))


async def _serve(stack: Stack) -> int:
    as_json = stack.settings.output == "json"
    for child in stack.children:
        put(json.dumps(_as_json(child)) if as_json else _as_text(child))
    if as_json:
        ready = {"router": stack.router_address, "admin": stack.admin_address}
        ready |= {"http": stack.http_address} if stack.http_address else {}
        put(json.dumps({"event": "ready", **ready}))
    else:
        put(f"ready: trtmesh generate --router {stack.router_address} {GENERATE_ARGUMENTS}")
        put(f"       trtmesh status --admin {stack.admin_address}")
        if stack.http_address:
            put(f"       curl -d '{CURL_BODY}' {stack.http_address}/v2/models/ensemble/generate")
    await asyncio.Event().wait()
    raise AssertionError("nothing sets this event")


def _as_text(child: Child) -> str:
    http = f"  HTTP {child.http_address}" if child.http_address else ""
    admin = f"  admin {child.admin_address}" if child.admin_address else ""
    metrics = f"  metrics on port {child.metrics_port}" if child.metrics_port else ""
    return f"{child.name:<12} {child.address:<22} process {child.pid}{http}{admin}{metrics}"


def _as_json(child: Child) -> dict[str, object]:
    return {
        "event": "serving",
        "name": child.name,
        "service": child.plan.service,
        "address": child.local_address,
        "admin_address": child.local_admin_address or None,
        "http_address": child.local_http_address or None,
        "metrics_port": child.metrics_port,
        "pid": child.pid,
    }
