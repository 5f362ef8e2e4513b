"""A service that starts, drains and stops as its flags say."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.service import run
from trtmesh.chassis.tls.settings import SecuredSettings

HANGUPS = "TESTED_HANGUPS"
"""Variable with what was set for SIGHUP when the process began."""


class ExampleSettings(SecuredSettings):
    section: ClassVar[str] = "engine"
    start: str = "well"
    drain: str = "well"
    stop: str = "well"


class Example:
    service_names: Sequence[str] = ("example.Service",)

    def __init__(self, settings: ExampleSettings, runtime: Any) -> None:
        self.settings, self.runtime = settings, runtime

    def register(self, server: Any) -> None:
        pass

    async def start(self) -> None:
        print("starting", file=sys.stderr, flush=True)
        if self.settings.start == "hang":
            await asyncio.Event().wait()
        if self.settings.start == "refuse":
            raise ModelUnusable("no such model")
        if self.settings.start == "break":
            self.runtime.fail(RuntimeError("broke at once"))
        print("started", file=sys.stderr, flush=True)

    async def drain(self) -> None:
        print("draining", file=sys.stderr, flush=True)
        if self.settings.drain == "break":
            self.runtime.fail(RuntimeError("broke while draining"))
        elif self.settings.drain == "grow":
            grow()
        elif self.settings.drain != "well":
            await asyncio.Event().wait()
        print("drained", file=sys.stderr, flush=True)

    async def stop(self) -> None:
        print("stopped", file=sys.stderr, flush=True)
        if self.settings.stop == "hang":
            await asyncio.to_thread(threading.Event().wait)


def grow() -> None:
    # Objects that stay, as those of thousands of calls.
    examined = []

    def record(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            young = range(info["generation"] + 1)
            examined.append(sum(len(gc.get_objects(generation)) for generation in young))

    gc.callbacks.append(record)
    kept: list[list[object]] = [[] for _ in range(1_200_000)]
    print(f"collections of {len(kept)} objects examined {examined} objects", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.Handlers(int(os.environ[HANGUPS])))
    sys.exit(run(ExampleSettings, Example, sys.argv[1:]))
