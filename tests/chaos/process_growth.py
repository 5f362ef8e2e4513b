"""What processes hold while they are idle, and whether it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from e2e.mesh import eventually, scrape
from processes import ServiceProcess

SETTLE_SECONDS = 60.0

MORE: Mapping[str, int] = {
    # Connections of clients and scrapes come and go, and an agent of NIXL has a dozen.
    "fds": 32,
    "tasks": 4,
    # Pools start their threads one by one.
    "threads": 16,
    # Buffers, caches, and ids that are remembered.
    "anonymous_kib": 8 * 1024,
    # The pages of KV pools that were not in use before, own and mapped.
    "shared_kib": 24 * 1024,
}
"""What a process may hold beyond its first look."""


@dataclass(frozen=True)
class Holding:
    """What an idle process holds."""

    pid: int
    rss_kib: int
    anonymous_kib: int
    shared_kib: int
    fds: int
    threads: int
    tasks: int


async def holding_of(process: ServiceProcess) -> Holding:
    folder = Path(f"/proc/{process.pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text("utf-8").splitlines()
    )
    rss, anonymous, shared = (
        int(status[name].removesuffix("kB")) for name in ("VmRSS", "RssAnon", "RssShmem")
    )
    return Holding(
        pid=process.pid,
        rss_kib=rss,
        anonymous_kib=anonymous,
        shared_kib=shared,
        fds=len([*(folder / "fd").iterdir()]),
        threads=int(status["Threads"]),
        tasks=int((await scrape(process))["trtmesh_tasks"]),
    )


@dataclass
class Growth:
    """Holdings of processes by name, one for each look at them."""

    looks: list[Mapping[str, Holding]] = field(default_factory=list)

    async def look(self, processes: Mapping[str, ServiceProcess]) -> None:
        """Notes what idle processes hold; fails if a process, or its predecessor of this name, held less at first."""
        held: dict[str, Holding] = {}
        grown: list[str] = []

        async def is_flat() -> bool:
            held.update({name: await holding_of(each) for name, each in processes.items()})
            grown[:] = [word for name, each in held.items() for word in self._grown(name, each)]
            return not grown

        try:
            # A peer may close a connection after it was idle.
            await eventually(is_flat, SETTLE_SECONDS)
        except TimeoutError:
            raise AssertionError(f"grown: {grown}") from None
        self.looks.append(held)

    def _grown(self, name: str, now: Holding) -> list[str]:
        if not self.looks:
            return []
        earlier = [look[name] for look in self.looks]
        # Memory grows with age: that of a successor is compared with its own.
        own = next((each for each in earlier if each.pid == now.pid), now)
        return [
            f"{name} has {value} {word}, not {least}"
            for word, more in MORE.items()
            for first in (own if word.endswith("kib") else earlier[0],)
            if (value := getattr(now, word)) > (least := getattr(first, word)) + more
        ]
