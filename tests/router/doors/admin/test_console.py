"""The console's page and what it asks, over real sockets: who may look, who may change, and what snapshots cost."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router.scripted import (
    PATIENCE_SECONDS,
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from trtmesh.router.callers.key_file import ListedKey, digest_of
from trtmesh.router.doors.admin import console
from trtmesh.router.doors.admin.console import CHANGES, READS
from trtmesh.router.doors.admin.service import RouterAdminService
from yarl import URL

SECRET = "s3cret-and-long"
NOBODY = "127.0.0.1:1"
WITH_TOKEN = {"Authorization": f"Bearer {SECRET}"}
GENERATING = ("v1/chat/completions", "v1/completions", "v1/responses")


class Browser:
    """Asks the console of a router."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self.url = f"http://{address}/console"

    async def get(self, path: str = "", **headers: str) -> tuple[int, str, Mapping[str, str]]:
        async with self._session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text(), response.headers

    async def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        sent = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        url = f"{self.url}/{path}"
        async with self._session.post(url, data=sent, headers=headers) as response:
            return response.status, await response.json()

    @asynccontextmanager
    async def feed(self, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.get(f"{self.url}/feed", headers=headers) as response:
            yield response


async def snapshot(response: aiohttp.ClientResponse) -> Any:
    """The next snapshot of a feed."""
    event = await response.content.readuntil(b"\n\n")
    return json.loads(event.removeprefix(b"data: "))


async def until_its_end(response: aiohttp.ClientResponse) -> None:
    while True:
        await snapshot(response)


@asynccontextmanager
async def browser_of(client: RouterClient) -> AsyncIterator[Browser]:
    async with aiohttp.ClientSession() as session:
        yield Browser(session, client.admin.address)


@asynccontextmanager
async def opened(engines: tuple[str, ...] = (NOBODY,), **settings: Any) -> AsyncIterator[Browser]:
    async with serving_router(engines, **settings) as client, browser_of(client) as browser:
        yield browser


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    return file


async def test_page_has_all_its_files_and_no_code_in_line() -> None:
    async with opened() as browser:
        async with (
            aiohttp.ClientSession() as session,
            session.get(URL(browser.url).origin()) as response,
        ):
            assert str(response.url) == browser.url
        status, page, headers = await browser.get()
        assert (status, headers["Content-Type"]) == (200, "text/html")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]* src=)", page)
        wanted, seen = set(re.findall(r'(?:href|src)="console(/[^"]+)"', page)), set[str]()
        while wanted:
            path = wanted.pop()
            seen.add(path)
            status, text, headers = await browser.get(path)
            assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff"), path
            assert set(re.findall(r"https?://[^/]*", text)) <= {"http://www.w3.org"}
            assert not re.search(r"innerHTML|insertAdjacentHTML|eval\(|document\.write", text)
            wanted |= {f"/{name}" for name in re.findall(r'from "\./([^"]+)"', text)} - seen
        assert seen == {f"/{file.name}" for file in console.PAGE.iterdir()} - {"/console.html"}


async def test_token_is_needed_for_changes_and_not_for_snapshots(token: Path) -> None:
    async with opened(admin={"token_file": token}, http={"port": 0}) as browser:
        changes = [*(f"calls/{method}" for method in CHANGES), *GENERATING]
        for path in changes:
            status, answer = await browser.call(path)
            assert (status, answer) == (
                401,
                {"error": "the call has no admin token or a wrong one"},
            ), path
            assert (await browser.call(path, **WITH_TOKEN))[0] != 401, path
        for method in READS:
            assert (await browser.call(f"calls/{method}"))[0] != 401
            wrong, _ = await browser.call(f"calls/{method}", Authorization="Bearer x")
            assert wrong == 401
        async with browser.feed() as feed:
            assert (await snapshot(feed))["guarded"]
        async with browser.feed(Authorization=f"Bearer {SECRET}x") as feed:
            assert feed.status == 401


