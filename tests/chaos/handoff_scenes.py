"""How a request comes to a handoff: a prompt is computed for another worker, a worker leaves, or a client pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

from chaos.handoff_mesh import RECEIVERS, ROLES, ROUTERS
from chaos.handoff_steps import MESSAGES_BEFORE, MOVING, PARKED, STEPS, Held
from e2e.mesh import eventually
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.client import AdminClient


class Prefill:
    """Prompts whose KV moves before their second token."""

    steps: ClassVar[Sequence[str]] = STEPS
    """Steps at which the request can be held."""
    prompts, prompt_tokens, max_tokens = 2, 200, 12
    messages_before = MESSAGES_BEFORE
    """Messages of a fetch before it is held."""

    def __init__(self, held: Held) -> None:
        self.held = held

    @property
    def receivers(self) -> Sequence[str]:
        """Workers that the KV may move to."""
        return RECEIVERS

    async def begin(self) -> bool:
        """Lets the request come close to its handoff; False if it ended before."""
        return True

    async def trigger(self) -> None:
        """Begins the handoff."""
        self.held.open()

    async def end(self) -> None:
        """Leaves the mesh as it was, after the request."""


class Drain(Prefill):
    """Running sequences whose worker is drained."""

    steps = MOVING
    prompt_tokens, max_tokens = 200, 50
    messages_before = 0
    """A running sequence has all its KV in one part."""

    def __init__(self, held: Held) -> None:
        super().__init__(held)
        self._leaving: asyncio.Task[None] | None = None

    @property
    def receivers(self) -> Sequence[str]:
        # The link of the worker that leaves carries the command.
        return [name for name in RECEIVERS if name != self.held.sender]

    async def begin(self) -> bool:
        held = self.held
        held.open()
        places = range(len(held.prompts))
        if not await held.until(lambda: all(held.reader.tokens(each) > 2 for each in places)):
            return False
        requests = (await held.mesh.admin.list_requests(held.reader.request_id)).requests
        held.sender = requests[0].items[0].worker if requests else ""
        return ROLES.get(held.sender) == "decode"

    async def trigger(self) -> None:
        self._leaving = asyncio.create_task(self._leave())

    async def end(self) -> None:
        if self._leaving is None:
            return
        self._leaving.cancel()
        await asyncio.gather(self._leaving, return_exceptions=True)
        await eventually(self._is_back)

    async def _leave(self) -> None:
        # The router or the worker may be lost.
        with suppress(TrtmeshError):
            await self._change(self.held.mesh.admin, self.held.sender)

    async def _is_back(self) -> bool:
        """Whether the worker is as before; it may be unconnected yet."""
        with suppress(TrtmeshError):
            await self._undo(self.held.mesh.admin, self.held.sender)
            return True
        return False

    async def _change(self, admin: AdminClient, worker: str) -> None:
        await admin.drain_worker(worker, finish_seconds=0)

    async def _undo(self, admin: AdminClient, worker: str) -> None:
        await admin.resume_worker(worker)


class Role(Drain):
    """Running sequences whose worker gets another role."""

    async def _change(self, admin: AdminClient, worker: str) -> None:
        # The links of the first router hold commands, the new role too.
        address = self.held.mesh.routers[ROUTERS[1]].admin_address
        async with AdminClient(address) as other:
            await other.set_worker_role(worker, "prefill")

    async def _undo(self, admin: AdminClient, worker: str) -> None:
        await admin.set_worker_role(worker, ROLES[worker])


class Pause(Prefill):
    """Sequences whose KV waits for a client that reads nothing, until it reads again."""

    steps = (PARKED, "reserving", *MOVING[2:])
    prompts, prompt_tokens, max_tokens = 2, 100, 100
    messages_before = 0

    async def begin(self) -> bool:
        held = self.held
        held.open()
        if not await held.until(lambda: held.reader.tokens() > 2):
            return False
        held.silence(held.client_proxy.from_target)
        return await held.at_stage(PARKED, self.prompts)

    async def trigger(self) -> None:
        client = self.held.client_proxy.from_target
        self.held.lanes.remove(client)
        client.release()


SCENES: Mapping[str, type[Prefill]] = {
    "prefill": Prefill,
    "drain": Drain,
    "role": Role,
    "pause": Pause,
}
