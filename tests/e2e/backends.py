"""The backends that suites of processes run over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.mesh import SIMULATED, Mesh
from engine.tensorrt_llm.site import Site
from engine.tensorrt_llm.stand_in.package import RELEASES
from processes import ServiceProcess


@dataclass(frozen=True)
class Backend:
    """How engines of a backend start."""

    flags: Sequence[str]
    draws: Mapping[str, Any]
    """Options with which a stream that moves has the tokens of an undisturbed one."""
    env: Mapping[str, str] = field(default_factory=dict)

    async def start(self, mesh: Mesh, *flags: str, port: int = 0) -> ServiceProcess:
        return await mesh.start_engine(*self.flags, *flags, port=port, env=self.env)


def simulated(_directory: Path) -> Backend:
    return Backend(SIMULATED, {"seed": 5, "temperature": 0.8})


def tensorrt_llm(directory: Path, release: str = RELEASES[0]) -> Backend:
    """Over the stand-in of the library, in a fresh directory. A sampled stream continues with other draws."""
    site = Site(directory, release)
    return Backend(site.flags, {"ignore_end_id": True}, site.env)


BACKENDS: Mapping[str, Callable[[Path], Backend]] = {
    "simulated": simulated,
    "tensorrt_llm": tensorrt_llm,
}