async def test_snapshots_may_need_the_token_too(token: Path) -> None:
    async with opened(admin={"token_file": token, "console": "token"}) as browser:
        assert (await browser.get())[0] == 200
        for method in READS:
            assert (await browser.call(f"calls/{method}"))[0] == 401
        async with browser.feed() as feed:
            assert feed.status == 401
        async with browser.feed(**WITH_TOKEN) as feed:
            assert (await snapshot(feed))["fleet"]["policy"] == "auto"


@pytest.mark.parametrize(
    "sent",
    [b"GET /console HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"],
    ids=["half-a-head", "a-request"],
)
async def test_idle_connections_keep_nobody_from_the_page(sent: bytes) -> None:
    async with opened() as browser, AsyncExitStack() as stack:
        url = URL(browser.url)
        for _ in range(2 * console.LIMITS.max_open):
            _, writer = await asyncio.open_connection(url.host, url.port)
            stack.callback(writer.close)
            writer.write(sent)
        async with browser.feed() as feed:
            assert (await snapshot(feed))["fleet"]["policy"] == "auto"
            assert (await browser.get())[0] == 200


async def test_address_without_a_console_speaks_grpc_alone() -> None:
    async with opened(admin={"console": "none"}) as browser:
        status, text, _ = await browser.get()
        assert (status, "This port speaks gRPC" in text) == (400, True)


async def test_pages_of_others_get_nothing() -> None:
    allowed = {"allowed_origins": "https://mesh.example"}
    async with opened(admin=allowed) as browser:
        own = f"http://{URL(browser.url).authority}"
        for origin, expected in (
            (own, 200),
            ("https://mesh.example", 200),
            ("https://evil.example", 403),
            ("null", 403),
        ):
            assert (await browser.call("calls/ListAdapters", Origin=origin))[0] == expected, origin
        # A name of others that points here: the page under it would read answers as its own.
        assert (await browser.get(Host="mesh.example"))[0] == 200
        for host in ("evil.example:8003", "::1"):
            for path in ("", "/feed"):
                status, text, _ = await browser.get(path, Host=host)
                assert (status, "admin.allowed_origins" in text) == (403, True), host


