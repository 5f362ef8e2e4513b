"""Clients of other libraries and releases, each in an environment of its own, against real routers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from compat_clients.conftest import Site
from compat_clients.environments import CLIENTS, Client, run
from forwarder import forwarded

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="module")]

PAUSE_SECONDS = 65
KEEPALIVE_SECONDS = 5
BIAS_BYTES = 8 * 6144 * 4


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name, scope="module")
def client(request: pytest.FixtureRequest) -> Client:
    found: Client = request.param
    return found


async def does(client: Client, case: str, address: str, **options: Any) -> None:
    """Has a client do a case."""
    if case in client.missing:
        pytest.skip(f"{client.name} has no such feature: {case}")
    await run(client, case, json.dumps({"address": address, **options}))


@pytest.mark.parametrize(
    "case",
    [
        *("health", "generate", "model_infer", "model_stream_infer", "cancel", "deadline"),
        "wrong_method",
    ],
)
async def test_call(site: Site, client: Client, case: str) -> None:
    await does(client, case, site.mesh.router.address)
    await site.mesh.idle()


async def test_answer_of_60_mib(site: Site, client: Client) -> None:
    await does(client, "large", site.real.router.address)
    await site.real.idle()


async def test_reader_that_pauses(site: Site, client: Client) -> None:
    """For longer than a minute, with 60 MiB of answers on their way and keepalive of both sides."""
    await does(
        client,
        "pause",
        site.real.router.address,
        keepalive_seconds=10,
        arguments={"seconds": PAUSE_SECONDS},
    )
    await site.real.idle()


async def test_keepalive(site: Site, client: Client) -> None:
    await does(
        client,
        "keepalive",
        site.mesh.router.address,
        keepalive_seconds=1,
        arguments={"seconds": KEEPALIVE_SECONDS},
    )


async def test_tls(site: Site, client: Client) -> None:
    await does(
        client, "tls", site.secure.address.replace("127.0.0.1", "localhost"), ca=str(site.ca)
    )


async def test_compressed_request_and_answer(site: Site, client: Client) -> None:
    async with forwarded(site.mesh.router.address) as forwarder:
        await does(client, "compressed", forwarder.address, gzip=True)
        assert 0 < forwarder.answered_bytes < BIAS_BYTES // 10
