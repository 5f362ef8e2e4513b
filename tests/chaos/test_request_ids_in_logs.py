"""Log lines of every service carry the id of their request."""

from __future__ import annotations

import signal

from compat.plain_http import PlainHttp
from e2e.mesh import (
    DEMO_VOCABULARY,
    ENDLESS,
    SIMULATED,
    Mesh,
    StreamReader,
    eventually,
    running_mesh,
)
from log_lines import LogLine, log_lines
from processes import ServiceProcess

LOGS = ("--log-level", "info", "--log-format", "json")
ENGINES = ("engine-0", "engine-1", "engine-2")


async def logged(process: ServiceProcess, words: str) -> list[LogLine]:
    """Waits for log lines with `words`."""
    found: list[LogLine] = []

    async def there() -> bool:
        found[:] = [line for line in log_lines(process.stderr) if words in line.message]
        return bool(found)

    await eventually(there)
    return found


async def telling_mesh(mesh: Mesh) -> None:
    await mesh.start_tokenizer()
    for name in ENGINES:
        await mesh.start_engine(*SIMULATED, "--worker", name, *LOGS)
    await mesh.start_router("--deadlines-silence-seconds", "1", *LOGS)
    await mesh.ready(len(ENGINES), 1)


async def engine_of(mesh: Mesh, reader: StreamReader) -> ServiceProcess:
    """The engine of the reader's only item."""
    await reader.tokens_here(1)
    found: list[str] = []

    async def has_worker() -> bool:
        """It has none while it moves, as after a slow moment of an engine."""
        ((item,),) = [request.items for request in (await mesh.admin.list_requests()).requests]
        found[:] = [item.worker]
        return bool(item.worker)

    await eventually(has_worker)
    return mesh.engines[ENGINES.index(found[0])]


async def test_log_lines_carry_the_request_id() -> None:
    async with running_mesh(start=telling_mesh) as mesh:
        reader = mesh.open(["prompt"], request_id="r-lost", max_tokens=ENDLESS, ignore_end_id=True)
        (await engine_of(mesh, reader)).signal(signal.SIGKILL)
        lost = await logged(mesh.router, "moves (worker_lost)")
        assert {line.request_id for line in lost} == {"r-lost"}

        await reader.tokens_here(reader.tokens() + 1)
        (await engine_of(mesh, reader)).signal(signal.SIGSTOP)
        moved = await logged(mesh.router, "moves (moved)")
        assert {line.request_id for line in moved} == {"r-lost"}
        await reader.cancel()

        bad = [DEMO_VOCABULARY]
        (item,) = await mesh.client.complete([bad], request_id="r-bad", max_tokens=1)
        assert item.error is not None
        (failed,) = await logged(mesh.router, "TOKEN_OUT_OF_VOCABULARY")
        assert failed.request_id == "r-bad"
        lines = [line for engine in mesh.engines for line in log_lines(engine.stderr)]
        (refused,) = [line for line in lines if "refused" in line.message]
        assert refused.request_id == "r-bad"

        async with PlainHttp(mesh.router.http_address) as http:
            body = {"id": "r-http", "text_input": "x", "max_tokens": "three"}
            assert (await http.post("/v2/models/ensemble/generate", body)).status == 400
        (unread,) = await logged(mesh.router, "max_tokens")
        assert unread.request_id == "r-http"
