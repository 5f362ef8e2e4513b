"""A finished request is freed at once, without the collector of reference cycles."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from leaks import alive, gone, without_collector
from router.requests.test_requests import door
from router.scripted import (
    LENGTH,
    READY,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.client import ItemResult
from trtmesh.router.placement.load_guard import Booking
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.streams.client_stream import ClientStream
from trtmesh.router.streams.sequence import SequenceRun

OF_A_REQUEST = (Booking, ClientStream, ItemRun, LiveRequest, SequenceRun)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    with without_collector():
        yield


async def test_a_request_that_its_client_resumes_is_freed() -> None:
    async with door() as router:
        request = router.request("r", items=2)
        lost = router.generate(request)
        await router.engine.submitted(2)
        again = router.resume(request)
        assert "continues in another call" in await lost.end()
        await router.engine.submitted(4)
        for number in range(2):
            await router.stopped(number)
        await eventually(lambda: alive(LiveRequest) == {"LiveRequest": 1})
        await router.finish(2)
        await router.finish(3)
        assert await again.end() == "OK"
        await gone(*OF_A_REQUEST)


async def test_every_end_of_a_request_frees_its_memory() -> None:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    tokenizer = ScriptedTokenizer()
    async with (
        serving_engine(engine) as address,
        serving_tokenizer(tokenizer) as decoder,
        serving_router([address], [decoder], retries={"worker_wait_seconds": 20}) as client,
    ):
        await until_states(client, [READY], [READY])

        def ask(*prompts: str) -> asyncio.Task[Sequence[ItemResult]]:
            asked = client.complete(prompts, max_tokens=9, request_id=prompts[0])
            return asyncio.create_task(asked)

        asked = ask("whole", "another")
        submits = await engine.submitted(2)
        ends = [(submit.handle, LENGTH) for submit in submits]
        await engine.step(*((submit.handle, 0, [65]) for submit in submits), ends=ends)
        assert [item.text for item in await asked] == ["A.", "A."]
        del asked
        await gone(*OF_A_REQUEST)

        asked = ask("cancelled")
        submit = (await engine.submitted(3))[-1]
        await engine.step((submit.handle, 0, [65]))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: engine.stops)
        await engine.step(ends=[(submit.handle, LENGTH)])
        await gone(*OF_A_REQUEST)

        asked = ask("stopped")
        await engine.submitted(4)
        assert await client.stop("stopped")
        await eventually(lambda: len(engine.stops) == 2)
        await engine.step(ends=[(engine.stops[-1][0], LENGTH)])
        await asked
        await gone(*OF_A_REQUEST)

        asked = ask("lost")
        await engine.submitted(5)
        await engine.hang_up()
        submit = (await engine.submitted(6))[-1]
        await engine.step((submit.handle, 0, [65]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].text == "A."
        await gone(*OF_A_REQUEST)

        tokenizer.breaks_on_token = 67
        asked = ask("failed")
        submit = (await engine.submitted(7))[-1]
        await engine.step((submit.handle, 0, [67]))
        assert (await asked)[0].error
        await eventually(lambda: len(engine.stops) == 3)
        await engine.step(ends=[(submit.handle, LENGTH)])
        await gone(*OF_A_REQUEST)
