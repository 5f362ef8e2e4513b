"""Brings a request to a step of the handoff protocol and holds it there: what would end the step waits in a proxy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.handoff_mesh import ROUTERS, SENDER, HandoffMesh
from chaos.proxy import Lane, Proxy
from e2e.mesh import StreamReader, eventually
from trtmesh.client import Client
from trtmesh.v1 import router_admin_pb2 as admin_pb

MESSAGES_BEFORE = 2
"""Messages of a fetch before a prefill is held."""

PREFILLING = "prefilling"
"""The sender computes, and some parts have arrived."""

MOVING = ("reserving", "starting", "transferring", "confirming", "first token")
"""Steps of every handoff: the router reserves, the sender has not heard of it yet, parts move after the commit, the
receiver asks for the confirmation, and it has consumed what the router does not know."""

STEPS = (*MOVING[:2], PREFILLING, *MOVING[2:])
"""Steps of a prompt that is computed for another worker."""

PARKED = "parked"


@dataclass
class Held:
    """A request at a step of its handoffs, and the lanes that hold it."""

    mesh: HandoffMesh
    client: Client
    client_proxy: Proxy
    """Between the client and the first router."""
    prompts: Sequence[Sequence[int]]
    options: dict[str, Any]
    reader: StreamReader = field(init=False)
    lanes: list[Lane] = field(default_factory=list)
    sender: str = SENDER
    receiver: str = ""

    def __post_init__(self) -> None:
        self._logged = len(self.mesh.process(ROUTERS[0]).stderr)

    @property
    def router_log(self) -> str:
        """What the first router has logged since it did not know the request."""
        return self.mesh.process(ROUTERS[0]).stderr[self._logged :]

    def open(self) -> None:
        self.reader = StreamReader(self.client, self.prompts, **self.options)

    def silence(self, lane: Lane) -> None:
        lane.open.clear()
        self.lanes.append(lane)

    def hold(self, lane: Lane, after: int) -> None:
        """Forwards some messages, then nothing."""
        lane.hold_data(after)
        self.lanes.append(lane)

    def lift(self, silenced: Sequence[Lane] = ()) -> None:
        """Forwards what waits, except on lanes that a fault has silenced."""
        for lane in self.lanes:
            if lane not in silenced:
                lane.release()

    async def at_stage(self, stage: str, handoffs: int = 1) -> bool:
        """Waits for handoffs of the request at a stage, and learns the workers of the first; False if the request ends
        before."""
        seen: list[admin_pb.Handoff] = []

        async def all_there() -> bool:
            seen[:] = [each for each in await self.mesh.handoffs() if each.stage == stage]
            return len(seen) >= handoffs

        if await self.until_true(all_there):
            self.sender, self.receiver = seen[0].sender, seen[0].receiver or seen[0].sender
            return True
        return False

    async def until(self, condition: Callable[[], object]) -> bool:
        """Waits for `condition`; False if the request ends before."""

        async def holds() -> object:
            return condition()

        return await self.until_true(holds)

    async def until_true(self, condition: Callable[[], Awaitable[object]]) -> bool:
        """The same for a condition that asks the mesh."""
        found = False

        async def true_or_over() -> bool:
            nonlocal found
            found = bool(await condition())
            return found or self.reader.is_over

        await eventually(true_or_over)
        return found

    def is_holding(self) -> bool:
        """Whether messages wait."""
        return any(lane.is_holding.is_set() for lane in self.lanes)


def fetch_lanes(mesh: HandoffMesh, *, to_sender: bool = False) -> list[Lane]:
    """What senders send to receivers of their KV, or what these send."""
    links = [worker.fetch_link(name) for worker in mesh.workers.values() for name in mesh.workers]
    return [link.to_target if to_sender else link.from_target for link in links]


def prepare(held: Held, step: str, receivers: Sequence[str], messages_before: int) -> None:
    """Prepares links, before the router hears of the handoff. A fetch is held after so many messages."""
    mesh = held.mesh
    match step:
        case "reserving" | "starting":
            for name in receivers:
                held.silence(mesh.workers[name].router_link.to_target)
        case "prefilling" | "transferring" | "first token":
            for lane in fetch_lanes(mesh):
                held.hold(lane, messages_before)
        case "confirming":
            # The first message opens the fetch, the second reports the end of the reads.
            for lane in fetch_lanes(mesh, to_sender=True):
                held.hold(lane, 1)


async def reach(held: Held, step: str) -> bool:
    """Waits until the request is at a step; False if it ended before, as after a slow moment of the machine."""
    match step:
        case "parked":
            return True
        case "reserving":
            return await held.at_stage("reserving")
        case "starting":
            return await _reach_start(held)
        case "prefilling":
            if not await held.until(held.is_holding):
                return False
            held.silence(held.mesh.workers[SENDER].router_link.from_target)
            return await held.at_stage("prefilling")
        case "transferring" | "confirming":
            return await held.until(held.is_holding) and await held.at_stage("transferring")
        case "first token":
            return await _reach_first_token(held)
    raise AssertionError(step)


async def _reach_start(held: Held) -> bool:
    """The receiver has reserved, and the sender has not heard of it."""
    if not await held.at_stage("reserving"):
        return False
    reserving = list(held.lanes)
    held.lanes.clear()
    held.silence(held.mesh.workers[held.sender].router_link.to_target)
    for lane in reserving:
        lane.release()
    return await held.at_stage("prefilling")


async def _reach_first_token(held: Held) -> bool:
    """The receiver has consumed the KV, and its router does not know."""
    if not await held.at_stage("transferring"):
        return False
    mesh, fetches, receiver = held.mesh, held.lanes, held.receiver
    consumed = await mesh.ended(receiver, "received", "consumed")
    held.lanes = [lane for lane in held.lanes if lane not in fetches]
    held.silence(mesh.workers[receiver].router_link.from_target)
    for lane in fetches:
        lane.release()

    async def has_consumed() -> bool:
        return await mesh.ended(receiver, "received", "consumed") > consumed

    if not await held.until_true(has_consumed):
        return False
    return any(each.stage == "transferring" for each in await mesh.handoffs())
