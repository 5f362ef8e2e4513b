"""Input over HTTP: parsed in turns, held behind a request that has not begun, counted while it waits."""

from __future__ import annotations

import asyncio
from typing import cast

from chassis.busy import keep_busy
from trtmesh.chassis.fair.limits import Budget
from trtmesh.chassis.fair.turns import PARSE_SLICE_SECONDS, TURN_SECONDS, ParseScheduler
from trtmesh.chassis.http_input import PIECE_BYTES, InputTransport

MOST_BYTES = 2**30


class Client:
    """A connection: the transport, and the reader of what it delivers."""

    def __init__(self, turns: ParseScheduler, budget: Budget, seconds: float = 0.0) -> None:
        self.seconds = seconds
        """Of the parsing of a piece."""
        self.parsed = bytearray()
        self.pieces = 0
        self.request_waits = False
        self.in_head = False
        self.body_left = 0
        self.reads = True
        self.aborted = False
        self.input = InputTransport(cast(asyncio.Transport, self), self, turns, budget)

    @property
    def body_received(self) -> int:
        return len(self.parsed)

    def parse(self, piece: bytes) -> None:
        self.parsed += piece
        self.pieces += 1
        keep_busy(self.seconds)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str) -> str:
        return f"the {name} of the transport"


def data(pieces: int) -> bytes:
    return b"".join(number.to_bytes(4) * (PIECE_BYTES // 4) for number in range(pieces))


async def until_parsed(client: Client, size: int) -> None:
    async with asyncio.timeout(60):
        while len(client.parsed) < size:  # noqa: ASYNC110 - each pass of the loop counts
            await asyncio.sleep(0)


async def test_small_input_is_parsed_at_once() -> None:
    client = Client(ParseScheduler(), Budget(MOST_BYTES))
    client.input.receive(b"small")
    assert client.parsed == b"small"
    assert client.reads
    assert client.input.get_extra_info("peername") == "the peername of the transport"


async def test_other_callbacks_run_between_the_pieces_of_many_connections() -> None:
    turns, budget = ParseScheduler(), Budget(MOST_BYTES)
    clients = [Client(turns, budget, TURN_SECONDS) for _ in range(10)]
    for client in clients:
        client.input.receive(data(5))
    in_passes = [sum(client.pieces for client in clients)]
    while sum(in_passes) < 50:
        await asyncio.sleep(0)
        in_passes.append(sum(client.pieces for client in clients) - sum(in_passes))
    assert max(in_passes) <= PARSE_SLICE_SECONDS / TURN_SECONDS + 1
    assert all(client.parsed == data(5) for client in clients)


async def test_a_body_that_is_only_copied_is_parsed_at_once() -> None:
    client = Client(ParseScheduler(), Budget(MOST_BYTES))
    client.body_left = len(data(3))
    client.input.receive(data(5))
    await until_parsed(client, len(data(5)))
    assert client.pieces == 2
    assert client.parsed == data(5)


async def test_input_that_waits_is_counted_and_no_more_is_read() -> None:
    budget = Budget(MOST_BYTES)
    client = Client(ParseScheduler(), budget, TURN_SECONDS)
    client.input.receive(data(9))
    assert not client.reads
    assert budget.held == len(data(9)) - len(client.parsed) > 0
    await until_parsed(client, len(data(9)))
    assert client.reads
    assert budget.held == 0


async def test_nothing_is_parsed_behind_a_request_that_has_not_begun() -> None:
    budget = Budget(MOST_BYTES)
    client = Client(ParseScheduler(), budget)
    client.request_waits = True
    client.input.receive(data(2))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not client.parsed
    assert not client.reads
    assert budget.held == len(data(2))
    client.request_waits = False
    client.input.go_on_soon()
    await until_parsed(client, len(data(2)))
    assert client.reads


async def test_a_connection_without_room_takes_no_more() -> None:
    client = Client(ParseScheduler(), Budget(MOST_BYTES))
    client.input.pause_reading()
    assert not client.reads
    client.input.receive(data(2))
    assert not client.parsed
    client.input.resume_reading()
    assert not client.parsed, "the parser may be at work"
    await until_parsed(client, len(data(2)))
    assert client.reads


async def test_a_head_counts_until_it_is_complete() -> None:
    budget = Budget(MOST_BYTES)
    client = Client(ParseScheduler(), budget)
    client.in_head = True
    for size in (100, 200):
        client.input.receive(b"x" * 100)
        await until_parsed(client, size)
    assert budget.held == 200
    client.in_head = False
    client.input.receive(b"x")
    await until_parsed(client, 201)
    assert budget.held == 0


async def test_the_connection_that_holds_most_gives_way() -> None:
    turns, budget = ParseScheduler(), Budget(3 * PIECE_BYTES)
    large, small = Client(turns, budget), Client(turns, budget)
    for client in (large, small):
        client.request_waits = True
    large.input.receive(data(2))
    small.input.receive(data(1))
    assert not large.aborted
    small.input.receive(b"x")
    assert large.aborted
    assert not small.aborted
    assert budget.held == PIECE_BYTES + 1


async def test_a_lost_connection_counts_no_longer() -> None:
    budget = Budget(MOST_BYTES)
    client = Client(ParseScheduler(), budget, TURN_SECONDS)
    client.input.receive(data(9))
    client.input.drop()
    assert budget.held == 0
    parsed = len(client.parsed)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(client.parsed) == parsed


async def test_a_defect_ends_its_connection_alone() -> None:
    class Broken(Client):
        def parse(self, piece: bytes) -> None:
            raise ZeroDivisionError

    turns, budget = ParseScheduler(), Budget(MOST_BYTES)
    broken, other = Broken(turns, budget), Client(turns, budget)
    broken.input.receive(b"x")
    other.input.receive(b"x")
    await until_parsed(other, 1)
    assert broken.aborted