async def test_playground_is_a_client_like_others(token: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{ListedKey('alice', digest_of('key-of-alice'), {})}\n")
    settings: dict[str, Any] = {"api_keys": {"file": keys}, "http": {"port": 0}}
    async with opened(admin={"token_file": token}, **settings) as browser:
        body = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        for path in GENERATING:
            # The admin token is no client's key, nor the other way round.
            status, answer = await browser.call(path, body, **WITH_TOKEN)
            assert (status, "no API key" in answer["error"]) == (401, True)
            status, answer = await browser.call(path, body, **{"X-API-Key": "key-of-alice"})
            assert (status, "no admin token" in answer["error"]) == (401, True)
            own = WITH_TOKEN | {"X-API-Key": "key-of-alice"}
            status, answer = await browser.call(path, body, **own)
            assert status not in (401, 404), answer
        async with browser.feed() as feed:
            assert (await snapshot(feed))["needs_key"]


async def test_router_ends_in_spite_of_viewers() -> None:
    async with aiohttp.ClientSession() as session:
        async with serving_router([NOBODY]) as client:
            viewer = Browser(session, client.admin.address)
            feed = await session.get(f"{viewer.url}/feed")
            await snapshot(feed)
        with pytest.raises((asyncio.IncompleteReadError, aiohttp.ClientError)):
            await until_its_end(feed)
        feed.close()


async def test_engine_that_dies_is_gone_in_the_next_snapshots() -> None:
    engine = ScriptedEngine(worker="w")
    async with serving_engine(engine) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        async with browser_of(client) as browser, browser.feed() as feed:
            (worker,) = (await snapshot(feed))["fleet"]["workers"]
            assert (worker["worker"], worker["state"]) == ("w", "WORKER_STATE_READY")
            engine.refusal = "stays away"
            await engine.hang_up()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while worker["state"] == "WORKER_STATE_READY":
                    (worker,) = (await snapshot(feed))["fleet"]["workers"]
            assert worker["problem"]


async def test_snapshots_are_shared_and_none_is_taken_without_a_viewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshots = 0
    list_workers = RouterAdminService.ListWorkers

    async def counted(*arguments: Any) -> Any:
        nonlocal snapshots
        snapshots += 1
        return await list_workers(*arguments)

    monkeypatch.setattr(RouterAdminService, "ListWorkers", counted)
    monkeypatch.setattr(console, "SNAPSHOT_SECONDS", 0.05)
    monkeypatch.setattr(console, "MOST_VIEWERS", 2)
    async with serving_router([NOBODY]) as client, browser_of(client) as browser:
        served = client.router._admin_door._console
        assert served is not None
        await asyncio.sleep(0.2)
        assert snapshots == 0
        async with browser.feed() as one, browser.feed() as other:
            times = ((await snapshot(one))["time"], (await snapshot(other))["time"])
            async with asyncio.timeout(PATIENCE_SECONDS):
                while times[0] != times[1]:
                    late = one if times[0] < times[1] else other
                    time = (await snapshot(late))["time"]
                    times = (time, times[1]) if late is one else (times[0], time)
            async with browser.feed() as third:
                assert third.status == 503
                assert (await third.json())["error"] == "2 others look already"
        await eventually(lambda: not served._viewers)
        # A snapshot under way may end.
        await asyncio.sleep(0.1)
        seen = snapshots
        await asyncio.sleep(0.2)
        assert snapshots == seen
        # Their places are free again.
        async with browser.feed() as feed:
            await snapshot(feed)


async def test_calls_answer_as_the_admin_api_does() -> None:
    engine = ScriptedEngine(worker="w", supported_fields=["stopping.max_tokens"])
    async with serving_engine(engine) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        stream = client.generate([[1, 2]], request_id="<b>", text=False, max_tokens=9)
        await anext(stream)
        await engine.submitted()
        async with browser_of(client) as browser, browser.feed() as feed:
            seen = await snapshot(feed)
            (request,) = seen["requests"]["requests"]
            assert (request["request_id"], seen["items"]) == ("<b>", [1])
            assert request["items"][0]["worker"] == "w"
            status, answer = await browser.call("calls/Explain", {"request_id": "<b>"})
            assert (status, answer["placements"][0]["worker"]) == (200, "w")
            assert answer["placements"][0]["candidates"][0]["excluded_by"] == ""
            status, answer = await browser.call(
                "calls/StopRequest", {"stop": {"request_id": "<b>"}}
            )
            assert (status, answer) == (200, {"stopped_items": 1})
            status, answer = await browser.call(
                "calls/DrainWorker", {"worker": "w", "finish_ms": 0}
            )
            assert (status, answer["worker"]["worker"]) == (200, "w")
            status, answer = await browser.call("calls/Explain", {"request_id": "unknown"})
            assert (status, "no recorded decision" in answer["error"]) == (404, True)
        await stream.aclose()


async def test_what_is_no_call_is_refused() -> None:
    async with opened() as browser:
        for method in ("RemoveWorker", "AddWorker", "UploadAdapter", "__init__"):
            assert (await browser.call(f"calls/{method}"))[0] == 404
        for body in (b"[]", b"{", b'{"nothing": 1}', b'{"request_id": 1}'):
            status, answer = await browser.call("calls/Explain", body)
            assert status == 400, answer
        status, answer = await browser.call("calls/Explain", {"x" * 2**15: 1})
        assert (status, len(answer["error"]) < 512) == (400, True)
        assert (await browser.call("calls/Explain", b" " * 2**17))[0] == 413
        # The playground is OpenAI's door, which is not there without a port for HTTP.
        assert (await browser.call(GENERATING[0]))[0] == 404
