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

GENERATE_ARGUMENTS = "--max-tokens 64 'def load_json(path):'"
CURL_KEY = '-H "x-api-key: $TRTMESH_API_KEY" '
CURL_BODY = '{"text_input": "def load_json(path):", "max_tokens": 51}'


@takes_mesh_flags
def up(flags: Flags) -> None:
    """Start routers, with tokenizers inside or beside them, and engines on this machine and serve until Ctrl-C.

    Ended processes are restarted. Each option is also the variable TRTMESH_MESH_<OPTION> and mesh.<option> in the file.

    Exit status: 0 stopped while serving, 1 a process ended for good, 2 wrong setting, 3 port in use, 4 unusable model,
    130 Ctrl-C during the start or twice.
    """
    run(supervise(flags, _serve))


async def _serve(stack: Stack) -> int:
    as_json = stack.settings.output == "json"
    for child in stack.children:
        put(json.dumps(_as_json(child)) if as_json else _as_text(child))
    router, plan = stack.router, stack.plan
    if as_json:
        ready: dict[str, object] = {"router": router.address, "admin": router.admin_address}
        ready |= {"http": router.http_address} if router.http_address else {}
        ready |= {"models": plan.models}
        ready |= {"ca": str(plan.ca)} if plan.ca else {}
        put(json.dumps({"event": "ready", **ready}))
    else:
        ca, cacert = (f" --ca {plan.ca}", f"--cacert {plan.ca} ") if plan.ca else ("", "")
        scheme = "https://" if plan.ca else ""
        put(f"ready: trtmesh generate --router {router.address}{ca} {GENERATE_ARGUMENTS}")
        put(f"       trtmesh status --admin {router.admin_address}{ca}")
        if plan.has_console:
            put(f"       console at {scheme or 'http://'}{router.admin_address}/console")
        if router.http_address:
            key = CURL_KEY if plan.needs_api_key else ""
            url = f"{scheme}{router.http_address}/v2/models/ensemble/generate"
            put(f"       curl {cacert}{key}-d '{CURL_BODY}' {url}")
        _put_models(*plan.models)
    await asyncio.Event().wait()
    raise AssertionError("nothing sets this event")


def _put_models(default: str, *others: str) -> None:
    """Says how to name the models, if there are several."""
    if others:
        put(
            f"models: {default} (default), {', '.join(others)}; for the latter generate --model {others[0]},"
        )
        put(
            f"        in Triton's words the model {others[0]}_ensemble, {others[0]}_tensorrt_llm ..."
        )


def _as_text(child: Child) -> str:
    at = child.bound
    http = f"  HTTP {at.http_address}" if at.http_address else ""
    admin = f"  admin {at.admin_address}" if at.admin_address else ""
    metrics = f"  metrics on port {at.metrics_port}" if at.metrics_port else ""
    return f"{child.name:<12} {at.address:<22} process {child.pid}{http}{admin}{metrics}"


def _as_json(child: Child) -> dict[str, object]:
    at = child.local
    return {
        "event": "serving",
        "name": child.name,
        "service": child.plan.service,
        "address": at.address,
        "admin_address": at.admin_address or None,
        "http_address": at.http_address or None,
        "metrics_port": at.metrics_port,
        "pid": child.pid,
    }
